"""Write one file of a zip archive, in any of its folders, to standard output: unzip.py ARCHIVE NAME.

Not every machine has the unzip command.
"""

import shutil
import sys
import zipfile
import zlib
from pathlib import PurePosixPath


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    archive, name = sys.argv[1:]
    try:
        with zipfile.ZipFile(archive) as packed:
            members = [member for member in packed.namelist() if PurePosixPath(member).name == name]
            if len(members) != 1:
                sys.exit(f"error: {archive} contains no file {name}: replace it with the right archive.")
            with packed.open(members[0]) as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        sys.exit(
            f"error: {archive} is damaged, truncated or not an archive: remove it and run this again, or replace it."
        )


if __name__ == "__main__":
    main()
