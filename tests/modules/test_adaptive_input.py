"""Adaptive input equals fairseq's, can be tied to an adaptive softmax, and refuses invalid options."""

from contextlib import nullcontext

import pytest
import torch
from fairseq import modules as stock

from mega_fairseq.models import language_decoder
from mega_fairseq.modules.adaptive_input import AdaptiveInput
from tests.helpers.golden_models import PAD
from tests.helpers.small_models import ADAPTIVE, HEADS, TYPES, texts
from tests.helpers.small_models import language_model as model


def test_adaptive_input_equals_fairseqs_in_values_and_gradients():
    ours, theirs = AdaptiveInput(40, PAD, 16, 12, [10, 20], 2.0), stock.AdaptiveInput(40, PAD, 16, 2.0, 12, [10, 20])
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    tokens = torch.cat([torch.randint(4, 40, (2, 9)), torch.full((2, 2), PAD)], 1)
    outs = [embedding(tokens) for embedding in (ours, theirs)]
    torch.testing.assert_close(*outs)
    for out in outs:
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    for (name, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters()):
        torch.testing.assert_close(own.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    for band in range(3):
        torch.testing.assert_close(ours.weights_for_band(band)[0], theirs.weights_for_band(band)[0])


@pytest.mark.parametrize("head", HEADS)
def test_too_many_scores_are_refused_unless_only_targets_are_scored(monkeypatch, head):
    monkeypatch.setattr(language_decoder, "MOST_SCORES", 9 * TYPES)
    made, (sources, targets) = model(**HEADS[head]), texts(9, 10)
    for source, allowed in zip(sources, (True, False)):
        with (
            nullcontext() if allowed else pytest.raises(ValueError, match="; choose --criterion mega_lm_cross_entropy")
        ):
            made.get_normalized_probs(made(source[None]), log_probs=True)
    assert made(sources[1][None], target=targets[1][None])[0].shape == (1, 10, 1)


def test_a_wrong_criterion_for_an_adaptive_softmax_is_refused_in_training_only():
    made = model(**ADAPTIVE)
    out = made(texts(7)[0][0][None])
    assert made.get_normalized_probs(out, log_probs=True).shape == (1, 7, TYPES)
    with pytest.raises(ValueError, match="^--criterion .*; choose adaptive_loss, .* mega_lm_cross_entropy$"):
        made.train().get_normalized_probs(out, log_probs=True)
