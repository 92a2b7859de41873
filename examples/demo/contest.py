"""What the demo trains: Mega and fairseq's Transformer, of equal size, on equal batches, for as many updates.

Sizes and budgets are what two CPU cores can do in some minutes; nothing here says how far either model gets in the end.
"""

import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

from benchmarks import quality_lm
from benchmarks.quality import both_sides
from benchmarks.runs import PLUGIN, WITH_PLUGIN, fairseq

EXAMPLES = PLUGIN.parent / "examples"
BIBLE, ADDRESSES = EXAMPLES / "wmt16_en_de/bible", EXAMPLES / "lm/addresses"

VOCABULARY = 2000  # pieces of words, English and German together
SENTENCES = 986  # of the test set
TRAINED_CHUNK = 256  # tokens that Mega's attention sees in training; evaluation tries others
CHUNKS = (64, 128, 256, 512, 1024)
WINDOW, CONTEXT = 512, 256  # the Transformer scores 512 tokens at once, of which so many are read only as context


class Task(NamedTuple):
    """One task, and what its two models have in common."""

    name: str
    updates: int
    loss: str  # fairseq's name of the bits per token that it logs
    options: List[str]
    models: Dict[str, List[str]]


TRANSLATION = Task(
    "translation",
    1400,
    "nll_loss",
    [
        *["--task=translation", "--source-lang=en", "--target-lang=de", "--share-all-embeddings", "--max-tokens=1024"],
        *["--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1", "--dropout=0.0", "--clip-norm=1.0"],
        *["--lr=3e-3", "--warmup-updates=200", "--weight-decay=0.05", "--required-batch-size-multiple=1"],
    ],
    {
        "Mega": ["--arch=mega_transformer", "--init=scaled"]
        + both_sides(embed_dim=128, hidden_dim=256, z_dim=32, ffn_embed_dim=256, layers=2),
        "Transformer": ["--arch=transformer_iwslt_de_en"]
        + both_sides(embed_dim=128, attention_heads=4, ffn_embed_dim=592, layers=2),
    },
)

LANGUAGE = Task(
    "language",
    300,
    "loss",
    [
        *["--max-tokens=2048", "--lr=8e-3", "--warmup-updates=75", "--clip-norm=0.25", "--weight-decay=0.1"],
        *["--num-workers=0"],
    ],
    {"Mega": quality_lm.MODELS["mega"], "Transformer": quality_lm.MODELS["transformer"]},
)


def training(task: Task, model: str, updates: int, data: Path, folder: Path) -> List[str]:
    """fairseq-train, which called again goes on from the last checkpoint in `folder`."""
    quarter = max(1, updates // 4)
    return [
        *[*fairseq("train"), str(data), *WITH_PLUGIN, "--save-dir", str(folder), "--seed=1"],
        "--distributed-world-size=1",  # however many GPUs there are: batches stay what they are
        *["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--lr-scheduler=polynomial_decay"],
        *[f"--total-num-update={updates}", f"--max-update={updates}", "--no-epoch-checkpoints"],
        *[f"--save-interval-updates={quarter}", "--save-interval=1000", "--keep-interval-updates=1"],
        *[f"--validate-interval-updates={quarter}", "--validate-interval=1000"],
        *["--log-format=json", f"--log-interval={min(20, quarter)}", *task.options, *task.models[model]],
    ]


def sweeping(checkpoint: Path, data: Path, prefix: Path) -> List[str]:
    """Mega on the test text as one stream, at all chunk sizes; goes on where it was."""
    chunks = ",".join(map(str, CHUNKS))
    command = [sys.executable, "-m", "mega_fairseq.cli", "sweep", str(checkpoint), str(data), "--out", str(prefix)]
    return [*command, "--chunks", chunks]


def sliding(checkpoint: Path, data: Path) -> List[str]:
    """The Transformer on the test text, by fairseq's sliding window."""
    return [
        *[*fairseq("eval_lm"), str(data), "--path", str(checkpoint), "--gen-subset=test", "--task=language_modeling"],
        *["--sample-break-mode=none", f"--tokens-per-sample={WINDOW}", f"--context-window={CONTEXT}"],
    ]
