"""Mega, the other token mixers and fairseq's Transformers as classifiers: equal parameters, updates and batches.

    python benchmarks/quality_classify.py DATA OUT --tasks listops,fashion --models mega,gau --seeds 1,2
    python benchmarks/quality_classify.py DATA OUT --collect docs/quality_classify.json     adds the results of all runs
    python benchmarks/quality_classify.py --plot docs/quality_classify.json                 draws a figure next to it

Without --lr, each model is trained with two learning rates. A run is OUT/TASK-MODEL-LR-SEED: train.log, checkpoints,
and test.log, the accuracy on test of the checkpoint with the best accuracy on valid. Results that exist are kept, and
an interrupted training is resumed by the same command. DATA/TASK is made by the recipes in examples/, once.

listops       expressions of 50 to 200 symbols, their value
fashion       Fashion-MNIST, 784 pixels
pathfinder32  generated images of 1,024 pixels: are two points connected
addresses     State of the Union addresses, the first 1,024 bytes of a passage: one of four eras
pairs         512 bytes each of two passages: of the same year, or of another year of the era
speech        ten words by four synthetic voices in noise, 2,000 samples, which is one second at 2 kHz

All models have 2 layers of width 64 (GAU and FLASH: 4, which have no feed-forward layers) and the same embedding, norm,
pooling and head. The width of the feed-forward layers is chosen so that parameters agree within 2%. `transformer` is
fairseq's encoder with sinusoidal positions and the same embedding, pooling and head. `roberta` is fairseq's own
classifier, with learned positions and the first position as features; it takes single inputs of tokens or bytes. Its
head for language modelling is not counted.

On one CPU thread a run takes about 3 to 10 minutes, and on speech with full attention up to 25. So few updates do not
suffice to learn Pathfinder; --updates changes their number.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import runs
from benchmarks.measure import chosen_names

ROOT = runs.PLUGIN.parent


class Task(NamedTuple):
    recipe: str  # folder in examples/
    kind: str
    classes: int
    length: int  # of the longest input
    batch: int
    updates: int
    head: int  # width
    chunk: int
    stride: int
    training: List[str]
    sizes: Tuple[str, ...] = ()  # of the data, for prepare.sh
    norm: str = "scalenorm"
    pairs: bool = False


def _values(mean: float, deviation: float, decay: float) -> List[str]:
    scaling = [f"--values-mean={mean}", f"--values-deviation={deviation}"]
    return [*scaling, "--dropout=0", f"--weight-decay={decay}"]


TASKS = {
    "listops": Task(
        *("lra/listops", "tokens", 10, 201, 32, 1000, 128, 64, 16, ["--dropout=0.1", "--weight-decay=0.01"]),
        sizes=("--train=40000", "--valid=1000", "--test=2000"),
        norm="layernorm",
    ),
    "fashion": Task("lra/image", "values", 10, 784, 20, 300, 320, 112, 28, _values(0.286, 0.353, 0.02)),
    "pathfinder32": Task(
        *("lra/pathfinder", "values", 2, 1024, 20, 300, 256, 128, 32, _values(0.5, 0.5, 0.01)),
        sizes=("--images=10000",),
    ),
    "addresses": Task(
        *("lra/text", "bytes", 4, 1024, 16, 400, 256, 128, 32, ["--dropout=0.1", "--weight-decay=0.01"]),
    ),
    "pairs": Task(
        *("lra/retrieval", "bytes", 2, 512, 16, 400, 256, 128, 32, ["--dropout=0.1", "--weight-decay=0.04"]),
        pairs=True,
    ),
    "speech": Task("speech_commands", "values", 10, 2000, 10, 300, 128, 125, 50, _values(0.0, 0.077, 0.01)),
}
TYPES = 25  # symbols of ListOps in fairseq's dictionary

# Mega starts as in the recipes. GAU and FLASH learn little with RoPE in so few updates; their paper has a bias for each
# distance. The others learn slowly from the recipes' initialisation, which is for wider models.
SCALED = "--init=scaled"
HEADS = ["--encoder-attention-heads=4"]
UNITS = ["--encoder-layers=4", "--encoder-ffn-embed-dim=0", "--encoder-z-dim=32", "--rel-pos-bias=simple"]
MEGA = ["--encoder-hidden-dim=128", "--encoder-z-dim=32"]
MODELS = {  # {names} are those of the task
    "mega": ["--encoder-token-mixer=mega", *MEGA],
    "mega-chunk": ["--encoder-token-mixer=mega", *MEGA, "--encoder-chunk-size={chunk}"],
    "gau": ["--encoder-token-mixer=gau", *UNITS],
    "flash": ["--encoder-token-mixer=flash", *UNITS, "--encoder-chunk-size={chunk}"],
    "attention": ["--encoder-token-mixer=attention", SCALED, *HEADS, "--encoder-rotary-dims=16"],
    "time-weighted": [
        *["--encoder-token-mixer=attention", SCALED, *HEADS],
        *["--encoder-rotary-dims=8", "--encoder-chunk-size={length}"],
        *["--encoder-time-weight=before", "--encoder-time-beta", "--encoder-time-gamma", "--encoder-token-shift"],
    ],
    "gmlp": [
        *["--encoder-token-mixer=gmlp", SCALED, *HEADS, "--encoder-chunk-size={length}"],
        *["--encoder-time-alpha", "--encoder-time-beta", "--encoder-token-shift"],
    ],
    "aft-local": ["--encoder-token-mixer=aft", SCALED, *HEADS, "--encoder-aft-form=local", "--encoder-aft-reach=32"],
    "sparse": [
        *["--encoder-token-mixer=sparse", SCALED, *HEADS, "--encoder-rotary-dims=16"],
        *["--encoder-sparse-pattern={pattern}", "--encoder-sparse-stride={stride}"],
    ],
    "transformer": ["--arch=transformer_classifier", *HEADS],
    "roberta": ["--arch=roberta", *HEADS, "--attention-dropout=0", "--init-token=0"],
}
STOCK = ("transformer", "roberta")
WIDTH = {"gau": "encoder-hidden-dim", "flash": "encoder-hidden-dim"}  # others: of feed-forward layers
REFERENCE, REFERENCE_WIDTH = "mega-chunk", 128
FAST, SLOW = ("4e-3", "1e-2"), ("1e-3", "4e-3")
RATES = dict.fromkeys(("attention", "time-weighted", "sparse", *STOCK), SLOW)  # others: FAST


# ------------------------------------------------------------------------------------------------ models


def models_of(task: str) -> List[str]:
    chosen = TASKS[task]
    return [name for name in MODELS if name != "roberta" or (chosen.kind != "values" and not chosen.pairs)]


def model_words(task: str, model: str, width: int) -> List[str]:
    """Arguments of the model for fairseq-train; `width` is that of its feed-forward layers."""
    chosen = TASKS[task]
    places = {**chosen._asdict(), "pattern": "strided" if chosen.kind == "values" else "fixed"}
    words = [word.format(**places) for word in MODELS[model]]
    common = ["--encoder-layers=2", "--encoder-embed-dim=64", f"--max-positions={chosen.length}"]
    words = [*common, *words, f"--{WIDTH.get(model, 'encoder-ffn-embed-dim')}={width}"]
    if model == "roberta":
        return words
    words += [f"--classifier-dim={chosen.head}", *["--pairs"] * chosen.pairs]
    if model in STOCK:
        return [f"--user-dir={ROOT / 'benchmarks/transformer_classifier'}", *words]
    words = ["--arch=mega_classifier", *words, f"--normalization-type={chosen.norm}"]
    if chosen.kind == "values":
        words = [word.replace("scalenorm", "batchnorm") for word in words] + ["--normalize-before"]
        words += ["--attention-activation-fn=laplace"] * model.startswith("mega")
    return words


@lru_cache(maxsize=None)
def fitted(task: str, model: str) -> Tuple[List[str], int]:
    """Arguments of the model, and its number of parameters, which is that of the reference within 2%."""
    if model == REFERENCE:
        words = model_words(task, model, REFERENCE_WIDTH)
        return words, _size(task, words)
    target = fitted(task, REFERENCE)[1]
    narrow, wide = (_size(task, model_words(task, model, width)) for width in (64, 128))
    words = model_words(task, model, 64 + round(64 * (target - narrow) / (wide - narrow)))
    size = _size(task, words)
    if abs(size / target - 1) > 0.02:
        raise ValueError(f"{model} has {size:,} parameters for {task}, and {REFERENCE} {target:,}")
    return words, size


def _size(task: str, words: List[str]) -> int:
    from benchmarks.models import used_size

    return used_size(build(task, words))


def build(task: str, words: List[str]) -> Any:
    """The model with its head, as fairseq-train builds it."""
    from benchmarks import models
    from mega_fairseq.data.classification.inputs import byte_dictionary

    chosen = TASKS[task]
    dictionary = {"bytes": byte_dictionary, "tokens": lambda: models.task(TYPES).source_dictionary}.get(chosen.kind)
    return models.classifier(words, chosen.kind, dictionary and dictionary(), [str(n) for n in range(chosen.classes)])


# ------------------------------------------------------------------------------------------------ data and runs


def prepared(task: str, data: Path) -> Path:
    """The folder with the data of a task, made by its recipe if it does not exist."""
    chosen, folder = TASKS[task], data / task
    script = ROOT / "examples" / chosen.recipe / "prepare.sh"
    environment = {**os.environ, "DATA": str(folder), "SIZE": "small", "PYTHON": sys.executable, "GPUS": "0"}
    made = folder / "small/bin"
    if not (folder / "complete").exists():
        subprocess.run(["bash", str(script), *chosen.sizes], check=True, env=environment)
        if task == "speech":
            slow_down(made)
        (folder / "complete").touch()
    return made


def slow_down(folder: Path) -> None:
    """Resamples sounds of 16 kHz to 2 kHz, by leaving out higher frequencies."""
    for path in sorted(folder.glob("*.npy")):
        samples = np.load(path)
        length = TASKS["speech"].length
        if samples.shape[1] > length:  # unless interrupted after it
            kept = np.fft.rfft(samples / 32768)[:, : length // 2 + 1]
            np.save(path, (np.fft.irfft(kept, length) * (length / samples.shape[1])).astype(np.float32))


def inputs_words(task: str) -> List[str]:
    chosen = TASKS[task]
    scaling = [word for word in chosen.training if word.startswith("--values")]
    limits = [f"--max-positions={chosen.length}", "--shorten-method=truncate", "--required-batch-size-multiple=1"]
    return [
        "--task=mega_classification",
        "--criterion=sentence_prediction",
        f"--input-kind={chosen.kind}",
        *limits,
        *scaling,
    ]


def recipe(task: str, lr: str, updates: int) -> List[str]:
    chosen, often = TASKS[task], str(max(1, updates // 8))
    return [
        *inputs_words(task),
        *chosen.training,
        *["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-8", "--clip-norm", "1.0"],
        *["--lr", lr, "--lr-scheduler", "polynomial_decay", "--warmup-updates", str(updates // 5)],
        *["--total-num-update", str(updates), "--max-update", str(updates), "--batch-size", str(chosen.batch)],
        *["--batch-size-valid", "50", "--validate-interval-updates", often, "--save-interval-updates", often],
        *["--keep-interval-updates", "1", "--no-epoch-checkpoints", "--save-interval", "1000"],
        *["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"],
        *["--log-format", "json", "--log-interval", str(min(20, updates))],
    ]


def run(data: Path, out: Path, task: str, model: str, lr: str, seed: int, updates: Optional[int]) -> None:
    """Trains and tests one model, unless already done."""
    updates, folder = updates or TASKS[task].updates, out / f"{task}-{model}-{lr}-{seed}"
    examples, words = prepared(task, data), fitted(task, model)[0]
    runs.train(folder, updates, str(examples), *words, *recipe(task, lr, updates), "--seed", str(seed))
    log, checkpoint = folder / "test.log", folder / "checkpoint_best.pt"
    if runs.is_done(log, checkpoint, "test_accuracy"):
        return
    plugin = [word for word in words if word.startswith("--user-dir")] or runs.WITH_PLUGIN
    command = [*runs.fairseq("validate"), *plugin, str(examples), *inputs_words(task), "--path", str(checkpoint)]
    with open(log, "w") as file:
        options = ["--valid-subset", "test", "--batch-size", "50", "--log-format", "json", "--cpu"]
        subprocess.run([*command, *options], check=True, stdout=file, stderr=subprocess.STDOUT)


# ------------------------------------------------------------------------------------------------ results


NAME = re.compile(r"(\w+)-(.*)-([\d.]+e-\d+)-(\d+)")  # of a run


def read(folder: Path, log: str) -> Dict:
    """Learning curves in percent and bits, and the accuracy on test at the update that is best on valid."""
    found, test = None, folder / "test.log"
    if test.exists():
        found = re.search(r'"test_accuracy": "([\d.]+)"', test.read_text())
    accuracies = runs.curve(log, "valid", "valid_accuracy", "valid_num_updates")
    task, model, *_ = NAME.fullmatch(folder.name).groups()
    return {
        "parameters": fitted(task, model)[1],
        "train_bits": runs.curve(log, "train_inner", "loss", "num_updates"),
        "valid_accuracy": accuracies,
        "best_valid": max((accuracy for _, accuracy in accuracies), default=None),
        "test_accuracy": found and float(found.group(1)),
    }


def collect(out: Path, target: Path) -> None:
    for name, found in runs.collect(out, target, read, "valid_accuracy").items():
        print(f"{name}: {found['parameters']:,} parameters, valid {found['best_valid']}, test {found['test_accuracy']}")


def by_model(found: Dict[str, Dict]) -> Dict[str, Dict[str, Dict[str, List[str]]]]:
    """Names of the tested runs by task, model and learning rate, seeds in order; the best rate on valid comes first.

    Of rates that are equally good on valid, the first is the one with the lower loss at the end of the training.
    """

    def merit(item: Tuple[str, List[str]]) -> Tuple[float, float]:
        first = found[item[1][0]]
        return -first["best_valid"], first["train_bits"][-1][1]

    rates: Dict[str, Dict[str, Dict[str, List[str]]]] = {}
    for name in sorted(name for name, run in found.items() if run["test_accuracy"] is not None):
        task, model, rate, _ = NAME.fullmatch(name).groups()
        rates.setdefault(task, {}).setdefault(model, {}).setdefault(rate, []).append(name)
    return {
        task: {m: dict(sorted(names.items(), key=merit)) for m, names in models.items()}
        for task, models in rates.items()
    }


LABELS = {
    "transformer": "fairseq's Transformer",
    "roberta": "fairseq `roberta`",
    "mega": "Mega",
    "mega-chunk": "Mega in chunks",
    "gau": "GAU",
    "flash": "FLASH",
    "attention": "attention, RoPE",
    "time-weighted": "attention, time weighting",
    "gmlp": "gMLP",
    "aft-local": "AFT-local",
    "sparse": "sparse attention",
}


def plot(source: Path) -> None:
    """Accuracy on valid against updates, next to `source`: each model at its best learning rate, first seed."""
    from matplotlib.figure import Figure

    found = json.loads(source.read_text())
    tasks = by_model(found)
    figure = Figure(figsize=(4 * min(3, len(tasks)) + 2, 3.2 * -(-len(tasks) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(tasks) // 3), min(3, len(tasks)), squeeze=False).flat
    for axis, (task, models) in zip(axes, tasks.items()):
        for number, (model, label) in enumerate(LABELS.items()):
            if model in models:
                names = next(iter(models[model].values()))
                style = {"color": f"C{number % 10}", "marker": "os"[number // 10], "markersize": 3}
                axis.plot(*zip(*found[names[0]]["valid_accuracy"]), label=label.replace("`", ""), **style)
        axis.set(title=task, xlabel="updates", ylabel="accuracy on valid, percent")
        axis.grid(alpha=0.3)
    handles = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside right center", fontsize=8)
    figure.savefig(source.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder of the data, which are made if they do not exist")
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lr", help="peak learning rates, separated by commas, in place of the two of each model")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--updates", type=int, help="in place of those of each task")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="only write the results of the runs in OUT")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves of FILE, next to it")
    args = parser.parse_args()
    if args.plot:
        return plot(args.plot)
    if args.out is None:
        parser.error("DATA and OUT are missing")
    if args.collect:
        return collect(args.out, args.collect)
    tasks = chosen_names(parser, "tasks", args.tasks, TASKS)
    models = chosen_names(parser, "models", args.models, MODELS)
    for seed in map(int, args.seeds.split(",")):
        for task in tasks:
            for model in (name for name in models_of(task) if name in models):
                for lr in args.lr.split(",") if args.lr else RATES.get(model, FAST):
                    run(args.data.resolve(), args.out.resolve(), task, model, lr, seed, args.updates)


if __name__ == "__main__":
    main()
