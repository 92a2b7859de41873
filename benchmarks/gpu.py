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
from typing import Any, Dict, Iterable, List

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import gpu_checks
from benchmarks.gpu_checks import Finding
from benchmarks.gpu_tables import TABLES, ceilings, measured
from benchmarks.measure import as_table, keep_memory, machine, names, shown
from mega_fairseq.ops.backend import TRITON, backend

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {
    check.__name__: check
    for check in (gpu_checks.graphs, gpu_checks.models, gpu_checks.search, gpu_checks.layers, gpu_checks.commands)
}
PARTS = ["graphs", "training", "translating", "sentence", "peers", "search", "models", "mixers"]
PARTS += ["layers", "commands"]
PAGE = ["training", "translating"]  # in docs/performance.md; the JSON has all
COLUMNS = ["device ms", "MiB"]  # there; printed while it runs, and in the JSON: all


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
        kept = self.json["checks"][name] = []
        for case, compare in CHECKS[name](self.device, self.quick):
            if self.is_late(f"{name}, from {case} on"):
                break
            findings: List[Finding] = []
            try:
                findings.extend(compare())
            except Exception as error:  # a case that fails must not hide the others
                findings.append(Finding(f"{case}: {type(error).__name__}: {error}", float("nan"), 0.0))
            for finding in findings:
                kept.append({**finding._asdict(), "ok": finding.ok})
                mark = "ok" if finding.ok else "WRONG"
                print(f"{mark:5} {finding.case}: differs by {finding.difference:.1e} of {finding.limit:g}", flush=True)

    def measure(self, name: str) -> None:
        table, rows = TABLES[name], self.json["tables"].setdefault(name, [])
        for contender in table.contenders(self.device, self.quick):
            case = f"{contender.case}, {contender.name}"
            if self.is_late(f"{name}, from {case} on"):
                break
            try:
                numbers = measured(contender, self.device, self.json["ceilings"], table.resource)
            except Exception as error:  # out of memory, for example
                self.missing.append(f"{name}, {case}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                print(f"FAILED {self.missing[-1]}", flush=True)
                continue
            rows.append({"case": contender.case, "contender": contender.name, "numbers": numbers})
            print(f"{case}: " + ", ".join(f"{what} {shown(number)}" for what, number in numbers.items()), flush=True)
            self.write()

    def wrong(self) -> List[Dict[str, Any]]:
        return [finding for findings in self.json["checks"].values() for finding in findings if not finding["ok"]]

    def summary(self) -> str:
        count = sum(map(len, self.json["checks"].values()))
        lines = [f"{count - len(self.wrong())} of {count} comparisons agree."]
        lines += [f"- differs: {finding['case']}, by {finding['difference']:.1e}" for finding in self.wrong()]
        return "\n".join([*lines, *(f"- not done: {what}" for what in self.missing)])


def markdown(results: Dict[str, Any], parts: Iterable[str] = TABLES) -> str:
    """Tables with these names; speeds have their ratio to the first contender of the case."""
    texts = [f"{results['device']}, torch {results['machine']['torch']}, commit {results['commit']}"]
    for name in (name for name in results["tables"] if name in parts):
        table, rows, lines, first = TABLES[name], results["tables"][name], [], {}
        columns = [c for c in COLUMNS if any(c in row["numbers"] for row in rows)]
        cases = [row["case"] for row in rows]
        for row in sorted(rows, key=lambda row: cases.index(row["case"])):
            case, numbers = row["case"], row["numbers"]
            ratio = f" ({numbers['speed'] / first[case]:.2f}x)" if case in first else ""
            cells = [shown(numbers[column]) if column in numbers else "" for column in columns]
            lines.append(["" if ratio else case, row["contender"], f"{shown(numbers['speed'])}{ratio}", *cells])
            first.setdefault(case, numbers["speed"])
        texts.append(f"{table.title}:\n\n{as_table(['', '', table.unit, *columns], lines)}")
    return "\n\n".join(texts)


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
