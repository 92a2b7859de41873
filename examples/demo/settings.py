"""The models of the demo, their training settings and the commands that train and evaluate them.

All models of a task have the same size, batches and number of updates. fairseq's Transformer has the best of its
learning rates: for translation 3e-3 of 1.5e-3, 3e-3 and 6e-3, for language 8e-3 of 1e-3 to 8e-3, which hardly differ,
and for images 4e-3 of 1e-3 and 4e-3, which are equal on the validation set. For language there is also attention with
RoPE in chunks, at the best of three rates in longer runs. The budgets do not show what any model can reach.
"""

import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

from benchmarks.quality_classify import TASKS, inputs_words, model_words
from benchmarks.quality_lm import BYTES
from benchmarks.quality_translation import both_sides
from benchmarks.runs import PLUGIN, TRAIN, WITH_PLUGIN, fairseq

EXAMPLES = PLUGIN.parent / "examples"
BIBLE, ADDRESSES, FASHION = EXAMPLES / "wmt16_en_de/bible", EXAMPLES / "lm/addresses", EXAMPLES / "lra/image"

VOCABULARY = 2000  # subword pieces, English and German together
WINDOW_TOKENS = 512  # of a chapter at most, read and translated at once
SEARCH = {"WINDOW_TOKENS": str(WINDOW_TOKENS), "BEAM": "2", "MAX_TOKENS": "16384"}  # of generate.sh
WINDOW, CONTEXT = 512, 256  # the Transformer reads 512 tokens at once, the first 256 of them only as context


class Task(NamedTuple):
    """The common settings of the models of a task, and the options that differ."""

    name: str
    updates: int
    loss: str  # fairseq's name of the bits per token in its log
    options: List[str]
    models: Dict[str, List[str]]


TRANSLATION = Task(
    "translation",
    1000,
    "nll_loss",
    [
        *["--task=mega_document_translation", f"--window-tokens={WINDOW_TOKENS}", "--single-lines=0.9"],
        *["--source-lang=en", "--target-lang=de", "--share-all-embeddings", "--max-tokens=1024"],
        *["--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1", "--dropout=0.0", "--clip-norm=1.0"],
        *["--lr=3e-3", "--warmup-updates=200", "--weight-decay=0.05", "--required-batch-size-multiple=1"],
    ],
    {
        "Mega": ["--arch=mega_transformer", "--init=scaled", "--cross-attention-positions=sentence"]
        + ["--encoder-chunk-size=128", "--decoder-chunk-size=128"]
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
    {"Mega": BYTES["mega-scaled"], "Transformer": BYTES["transformer"], "Attention": BYTES["attention"]},
)

IMAGES = Task(
    "images",
    250,
    "loss",
    [
        *[*inputs_words("fashion"), *TASKS["fashion"].training, "--batch-size=20", "--batch-size-valid=50"],
        *["--warmup-updates=60", "--clip-norm=1.0", "--adam-eps=1e-8"],
    ],
    {
        "Mega": [*model_words("fashion", "mega-chunk"), "--lr=1e-2"],
        "Transformer": [*model_words("fashion", "transformer"), "--lr=4e-3"],
    },
)
TRAININGS = (TRANSLATION, LANGUAGE, IMAGES)


def training(task: Task, model: str, updates: int, data: Path, folder: Path) -> List[str]:
    """The fairseq-train command, which resumes from the last checkpoint in `folder`."""
    quarter = max(1, updates // 4)
    return [
        *[sys.executable, str(TRAIN), str(data), *WITH_PLUGIN, "--save-dir", str(folder), "--seed=1"],
        "--distributed-world-size=1",  # equal batches, whatever the number of GPUs
        *["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--lr-scheduler=polynomial_decay"],
        *[f"--total-num-update={updates}", f"--max-update={updates}", "--no-epoch-checkpoints"],
        *[f"--save-interval-updates={max(50, quarter)}", "--save-interval=1000", "--keep-interval-updates=1"],
        *[f"--validate-interval-updates={quarter}", "--validate-interval=1000"],
        *["--log-format=json", f"--log-interval={min(20, quarter)}", *task.options, *task.models[model]],
    ]


def evaluating(model: str, checkpoint: Path, data: Path) -> List[str]:
    """Evaluates the Transformer on the test text in fairseq's sliding window, the others on the text as one stream."""
    options = [*WITH_PLUGIN, "--task=mega_language_modeling"]
    if model == "Transformer":
        options = ["--task=language_modeling", "--sample-break-mode=none"]
        options += [f"--tokens-per-sample={WINDOW}", f"--context-window={CONTEXT}"]
    return [*fairseq("eval_lm"), str(data), "--path", str(checkpoint), "--gen-subset=test", *options]
