"""Runs commands, two at a time. A command that has succeeded is not run again."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Dict, List, NamedTuple

SECONDS_BETWEEN_CHECKS, SECONDS_TO_SAVE = 0.5, 60.0
AT_ONCE = 2  # commands


class Job(NamedTuple):
    name: str
    command: List[str]
    log: Path
    variables: Dict[str, str]

    @property
    def ended(self) -> Path:
        """A file that exists once the command has succeeded."""
        return self.log.with_suffix(".ended")


class Failed(Exception):
    """A command that failed, its last lines and its log file."""


def run_together(title: str, jobs: List[Job]) -> None:
    waiting = [job for job in jobs if not job.ended.exists()]
    print(f"\n== {title}" + ("" if waiting else ": done before"), flush=True)
    running: Dict[subprocess.Popen, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                job = waiting.pop(0)
                running[start(job)] = job
            time.sleep(SECONDS_BETWEEN_CHECKS)
            for process, job in list(running.items()):
                code = process.poll()
                if code:
                    last = "\n".join(job.log.read_text(errors="replace").splitlines()[-5:])
                    raise Failed(f"{job.name} failed; {job.log} ends with\n{last}")
                if code == 0:
                    job.ended.touch()
                    del running[process]
                    print(f"{job.name}: done", flush=True)
    finally:
        stop([process for process in running if process.poll() is None])


def start(job: Job) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{job.name}: tail -f {job.log}", flush=True)
    with open(job.log, "a") as log:  # in a group, so that children can be ended too; inherits the demo's lock
        group = {"start_new_session": True, "close_fds": False}
        variables = {**os.environ, **job.variables}
        return subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, env=variables, **group)


def stop(alive: List[subprocess.Popen]) -> None:
    """Ends processes. Training gets time to save a checkpoint first."""
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
