"""Runs commands, two at a time, each with a progress bar. A command that has succeeded is not run again."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

from tqdm import tqdm

SECONDS_BETWEEN_CHECKS, SECONDS_BETWEEN_LINES, SECONDS_TO_SAVE = 0.5, 20.0, 60.0
AT_ONCE = 2  # commands


class Job(NamedTuple):
    """A command, its log file and its progress."""

    name: str
    command: List[str]
    log: Path
    total: int
    unit: str
    done: Callable[[str], int]  # how many of `total` are done, from what the command has written to its log
    environment: Dict[str, str]

    @property
    def ended(self) -> Path:
        """A file that exists once the command has succeeded."""
        return self.log.with_suffix(".ended")


class Failed(Exception):
    """A command that failed, its last lines and its log file."""


def run_together(title: str, jobs: List[Job]) -> None:
    waiting = [job for job in jobs if not job.ended.exists()]
    print(f"\n== {title}" + ("" if waiting else ": done before"), flush=True)
    running: List[Running] = []
    try:
        while True:
            active = sum([job.is_running() for job in running])
            if not (active or waiting):
                break
            for _ in range(min(AT_ONCE - active, len(waiting))):
                running.append(Running(waiting.pop(0), len(running)))
            time.sleep(SECONDS_BETWEEN_CHECKS)
    finally:
        stop(running)


class Running:
    """The process of a job, and its progress bar."""

    def __init__(self, job: Job, position: int):
        self.job = job
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "a") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.environment},
                start_new_session=True,  # a process group, so that its children can be ended too
                close_fds=False,  # inherits the demo's lock
            )
        self.started = self.printed = time.monotonic()
        self.bar = tqdm(total=job.total, unit=job.unit, desc=job.name, position=position, disable=None)

    def is_running(self) -> bool:
        """Whether the process is still running. Updates the progress bar."""
        code, job = self.process.poll(), self.job
        if code:
            last = "\n".join(job.log.read_text(errors="replace").splitlines()[-5:])
            raise Failed(f"{job.name} failed; {job.log} ends with\n{last}")
        ended = code == 0
        done = job.total if ended else min(job.done(self._output()), job.total)
        self.bar.update(done - self.bar.n)
        if ended and not job.ended.exists():
            job.ended.touch()
            self._print("done")
        elif not ended and time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self._print(f"{done:,} of {job.total:,} {job.unit}s")
        return not ended

    def _output(self) -> str:
        """What this process has written: the log also contains the output of interrupted runs."""
        with open(self.job.log, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def _print(self, what: str) -> None:
        """Prints a line if there is no terminal for a progress bar."""
        self.printed = time.monotonic()
        if self.bar.disable:
            print(f"{self.job.name}: {what} after {self.printed - self.started:.0f} s", flush=True)


def stop(jobs: List[Running]) -> None:
    """Ends all processes. Training gets time to save a checkpoint first."""
    for job in jobs:
        job.bar.close()
    alive = [job.process for job in jobs if job.process.poll() is None]
    try:
        for process in alive:
            process.terminate()
        for process in alive:
            process.wait(SECONDS_TO_SAVE)
    except subprocess.TimeoutExpired as late:
        print(f"had to be killed: {late.cmd[1]}")
    finally:  # ends their child processes, and all processes if this was interrupted
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# Progress, read from the log of a command.


def steps(output: str) -> int:
    """Steps that a prepare.sh has completed: each begins with a line "have" or "making", the last with "ready"."""
    return max(0, len(re.findall(r"^== (?:have|making|ready)\b", output, re.MULTILINE)) - 1)


def updates(output: str) -> int:
    """Number of updates done, from the output of fairseq-train, which starts with that of the loaded checkpoint."""
    found = re.findall(r'@ (\d+) updates\)|"num_updates": "(\d+)"', output)
    return int("".join(found[-1])) if found else 0


def matches(pattern: str, file: Optional[Path] = None) -> Callable[[str], int]:
    """Progress as the number of lines that match, in the output of the command or in a file that it writes."""

    def count(output: str) -> int:
        if file is not None:
            output = file.read_text(errors="replace") if file.exists() else ""
        return len(re.findall(pattern, output, re.MULTILINE))

    return count
