"""Checks and measures everything on a CUDA GPU: `make gpu`.

    python benchmarks/gpu.py                      at most 10 minutes; prints tables, writes docs/gpu.json
    python benchmarks/gpu.py --parts layers,speed only some parts; --help lists them
    python benchmarks/gpu.py --device cpu --quick small cases on the CPU, to check that everything runs

First all numbers are compared with those of the CPU: layers, models, search, fairseq's commands. Then times and memory
are measured beside torch's Transformer layer and fairseq's Transformers of the same size. What there was no time or no
device for is listed at the end. Nothing is downloaded. The exit code is 1 if a comparison failed.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import contenders as c
from benchmarks.gpu_checks import Finding, layers, models, search
from benchmarks.gpu_commands import commands
from benchmarks.gpu_measurements import MEASURED, Measurement
from benchmarks.measure import chosen_names, machine
from mega_fairseq.ops.backend import TRITON, backend

DOCS = Path(__file__).resolve().parent.parent / "docs"


CHECKS = {check.__name__: check for check in (layers, models, search, commands)}


# ------------------------------------------------------------------------------------------- report


def check(name: str, device: torch.device, quick: bool, deadline: float, missing: List[str]) -> List[Finding]:
    """The findings of a check, printed as they come."""
    found = []
    for case, compare in CHECKS[name](device, quick):
        if time.monotonic() > deadline:
            missing.append(f"{name}, from {case} on: no time was left")
            break
        for finding in _attempted(case, compare):
            found.append(finding)
            mark = "ok" if finding.ok else "WRONG"
            print(f"{mark:5} {finding.case}: differs by {finding.difference:.1e} of {finding.limit:g}", flush=True)
    return found


def _attempted(case: str, compare: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from compare()
    except Exception as error:  # a case that fails must not hide the others
        yield Finding(f"{case}: {type(error).__name__}: {error}", float("nan"), 0.0)


def measure(name: str, of: Measurement, deadline: float, missing: List[str]) -> List[Dict[str, Any]]:
    """The rows of a measurement, printed as they come."""
    rows = []
    print(f"\n{MEASURED[name].__doc__}", flush=True)
    try:
        for row in MEASURED[name](of):
            rows.append(row)
            print(f"{row['case']}: " + ", ".join(f"{n} {x:,.1f}" for n, x in row["numbers"].items()), flush=True)
            if time.monotonic() > deadline:
                missing.append(f"{name}, after {row['case']}: no time was left")
                break
    except Exception as error:  # out of memory, for example
        after = rows[-1]["case"] if rows else "the start"
        missing.append(f"{name}, after {after}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return rows


def as_markdown(found: Dict[str, Any]) -> str:
    """A page with all results."""
    setup = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = ["# On a GPU", "", f"Written by `make gpu` on {found['device']} ({setup}).", ""]
    wrong = [finding for findings in found["checks"].values() for finding in findings if not finding["ok"]]
    count = sum(map(len, found["checks"].values()))
    lines += [f"{count - len(wrong)} of {count} comparisons with the CPU agree.", ""]
    lines += [f"- differs: {finding['case']}, by {finding['difference']:.1e}" for finding in wrong]
    lines += [f"- not done: {what}" for what in found["missing"]] + [""]
    lines += ["In brackets: the ratio to the first contender, fairseq's or torch's Transformer.", ""]
    for name, rows in found["measured"].items():
        if rows:
            lines += [f"## {MEASURED[name].__doc__}", "", *_table(rows), ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(rows: List[Dict[str, Any]]) -> List[str]:
    """Numbers, and their ratios to those of the first contender; contenders are rows if there are many."""
    names = list(dict.fromkeys(name for row in rows for name in row["numbers"]))
    cells = {row["case"]: [_cell(row["numbers"], name, names[0]) for name in names] for row in rows}
    labels = [c.LABELS.get(name, name) for name in names]
    if len(names) > len(rows):
        table = [["", *cells], *([label, *column] for label, *column in zip(labels, *cells.values()))]
    else:
        table = [["", *labels], *([case, *values] for case, values in cells.items())]
    table.insert(1, ["---"] * len(table[0]))
    return [f"| {' | '.join(line)} |" for line in table]


def _cell(numbers: Dict[str, float], name: str, first: str) -> str:
    if name not in numbers:
        return ""
    number = f"{numbers[name]:,.{0 if numbers[name] >= 100 else 1}f}"
    ratio = numbers[name] / numbers[first] if name != first and numbers.get(first) else None
    return number if ratio is None else f"{number} ({ratio:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*CHECKS, *MEASURED]
    parser.add_argument("--parts", default=",".join(every), help=f"some of {', '.join(every)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10, help="time for everything")
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--json", type=Path, default=DOCS / "gpu.json", help="where results go")
    args = parser.parse_args()
    parts = chosen_names(parser, "parts", args.parts, every)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU was found by torch: mega-fairseq doctor says why")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_float32_matmul_precision("highest")  # no TF32
    deadline, missing = time.monotonic() + 60 * args.minutes, []
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        missing.append("training on two GPUs: there are not two")
    if backend(device) != TRITON:
        missing.append("Triton kernels: they do not run here")
    found: Dict[str, Any] = {"device": _name(device), "machine": machine(), "checks": {}, "measured": {}}
    found["missing"] = missing
    for part in parts:
        if time.monotonic() > deadline:
            missing.append(f"{part}: no time was left")
        elif part in CHECKS:
            rows = check(part, device, args.quick, deadline, missing)
            found["checks"][part] = [{**row._asdict(), "ok": row.ok} for row in rows]
        else:
            found["measured"][part] = measure(part, Measurement(device, args.quick), deadline, missing)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{as_markdown(found)}\nwrote {args.json}")
    sys.exit(any(not finding["ok"] for findings in found["checks"].values() for finding in findings))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    main()
