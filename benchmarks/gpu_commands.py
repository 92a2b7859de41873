"""fairseq's commands on a GPU and on the CPU, as a user runs them: training in each number format, and evaluation.

The data are the bytes of the pages in docs/.
"""

import os
import re
import subprocess
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterator

import torch

from benchmarks import quality_lm, runs
from benchmarks.gpu_checks import Case, Finding

DOCS = Path(__file__).resolve().parent.parent / "docs"
UPDATES = 30
Run = Callable[[], float]  # a command, and the loss that it prints
# With the first loss scale of fairseq, 128, the first updates overflow and are left out. --amp has the same option.
SCALED = [["--fp16", "--fp16-init-scale", "4"], ["--amp", "--fp16-init-scale", "4"]]
LIMIT, HALF_LIMIT, EVALUATION_LIMIT = 0.01, 0.03, 1e-3  # relative differences of losses
RECIPE = [
    *["--optimizer", "adam", "--lr", "5e-3", "--clip-norm", "1.0", "--max-tokens", "2048", "--num-workers", "0"],
    *["--log-format", "json", "--log-interval", "10", "--no-epoch-checkpoints", "--disable-validation"],
]


def commands(device: torch.device, quick: bool) -> Iterator[Case]:
    """fairseq-train in each number format, fairseq-eval-lm, and training on two GPUs if there are."""
    gpus = 0 if device.type == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder:
        data = _bytes(Path(folder))

        def train(name: str, count: int, *options: object) -> Run:
            return partial(_trained, count, data, Path(folder, name), *options)

        truth = lru_cache(train("cpu", 0))
        formats = [[], ["--bf16"], *(SCALED if gpus else [])]
        for options in formats[: 1 if quick else None]:
            case, limit = (f"training {options[0]}", HALF_LIMIT) if options else ("training in float32", LIMIT)
            yield case, partial(_finding, case, train(case, gpus, *options), truth, limit)
        for block in ("documents", "splits:7")[: 1 if quick else None]:
            ours, theirs = (partial(_evaluated, each, data, Path(folder, "cpu"), block) for each in (gpus, 0))
            yield f"evaluation, {block}", partial(_finding, f"evaluation, {block}", ours, theirs, EVALUATION_LIMIT)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            both = ["--distributed-world-size", 2]
            case, theirs = "training on two GPUs", train("twice", 1, "--update-freq", 2)
            yield case, partial(_finding, case, train(case, 2, *both), theirs, LIMIT)
            case, theirs = "segments shared by two GPUs", train("whole", 1, "--max-tokens", 4096)  # as large a batch
            yield case, partial(_finding, case, train(case, 2, *both, "--sequence-parallel-size", 2), theirs, LIMIT)


def _run(gpus: int, command: str, *words: object) -> str:
    """What a command of fairseq prints that sees this number of GPUs, or runs on the CPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    given = [*runs.fairseq(command), *map(str, words), *runs.WITH_PLUGIN, *([] if gpus else ["--cpu"])]
    done = subprocess.run(given, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)} failed: {done.stdout[-2000:]}")
    return done.stdout


def _bytes(folder: Path) -> Path:
    text = folder / "docs"
    text.write_text("".join(page.read_text() for page in sorted(DOCS.glob("*.md"))))
    quality_lm.prepare(text, folder / "bytes")
    return folder / "bytes/bin"


def _trained(gpus: int, data: Path, folder: Path, *options: object) -> float:
    """The loss of the last updates."""
    words = [data, *quality_lm.MEGA, *RECIPE, "--max-update", UPDATES, "--save-dir", folder, *options]
    return runs.curve(_run(gpus, "train", *words), "train_inner", "loss", "num_updates")[-1][1]


def _evaluated(gpus: int, data: Path, folder: Path, block: str) -> float:
    checkpoint = folder / "checkpoint_last.pt"
    words = [data, "--task", "mega_language_modeling", "--path", checkpoint, "--valid-block", block]
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", _run(gpus, "eval_lm", *words))[1])


def _finding(case: str, ours: Run, theirs: Run, limit: float) -> Iterator[Finding]:
    truth = theirs()
    yield Finding(case, abs(ours() - truth) / abs(truth), limit)
