"""Mega against fairseq's Transformer on the shipped Bible corpus: equal parameters, updates and batches.

    examples/wmt16_en_de/bible/prepare.sh with VOCABULARY=4000 DATA=DATA     first, once
    python benchmarks/quality.py DATA OUT --models transformer,mega-scaled --seeds 1,2
    python benchmarks/quality.py DATA OUT --collect docs/quality.json        scores and learning curves of all runs
    python benchmarks/quality.py --plot docs/quality.json                    draws docs/quality.png

A run is OUT/MODEL-SEED: train.log, checkpoint_last.pt and scores.txt. Results that exist are kept, and an interrupted
training is resumed by the same command. On one CPU thread a run takes about half an hour.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import runs
from benchmarks.measure import chosen_names

EXAMPLE = runs.PLUGIN.parent / "examples/wmt16_en_de/bible"


def both_sides(**sizes: int) -> List[str]:
    return [
        part
        for side in ("encoder", "decoder")
        for name, size in sizes.items()
        for part in (f"--{side}-{name.replace('_', '-')}", str(size))
    ]


MODELS = {  # 2,038,391 parameters; the Transformer's feed-forward is chosen to have 2,017,760
    "mega": ["--arch", "mega_transformer_tiny", "--init", "released"],
    "mega-scaled": ["--arch", "mega_transformer_tiny"],
    "transformer": ["--arch", "transformer_iwslt_de_en"]
    + both_sides(embed_dim=128, attention_heads=4, ffn_embed_dim=592, layers=3),
}


def recipe(updates: int) -> List[str]:
    return [
        *["--task", "translation", "--source-lang", "en", "--target-lang", "de", "--share-all-embeddings"],
        *["--dropout", "0.1", "--weight-decay", "0.05", "--clip-norm", "1.0"],
        *["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"],
        *["--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-8"],
        *["--lr", "2e-3", "--lr-scheduler", "polynomial_decay", "--warmup-updates", "300"],
        *["--total-num-update", str(updates), "--max-update", str(updates), "--max-tokens", "4096"],
        *["--required-batch-size-multiple", "1", "--validate-interval-updates", "200", "--no-epoch-checkpoints"],
        *["--save-interval", "1000", "--save-interval-updates", "400", "--keep-interval-updates", "1"],
        *["--log-format", "json", "--log-interval", "50"],
    ]


def run(data: Path, out: Path, model: str, seed: int, updates: int) -> None:
    """Trains and scores one model, unless already done."""
    folder = out / f"{model}-{seed}"
    words = [*MODELS[model], *recipe(updates), "--seed", str(seed)]
    runs.train(folder, updates, str(data / "sentencepiece/bin"), *words)
    checkpoint = folder / "checkpoint_last.pt"
    if not runs.is_done(folder / "scores.txt", checkpoint, "chrF2"):
        print(f"scoring {folder}", flush=True)
        translate(data, checkpoint, folder)


def translate(data: Path, checkpoint: Path, results: Path, *options: str) -> str:
    """Writes translations of the test set and their scores to the folder `results`; returns what was printed."""
    places = {"DATA": data, "CHECKPOINT": checkpoint, "RESULTS": results, "GPUS": 0, "PYTHON": sys.executable}
    environment = {**os.environ, **{name: str(value) for name, value in places.items()}}
    command = ["bash", str(EXAMPLE / "generate.sh"), *options]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, **output)
    print(done.stdout, flush=True)
    done.check_returncode()
    return done.stdout


def read(folder: Path, log: str) -> Dict:
    """Learning curve and test scores of a run."""
    scores = folder / "scores.txt"
    return {
        "valid_bits_per_token": runs.curve(log, "valid", "valid_nll_loss", "valid_num_updates"),
        "scores": scores.read_text().splitlines() if scores.exists() else None,
    }


def collect(out: Path, target: Path) -> None:
    for name, found in runs.collect(out, target, read, "valid_bits_per_token").items():
        update, bits = found["valid_bits_per_token"][-1]
        print(f"{name}: {found['parameters']:,} parameters, validation {bits} bits per token after {update} updates")
        print("   " + "\n   ".join(found["scores"] or ["not scored"]))


def plot(source: Path) -> None:
    """Validation loss against updates: one line per run, one colour per model."""
    colours = dict(zip(MODELS, ("tab:orange", "tab:red", "tab:purple", "tab:blue")))

    def style(name: str) -> Dict[str, str]:
        model, seed = name.rsplit("-", 1)
        return {"color": colours[model], "label": f"{model}, seed {seed}"}

    title = "Bible en-de, validation, 2.0M parameters"
    runs.plot(source, "valid_bits_per_token", "bits per token", title, style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="the DATA of prepare.sh")
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--models", default="transformer,mega-scaled", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="only write the results of the runs in OUT")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves of FILE, next to it")
    args = parser.parse_args()
    if args.plot:
        return plot(args.plot)
    if args.out is None:
        parser.error("DATA and OUT are missing")
    models = chosen_names(parser, "models", args.models, MODELS)
    if args.collect:
        return collect(args.out, args.collect)
    for seed in map(int, args.seeds.split(",")):
        for model in models:
            run(args.data.resolve(), args.out.resolve(), model, seed, args.updates)


if __name__ == "__main__":
    main()
