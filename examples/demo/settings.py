"""The models of the demo, their training settings and the commands that train and evaluate them.

All models of a task have the same size, batches and number of updates. fairseq's Transformer has the best of several
learning rates. For language there is also attention with RoPE in chunks, at the best of three rates in longer runs.
The budgets do not show what any model can reach.
"""

import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

from benchmarks import quality_classify
from benchmarks.quality_lm import MODELS
from benchmarks.quality_translation import both_sides
from benchmarks.runs import PLUGIN, TRAIN, WITH_PLUGIN, fairseq

EXAMPLES = PLUGIN.parent / "examples"
VOCABULARY = 2000  # subword pieces, English and German together
WINDOW_TOKENS = 512  # of a chapter at most, read and translated at once
SEARCH = {"WINDOW_TOKENS": str(WINDOW_TOKENS), "BEAM": "2", "MAX_TOKENS": "16384"}  # of generate.sh
WINDOW, CONTEXT = 512, 256  # the Transformer reads 512 tokens at once, the first 256 of them only as context
FASHION = quality_classify.TASKS["fashion"]
CLASSIFIERS = {"Mega": "mega-chunk", "Transformer": "transformer"}  # their names in benchmarks/


class Task(NamedTuple):
    """The common settings of the models of a task, and the options that differ."""

    name: str
    updates: int
    recipe: Path
    corpus: str  # folder
    binarised: str  # folder in that of the corpus
    options: List[str]
    models: Dict[str, List[str]]


TRANSLATION = Task(
    *("translation", 1000, EXAMPLES / "wmt16_en_de/bible", "bible", "sentencepiece/bin"),
    [
        *["--task=mega_document_translation", f"--window-tokens={WINDOW_TOKENS}", "--single-lines=0.9"],
        *["--source-lang=en", "--target-lang=de", "--share-all-embeddings", "--max-tokens=1024"],
        *["--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1", "--dropout=0.0", "--clip-norm=1.0"],
        *["--lr=3e-3", "--warmup-updates=200", "--weight-decay=0.05", "--required-batch-size-multiple=1"],
    ],
    {
        "Mega": ["--arch=mega_transformer", "--init=scaled", "--cross-attention-positions=sentence"]
        + both_sides(chunk_size=128, embed_dim=128, hidden_dim=256, z_dim=32, ffn_embed_dim=256, layers=2),
        "Transformer": ["--arch=transformer_iwslt_de_en"]
        + both_sides(embed_dim=128, attention_heads=4, ffn_embed_dim=592, layers=2),
    },
)
LANGUAGE = Task(
    *("language", 300, EXAMPLES / "lm/addresses", "addresses", "bytes/bin"),
    [
        *["--max-tokens=2048", "--lr=8e-3", "--warmup-updates=75", "--clip-norm=0.25", "--weight-decay=0.1"],
        "--num-workers=0",
    ],
    {"Mega": MODELS["mega-scaled"], "Transformer": MODELS["transformer"], "Attention": MODELS["attention"]},
)
IMAGES = Task(
    *("images", 250, EXAMPLES / "lra/image", "fashion", "small/bin"),
    [
        *[*quality_classify.inputs_words("fashion"), *FASHION.training, "--batch-size=20", "--batch-size-valid=50"],
        *["--warmup-updates=60", "--clip-norm=1.0", "--adam-eps=1e-8"],
    ],
    {
        "Mega": [*quality_classify.model_words("fashion", CLASSIFIERS["Mega"]), "--lr=1e-2"],
        "Transformer": [*quality_classify.model_words("fashion", CLASSIFIERS["Transformer"]), "--lr=4e-3"],
    },
)
TASKS = (TRANSLATION, LANGUAGE, IMAGES)


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


def testing(task: Task, model: str, checkpoint: str, data: Path) -> List[str]:
    """The command that scores a language model or a classifier on the test set.

    The Transformer reads the text in fairseq's sliding window, the others as one stream.
    """
    if task is IMAGES:
        return quality_classify.testing("fashion", CLASSIFIERS[model], data, checkpoint)
    options = [*WITH_PLUGIN, "--task=mega_language_modeling"]
    if model == "Transformer":
        options = ["--task=language_modeling", "--sample-break-mode=none"]
        options += [f"--tokens-per-sample={WINDOW}", f"--context-window={CONTEXT}"]
    return [*fairseq("eval_lm"), str(data), "--path", checkpoint, "--gen-subset=test", *options]
