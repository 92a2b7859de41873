"""The output folder of `mega-fairseq prepare`, which an interrupted preparation continues.

prepare.json has the settings and whether the data are complete. Until then, parts/ has the parts that are finished:
each depends on the settings and its number alone, so the number of workers does not change the data. No file has its
final name before it is completely written.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, Sequence

from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write, write_json

SPLITS = ("train", "valid", "test")
UNFINISHED = re.compile(r"\w+\.\w+\.\d+\.tmp")  # files of a process that was killed


class Folder:
    """The folder `path` for data with these settings: new, empty, or with the same settings."""

    def __init__(self, path: str, settings: Dict[str, Any]):
        self.path, self.settings = path, settings
        found = self._read()
        self.complete = found.pop("complete", False)
        if found and found != settings:
            raise UserError(
                f"{path} contains data of other settings ({_listing(found)}); give another folder, or remove this one"
            )
        if not found:
            try:
                os.makedirs(path, exist_ok=True)
            except OSError as error:
                raise UserError(f"{path} was not created ({error.strerror}); choose another folder") from None
            self._save(complete=False)
        if self.complete:  # a process may have been killed before it removed them
            shutil.rmtree(self._place("parts"), ignore_errors=True)

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

    def _save(self, complete: bool) -> None:
        write_json(self._place("prepare"), {**self.settings, "complete": complete})

    def part(self, number: int) -> bytes:
        with open(_part(self._place("parts"), number), "rb") as file:
            return file.read()

    def make(self, make: Callable[[int], bytes], numbers: Sequence[int], workers: int, examples: int) -> None:
        """Write the parts with these numbers that do not exist; each has so many examples."""
        parts = self._place("parts")
        os.makedirs(parts, exist_ok=True)
        missing = [number for number in numbers if not os.path.exists(_part(parts, number))]
        done = (len(numbers) - len(missing)) * examples
        try:
            with _mapping(min(workers, len(missing))) as each, tqdm(
                total=len(numbers) * examples, initial=done, unit="example", disable=None
            ) as bar:
                for _ in each(partial(_write_part, make, parts), missing):
                    bar.update(examples)
        except KeyboardInterrupt:
            raise UserError("interrupted; the same command continues") from None
        except BrokenProcessPool:
            raise UserError(
                "a worker was killed, perhaps for lack of memory; the same command with fewer --workers continues"
            ) from None

    def discard(self) -> None:
        """Remove the folder, after the first parts have shown that the settings are impossible."""
        shutil.rmtree(self.path)

    def finish(self, files: Dict[str, Iterable[bytes]]) -> None:
        """Write the data from the parts, and remove the parts."""
        for name in os.listdir(self.path):
            if UNFINISHED.fullmatch(name):
                os.remove(self._place(name))
        for name, content in files.items():
            write(self._place(name), content)
        self._save(complete=True)
        shutil.rmtree(self._place("parts"), ignore_errors=True)


def _listing(settings: Dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _part(parts: str, number: int) -> str:
    return os.path.join(parts, f"{number:06d}")


def _write_part(make: Callable[[int], bytes], parts: str, number: int) -> None:
    write(_part(parts, number), make(number))


@contextlib.contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterable[None]]]:
    """`map` in this process or in several."""
    if workers < 2:
        yield map
        return
    processes = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, processes, _start_worker) as pool:
        yield pool.map


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
