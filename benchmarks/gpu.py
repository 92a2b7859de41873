"""Checks and measures everything on a CUDA GPU: `make gpu`.

    python benchmarks/gpu.py                         at most 10 minutes; writes docs/gpu.json and prints tables
    python benchmarks/gpu.py --parts graphs,training only some parts, in this order; --help lists them
    python benchmarks/gpu.py --table docs/gpu.json   prints the tables of this file for docs/performance.md
    python benchmarks/gpu.py --device cpu --quick    small cases on the CPU, to check that everything runs

Checks compare numbers: CUDA graphs with the same steps without, and layers, models, search and fairseq's commands with
the CPU. Tables have fairseq's Transformers and layers of equal size beside Mega. What there was no time or no device
for is listed at the end. The exit code is 1 if a comparison failed.
"""

import json
import logging
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import gpu_checks
from benchmarks.gpu_checks import Finding
from benchmarks.gpu_tables import TABLES, ceilings, measured
from benchmarks.measure import keep_memory, machine, names, shown
from mega_fairseq.ops.backend import TRITON, backend

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {
    check.__name__: check
    for check in (gpu_checks.graphs, gpu_checks.models, gpu_checks.search, gpu_checks.layers, gpu_checks.commands)
}
PARTS = ["graphs", "training", "translating", "sentence", "peers", "ema", "search", "models"]
PARTS += ["mixers", "compiled", "layers", "commands"]
PAGE = ["training", "translating", "sentence", "peers"]  # in docs/performance.md; the JSON has all
COLUMNS = ["wall ms", "device ms", "launches", "share", "MiB"]


class Report:
    """What was checked and measured until the time is over, and what was not; kept in a file."""

    def __init__(self, device: torch.device, quick: bool, minutes: float, limit: float, commit: str, path: Path):
        self.device, self.quick, self.limit, self.path = device, quick, limit, path
        self.end = self.deadline = time.monotonic() + 60 * minutes
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        self.missing: List[str] = []
        self.json: Dict[str, Any] = {"commit": commit, "device": gpu, "machine": machine()}
        self.json.update(checks={}, tables={}, missing=self.missing)

    def run(self, parts: List[str]) -> None:
        self.json["ceilings"] = ceilings(self.device, self.quick)
        for part in parts:
            self.deadline = min(self.end, time.monotonic() + self.limit)
            print(f"\n{part}: {(TABLES[part].title if part in TABLES else CHECKS[part].__doc__)}", flush=True)
            (self.measure if part in TABLES else self.check)(part)
            self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.json, indent=1) + "\n")

    def is_late(self, what: str) -> bool:
        late = time.monotonic() > self.deadline
        self.missing += [f"{what}: no time was left"] * late
        return late

    def check(self, name: str) -> None:
        findings = self.json["checks"][name] = []
        for case, compare in CHECKS[name](self.device, self.quick):
            if self.is_late(f"{name}, from {case} on"):
                break
            for finding in _attempted(case, compare):
                findings.append({**finding._asdict(), "ok": finding.ok})
                mark = "ok" if finding.ok else "WRONG"
                print(f"{mark:5} {finding.case}: differs by {finding.difference:.1e} of {finding.limit:g}", flush=True)

    def measure(self, name: str) -> None:
        table = TABLES[name]
        rows = self.json["tables"][name] = []
        for contender in table.contenders(self.device, self.quick):
            if self.is_late(f"{name}, from {contender.case}, {contender.name} on"):
                break
            try:
                numbers = measured(contender, self.device, self.json["ceilings"], table.resource)
            except Exception as error:  # out of memory, for example
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                self.missing.append(f"{name}, {contender.case}, {contender.name}: {reason}")
                print(f"FAILED {self.missing[-1]}", flush=True)
                continue
            rows.append({"case": contender.case, "contender": contender.name, "numbers": numbers})
            print(f"{contender.case}, {contender.name}: {_line(numbers)}", flush=True)
            self.write()

    def wrong(self) -> List[Dict[str, Any]]:
        return [finding for findings in self.json["checks"].values() for finding in findings if not finding["ok"]]

    def summary(self) -> str:
        count = sum(map(len, self.json["checks"].values()))
        lines = [f"{count - len(self.wrong())} of {count} comparisons agree."]
        lines += [f"- differs: {finding['case']}, by {finding['difference']:.1e}" for finding in self.wrong()]
        return "\n".join([*lines, *(f"- not done: {what}" for what in self.missing)])


def _attempted(case: str, compare: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from compare()
    except Exception as error:  # a case that fails must not hide the others
        yield Finding(f"{case}: {type(error).__name__}: {error}", float("nan"), 0.0)


def _line(numbers: Dict[str, float]) -> str:
    return ", ".join(f"{name} {shown(number)}" for name, number in numbers.items())


def markdown(results: Dict[str, Any], parts: Sequence[str] = tuple(TABLES)) -> str:
    """Tables with these names; speeds have their ratio to the first contender of the case."""
    texts = [f"{results['device']}, torch {results['machine']['torch']}, commit {results['commit']}"]
    for name, rows in results["tables"].items():
        if name not in parts:
            continue
        table, columns = TABLES[name], [c for c in COLUMNS if any(c in row["numbers"] for row in rows)]
        share = f"share of {table.resource}"
        titles = ["", "", table.unit, *(share if column == "share" else column for column in columns)]
        lines = [titles, ["---"] * len(titles)]
        for case in dict.fromkeys(row["case"] for row in rows):
            group = {row["contender"]: row["numbers"] for row in rows if row["case"] == case}
            first = next(iter(group.values()))["speed"]
            for number, (contender, numbers) in enumerate(group.items()):
                ratio = f" ({numbers['speed'] / first:.2f}x)" if number else ""
                cells = [_cell(column, numbers) for column in columns]
                lines.append(["" if number else case, contender, f"{shown(numbers['speed'])}{ratio}", *cells])
        texts.append(f"{table.title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(texts)


def _cell(column: str, numbers: Dict[str, float]) -> str:
    if column not in numbers:
        return ""
    return f"{numbers[column]:.1%}" if column == "share" else shown(numbers[column])


def commit() -> str:
    """The hash of the working tree's commit, with -dirty if files were changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names(PARTS), default=PARTS, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything")
    parser.add_argument("--seconds", type=float, default=75, help="time for each part")
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--commit", help="hash of the code, where there is no git")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/gpu.json", help="where the results go")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of FILE")
    args = parser.parse_args()
    if args.table:
        return print(markdown(json.loads(args.table.read_text()), PAGE))
    if args.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU was found by torch: mega-fairseq doctor says why")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    keep_memory()
    torch.set_float32_matmul_precision("highest")  # no TF32
    report = Report(args.device, args.quick, args.minutes, args.seconds, args.commit or commit(), args.json)
    if args.device.type != "cuda" or torch.cuda.device_count() < 2:
        report.missing.append("training on two GPUs: there are not two")
    if backend(args.device) != TRITON:
        report.missing.append("Triton kernels: they do not run here")
    report.run(args.parts)
    print(f"\n{markdown(report.json)}\n\n{report.summary()}\nwrote {args.json}")
    sys.exit(bool(report.wrong()))


if __name__ == "__main__":
    main()
