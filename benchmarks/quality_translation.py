"""Mega against fairseq's Transformer in translation: equal parameters, batches and updates.

    VOCABULARY=4000 DATA=DATA/bible examples/wmt16_en_de/bible/prepare.sh
    VOCABULARY=4000 DATA=DATA/docs CORPUS=.../ende-docs examples/wmt16_en_de/bible/prepare.sh     first, once
    python benchmarks/quality_translation.py DATA OUT --lr 2e-3,4e-3,8e-3 --updates 2800 --unscored   chooses the rates
    python benchmarks/quality_translation.py DATA OUT --models mega --lr 8e-3 --seeds 1,2
    python benchmarks/quality_translation.py DATA OUT --collect docs/quality_translation.json
    python benchmarks/quality_translation.py --plot docs/quality_translation.json

Training ends after 12,000 updates, or when five validations, 400 updates apart, have found no better loss; the average
of the last five checkpoints is scored. The learning rate does not depend on the number of updates, so a short run is
the beginning of a long one. An update takes about a second on one CPU thread. `short` trains on
DATA/bible for 1,500 updates and scores without an average.
"""

import os
import re
import sys
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.runs import PLUGIN, Experiment, Run, output

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
    tasks, models = TASKS, MODELS
    curve, unit = ("valid", "valid_nll_loss"), "bits per piece on valid"

    def rates(self, model: str) -> List[str]:
        return ["2e-3"]

    def updates(self, task: str) -> int:
        return 1500 if task == "short" else 12_000

    def training(self, run: Run, updates: int) -> List[str]:
        data, often = corpus(run) / "sentencepiece/bin", min(400, updates)
        recipe = [word.format(often=often) for word in [*COMMON, *TASKS[run.task]]]
        return [str(data), *MODELS[run.model], *recipe, f"--lr={run.lr}", f"--max-update={updates}"]

    def scores(self, run: Run) -> Dict[str, float]:
        checkpoint = run.folder / "checkpoint_last.pt" if run.task == "short" else averaged(run)
        places = {"DATA": corpus(run), "CHECKPOINT": checkpoint, "RESULTS": run.folder, "PYTHON": sys.executable}
        environment = {**os.environ, "GPUS": "0", **{name: str(value) for name, value in places.items()}}
        output(["bash", str(EXAMPLE / "generate.sh")], run.folder / "translate.log", env=environment)
        scores = re.findall(r"(BLEU|chrF2)\S* = ([\d.]+)", (run.folder / "scores.txt").read_text())
        return {name: float(score) for name, score in scores}


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
