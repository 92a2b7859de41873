"""Checks and measures everything on a CUDA GPU: `make gpu`.

    python benchmarks/gpu.py                      at most 10 minutes; writes docs/gpu.json and prints tables in Markdown
    python benchmarks/gpu.py --parts layers,speed only some parts; --help lists them
    python benchmarks/gpu.py --device cpu --quick small cases on the CPU, to check that everything runs

First all numbers are compared with those of the CPU: layers, models, search, fairseq's commands. Then kernels are
counted, and times and memory measured beside torch's Transformer layer and fairseq's Transformers of the same size.
What there was no time or no device for is listed at the end. The exit code is 1 if a comparison failed.
"""

import json
import logging
import sys
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import contenders as c
from benchmarks import decode, gpu_checks, layer, train
from benchmarks.gpu_checks import Finding
from benchmarks.measure import Meter, Row, machine, names, rows
from mega_fairseq.ops.backend import TRITON, backend

FILE = Path(__file__).resolve().parent.parent / "docs/gpu.json"
CHECKS = {
    check.__name__: check for check in (gpu_checks.layers, gpu_checks.models, gpu_checks.search, gpu_checks.commands)
}
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16}
TRANSLATED = {"float32": torch.float32, "fp16": torch.float16}  # fairseq-generate has no --bf16
TOKENS, LENGTHS, TRAINED, BATCHES = 65_536, [512, 2048, 8192, 65_536], 32_768, [1, 16, 64, 256]
GROUP = c.GROUPS["mixers"]

# ------------------------------------------------------------------------------------------- measurements


def speed(meter: Meter) -> Iterator[Row]:
    """One layer, forward and backward: tokens per second"""
    contenders, lengths, tokens = (GROUP[:2], [128], 128) if meter.quick else (GROUP, LENGTHS, TOKENS)
    for name, dtype in FORMATS.items():
        for length, numbers in layer.speed(contenders, lengths, tokens, meter, dtype):
            yield f"{length:,} tokens, {name}", numbers


def memory(meter: Meter) -> Iterator[Row]:
    """One layer, forward and backward: peak MiB"""
    contenders, lengths, tokens = (GROUP[:2], [128], 128) if meter.quick else (GROUP, LENGTHS, TOKENS)
    yield from layer.memory(contenders, lengths, tokens, meter)


def steps(meter: Meter) -> Iterator[Row]:
    """Training steps of whole models: tokens per second"""
    for table in ["small"] if meter.quick else ["base", "language"]:
        chosen = train.TABLES[table]
        lengths, tokens = ([34], 34) if meter.quick else (chosen.lengths, TRAINED)
        for name, dtype in FORMATS.items():
            for length, numbers in train.speed(chosen, lengths, tokens, meter, dtype):
                yield f"{table}, {length:,} tokens, {name}", numbers


def kernels(meter: Meter) -> Iterator[Row]:
    """Training steps in bf16, the longest sequences: kernels, and milliseconds that they take"""
    for table in ["small"] if meter.quick else ["base", "language"]:
        chosen, measured = train.TABLES[table], {}
        for name, words in chosen.models.items():
            with meter.device:
                step = train.training(words, chosen.types, chosen.lengths[-1], chosen.tokens, torch.bfloat16)
                step()
                with torch.profiler.profile() as profile:
                    step()
            events = [event for event in profile.events() if event.device_type.name == meter.device.type.upper()]
            measured[name] = len(events), sum(event.time_range.elapsed_us() for event in events) / 1000
        for unit, numbers in zip(("kernels", "milliseconds"), zip(*measured.values())):
            yield f"{table}, {unit}", dict(zip(measured, numbers))


def decoding(meter: Meter) -> Iterator[Row]:
    """Beam search of one sentence, beam 5: milliseconds per token"""
    yield from decode.decode(*((1000, [8]) if meter.quick else (decode.TYPES, [64, 256])), meter)


def batches(meter: Meter) -> Iterator[Row]:
    """Beam search of sentences of 30 tokens, beam 5: sentences per second"""
    types, sizes = (1000, [2]) if meter.quick else (decode.TYPES, BATCHES)
    for name, dtype in TRANSLATED.items():
        for batch, numbers in decode.batches(types, sizes, meter, dtype):
            yield f"batch {batch}, {name}", numbers


MEASURED = {table.__name__: table for table in (speed, memory, steps, kernels, decoding, batches)}

# ------------------------------------------------------------------------------------------- report


class Report:
    """What was checked and measured until the time is over, and what was not."""

    def __init__(self, meter: Meter, minutes: float):
        self.meter, self.deadline = meter, time.monotonic() + 60 * minutes
        self.checks: Dict[str, List[Finding]] = {}
        self.measured: Dict[str, Dict[str, Any]] = {}
        self.missing: List[str] = []

    def is_late(self, what: str) -> bool:
        late = time.monotonic() > self.deadline
        self.missing += [f"{what}: no time was left"] * late
        return late

    def check(self, name: str) -> None:
        findings = self.checks[name] = []
        for case, compare in CHECKS[name](self.meter.device, self.meter.quick):
            if self.is_late(f"{name}, from {case} on"):
                break
            for finding in _attempted(case, compare):
                findings.append(finding)
                mark = "ok" if finding.ok else "WRONG"
                print(f"{mark:5} {finding.case}: differs by {finding.difference:.1e} of {finding.limit:g}", flush=True)

    def measure(self, name: str) -> None:
        def table(meter: Meter) -> Iterator[Row]:
            after = "the start"
            try:
                for after, numbers in MEASURED[name](meter):
                    yield after, numbers
                    if self.is_late(f"{name}, after {after}"):
                        break
            except Exception as error:  # out of memory, for example
                reason = str(error).splitlines()[0]
                self.missing.append(f"{name}, after {after}: {type(error).__name__}: {reason}")

        table.__doc__ = MEASURED[name].__doc__
        self.measured[name] = rows(name, table, self.meter)

    def as_json(self) -> Dict[str, Any]:
        device = self.meter.device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            "machine": machine(),
            "checks": {name: [{**f._asdict(), "ok": f.ok} for f in found] for name, found in self.checks.items()},
            "measured": self.measured,
            "missing": self.missing,
        }

    def wrong(self) -> List[Finding]:
        return [finding for findings in self.checks.values() for finding in findings if not finding.ok]

    def summary(self) -> str:
        count = sum(map(len, self.checks.values()))
        lines = [f"{count - len(self.wrong())} of {count} comparisons with the CPU agree."]
        lines += [f"- differs: {finding.case}, by {finding.difference:.1e}" for finding in self.wrong()]
        return "\n".join([*lines, *(f"- not done: {what}" for what in self.missing)])


def _attempted(case: str, compare: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from compare()
    except Exception as error:  # a case that fails must not hide the others
        yield Finding(f"{case}: {type(error).__name__}: {error}", float("nan"), 0.0)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    every = [*CHECKS, *MEASURED]
    parser.add_argument("--parts", type=names(every), default=every, help=f"some of {', '.join(every)}")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--minutes", type=float, default=10, help="time for everything")
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--json", type=Path, default=FILE, help="where the results go")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU was found by torch: mega-fairseq doctor says why")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_float32_matmul_precision("highest")  # no TF32
    report = Report(Meter(args.device, args.quick), args.minutes)
    if args.device.type != "cuda" or torch.cuda.device_count() < 2:
        report.missing.append("training on two GPUs: there are not two")
    if backend(args.device) != TRITON:
        report.missing.append("Triton kernels: they do not run here")
    for part in args.parts:
        if not report.is_late(part):
            (report.check if part in CHECKS else report.measure)(part)
        args.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    print(f"\n{report.summary()}\nwrote {args.json}")
    sys.exit(bool(report.wrong()))


if __name__ == "__main__":
    main()
