"""Mega against fairseq's Transformer in translation, until validation stops falling: equal parameters and batches.

    VOCABULARY=4000 DATA=DATA/bible examples/wmt16_en_de/bible/prepare.sh
    VOCABULARY=4000 DATA=DATA/docs CORPUS=.../ende-docs examples/wmt16_en_de/bible/prepare.sh     first, once
    python benchmarks/quality_translation.py DATA OUT --lr 2e-3,4e-3,8e-3 --updates 2800 --unscored   chooses the rates
    python benchmarks/quality_translation.py DATA OUT --models mega --lr 2e-3 --seeds 1,2        to the end, and scores
    python benchmarks/quality_translation.py DATA OUT --speeds          then, while nothing else runs on the machine
    python benchmarks/quality_translation.py DATA OUT --collect docs/quality_translation.json    adds all runs
    python benchmarks/quality_translation.py --plot docs/quality_translation.json                draws a figure

A run is OUT/CORPUS-MODEL-LR-SEED: train.log, checkpoints, and scores.txt of the average of the last five. It ends after
12,000 updates, or when five validations, 400 updates apart, have found no better loss. The learning rate does not
depend on the number of updates, so a short run is the beginning of a long one, which continues it. Results that exist
are kept, and an interrupted training is resumed by the same command. An update takes about a second on one CPU thread.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import runs
from benchmarks.measure import chosen_names
from benchmarks.quality import EXAMPLE, translate
from benchmarks.quality import MODELS as SMALL

OFTEN, KEPT, PATIENCE = 400, 5, 5  # updates between validations; checkpoints to average; validations without a gain
LONGEST, CHOSEN_AT = 12_000, 2800  # updates; learning rates are chosen by the loss after the latter
BATCHES = (1, 16, 64)  # sentences that are translated at a time, when speed is measured
TIMED, TURNS = 50, 3  # the first updates of a training are timed three times


class Corpus(NamedTuple):
    name: str
    dropout: float


CORPORA = {"bible": Corpus("Bible", 0.2), "docs": Corpus("software documentation", 0.1)}
MODELS = {  # of 2.0 million parameters
    "mega": [*SMALL["mega-scaled"], "--bf16"],
    "transformer": [*SMALL["transformer"], "--bf16"],
}
LABELS = {"mega": "Mega", "transformer": "fairseq's Transformer"}


def recipe(corpus: str, lr: str, updates: int) -> List[str]:
    often = str(min(OFTEN, updates))
    return [
        *["--task", "translation", "--source-lang", "en", "--target-lang", "de", "--share-all-embeddings"],
        *["--dropout", str(CORPORA[corpus].dropout), "--weight-decay", "0.05", "--clip-norm", "1.0"],
        *["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"],
        *["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-8"],
        *["--lr", lr, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "400", "--max-update", str(updates)],
        *["--max-tokens", "4096", "--required-batch-size-multiple", "1", "--no-epoch-checkpoints"],
        *["--validate-interval-updates", often, "--validate-interval", "1000", "--patience", str(PATIENCE)],
        *["--save-interval-updates", often, "--save-interval", "1000", "--keep-interval-updates", str(KEPT)],
        *["--log-format", "json", "--log-interval", "50"],
    ]


def train(data: Path, folder: Path, corpus: str, model: str, lr: str, seed: int, updates: int, *options: str) -> None:
    words = [*MODELS[model], *recipe(corpus, lr, updates), "--seed", str(seed), *options]
    runs.train(folder, updates, str(data / corpus / "sentencepiece/bin"), *words)


def run(data: Path, out: Path, corpus: str, model: str, lr: str, seed: int, updates: int, scored: bool) -> None:
    """Trains and scores one model, unless already done."""
    folder = out / f"{corpus}-{model}-{lr}-{seed}"
    train(data, folder, corpus, model, lr, seed, updates)
    last, averaged = folder / "checkpoint_last.pt", folder / "averaged.pt"
    if not scored or runs.is_done(folder / "scores.txt", last, "chrF2"):
        return
    print(f"scoring {folder}", flush=True)
    saved = sorted(folder.glob("checkpoint_*_*.pt"), key=_updates)[-KEPT:]
    average = [sys.executable, str(EXAMPLE.parent / "average_checkpoints.py"), str(averaged), *map(str, saved)]
    subprocess.run(average, check=True)
    translate(data / corpus, averaged, folder)


def _updates(checkpoint: Path) -> int:
    return int(checkpoint.stem.split("_")[-1])


# ------------------------------------------------------------------------------------------------ speed


NAME = re.compile(r"(\w+)-(\w+)-([\d.]+e-\d+)-(\d+)")  # of a run


def measure(data: Path, out: Path, updates: int) -> None:
    """Trains and translates with the scored models of seed 1, in turns, and keeps the speeds in speed-WHAT.txt."""
    for corpus in CORPORA:
        folders = sorted(path.parent for path in out.glob(f"{corpus}-*-1/averaged.pt"))
        measure_training(data, out / "speeds", folders, updates)
        measure_translation(data / corpus, folders)


def measure_training(data: Path, logs: Path, folders: List[Path], updates: int) -> None:
    speeds = {folder: [] for folder in folders}  # tokens/s
    for turn in range(TURNS):
        for folder, measured in speeds.items():
            corpus, model, lr, seed = NAME.fullmatch(folder.name).groups()
            timed = logs / f"{folder.name}-{turn}"
            train(data, timed, corpus, model, lr, int(seed), updates, "--no-save", "--disable-validation")
            measured.append(float(re.search(r'wps": "([\d.]+)"', (timed / "train.log").read_text()).group(1)))
    for folder, measured in speeds.items():
        (folder / "speed-training.txt").write_text(str(statistics.median(measured)))


def measure_translation(data: Path, folders: List[Path]) -> None:
    for batch in BATCHES:
        for folder in folders:
            kept, results = folder / f"speed-{batch}.txt", folder / f"speed-{batch}"
            if not kept.exists():
                said = translate(data, folder / "averaged.pt", results, f"--batch-size={batch}")
                kept.write_text(re.search(r"\(([\d.]+) sentences/s", said).group(1))


# ------------------------------------------------------------------------------------------------ results


def read(folder: Path, log: str) -> Dict:
    """Learning curve, speeds and test scores of a run."""
    scores = folder / "scores.txt"
    speeds = {path.stem.split("-")[1]: float(path.read_text()) for path in sorted(folder.glob("speed-*.txt"))}
    return {
        "valid_bits_per_token": runs.curve(log, "valid", "valid_nll_loss", "valid_num_updates"),
        "speeds": speeds,  # training: tokens/s of the target; 1, 16, 64: sentences/s, by batch
        "scores": scores.read_text().splitlines() if scores.exists() else None,
    }


def collect(out: Path, target: Path) -> None:
    for name, found in runs.collect(out, target, read, "valid_bits_per_token").items():
        update, bits = min(found["valid_bits_per_token"], key=lambda point: point[1])
        print(f"{name}: {found['parameters']:,} parameters, validation {bits} bits per piece at update {update}")
        print("   " + "\n   ".join(found["scores"] or ["not scored"]))


def plot(source: Path) -> None:
    """Validation loss against updates: a panel for each corpus, a line for each of its runs that was scored."""
    from matplotlib.figure import Figure

    found = {name: run for name, run in json.loads(source.read_text()).items() if run["scores"]}
    scored = [corpus for corpus in CORPORA if any(name.startswith(f"{corpus}-") for name in found)]
    figure = Figure(figsize=(6 * len(scored), 4), layout="constrained")
    for axis, corpus in zip(figure.subplots(1, len(scored), squeeze=False)[0], scored):
        for name, run in found.items():
            of_corpus, model, lr, seed = NAME.fullmatch(name).groups()
            if of_corpus == corpus:
                style = {
                    "color": f"C{list(MODELS).index(model)}",
                    "linestyle": ("-", "--", "-.", ":")[(int(seed) - 1) % 4],
                }
                label = f"{LABELS[model]}, {lr}, seed {seed}"
                axis.plot(*zip(*run["valid_bits_per_token"]), label=label, **style)
        axis.set(title=f"{CORPORA[corpus].name}, validation", xlabel="updates", ylabel="bits per piece")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(source.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="a folder with the DATA of prepare.sh for each corpus")
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--corpora", default=",".join(CORPORA), help=f"some of {', '.join(CORPORA)}")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lr", default="2e-3", help="peak learning rates, separated by commas")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--updates", type=int, default=LONGEST, help="default: %(default)s")
    parser.add_argument("--unscored", action="store_true", help="only train and validate")
    parser.add_argument("--speeds", action="store_true", help="only measure how fast the scored models translate")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="only write the results of the runs in OUT")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves of FILE, next to it")
    args = parser.parse_args()
    if args.plot:
        return plot(args.plot)
    if args.out is None:
        parser.error("DATA and OUT are missing")
    data, out = args.data.resolve(), args.out.resolve()
    if args.collect:
        return collect(out, args.collect)
    if args.speeds:
        return measure(data, out, min(args.updates, TIMED))
    corpora = chosen_names(parser, "corpora", args.corpora, CORPORA)
    models = chosen_names(parser, "models", args.models, MODELS)
    for seed in map(int, args.seeds.split(",")):
        for corpus in corpora:
            for lr in args.lr.split(","):
                for model in models:
                    run(data, out, corpus, model, lr, seed, args.updates, not args.unscored)


if __name__ == "__main__":
    main()
