"""Mega against fairseq's Transformer in translation: equal parameters, batches and updates.

    VOCABULARY=4000 DATA=DATA/bible examples/wmt16_en_de/bible/prepare.sh
    VOCABULARY=4000 DATA=DATA/docs CORPUS=.../ende-docs examples/wmt16_en_de/bible/prepare.sh     first, once
    python benchmarks/quality_translation.py DATA OUT --tasks bible,docs --models mega --lr 8e-3 --seeds 1,2
    python benchmarks/quality_translation.py DATA OUT --collect docs/quality_translation.json
    python benchmarks/quality_translation.py --plot docs/quality_translation.json

Training ends after 12,000 updates, or when five validations, 400 updates apart, have found no better loss; the average
of the last five checkpoints is scored. The learning rate does not depend on the number of updates, so a short run is
the beginning of a long one. An update takes about a second on one CPU thread. `short` trains on
DATA/bible for 1,500 updates and scores without an average.

    python benchmarks/quality_translation.py DATA --prepare FOLDER      the first pairs of FOLDER/train.{en,de}
    python benchmarks/quality_translation.py DATA OUT --tasks pairs5000,pairs30000,pairs186000 --models tiny,tiny-bf16
    python benchmarks/quality_translation.py DATA OUT --collect docs/quality_pairs.json

The recipe of docs/translation.md by number of pairs, in float32 and bf16. A run pauses after 500 and 1,000 of its 3,000
updates, and its best checkpoint is scored.
"""

import json
import os
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.runs import PLUGIN, Experiment, Run, curve, output

EXAMPLE = PLUGIN.parent / "examples/wmt16_en_de/bible"
AVERAGED = 5  # checkpoints


def both_sides(**sizes: int) -> List[str]:
    return [
        f"--{side}-{name.replace('_', '-')}={size}" for side in ("encoder", "decoder") for name, size in sizes.items()
    ]


MODELS = {  # 2,038,391 parameters; the Transformer's feed-forward is chosen to have 2,017,760
    "mega": ["--arch=mega_transformer_tiny"],
    "mega-released": ["--arch=mega_transformer_tiny", "--init=released"],
    "transformer": [
        "--arch=transformer_iwslt_de_en",
        *both_sides(embed_dim=128, attention_heads=4, ffn_embed_dim=592, layers=3),
    ],
}
# The recipe: models and, by task, how many pairs they train on and with which dropout.
RECIPE = {"tiny": ["--arch=mega_transformer_tiny"], "tiny-bf16": ["--arch=mega_transformer_tiny", "--bf16"]}
PAIRS = {"pairs5000": (5_000, 0.3), "pairs30000": (30_000, 0.2), "pairs186000": (186_000, 0.1)}
SCORED = (500, 1000, 3000)  # updates
BY_PAIRS = [
    *["--lr-scheduler=inverse_sqrt", "--warmup-updates=400", "--validate-interval=1000"],
    *["--validate-interval-updates={often}", "--save-interval-updates={often}", "--keep-interval-updates=1"],
]
LONG = [
    *["--bf16", "--lr-scheduler=inverse_sqrt", "--warmup-updates=400", "--validate-interval=1000", "--patience=5"],
    *["--validate-interval-updates={often}", "--save-interval-updates={often}", f"--keep-interval-updates={AVERAGED}"],
]
SHORT = [
    *["--lr-scheduler=polynomial_decay", "--warmup-updates=300", "--total-num-update=1500"],
    *["--validate-interval-updates=200", "--save-interval-updates=400", "--keep-interval-updates=1"],
]
TASKS = {
    "bible": ["--dropout=0.2", *LONG],
    "docs": ["--dropout=0.1", *LONG],
    "short": ["--dropout=0.1", *SHORT],
}
COMMON = [
    *["--task=translation", "--source-lang=en", "--target-lang=de", "--share-all-embeddings", "--max-tokens=4096"],
    *["--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1", "--weight-decay=0.05", "--clip-norm=1.0"],
    *["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--adam-eps=1e-8", "--required-batch-size-multiple=1"],
    *["--no-epoch-checkpoints", "--save-interval=1000", "--log-format=json", "--log-interval=50"],
]


class Translation(Experiment):
    updates = {"bible": 12_000, "docs": 12_000, "short": 1500, **dict.fromkeys(PAIRS, SCORED[-1])}
    rates = {**dict.fromkeys(MODELS, ("2e-3",)), **dict.fromkeys(RECIPE, ("8e-3",))}
    curve, unit = ("valid", "valid_nll_loss"), "bits per piece on valid"

    def prepare(self, source: Path, data: Path) -> None:
        """Makes the data of `PAIRS` as docs/own-data.md does, with at most 8,000 pieces."""
        for task, (count, _) in PAIRS.items():
            text, size = data / f"{task}-text", 0
            text.mkdir(parents=True, exist_ok=True)
            for split in ("train", "valid", "test"):
                for language in ("en", "de"):
                    with open(source / f"{split}.{language}", "rb") as file:
                        lines = b"".join(islice(file, count if split == "train" else None))
                    (text / f"{split}.{language}").write_bytes(lines)
                    size += len(lines) if split == "train" else 0
            places = {"DATA": data / task, "CORPUS": text, "VOCABULARY": min(8000, size // 100)}
            script("prepare.sh", data / f"{task}.log", **places)

    def training(self, run: Run, updates: int) -> List[str]:
        data, recipe, often = corpus(run) / "sentencepiece/bin", TASKS.get(run.task), 400
        if run.task in PAIRS:
            recipe, often = [f"--dropout={PAIRS[run.task][1]}", *BY_PAIRS], 250
        words = [word.format(often=min(often, updates)) for word in [*COMMON, *recipe]]
        return [str(data), *{**MODELS, **RECIPE}[run.model], *words, f"--lr={run.lr}", f"--max-update={updates}"]

    def run(self, run: Run, updates: int, scored: bool) -> None:
        """Scores a run of `PAIRS` before it goes on: fairseq may keep no checkpoint of an update that ends an epoch."""
        if run.task not in PAIRS or not scored:
            return super().run(run, updates, scored)
        found = {}
        for count in sorted({min(count, updates) for count in SCORED}):
            folder = run.folder / f"after-{count}"
            scores = folder / "scores.json"
            if not scores.exists():
                self.train(run, count)
                print(f"scoring {run.folder} after {count:,} updates", flush=True)
                losses = curve((run.folder / "train.log").read_text(), *self.curve)
                numbers = {"bits": self.best(losses)[1], **translated(run, run.folder / "checkpoint_best.pt", folder)}
                scores.write_text(json.dumps({f"{name} after {count:,}": value for name, value in numbers.items()}))
            found.update(json.loads(scores.read_text()))
        (run.folder / "scores.json").write_text(json.dumps(found))

    def scores(self, run: Run) -> Dict[str, float]:
        checkpoint = run.folder / "checkpoint_last.pt" if run.task == "short" else averaged(run)
        return translated(run, checkpoint, run.folder)


def translated(run: Run, checkpoint: Path, folder: Path) -> Dict[str, float]:
    """Scores of the test set, which are kept in `folder`."""
    folder.mkdir(exist_ok=True)
    script("generate.sh", folder / "translate.log", DATA=corpus(run), CHECKPOINT=checkpoint, RESULTS=folder)
    scores = re.findall(r"(BLEU|chrF2)\S* = ([\d.]+)", (folder / "scores.txt").read_text())
    return {name: float(score) for name, score in scores}


def script(name: str, log: Path, **variables: object) -> None:
    """Runs a script of the recipe for the Bible, on the CPU."""
    environment = {**os.environ, "GPUS": "0", "PYTHON": sys.executable}
    environment.update({variable: str(value) for variable, value in variables.items()})
    output(["bash", str(EXAMPLE / name)], log, env=environment)


def averaged(run: Run) -> Path:
    """A checkpoint with the mean of the last ones."""
    saved = sorted(run.folder.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
    program, checkpoint = EXAMPLE.parent / "average_checkpoints.py", run.folder / "averaged.pt"
    output([sys.executable, str(program), str(checkpoint), *map(str, saved[-AVERAGED:])], run.folder / "average.log")
    return checkpoint


def corpus(run: Run) -> Path:
    return run.data.parent / "bible" if run.task == "short" else run.data


if __name__ == "__main__":
    Translation().main(__doc__)
