"""Correct values where the release is wrong. docs/paper-deviations.md has a row for each of these tests.

The correct values come from the release itself where possible: pads are added to a case recorded without pads, and
every sentence must still give the released outputs and gradients.
"""

import pytest
import torch

from mega_fairseq.modules import CrossAttentionState
from mega_fairseq.modules.normalization import SequenceNorm
from tests.helpers import golden_cases as golden
from tests.helpers import golden_checks as checks
from tests.helpers.golden_checks import assert_outputs, assert_released_gradients, each

PADS = 5  # around each sentence; not a multiple of a chunk, so that counting pads would move chunk borders


def is_unpadded(case):
    """Whether the case has correct outputs without pads."""
    return case.padding is None and "y" in case.outputs and bool(case.outputs["y"].isfinite().all())


def with_pads(x):
    """x (B, L, D) -> (B, L + PADS, D) with noise before and after each row, and the padding mask."""
    batch, length, dim = x.shape
    leading = ((3 * torch.arange(batch) + 2) % (PADS + 1)).unsqueeze(1)  # 2, 5, 2, 5, ...
    columns = torch.arange(length + PADS)
    padding = (columns < leading) | (columns >= leading + length)
    noise = torch.randn(batch, length + PADS, dim, generator=torch.Generator().manual_seed(0)) * 10.0
    return noise.to(x).masked_scatter(~padding.unsqueeze(-1), x), padding


def assert_no_gradient_at_pads(padded, padding):
    def check(gradient):
        assert not gradient[padding].any()

    padded.register_hook(check)


def weighted(case, y):
    """The loss of the recorded gradients."""
    return (y * case.inputs.get("cotangent", torch.ones_like(y))).sum()


@each("ema", "mega", where=is_unpadded)
def test_pads_around_sentences_change_neither_released_outputs_nor_gradients(case):
    """Deviation: left pads move released chunk borders, count in tau of relu2 and laplace, or give NaN."""

    def output(module, x):
        padded, padding = with_pads(x)
        if x.requires_grad:
            assert_no_gradient_at_pads(padded, padding)
        return checks.run(module.train(case.gradients_of_training), padded, padding)[~padding].view(x.shape)

    y = output(golden.build(case), case.inputs["x"])
    assert_outputs(y, case.outputs["y_train" if case.gradients_of_training else "y"], "y")
    assert_released_gradients(case, lambda module, x: weighted(case, output(module, x)))


@each("cross", where=is_unpadded)
def test_pads_around_sources_change_neither_released_outputs_nor_gradients(case):
    """Deviation: released cross attention counts pads as positions; left padding changes a translation."""

    def output(module, query, key):
        padded, padding = with_pads(key)
        if key.requires_grad:
            assert_no_gradient_at_pads(padded, padding)
        return module(query, padded, source_padding_mask=padding)[0]

    y = output(golden.build(case), case.inputs["query"], case.inputs["key"])
    assert_outputs(y, case.outputs["y"], "y")
    assert_released_gradients(case, lambda module, query, key: weighted(case, output(module, query, key)))


@each("cross", where=lambda case: case.padding is not None and case.real.any(1).all())
def test_cross_attention_that_counts_pads_as_positions_equals_the_released_one(case):
    """Deviation: this is the only reason why released left-padded cases differ, in values and gradients."""

    def counted(module, key):
        projected = module.project_source(key)
        return CrossAttentionState(projected.keys, projected.values, case.padding, 0)

    def output(module, query, key):
        return module(query, state=counted(module, key))[0]

    module, query, key = golden.build(case), case.inputs["query"], case.inputs["key"]
    assert_outputs(output(module, query, key), case.outputs["y"], "y")
    if "attn_weights" in case.outputs:
        assert_outputs(
            module(query, None, counted(module, key), need_weights=True)[2],
            case.outputs["attn_weights"],
            "attn_weights",
        )
    if case.gradients:
        assert_released_gradients(case, lambda module, query, key: weighted(case, output(module, query, key)))


in_batch_norm = each(
    "mega", "nffn", where=lambda case: is_unpadded(case) and "batchnorm" in case.config.get("norm_type", "")
)


def assert_pads_change_nothing(case, prenorm):
    plain, module = (golden.build(case, prenorm=prenorm).train() for _ in range(2))
    padded, padding = with_pads(case.inputs["x"])
    y = checks.run(module, padded, padding)[~padding].view(case.inputs["x"].shape)
    assert_outputs(y, checks.run(plain, case.inputs["x"]), "y")
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], buffer, msg=name)


@in_batch_norm
@pytest.mark.parametrize("prenorm", [True, False], ids=["pre", "post"])
def test_pads_change_neither_outputs_nor_statistics_of_a_layer_with_batch_norm(case, prenorm):
    assert_pads_change_nothing(case, prenorm)


@in_batch_norm
def test_batch_norm_over_pads_would_be_noticed(case, monkeypatch):
    norm = SequenceNorm.forward
    monkeypatch.setattr(SequenceNorm, "forward", lambda self, x, padding_mask=None: norm(self, x))
    with pytest.raises(AssertionError):
        assert_pads_change_nothing(case, prenorm=True)
