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
HERE = Path(__file__).parent

VOCABULARY = 2000  # subword pieces, English and German together
LINES, WINDOWS = 986, 97  # of the test set
WINDOW_TOKENS = 512  # of a chapter at most, read and translated at once
SEARCH = {"WINDOW_TOKENS": str(WINDOW_TOKENS), "BEAM": "2", "MAX_TOKENS": "16384"}  # of generate.sh
TRAINED_CHUNK = 256  # chunk size of Mega's attention in training
CHUNKS = (64, TRAINED_CHUNK, 1024)  # chunk sizes of the evaluation
WINDOW, CONTEXT = 512, 256  # the Transformer reads 512 tokens at once, the first 256 of them only as context
PROMPT, CONTINUED = 150, 300  # bytes of test text at most that Mega continues, and bytes at least that it adds


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
LONGEST = 4096  # bytes of a text in an update that is timed


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


def sweeping(checkpoint: Path, data: Path, prefix: Path) -> List[str]:
    """Evaluates a model with chunks on the test text as one stream, for each size; skips those already done."""
    chunks = ",".join(map(str, CHUNKS))
    command = [sys.executable, "-m", "mega_fairseq.cli", "sweep", str(checkpoint), str(data), "--out", str(prefix)]
    return [*command, "--chunks", chunks]


def sliding(checkpoint: Path, data: Path) -> List[str]:
    """Evaluates the Transformer on the test text with fairseq's sliding window."""
    return [
        *[*fairseq("eval_lm"), str(data), "--path", str(checkpoint), "--gen-subset=test", "--task=language_modeling"],
        *["--sample-break-mode=none", f"--tokens-per-sample={WINDOW}", f"--context-window={CONTEXT}"],
    ]


def continuing(checkpoint: Path, data: Path, prompt: Path) -> List[str]:
    """Lets Mega continue the text in `prompt`, whose bytes are written as numbers."""
    return [
        *[*fairseq("interactive"), str(data), *WITH_PLUGIN, "--path", str(checkpoint), "--input", str(prompt)],
        *["--task=mega_language_modeling", "--beam=1", "--sampling", "--sampling-topp=0.9", "--temperature=0.8"],
        *["--seed=1", "--max-len-a=0", f"--max-len-b={PROMPT + CONTINUED}", f"--min-len={PROMPT + CONTINUED}"],
    ]


def classifying(checkpoint: Path, data: Path, out: Path) -> List[str]:
    return [sys.executable, str(HERE / "classifying.py"), str(checkpoint), str(data), str(out)]


def timing(model: str, longest: int, out: Path) -> List[str]:
    return [sys.executable, str(HERE / "lengths.py"), model, str(longest), str(out)]


def lengths(longest: int) -> List[int]:
    """Bytes of the texts that are timed."""
    return [256 * 2**power for power in range(max(1, (longest // 256).bit_length()))]
