"""Mega, the other token mixers and fairseq's Transformers as classifiers: equal parameters, updates and batches.

    python benchmarks/quality_classify.py DATA OUT --tasks listops,fashion --models mega,gau
    python benchmarks/quality_classify.py DATA OUT --collect docs/quality_classify.json
    python benchmarks/quality_classify.py --plot docs/quality_classify.json

Without --lr, each model is trained with two learning rates. The checkpoint with the best accuracy on valid is tested.
DATA/TASK is made by the recipes in examples/, once:

listops       expressions of 50 to 200 symbols, their value
fashion       Fashion-MNIST, 784 pixels
addresses     State of the Union addresses, the first 1,024 bytes of a passage: one of four eras

All models have 2 layers of width 64 (GAU and FLASH: 4, which have no feed-forward layers) and the same embedding, norm,
pooling and head. The widths of the feed-forward layers make parameters equal within 2%. `transformer` is
fairseq's encoder with sinusoidal positions. On one CPU thread a run takes 3 to 10 minutes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import BaseFairseqModel

from benchmarks import models
from benchmarks.runs import PLUGIN, WITH_PLUGIN, Experiment, Run, fairseq, output
from mega_fairseq.data.classification.inputs import byte_dictionary

ROOT = PLUGIN.parent


class Task(NamedTuple):
    recipe: str  # folder in examples/lra
    kind: str
    classes: int
    length: int  # of the longest input
    batch: int
    updates: int
    head: int  # width
    chunk: int
    stride: int
    norm: str
    training: List[str]


BYTES = ["--dropout=0.1", "--weight-decay=0.01"]
VALUES = ["--values-mean=0.286", "--values-deviation=0.353", "--dropout=0", "--weight-decay=0.02"]
TASKS = {
    "listops": Task("listops", "tokens", 10, 201, 32, 1000, 128, 64, 16, "layernorm", BYTES),
    "fashion": Task("image", "values", 10, 784, 20, 300, 320, 112, 28, "batchnorm", VALUES),
    "addresses": Task("text", "bytes", 4, 1024, 16, 400, 256, 128, 32, "scalenorm", BYTES),
}
LISTOPS = ["--train=40000", "--valid=1000", "--test=2000"]
TYPES = 25  # symbols of ListOps in fairseq's dictionary

# Mega starts as in the recipes. GAU and FLASH learn little with RoPE in so few updates; their paper has a bias for each
# distance. The others learn slowly from the recipes' initialisation, which is for wider models.
SCALED = "--init=scaled"
HEADS = "--encoder-attention-heads=4"
UNITS = ["--encoder-layers=4", "--encoder-ffn-embed-dim=0", "--encoder-z-dim=32", "--rel-pos-bias=simple"]
MEGA = ["--encoder-token-mixer=mega", "--encoder-hidden-dim=128", "--encoder-z-dim=32"]
ATTENTION = ["--encoder-token-mixer=attention", SCALED, HEADS]
CONTROLS = f"--user-dir={ROOT / 'benchmarks/transformer_classifier'}"
MODELS = {  # {names} are those of the task
    "transformer": [CONTROLS, "--arch=transformer_classifier", HEADS],
    "mega": MEGA,
    "mega-chunk": [*MEGA, "--encoder-chunk-size={chunk}"],
    # Without memory beyond a chunk, for inputs of whole chunks: fashion.
    "mega-cut": [CONTROLS, "--arch=mega_classifier_cut", *MEGA, "--encoder-chunk-size={chunk}"],
    "gau": ["--encoder-token-mixer=gau", *UNITS],
    "flash": ["--encoder-token-mixer=flash", *UNITS, "--encoder-chunk-size={chunk}"],
    "attention": [*ATTENTION, "--encoder-rotary-dims=16"],
    "time-weighted": [
        *[*ATTENTION, "--encoder-rotary-dims=8", "--encoder-chunk-size={length}"],
        *["--encoder-time-weight=before", "--encoder-time-beta", "--encoder-time-gamma", "--encoder-token-shift"],
    ],
    "gmlp": [
        *["--encoder-token-mixer=gmlp", SCALED, HEADS, "--encoder-chunk-size={length}"],
        *["--encoder-time-alpha", "--encoder-time-beta", "--encoder-token-shift"],
    ],
    "aft-local": ["--encoder-token-mixer=aft", SCALED, HEADS, "--encoder-aft-form=local", "--encoder-aft-reach=32"],
    "sparse": [
        *["--encoder-token-mixer=sparse", SCALED, HEADS, "--encoder-rotary-dims=16"],
        *["--encoder-sparse-pattern={pattern}", "--encoder-sparse-stride={stride}"],
    ],
}
# Widths of the feed-forward layers for listops, fashion and addresses; with GAU and FLASH, of the values.
WIDTHS = {
    "transformer": (339, 340, 338),
    "mega": (126, 118, 114),
    "mega-chunk": (128, 128, 128),
    "mega-cut": (128, 128, 128),
    "gau": (142, 136, 134),
    "flash": (143, 142, 142),
    "attention": (339, 339, 340),
    "time-weighted": (318, 260, 236),
    "gmlp": (250, 178, 149),
    "aft-local": (337, 337, 338),
    "sparse": (339, 339, 340),
}


def model_words(task: str, model: str) -> List[str]:
    """Arguments of the model for fairseq-train."""
    chosen = TASKS[task]
    places = {**chosen._asdict(), "pattern": "strided" if chosen.kind == "values" else "fixed"}
    words = [word.format(**places) for word in MODELS[model]]
    common = ["--encoder-layers=2", "--encoder-embed-dim=64", f"--max-positions={chosen.length}"]
    width = "encoder-hidden-dim" if model in ("gau", "flash") else "encoder-ffn-embed-dim"
    words = [*common, *words, f"--{width}={WIDTHS[model][list(TASKS).index(task)]}", f"--classifier-dim={chosen.head}"]
    if model == "transformer":
        return words
    words = ["--arch=mega_classifier", *words, f"--normalization-type={chosen.norm}"]
    if chosen.kind == "values":
        words += ["--normalize-before", *["--attention-activation-fn=laplace"] * model.startswith("mega")]
    return words


def build(task: str, model: str) -> BaseFairseqModel:
    """The model with its head, as fairseq-train builds it."""
    kind, classes = TASKS[task].kind, [str(n) for n in range(TASKS[task].classes)]
    dictionaries = {"bytes": byte_dictionary(), "tokens": models.dictionary(TYPES), "values": None}
    return models.classifier(model_words(task, model), kind, dictionaries[kind], classes)


# ------------------------------------------------------------------------------------------------ data and runs


def prepared(task: str, folder: Path) -> Path:
    """The folder with the data of a task, made by its recipe if it does not exist."""
    if not (folder / "complete").exists():
        script = ROOT / "examples/lra" / TASKS[task].recipe / "prepare.sh"
        environment = {**os.environ, "DATA": str(folder), "SIZE": "small", "PYTHON": sys.executable, "GPUS": "0"}
        subprocess.run(["bash", str(script), *(LISTOPS if task == "listops" else [])], check=True, env=environment)
        (folder / "complete").touch()
    return folder / "small/bin"


def inputs_words(task: str) -> List[str]:
    chosen = TASKS[task]
    return [
        *["--task=mega_classification", "--criterion=sentence_prediction", f"--input-kind={chosen.kind}"],
        *[f"--max-positions={chosen.length}", "--shorten-method=truncate", "--required-batch-size-multiple=1"],
        *(word for word in chosen.training if word.startswith("--values")),
    ]


class Classifiers(Experiment):
    updates = {name: task.updates for name, task in TASKS.items()}
    rates = dict.fromkeys(MODELS, ("4e-3", "1e-2"))
    rates.update(dict.fromkeys(("attention", "time-weighted", "sparse", "transformer"), ("1e-3", "4e-3")))
    curve, unit, lower_is_better = ("valid", "valid_accuracy"), "accuracy on valid", False

    def training(self, run: Run, updates: int) -> List[str]:
        chosen, often = TASKS[run.task], max(1, updates // 8)
        return [
            *[str(prepared(run.task, run.data)), *model_words(run.task, run.model), *inputs_words(run.task)],
            *[*chosen.training, "--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--adam-eps=1e-8", "--clip-norm=1.0"],
            *[f"--lr={run.lr}", "--lr-scheduler=polynomial_decay", f"--warmup-updates={updates // 5}"],
            *[f"--total-num-update={updates}", f"--max-update={updates}", f"--batch-size={chosen.batch}"],
            *["--batch-size-valid=50", f"--validate-interval-updates={often}", f"--save-interval-updates={often}"],
            *["--keep-interval-updates=1", "--no-epoch-checkpoints", "--save-interval=1000"],
            *["--best-checkpoint-metric=accuracy", "--maximize-best-checkpoint-metric"],
            *["--log-format=json", f"--log-interval={min(20, updates)}"],
        ]

    def scores(self, run: Run) -> Dict[str, float]:
        data, checkpoint = prepared(run.task, run.data), run.folder / "checkpoint_best.pt"
        printed = output([*testing(run.task, run.model, data, str(checkpoint)), "--cpu"], run.folder / "test.log")
        return {"accuracy on test": float(re.search(r'"test_accuracy": "([\d.]+)"', printed)[1])}


def testing(task: str, model: str, data: Path, checkpoint: str) -> List[str]:
    """The command that measures the accuracy on the test set."""
    plugin = [word for word in MODELS[model] if word.startswith("--user-dir")] or WITH_PLUGIN
    options = ["--valid-subset=test", "--batch-size=50", "--log-format=json", "--path", checkpoint]
    return [*fairseq("validate"), *plugin, str(data), *inputs_words(task), *options]


if __name__ == "__main__":
    Classifiers().main(__doc__)
