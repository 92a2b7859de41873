"""Measures CPU time of one thread (medians, in turns in one process) and memory (in fresh processes)."""

import json
import platform
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List

import torch


def seconds(
    steps: Dict[str, Callable[[], None]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> Dict[str, float]:
    """Median CPU seconds of each step. They take turns, so that a slow phase of the machine affects all of them."""
    times: Dict[str, List[float]] = {name: [] for name in steps}
    for repeat in range(warm_up + repeats):
        for name, step in steps.items():
            start = clock()
            step()
            if repeat >= warm_up:
                times[name].append(clock() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def peak_mib(step: Callable[[], None]) -> float:
    """Peak MiB of resident memory during a step, minus the memory in use before it (Linux)."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # resets the high-water mark
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def resident_mib() -> float:
    return _status("VmRSS") / 1024


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def in_fresh_process(script: str, *arguments: Any) -> List[float]:
    """Runs `script --one ...` in a separate process and returns the numbers in its last line."""
    command = [sys.executable, script, "--one", *map(str, arguments)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(word) for word in result.stdout.splitlines()[-1].split()]


def chosen_names(parser: ArgumentParser, option: str, given: str, known: Iterable[str]) -> List[str]:
    """The names that an option lists, separated by commas; unknown ones are a usage error."""
    chosen = given.split(",")
    unknown = set(chosen) - set(known)
    if unknown:
        parser.error(f"--{option}: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(known)}")
    return chosen


def machine() -> Dict[str, str]:
    """The machine and versions of a measurement."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as info:
            model = next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": f"{model}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: str, tables: Dict[str, Any]) -> None:
    """Writes tables and the machine of each; other tables in the file are kept."""
    file = Path(path)
    earlier = json.loads(file.read_text()) if file.exists() else {}
    machines = {**earlier.get("machine", {}), **{name: machine() for name in tables}}
    file.write_text(json.dumps({**earlier, **tables, "machine": machines}, indent=1) + "\n")
