"""Measures times and memory of contenders, prints them as Markdown and adds them to a JSON file.

A table is a generator of rows: a case, and a number for each contender, in the unit that its docstring names. The
first contender is the reference of all ratios.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch

from benchmarks.figures import draw_tables
from mega_fairseq.cli.cpu import GLIBC, KEEP_MEMORY

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
Step = Callable[[], Any]
Numbers = Dict[str, float]
Row = Tuple[Union[int, str], Numbers]


class Meter:
    """Measures time, of one thread's CPU by default, and resident memory (Linux) of steps."""

    def __init__(self, quick: bool = False, repeats: int = 3):
        self.quick, self.repeats = quick, repeats

    def seconds(
        self,
        steps: Dict[str, Step],
        repeats: Optional[int] = None,
        warm_up: int = 1,
        clock: Callable[[], float] = time.process_time,
    ) -> Numbers:
        """Median seconds of each step. They take turns, so that a slow phase of the machine affects all of them."""
        times: Dict[str, List[float]] = {name: [] for name in steps}
        warm_up, repeats = (0, 1) if self.quick else (warm_up, repeats or self.repeats)
        for turn in range(warm_up + repeats):
            for name, step in steps.items():
                start = clock()
                step()
                if turn >= warm_up:
                    times[name].append(clock() - start)
        return {name: statistics.median(values) for name, values in times.items()}

    def mib(self, build: Callable[..., Step], arguments: Tuple, warm_up: Tuple) -> float:
        """Peak MiB of the step `build(*arguments)`, after the small step `build(*warm_up)`, above those before it.

        Libraries keep some memory after the first step, so each step runs in a new process. It returns all memory that
        is not in use: otherwise peaks depend on the order of sizes, and vary by a quarter.
        """
        return self.apart(_peak_after, build, arguments, warm_up, keep=False)

    def apart(self, function: Callable, *arguments: Any, keep: bool = True) -> Any:
        """The result of a function in a new process, which `quick` saves."""
        return function(*arguments) if self.quick else in_new_process(function, *arguments, keep=keep)


Table = Callable[[Meter], Iterator[Row]]


def in_new_process(function: Callable, *arguments: Any, keep: bool = True) -> Any:
    """The result of a function in a new process with one thread, which keeps memory or returns it to the system.

    This does not depend on the settings of the environment.
    """
    context, given = multiprocessing.get_context("spawn"), dict(os.environ)
    for name in KEEP_MEMORY:
        os.environ.pop(name, None)
    try:
        with ProcessPoolExecutor(1, context, initializer=prepare_process, initargs=(keep,)) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.update(given)


def _peak_after(build: Callable[..., Step], arguments: Tuple, warm_up: Tuple) -> float:
    if GLIBC:
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17) == 1
    build(*warm_up)()
    return peak_mib(build(*arguments))


def peak_mib(step: Step) -> float:
    """Peak MiB of resident memory during a step, minus the memory in use before it."""
    if GLIBC:
        ctypes.CDLL(None).malloc_trim(0)  # memory that is kept, but not in use, would not count in the step
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # resets the high-water mark
    before = _status("VmRSS")
    step()
    return max(0.0, _status("VmHWM") - before)  # the counts are rough, and a step may only use memory freed before


def _status(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def prepare_process(keep: bool = True) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)  # fairseq's
    torch.set_num_threads(1)
    if keep:
        keep_memory()


def keep_memory() -> None:
    """Does in this process what KEEP_MEMORY of mega_fairseq.cli.cpu, in the README's environment, does in new ones."""
    if GLIBC:
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            assert ctypes.CDLL(None).mallopt(parameter, value) == 1


# ------------------------------------------------------------------------------------------- command line


def names(known: Iterable[str]) -> Callable[[str], List[str]]:
    """An argparse type: some of the known names, separated by commas."""

    def parse(text: str) -> List[str]:
        unknown = sorted(set(text.split(",")) - set(known))
        if unknown:
            raise ArgumentTypeError(f"{', '.join(unknown)} is unknown; choose from {', '.join(known)}")
        return text.split(",")

    return parse


def parser(description: str, tables: Iterable[str]) -> ArgumentParser:
    result = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    result.add_argument("--tables", type=names(tables), default=list(tables), help=f"some of {', '.join(tables)}")
    result.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is taken")
    result.add_argument("--quick", action="store_true", help="small sizes and one round, to check that everything runs")
    result.add_argument("--json", type=Path, metavar="FILE", help="add the tables to FILE")
    return result


def main(description: str, tables: Dict[str, Table], drawn: bool = False) -> None:
    """Measures the tables that the command line names; `drawn` adds --plot."""
    arguments = parser(description, tables)
    if drawn:
        arguments.add_argument("--plot", type=Path, metavar="FILE", help="only draw the tables of FILE, next to it")
    args = arguments.parse_args()
    if drawn and args.plot:
        return draw_tables(args.plot, tables)
    prepare_process()
    run(tables, args)


def run(tables: Dict[str, Table], args: Namespace) -> None:
    """Prints the rows of tables as they are measured, then all as Markdown."""
    print(" ".join(f"{name}={value}" for name, value in machine().items()), flush=True)
    meter = Meter(args.quick, args.repeats)
    for name in args.tables:
        title = getattr(tables[name], "func", tables[name]).__doc__.splitlines()[0]  # of a function or a partial one
        print(f"\n{name}: {title}", flush=True)
        rows = []
        for case, numbers in tables[name](meter):
            rows.append({"case": case, "numbers": numbers})
            print(f"{case}: " + ", ".join(f"{contender} {shown(x)}" for contender, x in numbers.items()), flush=True)
        print(f"\n{markdown(rows)}", flush=True)
        if args.json and rows:
            write_json(args.json, {name: {"title": title, "rows": rows}})


def shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def markdown(rows: List[Dict[str, Any]]) -> str:
    """A table with ratios to the first contender. Contenders are its rows if there are more of them than cases."""
    contenders = list(dict.fromkeys(name for row in rows for name in row["numbers"]))
    cases = [f"{row['case']:,}" if isinstance(row["case"], int) else row["case"] for row in rows]
    cells = [[_cell(row["numbers"], name, contenders[0]) for name in contenders] for row in rows]
    if len(contenders) > len(rows):
        contenders, cases, cells = cases, contenders, [list(column) for column in zip(*cells)]
    return as_table(["", *contenders], [[case, *row] for case, row in zip(cases, cells)])


def as_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in [titles, *rows])
    return "\n".join([head, "|" + "---|" * len(titles), *lines])


def _cell(numbers: Numbers, name: str, first: str) -> str:
    if name not in numbers:
        return ""
    ratio = f" ({numbers[name] / numbers[first]:.2f}x)" if name != first and numbers.get(first) else ""
    return shown(numbers[name]) + ratio


def machine() -> Dict[str, str]:
    """The machine and versions of a measurement."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": f"{model}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "memory": "kept" if GLIBC else "as by default",
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: Path, tables: Dict[str, Any]) -> None:
    """Writes tables and the machine of each; other tables in the file are kept."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    machines = {**earlier.get("machine", {}), **{name: machine() for name in tables}}
    path.write_text(json.dumps({**earlier, **tables, "machine": machines}, indent=1) + "\n")
