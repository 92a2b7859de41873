"""Files that users bring: in a folder, or in a .tar.gz archive of it.

An archive is unpacked once, as a whole, to a temporary .tar file: this checks it, and its members can then be read in
any order. No code in a file is executed, and no member is written under its own name.
"""

import gzip
import os
import posixpath
import tarfile
import zlib
from functools import partial
from typing import Dict, Iterator, List, NamedTuple, Sequence

from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write
from mega_fairseq.cli.prepare.folder import Folder


class _Member(tarfile.TarInfo):
    """A negative size would lead tarfile back to earlier members, without end."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0:
            raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
        return member


class Place(NamedTuple):
    """Where the bytes of a file are, and when they last changed."""

    name: str
    path: str
    start: int
    size: int
    time: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.size)


class Source(NamedTuple):
    """What the user has to give: the folder `top`, or an archive that contains it."""

    top: str
    archive: str

    @property
    def remedy(self) -> str:
        return f"give the folder {self.top}, or {self.archive} as it was published"

    def find(self, path: str, folders: Sequence[str], ending: str, folder: Folder) -> Dict[str, List[Place]]:
        """The files with this ending in each of the folders below `top`, sorted by name."""
        if os.path.isdir(path):
            found = {name: files_in(os.path.join(path, name)) for name in folders}
        elif os.path.exists(path):
            found = self._in_archive(path, folders, folder)
        else:
            raise UserError(f"{path} does not exist; {self.remedy}")
        return {name: sorted(place for place in found[name] if place.name.endswith(ending)) for name in folders}

    def _in_archive(self, path: str, folders: Sequence[str], folder: Folder) -> Dict[str, List[Place]]:
        found: Dict[str, List[Place]] = {name: [] for name in folders}
        unpacked, time = self._unpacked(path, folder), os.stat(path).st_mtime_ns
        end = os.path.getsize(unpacked)
        try:
            with tarfile.open(unpacked, "r:", tarinfo=_Member) as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if name.startswith(f"{self.top}/"):
                        name = name[len(self.top) + 1 :]
                    if not 0 <= member.size <= end - member.offset_data:  # a pax header can replace the size
                        raise tarfile.ReadError(f"{name} has {member.size} bytes")
                    if member.isfile() and posixpath.dirname(name) in found:
                        if member.issparse():
                            raise UserError(f"{path} has the sparse file {name}; make the archive without --sparse")
                        place = Place(f"{path}/{name}", unpacked, member.offset_data, member.size, time)
                        found[posixpath.dirname(name)].append(place)
        except (tarfile.TarError, OSError, OverflowError, ValueError):  # for damaged headers
            raise UserError(f"{path} is not a .tar.gz archive; {self.remedy}") from None
        return found

    def _unpacked(self, path: str, folder: Folder) -> str:
        status = os.stat(path)
        target = folder.temporary("source.tar", (os.path.abspath(path), status.st_size, status.st_mtime_ns))
        if not os.path.exists(target):
            write(target, self._content(path))
        return target

    def _content(self, path: str) -> Iterator[bytes]:
        try:
            with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) as file, tqdm(
                total=os.path.getsize(path), unit="B", unit_scale=True, desc="unpacking", disable=None
            ) as bar:
                for chunk in iter(partial(file.read, 1 << 20), b""):
                    yield chunk
                    bar.update(raw.tell() - bar.n)
        except (EOFError, OSError, zlib.error):
            raise UserError(f"{path} is not a .tar.gz archive, or only a part of one; {self.remedy}") from None


def files_in(path: str) -> List[Place]:
    """The files of a folder; none if it does not exist."""
    try:
        with os.scandir(path) as entries:
            files = [(entry.path, entry.stat()) for entry in entries if entry.is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); change its permissions") from None
    return [Place(name, name, 0, status.st_size, status.st_mtime_ns) for name, status in files]
