"""The label-smoothed loss in pieces of rows equals its definition and fairseq's, with less memory."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.ops import log_probs
from mega_fairseq.ops import smoothed_loss as ops
from mega_fairseq.ops.smoothed_loss import smoothed_loss, smoothed_loss_naive
from tests.ops.helpers import Recorder, assert_close, kept_for_backward, noise, relative_error

PAD = 1


def inputs(tokens, width, types, dtype=torch.float64, bias=True):
    shapes = {"x": (tokens, width), "weight": (types, width), "bias": (types,)}
    made = {name: noise(*shape, seed=i, dtype=dtype, grad=True) for i, (name, shape) in enumerate(shapes.items())}
    return {**made, **({} if bias else {"bias": None})}


def targets_of(tokens, types, pads=0.2):
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(0, types, (tokens,), generator=generator)
    return targets.masked_fill(torch.rand(tokens, generator=generator) < pads, PAD)


def measured(function, given, *options):
    """Losses, and the gradients of the loss by name."""
    losses = function(given["x"], given["weight"], given["bias"], *options)
    learned = {name: t for name, t in given.items() if t is not None}
    gradients = torch.autograd.grad(losses.loss, list(learned.values()))
    return {**losses._asdict(), **dict(zip(learned, gradients))}


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name].double(), value.double(), name, **tolerance)


@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 5),
    types=st.one_of(st.integers(2, 50), st.just(70_000)),
    smoothing=st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)),
    rows=st.sampled_from([1, 3, 16, 1000]),
    pads=st.sampled_from([0.0, 0.3, 1.0]),
    bias=st.booleans(),
)
def test_pieces_equal_the_definition(tokens, width, types, smoothing, rows, pads, bias):
    given, targets = inputs(tokens, width, types, bias=bias), targets_of(tokens, types, pads)
    options = targets, smoothing, PAD, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_probs, "SCORES", rows * types)
        found = measured(smoothed_loss, given, *options)
    assert_equal(found, measured(smoothed_loss_naive, given, *options), rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # in validation
        assert_close(smoothed_loss(*given.values(), *options).loss, found["loss"])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_are_fairseqs(smoothing):
    given, targets = inputs(60, 8, 300, torch.float32, bias=False), targets_of(60, 300)

    def fairseqs(x, weight, bias, *_):
        log_probs = torch.log_softmax(x @ weight.t(), -1)
        loss, nll = label_smoothed_nll_loss(log_probs, targets, smoothing, PAD)
        return ops.SmoothedLoss(loss, nll, log_probs.argmax(1).eq(targets)[targets != PAD].sum())

    found = measured(smoothed_loss, given, targets, smoothing, PAD, True)
    assert_equal(found, measured(fairseqs, given), rtol=1e-6, atol=1e-6)


def test_the_comparison_notices_another_smoothing():
    """As of torch, whose smoothing includes the target's own share."""
    given, targets = inputs(20, 4, 9), targets_of(20, 9)
    found = measured(smoothed_loss, given, targets, 0.1, PAD)
    other = measured(smoothed_loss, given, targets, 0.1 * 8 / 9, PAD)
    of_torch = torch.nn.functional.cross_entropy(
        given["x"] @ given["weight"].t() + given["bias"],
        targets,
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=0.1,
    )
    assert_close(other["loss"], of_torch)
    assert (found["loss"] - of_torch).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_sums_in_float32(monkeypatch, dtype, autocast):
    """As near to the truth as autograd's gradients, which are summed in one product."""
    monkeypatch.setattr(ops, "product_dtype", lambda x, dtype: dtype)  # float16 as on a GPU
    monkeypatch.setattr(log_probs, "SCORES", 64 * 500)
    targets, options = targets_of(600, 500), (0.1, PAD)
    wide = inputs(600, 16, 500)
    kind = torch.float32 if autocast else dtype
    given = {name: t.detach().to(kind).requires_grad_() for name, t in wide.items()}
    truth = measured(
        smoothed_loss_naive, {n: t.detach().double().requires_grad_() for n, t in given.items()}, targets, *options
    )
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = measured(smoothed_loss, given, targets, *options)
        plain = measured(smoothed_loss_naive, given, targets, *options)
    assert found["loss"].dtype == torch.float32
    for name in ("x", "weight", "bias"):
        assert found[name].dtype == kind
        assert relative_error(found[name], truth[name]) < 1.1 * relative_error(plain[name], truth[name]) + 1e-4


@pytest.mark.parametrize("grad", [False, True])
def test_only_the_scores_of_one_piece_are_in_memory(monkeypatch, grad):
    monkeypatch.setattr(log_probs, "SCORES", 4096)
    given, targets = inputs(900, 4, 500, torch.float32), targets_of(900, 500)
    with Recorder() as recorder, torch.set_grad_enabled(grad):
        smoothed_loss(*given.values(), targets, 0.1, PAD)
    assert recorder.largest <= 4096
    kept = kept_for_backward(lambda: smoothed_loss(*given.values(), targets, 0.1, PAD))
    assert max(kept) <= 900 * 4


def test_there_are_no_second_derivatives():
    given = inputs(3, 2, 5)
    loss = smoothed_loss(*given.values(), targets_of(3, 5), 0.1, PAD).loss
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, given["x"], create_graph=True)
