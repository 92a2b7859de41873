"""One file of a zip archive, to standard output: unzip.py ARCHIVE NAME. It may lie in any folder there.

In Python, because not every machine has unzip.
"""

import shutil
import sys
import zipfile
import zlib
from pathlib import PurePosixPath


def main() -> None:
    archive, name = sys.argv[1:]
    try:
        with zipfile.ZipFile(archive) as packed:
            members = [member for member in packed.namelist() if PurePosixPath(member).name == name]
            if len(members) != 1:
                sys.exit(f"error: {archive} holds no file {name}: it is another archive.")
            with packed.open(members[0]) as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        sys.exit(
            f"error: {archive} is damaged, truncated or no archive: remove it and run this again, "
            "or put a good one in its place."
        )


if __name__ == "__main__":
    main()
