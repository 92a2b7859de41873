"""Mega, the other token mixers and fairseq's transformer_lm on bytes of Wikipedia: equal parameters, updates, tokens.

    python benchmarks/quality_lm.py DATA --prepare FILE     first, once: FILE is text, or text compressed with xz
    python benchmarks/quality_lm.py DATA OUT --models mega,transformer --lr 5e-3 --seeds 1,2
    python benchmarks/quality_lm.py DATA OUT --collect docs/quality_lm.json    adds scores and curves of all runs
    python benchmarks/quality_lm.py --plot docs/quality_lm.json                draws docs/quality_lm.png

A run is OUT/MODEL-LR-SEED: train.log, checkpoint_last.pt and one eval-*.log for each test chunk, or each context window
of the Transformer. Results that exist are kept, and an interrupted training is resumed by the same command.
"""

import argparse
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import runs
from benchmarks.measure import chosen_names

TO_BYTES = runs.PLUGIN.parent / "examples/lm/to_bytes.py"
PARTS = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}  # as enwik8 is split

OURS = [
    *["--task", "mega_language_modeling", "--criterion", "mega_lm_cross_entropy"],
    *["--variant-block-multiple-min", "2", "--variant-block-multiple-max", "4"],
]
SCALED = [*OURS, "--arch", "mega_lm_small"]
MEGA = [*SCALED, "--init", "released"]
TRAINED_CONTEXT = ["--valid-block", "size:1024"]  # of the longest training segments
MODELS = {  # parameters within 2%; the Transformer's feed-forward is chosen to have 887,816
    "mega": MEGA,
    "mega-scaled": SCALED,
    "mega-bf16": [*MEGA, "--bf16"],
    "mega-shift": [*MEGA, "--decoder-token-shift"],
    "mega-shift-scaled": [*SCALED, "--decoder-token-shift"],
    "mega-rope": [*MEGA, "--rel-pos-bias", "rope"],
    "mega-alibi": [*MEGA, "--rel-pos-bias", "alibi"],
    "mega-simple": [*MEGA, "--rel-pos-bias", "simple"],
    "flash-quad": [*OURS, "--arch", "flash_quad_lm_small"],
    "flash": [*OURS, "--arch", "flash_lm_small"],
    "attention": [*OURS, "--arch", "attention_lm_small"],
    "time-weighted": [*OURS, "--arch", "time_weighted_lm_small"],
    "gmlp": [*OURS, "--arch", "gmlp_lm_small"],
    "aft-local": [*OURS, "--arch", "aft_lm_small", "--tokens-per-sample", "256", *TRAINED_CONTEXT],
    "sparse": [*OURS, "--arch", "sparse_lm_small", "--tokens-per-sample", "256"],
    "transformer": [
        *["--task", "language_modeling", "--arch", "transformer_lm", "--sample-break-mode", "none"],
        *["--tokens-per-sample", "512", "--decoder-layers", "4", "--decoder-embed-dim", "128"],
        *["--decoder-input-dim", "128", "--decoder-output-dim", "128"],
        *["--decoder-ffn-embed-dim", "578", "--decoder-attention-heads", "4", "--decoder-normalize-before"],
        *["--share-decoder-input-output-embed", "--dropout", "0.0"],
    ],
}
# Settings of the evaluation; the first one is also evaluated on valid.
WINDOWS = (384, 0, 256)  # minimum context of a scored token, out of the Transformer's 512
CHUNKS = (256, 64, 128, 512, 1024, 2048)
FEWER_CHUNKS = {  # of models that do not work with other chunks
    "mega-simple": (256, 64, 128),
    "time-weighted": (256,),
    "gmlp": (256,),
    "sparse": (1024,),
}


def prepare(text: Path, data: Path) -> None:
    """Splits a text, writes its bytes as numbers and binarises them in DATA/bin."""
    content = text.read_bytes()
    if text.suffix == ".xz":
        content = lzma.decompress(content)
    data.mkdir(parents=True, exist_ok=True)
    for name, (start, stop) in PARTS.items():
        part = content[int(len(content) * start) : int(len(content) * stop)]
        with open(data / f"{name}.bytes", "wb") as file:
            subprocess.run([sys.executable, str(TO_BYTES)], input=part, stdout=file, check=True)
    files = [word for name in PARTS for word in (f"--{name}pref", str(data / f"{name}.bytes"))]
    subprocess.run([*runs.fairseq("preprocess"), "--only-source", *files, "--destdir", str(data / "bin")], check=True)


def recipe(lr: str, updates: int) -> List[str]:
    return [
        *["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "0.25", "--weight-decay", "0.1"],
        *["--lr", lr, "--lr-scheduler", "polynomial_decay", "--warmup-updates", "150"],
        *["--total-num-update", str(updates), "--max-update", str(updates), "--max-tokens", "4096"],
        *["--no-epoch-checkpoints", "--validate-interval-updates", "300", "--save-interval", "1000"],
        *["--save-interval-updates", "500", "--keep-interval-updates", "1"],
        *["--log-format", "json", "--log-interval", str(min(50, updates))],
    ]


def run(data: Path, out: Path, model: str, lr: str, seed: int, updates: int) -> None:
    """Trains and scores one model, unless already done."""
    folder = out / f"{model}-{lr}-{seed}"
    runs.train(folder, updates, str(data / "bin"), *MODELS[model], *recipe(lr, updates), "--seed", str(seed))
    for number, (setting, options) in enumerate(evaluations(model)):
        for subset in ("test",) if number else ("valid", "test"):
            evaluate(data, folder, subset, setting, options)


def evaluations(model: str) -> List[Tuple[str, List[str]]]:
    if model == "transformer":
        common = ["--task", "language_modeling", "--sample-break-mode", "none", "--tokens-per-sample", "512"]
        return [(f"window {w}", [*common, "--context-window", str(w)]) for w in WINDOWS]
    common = [*runs.WITH_PLUGIN, "--task", "mega_language_modeling"]
    if model.startswith("aft"):  # without chunks; AFT-local's weights count for less, the more tokens came before
        return [("context 1024", [*common, *TRAINED_CONTEXT]), ("stream", common)]
    chunks = FEWER_CHUNKS.get(model, CHUNKS)
    return [(f"chunk {c}", [*common, "--model-overrides", f"{{'decoder_chunk_size': {c}}}"]) for c in chunks]


def evaluate(data: Path, folder: Path, subset: str, setting: str, options: List[str]) -> None:
    log, checkpoint = folder / f"eval-{subset}-{setting.replace(' ', '-')}.log", folder / "checkpoint_last.pt"
    if runs.is_done(log, checkpoint, "Perplexity"):
        return
    print(f"evaluating {folder} on {subset}, {setting}", flush=True)
    command = [*runs.fairseq("eval_lm"), str(data / "bin"), *options, "--gen-subset", subset, "--cpu"]
    with open(log, "w") as file:
        subprocess.run([*command, "--path", str(checkpoint)], check=True, stdout=file, stderr=subprocess.STDOUT)


def read(folder: Path, log: str) -> Dict:
    """Learning curves and scores of a run, in bits per token: all but one token in 65,537 is a byte."""
    scores: Dict[str, Dict[str, float]] = {}
    for evaluation in sorted(folder.glob("eval-*.log")):
        _, subset, setting = evaluation.stem.split("-", 2)
        found = re.search(r"Loss \(base 2\): ([\d.]+)", evaluation.read_text())
        if found:
            scores.setdefault(subset, {})[setting.replace("-", " ")] = float(found.group(1))
    return {
        "train_bits": runs.curve(log, "train_inner", "loss", "num_updates"),
        "valid_bits": runs.curve(log, "valid", "valid_loss", "valid_num_updates"),
        "bits_per_byte": scores,
    }


def collect(out: Path, target: Path) -> None:
    for name, found in runs.collect(out, target, read, "train_bits").items():
        update, bits = found["train_bits"][-1]
        print(f"{name}: {found['parameters']:,} parameters, training {bits} bits at update {update}")
        for subset, scores in found["bits_per_byte"].items():
            print(f"   {subset}: " + ", ".join(f"{setting} {value}" for setting, value in scores.items()))


def by_model(found: Dict[str, Dict]) -> Dict[str, Dict[str, List[str]]]:
    """Names of the scored runs of each model, by learning rate, seeds in order; the best rate on valid comes first."""
    score = {n: min(run["bits_per_byte"]["valid"].values()) for n, run in found.items() if run["bits_per_byte"]}
    rates: Dict[str, Dict[str, List[str]]] = {}
    for name in sorted(score):
        model, rate = NAME.fullmatch(name).groups()
        rates.setdefault(model, {}).setdefault(rate, []).append(name)
    return {model: dict(sorted(of.items(), key=lambda item: score[item[1][0]])) for model, of in rates.items()}


NAME = re.compile(r"(.*)-([\d.]+e-\d+)-\d+")  # of a run
LABELS = {  # of the models that are compared
    "transformer": "fairseq `transformer_lm`",
    "mega": "Mega",
    "mega-scaled": "Mega, `--init scaled`",
    "mega-shift": "Mega, token shift",
    "mega-shift-scaled": "Mega, token shift, `--init scaled`",
    "flash": "FLASH",
    "flash-quad": "FLASH-Quad",
    "attention": "attention, RoPE",
    "time-weighted": "attention, time weighting",
    "gmlp": "gMLP",
    "aft-local": "AFT-local",
    "sparse": "sparse attention",
}


def plot(source: Path) -> None:
    """Validation loss against updates: each model at its best learning rate, first seed."""
    best = {next(iter(rates.values()))[0]: m for m, rates in by_model(json.loads(source.read_text())).items()}

    def style(name: str) -> Optional[Dict[str, str]]:
        if best.get(name) not in LABELS:
            return None
        number = list(LABELS).index(best[name])
        color = "black" if best[name] == "transformer" else f"C{number}"
        return {"color": color, "marker": "o.^v"[number % 4], "label": LABELS[best[name]].replace("`", "")}

    title = "Bytes of Wikipedia, validation, 0.89M parameters, best learning rates"
    runs.plot(source, "valid_bits", "bits per byte", title, style, fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder that --prepare writes")
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="only make DATA from this text")
    parser.add_argument("--models", default="mega,transformer", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lr", default="5e-3", help="peak learning rates, separated by commas")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="only write the results of the runs in OUT")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves of FILE, next to it")
    args = parser.parse_args()
    if args.plot:
        return plot(args.plot)
    if args.prepare and args.data:
        return prepare(args.prepare, args.data)
    if args.out is None:
        parser.error("DATA and OUT are missing")
    models = chosen_names(parser, "models", args.models, MODELS)
    if args.collect:
        return collect(args.out, args.collect)
    for lr in args.lr.split(","):
        for seed in map(int, args.seeds.split(",")):
            for model in models:
                run(args.data.resolve(), args.out.resolve(), model, lr, seed, args.updates)


if __name__ == "__main__":
    main()
