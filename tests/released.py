"""Checkpoints as the released code writes them, made from golden cases, and the command that converts them."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Sequence

import pytest
import torch

from mega_fairseq.cli.main import main
from tests import golden_cases as golden

READS_SAFELY = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
NEEDS_TORCH = "convert needs torch 2.6"
ROOT = Path(__file__).resolve().parent.parent
REMARKS = ("gen", "src_left_pad")  # entries of a case's config that are no options
# Of the 150 options that every checkpoint carries, some that the converter reads and some that it must not mind.
OF_TRAINING = {
    "task": "translation",
    "source_lang": "de",
    "target_lang": "en",
    "data": "data-bin",
    "left_pad_source": True,
    "left_pad_target": False,
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
    "optimizer": "adam",
    "lr_scheduler": "linear_decay",
    "clip_mode": "total",
    "lr": [0.001],
    "adam_betas": "(0.9, 0.98)",
    "update_freq": [1],
    "user_dir": None,
}


def models():
    return golden.cases("translation model")


def model(name: str) -> golden.Case:
    return golden.load(golden.FOLDER / f"mega_model_{name}.npz")


def checkpoint(case: golden.Case, **options: Any) -> Dict[str, Any]:
    """What the released code would have saved for this model; `options` replace or add some, None included."""
    config = {name: value for name, value in case.config.items() if name not in REMARKS}
    return {
        "args": Namespace(**{**config, **OF_TRAINING, **options}),
        "model": dict(case.parameters),
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": 3.2},
                "num_updates": 40,
            }
        ],
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 3, "iterations_in_epoch": 6, "shuffle": True},
            "val_loss": 3.2,
            "best": 3.2,
            "metrics": {"default": [(10, "loss", "AverageMeter", {"val": torch.tensor(3.6), "sum": 4.0, "count": 1})]},
        },
        "last_optimizer_state": {
            "state": {0: {"step": 40, "exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.004, "params": [0]}],
        },
    }


def save(content: Any, path: Path, **how: Any) -> Path:
    torch.save(content, path, **how)
    return path


def run(*arguments: Any, program: str = "") -> subprocess.CompletedProcess:
    """The command in a process of its own; `program` is Python to run there first."""
    if "convert" in arguments and not READS_SAFELY:
        pytest.skip(NEEDS_TORCH)
    start = f"{program}\nimport sys\nfrom mega_fairseq.cli.main import main\nsys.exit(main())"
    return subprocess.run([sys.executable, "-c", start, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def refuse(capsys: Any, *arguments: Any, words: Sequence[Any]) -> None:
    """The command in this process, which must refuse."""
    if not READS_SAFELY:
        pytest.skip(NEEDS_TORCH)
    code = main(["convert", *map(str, arguments)])
    assert_sentence(code, *capsys.readouterr(), words)


def assert_refused(result: subprocess.CompletedProcess, *words: Any) -> None:
    assert_sentence(result.returncode, result.stdout, result.stderr, words)


def assert_sentence(code: int, out: str, err: str, words: Sequence[Any]) -> None:
    """One sentence on stderr that says these words, nothing on stdout, and no traceback."""
    assert code == 1, err
    assert out == ""
    assert err.startswith("mega-fairseq convert: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert str(word) in err
    assert ";" in err, "no remedy"
