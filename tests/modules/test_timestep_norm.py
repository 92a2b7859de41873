"""The timestep norm equals its definition and its reference, in any pieces, over long streams and in half precision.

tests/properties/ runs the contracts of all causal layers on it.
"""

from functools import partial, reduce

import pytest
import torch

from mega_fairseq.modules.timestep_norm import TimestepNorm
from mega_fairseq.ops import precision
from mega_fairseq.ops.timestep_norm import Statistics, merged, statistics, timestep_norm, timestep_norm_naive
from mega_fairseq.ops.timestep_norm.naive import no_statistics, norm_step
from tests.helpers.golden_checks import assert_outputs, each
from tests.ops.helpers import assert_same, kept_for_backward, noise, with_gradients
from tests.properties.layers import randomise

BATCH, DIM, GROUPS = 3, 8, 2
EPS = 1e-5


def inputs(length, state=False, lengths=False):
    tensors = {"x": noise(BATCH, length, DIM, seed=1, grad=True)}
    tensors.update({name: noise(DIM, seed=seed, grad=True) for name, seed in (("weight", 2), ("bias", 3))})
    if state:
        var = noise(BATCH, GROUPS, seed=5).exp().requires_grad_()
        tensors.update(count=torch.tensor([7, 0, 100_000]), mean=noise(BATCH, GROUPS, seed=4, grad=True), var=var)
    if lengths:
        tensors["lengths"] = torch.tensor([length, length - length // 3, 0])
    return tensors


def outputs(form, x, weight, bias, count=None, mean=None, var=None, lengths=None):
    state = no_statistics(x, GROUPS) if count is None else Statistics(count, mean, var)
    y, (count, mean, var) = form(x, weight, bias, state, lengths, EPS)
    return y, mean, var, count.double()


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", [1, 2, 37])
def test_prefix_sums_equal_the_loop_with_all_gradients(length, state, lengths):
    tensors = inputs(length, state, lengths)
    ours, truth = (with_gradients(partial(outputs, form), tensors) for form in (timestep_norm, timestep_norm_naive))
    assert_same(ours, truth)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["double", "single"])
@each("timestep norm")
def test_the_norm_gives_golden_outputs_states_and_gradients(case, precision):
    norm = TimestepNorm(case.config["dim"], case.config["groups"], case.config["eps"]).to(precision)
    norm.load_state_dict({name[len("norm.") :]: tensor for name, tensor in case.parameters.items()})
    given, x, state = case.inputs, case.inputs["x"].to(precision, copy=True).requires_grad_(), None
    if "state_count" in given:
        state = Statistics(*(given[f"state_{name}"].clone() for name in Statistics._fields))
        state = state._replace(mean=state.mean.requires_grad_(), var=state.var.requires_grad_())
    y, after = norm(x, state, case.padding)
    exact = precision == torch.float64
    assert_outputs(y.double(), case.outputs["y"], "y", 1e-12 if exact else 1e-4)
    for name, ours in zip(("count", "mean", "var"), after):
        assert_outputs(ours.double(), case.outputs[f"state_{name}"].double(), name, 1e-12 if exact else 3e-5)
    loss = (y * given["cotangent"].to(precision)).sum()
    (loss + sum((t * given[f"cotangent_{n}"]).sum() for n, t in zip(("mean", "var"), after[1:]))).backward()
    ours = {"__input_x": x.grad, "norm.weight": norm.weight.grad, "norm.bias": norm.bias.grad}
    if state is not None:
        ours.update(__input_state_mean=state.mean.grad, __input_state_var=state.var.grad)
    expected = {**case.gradients, **{f"__input_{name}": t for name, t in case.input_gradients.items()}}
    for name, gradient in expected.items():
        assert_outputs(ours[name].double(), gradient, f"gradient of {name}", 1e-11 if exact else 2e-3)


# ------------------------------------------------------------------------------------------- statistics


def test_statistics_of_pieces_merge_in_any_order_to_those_of_the_whole():
    x = noise(BATCH, 24, DIM) + 100.0
    parts = [statistics(part, GROUPS) for part in x.split([5, 1, 16, 2], 1)]
    (_, mean, var, _), whole = outputs(timestep_norm_naive, x, None, None), statistics(x, GROUPS)
    nothing = no_statistics(x, GROUPS)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        first, *rest = (parts[i] for i in order)
        right = reduce(lambda later, part: merged(part, later), reversed([first, *rest]), nothing)
        for found in (reduce(merged, [first, *rest], nothing), right, whole):
            assert found.count.tolist() == [24] * BATCH
            torch.testing.assert_close(torch.stack(found[1:]), torch.stack([mean, var]), rtol=1e-12, atol=1e-12)


def test_statistics_and_outputs_do_not_drift_over_100_000_tokens():
    x = (noise(1, 100_032, DIM) + 100.0).float()
    exact, *truth, _ = outputs(timestep_norm, x.double(), None, None)
    y, mean, var, _ = outputs(timestep_norm, x, None, None)
    assert (y - exact).abs().max() < 3e-5
    assert max((mean - truth[0]).abs().max(), (var / truth[1] - 1.0).abs().max()) < 1e-5
    of_tokens = x.unflatten(-1, (GROUPS, -1)).mean(-1)[0, :, 0]
    in_float32 = of_tokens.numpy().cumsum()[-1] / x.size(1)  # torch would sum in float64
    assert abs(in_float32 - truth[0][0, 0]) > 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_without_float64_outputs_after_100_000_tokens_are_this_accurate(monkeypatch):
    """In pieces, whose sums are relative to the mean before them, and token by token."""
    x = (noise(1, 100_032, DIM) + 100.0).float()
    exact, *_ = outputs(timestep_norm, x.double(), None, None)
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", ("cpu",))
    monkeypatch.setattr(torch.Tensor, "cumsum", in_float32)
    norm, state, ys = TimestepNorm(DIM, GROUPS), None, []
    for piece in x.split(512, 1):
        y, state = norm(piece, state)
        ys.append(y)
    assert {t.dtype for t in (y, *state[1:])} == {torch.float32}
    assert (torch.cat(ys, 1) - exact).abs().max() < 1e-4
    step, state = norm.step(), no_statistics(x, GROUPS)
    for token in x.unbind(1):
        y, state = step(token, state)
    assert (y - exact[:, -1]).abs().max() < 1e-3


def in_float32(x, dim):
    """The sums of a GPU; on the CPU, torch's are in float64."""
    return torch.from_numpy(x.numpy().cumsum(dim, dtype=x.numpy().dtype))


def drifting(dtype):
    """4,000 tokens whose mean goes from 0 to 3, and whose deviation from 1 to 3."""
    progress = torch.linspace(0.0, 1.0, 4000).view(1, -1, 1)
    return (noise(1, 4000, DIM) * (1.0 + 2.0 * progress) + 3.0 * progress).to(dtype)


@torch.no_grad()
def test_single_tokens_in_bfloat16_equal_the_whole_unless_their_state_is_rounded_too():
    x, norm = drifting(torch.bfloat16), TimestepNorm(DIM, GROUPS).bfloat16()
    whole, state = norm(x)
    assert [t.dtype for t in (whole, *state)] == [torch.bfloat16, torch.int64, torch.float64, torch.float64]

    def streamed(rounded):
        ys, state = [], no_statistics(x, GROUPS)
        for token in x.unbind(1):
            y, state = norm_step(token, norm.weight, norm.bias, state, EPS)
            state = state._replace(mean=rounded(state.mean), var=rounded(state.var))
            ys.append(y)
        return torch.stack(ys, 1)

    torch.testing.assert_close(streamed(lambda t: t), whole, rtol=2**-7, atol=2**-7)
    assert (streamed(lambda t: t.bfloat16().double()) - whole).abs().max() > 0.5


@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_a_constant_added_to_all_inputs_changes_nothing(offset):
    x, norm = noise(2, 50, DIM, dtype=torch.float32), randomise(TimestepNorm(DIM, GROUPS), 1).float()
    torch.testing.assert_close(norm(x + offset)[0], norm(x)[0], rtol=0.0, atol=1e-6 * offset + 1e-5)


def test_constant_groups_give_finite_outputs_and_gradients():
    x = torch.ones(2, 9, DIM, requires_grad=True)
    y, state = TimestepNorm(DIM, GROUPS)(x)
    (y.sum() + state.var.sum()).backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_a_forward_pass_keeps_its_input_and_no_other_large_tensor():
    x, norm = noise(2, 50, 64, dtype=torch.float32, grad=True), TimestepNorm(64, GROUPS)
    assert sum(kept_for_backward(lambda: norm(x))) < 1.2 * x.numel()


# ------------------------------------------------------------------------------------------- broken twins
