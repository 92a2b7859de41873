"""Commands side by side, each with a bar. What has ended well is not run again, so an interrupted race can go on."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

from tqdm import tqdm

SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LINES = 0.5, 20.0


class Run(NamedTuple):
    """A command, the log of all that it says, and how far it is by what it writes."""

    name: str
    command: List[str]
    log: Path
    total: int
    unit: str
    done: Callable[[], int]
    environment: Dict[str, str]

    @property
    def ended(self) -> Path:
        """A file that is there when the command has ended well."""
        return self.log.with_suffix(".ended")


class Failed(Exception):
    """Which command failed, its last words and where the others are."""


def race(title: str, runs: List[Run]) -> None:
    waiting = [run for run in runs if not run.ended.exists()]
    print(f"\n== {title}" + ("" if waiting else ": done before"), flush=True)
    lanes: List[Lane] = []
    try:
        for run in waiting:
            lanes.append(Lane(run, len(lanes)))
        while sum(lane.goes_on() for lane in lanes):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:  # also after Ctrl-C
        for lane in lanes:
            lane.close()


class Lane:
    """A run on its way."""

    def __init__(self, run: Run, position: int):
        self.run = run
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with open(run.log, "a") as log:
            self.process = subprocess.Popen(
                run.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **run.environment},
                start_new_session=True,  # with all that it starts, so that all of it can be ended
                close_fds=False,  # the demo's lock
            )
        self.started = self.spoke = time.monotonic()
        self.bar = tqdm(total=run.total, unit=run.unit, desc=run.name, position=position, disable=None)

    def goes_on(self) -> bool:
        """Shows how far it is."""
        code, run = self.process.poll(), self.run
        if code:
            last = "\n".join(run.log.read_text(errors="replace").splitlines()[-5:])
            raise Failed(f"{run.name} failed; {run.log} ends with\n{last}")
        ended = code == 0
        done = run.total if ended else min(run.done(), run.total)
        self.bar.update(done - self.bar.n)
        if ended and not run.ended.exists():
            run.ended.touch()
            self._say("done")
        elif not ended and time.monotonic() - self.spoke > SECONDS_BETWEEN_LINES:
            self._say(f"{done:,} of {run.total:,} {run.unit}s")
        return not ended

    def _say(self, what: str) -> None:
        """A line now and then, where there is no terminal to show a bar."""
        self.spoke = time.monotonic()
        if self.bar.disable:
            print(f"{self.run.name}: {what} after {self.spoke - self.started:.0f} s", flush=True)

    def close(self) -> None:
        self.bar.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()


def count(file: Path, pattern: str) -> int:
    """How often the pattern matches in what a command has written so far."""
    return len(re.findall(pattern, _text(file), re.MULTILINE))


def last_number(file: Path, pattern: str) -> int:
    """The whole number in the pattern's last match."""
    return int((re.findall(pattern, _text(file)) or ["0"])[-1])


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
