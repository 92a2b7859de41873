"""The time weighting experiment: attention with time weighting (MHA+), gMLP and AFT, one layer each, on characters.

    python benchmarks/quality_seed.py DATA --prepare FOLDER     first, once: FOLDER has train.txt, valid.txt, test.txt
    python benchmarks/quality_seed.py DATA OUT --seeds 1,2
    python benchmarks/quality_seed.py DATA OUT --collect docs/quality_seed.json     adds scores and curves of all runs

The models are those of the original experiment: d 512, 8 heads, windows of 128 characters, GEGLU, token shift. The
learning rate falls from 1e-3 to 1e-4 with the cosine. Adam takes the place of AdaBelief, and an update has 16 windows
and not 64. They are trained in bf16; time-weighted-fp32 shows what that changes.

A run is OUT/MODEL-SEED: train.log, checkpoint_last.pt, eval-*.log. An interrupted run is resumed.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import quality_lm, runs
from benchmarks.measure import chosen_names

TASK = ["--task", "mega_language_modeling", "--criterion", "mega_lm_cross_entropy"]
MODELS: Dict[str, List[str]] = {
    "time-weighted": [*TASK, "--arch", "time_weighted_lm_seed", "--bf16"],
    "time-weighted-fp32": [*TASK, "--arch", "time_weighted_lm_seed"],
    "gmlp": [*TASK, "--arch", "gmlp_lm_seed", "--bf16"],
    "aft": [*TASK, "--arch", "aft_lm_seed", "--bf16"],
}
LABELS = {
    "aft": "AFT",
    "time-weighted": "attention, time weighting (MHA+)",
    "time-weighted-fp32": "the same in float32",
    "gmlp": "gMLP",
}
SUBSETS = ("train", "valid", "test")
LINE = 65_536  # characters


def prepare(text: Path, data: Path) -> None:
    """Writes each character as its code point and binarises the files in DATA/bin."""
    data.mkdir(parents=True, exist_ok=True)
    for name in SUBSETS:
        content = (text / f"{name}.txt").read_text(encoding="utf-8")
        parts = (content[start : start + LINE] for start in range(0, len(content), LINE))
        (data / f"{name}.characters").write_text("".join(" ".join(str(ord(c)) for c in part) + "\n" for part in parts))
    files = [word for name in SUBSETS for word in (f"--{name}pref", str(data / f"{name}.characters"))]
    subprocess.run([*runs.fairseq("preprocess"), "--only-source", *files, "--destdir", str(data / "bin")], check=True)


def recipe(updates: int) -> List[str]:
    return [
        *["--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--clip-norm", "1.0", "--dropout", "0.0"],
        *["--lr", "1e-3", "--lr-scheduler", "cosine", "--min-lr", "1e-4", "--lr-period-updates", str(updates)],
        *["--max-update", str(updates), "--max-tokens", "2048", "--no-epoch-checkpoints"],
        *["--validate-interval-updates", "500", "--save-interval-updates", "500", "--keep-interval-updates", "1"],
        *["--log-format", "json", "--log-interval", str(min(50, updates))],
    ]


def run(data: Path, out: Path, model: str, seed: int, updates: int) -> None:
    """Trains and scores one model, unless already done."""
    folder = out / f"{model}-{seed}"
    runs.train(folder, updates, str(data / "bin"), *MODELS[model], *recipe(updates), "--seed", str(seed))
    for subset in ("valid", "test"):
        options = [*runs.WITH_PLUGIN, "--task", "mega_language_modeling"]
        quality_lm.evaluate(data, folder, subset, "stream", options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that --prepare writes")
    parser.add_argument("out", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="only make DATA from the text in this folder")
    parser.add_argument("--models", default="time-weighted,gmlp,aft", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="only write the results of the runs in OUT")
    args = parser.parse_args()
    if args.prepare:
        return prepare(args.prepare, args.data)
    if args.out is None:
        parser.error("OUT is missing")
    models = chosen_names(parser, "models", args.models, MODELS)
    if args.collect:
        return quality_lm.collect(args.out, args.collect)
    for seed in map(int, args.seeds.split(",")):
        for model in models:
            run(args.data.resolve(), args.out.resolve(), model, seed, args.updates)


if __name__ == "__main__":
    main()
