"""The output folder of `mega-fairseq prepare`, which an interrupted preparation continues.

prepare.json has the settings and whether the data are complete. Until then, parts/ has the parts that are finished:
each depends on the settings and its item alone, so the number of workers does not change the data. Its name has a hash
of the item: if a file of the source changes, its parts are made again. No file has its final name before it is
completely written.
"""

import hashlib
import json
import os
import re
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import lock, write, write_json
from mega_fairseq.cli.workers import in_order

MOST = 100_000_000  # generated examples
SPLITS = ("train", "valid", "test")
UNFINISHED = re.compile(r"\w+\.\w+\.\d+\.tmp")  # files of a process that was killed
PART = re.compile(r"\d{6}-[0-9a-f]{16}")


class Folder:
    """The folder `path` for data with these settings: new, without any data, or with data of the same settings."""

    def __init__(self, path: str, settings: Dict[str, Any]):
        self.path, self.settings = path, settings
        self.parts: List[str] = []  # paths
        self.claim: Optional[int] = None  # the open folder, which no other process claims until `release`
        self.found = self._read()  # prepare.json
        self.complete, written = self.found.get("complete", False), self.found.get("bytes", {})
        others = self._other_settings()
        if others and (self.complete or self._has_parts()):
            raise UserError(
                f"{path} contains data of other settings ({_listing(others)}); give another folder, or remove this one"
            )
        if self.complete:
            self._check_files(written)
            shutil.rmtree(self._place("parts"), ignore_errors=True)  # if a process was killed before it did this

    def _other_settings(self) -> Dict[str, Any]:
        """The settings of the folder, if there are any and they are not ours."""
        found = {name: value for name, value in self.found.items() if name not in ("complete", "bytes")}
        return {} if found == self.settings else found

    def _has_parts(self) -> bool:
        parts = self._place("parts")
        return os.path.isdir(parts) and any(map(PART.fullmatch, os.listdir(parts)))

    def _check_files(self, written: Dict[str, int]) -> None:
        for name, size in written.items():
            place = self._place(name)
            if not os.path.exists(place) or os.path.getsize(place) != size:
                raise UserError(
                    f"{place} is not the file of {size:,} bytes that was prepared; remove {self.path} and start again"
                )

    def _read(self) -> Dict[str, Any]:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise UserError(f"{self.path} is a file; give the name of a folder")
        if not os.path.isdir(self.path) or all(map(UNFINISHED.fullmatch, os.listdir(self.path))):
            return {}
        try:
            with open(self._place("prepare.json")) as file:
                return dict(json.load(file))
        except (OSError, TypeError, ValueError):
            raise UserError(f"{self.path} contains files of something else; give a new or empty folder") from None

    def _place(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _save(self, complete: bool, files: Iterable[str] = ()) -> None:
        written = {name: os.path.getsize(self._place(name)) for name in files}
        write_json(self._place("prepare"), {**self.settings, "complete": complete, "bytes": written})

    def temporary(self, name: str, item: Any) -> str:
        """The path of a file that depends on this item and is removed when the data are complete."""
        if self.claim is None:
            self._claim()
        digest = hashlib.blake2b(repr(item).encode(errors="surrogateescape"), digest_size=8).hexdigest()
        return os.path.join(self._place("parts"), f"{name}-{digest}")

    def _claim(self) -> None:
        try:
            os.makedirs(self.path, exist_ok=True)
            self.claim = lock(self.path, wait=False)
        except BlockingIOError:
            raise UserError(f"another process is preparing {self.path}; wait until it has finished") from None
        except OSError as error:
            raise UserError(f"{self.path} was not created ({error.strerror}); choose another folder") from None
        if self._read() != self.found:
            raise UserError(f"another process has changed {self.path}; run the same command again")
        if self._other_settings():
            shutil.rmtree(self._place("parts"), ignore_errors=True)  # the source of those settings was wrong
        self._save(complete=False)
        os.makedirs(self._place("parts"), exist_ok=True)

    def release(self) -> None:
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None

    def make(
        self, make: Callable[[Any], bytes], items: Sequence[Any], workers: int, size: int, unit: str = "example"
    ) -> None:
        """Write a part for each item unless it exists; the progress bar counts `size` units for each."""
        self.parts = [self.temporary(f"{number:06d}", item) for number, item in enumerate(items)]
        missing = [(path, item) for path, item in zip(self.parts, items) if not os.path.exists(path)]
        done = (len(items) - len(missing)) * size
        try:
            with tqdm(total=len(items) * size, initial=done, unit=unit, disable=None) as bar:
                for _ in in_order(partial(_write_part, make), missing, min(workers, len(missing))):
                    bar.update(size)
        except BrokenProcessPool:
            time.sleep(0.5)  # Ctrl-C ends workers too, and may reach this process after them
            raise UserError(
                "a worker was killed, perhaps for lack of memory; the same command with fewer --workers continues"
            ) from None

    def lines(self, parts: slice = slice(None)) -> Iterator[bytes]:
        """The lines of all parts or some, without their ends."""
        for path in self.parts[parts]:
            with open(path, "rb") as file:
                yield from file.read().split(b"\n")[:-1]

    def discard(self) -> None:
        """Remove the folder, after the first parts have shown that the settings are impossible."""
        shutil.rmtree(self.path)

    def finish(self, files: Dict[str, Iterable[bytes]], sizes: Dict[str, int]) -> None:
        """Write the data from the parts, remove the parts, and print the sizes of the splits."""
        for name in os.listdir(self.path):
            if UNFINISHED.fullmatch(name):
                os.remove(self._place(name))
        for name, content in files.items():
            write(self._place(name), content)
        self._save(complete=True, files=files)
        shutil.rmtree(self._place("parts"), ignore_errors=True)
        print(f"wrote {', '.join(f'{split} ({size:,})' for split, size in sizes.items())} to {self.path}")


def batches(items: Sequence[Any], size: int) -> List[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def column(lines: Iterable[bytes], number: int, columns: int = 2) -> Iterator[bytes]:
    """One of `columns` columns, which tabs separate, as lines of a file."""
    return (line.split(b"\t", columns - 1)[number] + b"\n" for line in lines)


def _listing(settings: Dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _write_part(make: Callable[[Any], bytes], job: Tuple[str, Any]) -> None:
    path, item = job
    write(path, make(item))
