"""NaN and infinity: training stops when they appear, and evaluation raises an error instead of reporting a score."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.commands import (
    CPU,
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    PLUGIN,
    SEARCH,
    TRAINING,
    Running,
    failure,
    fairseq,
    preprocess_pairs,
    preprocess_text,
    records,
)

pytestmark = pytest.mark.slow

KAPPA = "decoder.layers.0.mixer.kappa"  # used for every feature of every token
TABLE = "decoder.embed_tokens.weight"
GRADIENTS = "FloatingPointError: gradients are Nan/Inf"
PROBABILITIES = "FloatingPointError: the model gives probabilities that are not finite (NaN or infinity): its training"
LOSS = "FloatingPointError: the loss is nan: training has diverged; take an earlier checkpoint"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A function that trains a model for two updates: translation, or a language model with either softmax."""

    @functools.lru_cache(maxsize=None)
    def data(kind):
        folder = tmp_path_factory.mktemp(kind)
        return preprocess_text(folder) if kind == "text" else preprocess_pairs(folder)

    @functools.lru_cache(maxsize=None)
    def call(kind):
        folder, where = tmp_path_factory.mktemp(kind), data("sentences" if kind == "translation" else "text")
        words = [*PLUGIN, *MEGA, *TRAINING] if kind == "translation" else [*LM, *MEGA_LM, *LM_HEADS[kind], *LM_TRAINING]
        fairseq("train", where, *words, "--max-update=2", "--disable-validation", "--save-dir", folder)
        return SimpleNamespace(data=where, words=words, last=folder / "checkpoint_last.pt")

    return call


def spoiled(model, folder, value=math.nan, name=KAPPA):
    """Copies the checkpoint and changes one number of a parameter."""
    content = torch.load(model.last, weights_only=True)
    content["model"][name].view(-1)[7] = value
    torch.save(content, folder / "spoiled.pt")
    return folder / "spoiled.pt"


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("translation", "a parameter is NaN"),
        ("adaptive", "a parameter is NaN"),
        ("softmax", "the learning rate is too high"),
    ],
)
def test_training_stops_at_the_first_gradients_that_are_not_finite(model, kind, fault, tmp_path):
    """fairseq then searches for the layer, which fails differently for an encoder, so the last line differs."""
    made, start = model(kind), tmp_path / "spoiled.pt"
    words = ["--finetune-from-model", start] if "NaN" in fault else ["--lr=1e30"]
    spoiled(made, tmp_path)
    code, said = Running("train", made.data, *made.words, *words, "--max-update=9", "--save-dir", tmp_path).wait()
    assert code == 1
    assert GRADIENTS in said
    assert len(records(said, "train_inner")) == ("NaN" not in fault)
    assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize(("kind", "said"), [("translation", PROBABILITIES), ("softmax", LOSS), ("adaptive", LOSS)])
def test_training_stops_at_a_validation_loss_that_is_not_finite(model, kind, said, tmp_path):
    """fairseq does not check gradients after the last update."""
    made = model(kind)
    words = [*made.words, "--lr=1e30", "--max-update=1", "--save-dir", tmp_path]
    assert failure("train", made.data, *words).startswith(said)
    assert not list(tmp_path.glob("checkpoint*"))


# ------------------------------------------------------------------------------------------------ evaluation

STOCK = ["--task=language_modeling", "--tokens-per-sample=100", "--sample-break-mode=none"]
PREFIX = ["--gen-subset=test", "--documents=line", "--prefix-size=1", "--beam=1", "--max-len-b=90"]
SINGLE = [*CPU, *PLUGIN, *SEARCH]
EVALUATIONS = [
    ("eval-lm", "softmax", [*LM, "--softmax-batch=16"]),
    ("eval-lm", "adaptive", LM),
    ("eval-lm", "softmax", [*PLUGIN, "--cpu", *STOCK]),
    ("generate", "softmax", [*LM, *PREFIX]),
    ("generate", "adaptive", [*LM, *PREFIX, "--sampling"]),
    ("generate", "translation", SINGLE),
    ("generate", "translation", [*SINGLE, "--score-reference"]),
    ("validate", "translation", [*CPU, *PLUGIN, "--task=translation", "--batch-size=9"]),
]


@pytest.mark.parametrize(("command", "kind", "words"), EVALUATIONS)
def test_evaluating_a_model_with_nan_raises_an_error(model, command, kind, words, tmp_path):
    made = model(kind)
    assert failure(command, made.data, *words, "--path", spoiled(made, tmp_path)).startswith(PROBABILITIES)


def test_validating_a_model_with_nan_raises_an_error(model, tmp_path):
    made = model("softmax")
    line = failure("validate", made.data, *LM, "--max-tokens=100", "--path", spoiled(made, tmp_path))
    assert line.startswith(LOSS)


def test_evaluating_an_ensemble_that_contains_nan_raises_an_error(model, tmp_path):
    made = model("translation")
    line = failure("generate", made.data, *SINGLE, "--path", f"{made.last}:{spoiled(made, tmp_path)}")
    assert line.startswith(PROBABILITIES)


@pytest.mark.parametrize("value", [math.inf, 1e38])
def test_infinite_and_overflowing_scores_raise_an_error(model, value, tmp_path):
    """fairseq would skip tokens with a probability of zero, and report an overflowing sum as the loss."""
    made = model("softmax")
    path = spoiled(made, tmp_path, value, TABLE)
    assert failure("eval-lm", made.data, *LM, "--path", path).startswith(PROBABILITIES)
