"""NaN and infinity: training stops when they appear, and evaluation raises an error instead of reporting a score."""

import math

import pytest
import torch

from tests.helpers.commands import CPU, LM, PLUGIN, SEARCH, Running, failure, records, trained

pytestmark = pytest.mark.slow

KAPPA = "decoder.layers.0.mixer.kappa"  # used for every feature of every token


def spoiled(model, folder, value=math.nan, name=KAPPA):
    """Copies the checkpoint and changes one number of a parameter."""
    content = torch.load(model.last, weights_only=True)
    content["model"][name].view(-1)[7] = value
    torch.save(content, folder / "spoiled.pt")
    return folder / "spoiled.pt"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("translation", "a parameter is NaN"),
        ("softmax", "the learning rate is too high"),
    ],
)
def test_training_stops_at_gradients_that_are_not_finite(kind, fault, tmp_path):
    """fairseq then searches for the layer, which fails differently for an encoder, so the last line differs."""
    model = trained(kind)
    words = ["--lr=1e30"]
    if "NaN" in fault:
        words = ["--finetune-from-model", spoiled(model, tmp_path)]
    code, said = Running("train", model.data, *model.words, *words, "--max-update=9", "--save-dir", tmp_path).wait()
    assert code == 1
    assert "FloatingPointError: gradients are Nan/Inf" in said
    assert len(records(said, "train_inner")) == ("NaN" not in fault)
    assert not list(tmp_path.glob("checkpoint*"))


def test_training_stops_at_a_validation_loss_that_is_not_finite(tmp_path):
    """fairseq does not check gradients after the last update."""
    model = trained("softmax")
    words = [*model.words, "--lr=1e30", "--max-update=1", "--save-dir", tmp_path]
    assert failure("train", model.data, *words).startswith("FloatingPointError: ")
    assert not list(tmp_path.glob("checkpoint*"))


SINGLE = [*CPU, *PLUGIN, *SEARCH]
EVALUATIONS = [
    ("eval-lm", "softmax", [*LM, "--softmax-batch=16"]),
    ("eval-lm", "softmax", [*PLUGIN, "--cpu", "--task=language_modeling", "--tokens-per-sample=100"]),
    ("generate", "translation", SINGLE),
    ("generate", "translation", [*SINGLE, "--score-reference"]),
]


@pytest.mark.parametrize(("command", "kind", "words"), EVALUATIONS)
def test_evaluating_a_model_with_nan_raises_an_error(command, kind, words, tmp_path):
    path = spoiled(trained(kind), tmp_path)
    assert failure(command, trained(kind).data, *words, "--path", path).startswith("FloatingPointError: ")


def test_scores_that_overflow_raise_an_error(tmp_path):
    """fairseq would skip tokens with a probability of zero, and report an overflowing sum as the loss."""
    path = spoiled(trained("softmax"), tmp_path, 1e38, "decoder.embed_tokens.weight")
    assert failure("eval-lm", trained("softmax").data, *LM, "--path", path).startswith("FloatingPointError: ")
