"""Criteria without scores of all types for all tokens have fairseq's losses and gradients."""

from argparse import Namespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmLoss
from torch.nn.utils.parametrizations import weight_norm

from mega_fairseq.criterions import MegaLMCrossEntropy, MegaMaskedLM
from mega_fairseq.ops import log_probs
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.small_models import HEADS, documents, encoder, language_model, padded
from tests.ops.helpers import Recorder, assert_close

FULL = {name: options for name, options in HEADS.items() if "adaptive_softmax_cutoff" not in options}
LM_HEADS = {
    "gelu, tied": {},
    "tanh, untied": {"lm_head": "tanh", "untie_lm_head": True},
    "linear": {"lm_head": "linear"},
}


class Task:
    target_dictionary = dictionary(4)


def sample(masked=False):
    tokens = padded(documents(), left=False)
    target = tokens.roll(-1, 1)
    if masked:
        target = target.masked_fill(torch.arange(target.numel()).view_as(target) % 3 == 0, PAD)
    net_input = {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}
    return {"net_input": net_input, "target": target, "ntokens": int(tokens.ne(PAD).sum()), "nsentences": len(tokens)}


def measured(criterion, model, given):
    """Loss, sample size, logging output, and gradients by name."""
    model.zero_grad()
    loss, size, logged = criterion(model.train(), given)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "size": torch.as_tensor(size), "logged": logged["loss"], **gradients}


def assert_same(found, expected):
    """fairseq's losses are in float32, also for models in float64."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name].double(), value.double(), name, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", FULL)
@pytest.mark.parametrize("sentence_avg", [False, True])
def test_language_models_have_the_loss_and_gradients_of_cross_entropy(head, sentence_avg):
    model, given = language_model(**FULL[head]).double(), sample()
    ours, theirs = (kind(Task(), sentence_avg) for kind in (MegaLMCrossEntropy, CrossEntropyCriterion))
    assert_same(measured(ours, model, given), measured(theirs, model, given))


@pytest.mark.parametrize("head", LM_HEADS)
def test_masked_language_models_have_the_loss_and_gradients_of_masked_lm(head):
    model, given = encoder(**LM_HEADS[head]).double(), sample(masked=True)
    ours, theirs = (kind(Namespace(tpu=False), Task()) for kind in (MegaMaskedLM, MaskedLmLoss))
    assert_same(measured(ours, model, given), measured(theirs, model, given))


def test_a_batch_without_masked_tokens_has_a_loss_of_zero():
    model, given = encoder().double(), sample()
    given["target"] = torch.full_like(given["target"], PAD)
    found = measured(MegaMaskedLM(Namespace(tpu=False), Task()), model, given)
    assert (found["loss"], found["size"]) == (0, 0)
    assert not any(gradient.any() for gradient in found.values())


def test_a_head_with_a_parametrisation_is_called():
    model, given = encoder(untie_lm_head=True).double(), sample(masked=True)
    weight_norm(model.encoder.lm_head)
    ours, theirs = (kind(Namespace(tpu=False), Task()) for kind in (MegaMaskedLM, MaskedLmLoss))
    assert_same(measured(ours, model, given), measured(theirs, model, given))


def test_no_scores_of_all_types_for_all_masked_tokens_are_in_memory(monkeypatch):
    types, given = 2000, sample(masked=True)
    monkeypatch.setattr(log_probs, "SCORES", types)
    model = encoder(types)
    with Recorder() as recorder:
        measured(MegaMaskedLM(Namespace(tpu=False), Task()), model, given)
    assert recorder.largest == types * model.cfg.encoder_embed_dim < types * int(given["target"].ne(PAD).sum())
