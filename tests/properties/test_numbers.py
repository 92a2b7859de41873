"""Numerical stability: finite for any finite parameters, and close to float64 in half precision."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_fairseq.modules import DampedEMA, GatedAttentionConfig, MovingAverageGatedAttention
from tests.properties.contracts import Layer, check_finite, check_near, leaves
from tests.properties.layers import (
    BIDIRECTIONAL,
    CAUSAL,
    DIM,
    layouts,
    random_input,
    recipes,
    seeds,
    stateless,
    with_state,
)

EXTREME = 1e4
numbers = st.one_of(
    st.floats(-EXTREME, EXTREME, width=32), st.sampled_from((0.0, 30.0, -30.0, 90.0, -90.0, EXTREME, -EXTREME))
)
dtypes = st.sampled_from((torch.float32, torch.float64))
HALVES = (torch.bfloat16, torch.float16)
SUBLAYERS = {"block": 2, "bidirectional_block": 2, "decoder_block": 3}


def half_precision_error(kind, dtype):
    """The relative RMS error to allow: six roundings per layer."""
    return 6 * torch.finfo(dtype).eps * SUBLAYERS.get(kind, 1)


def fill(parameter, values):
    with torch.no_grad():
        parameter.copy_(torch.tensor(values).view(parameter.shape))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
@given(data=st.data(), length=st.sampled_from((1, 2, 24, 70)), truncation=st.sampled_from((None, 1, 5)), dtype=dtypes)
def test_any_finite_ema_parameters_give_finite_outputs_states_and_gradients(
    bidirectional, data, length, truncation, dtype
):
    module = DampedEMA(2, 2, bidirectional, truncation).to(dtype)
    for parameter in module.parameters():
        size = parameter.numel()
        fill(parameter, data.draw(st.lists(numbers, min_size=size, max_size=size)))
    layer = stateless(module) if bidirectional else with_state(module)
    check_finite(layer, random_input(length, 2, length, 2).to(dtype))


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@given(data=st.data(), scale=st.floats(0.0, 1e3), seed=seeds)
def test_layers_with_large_or_zero_parameters_and_all_padded_rows_stay_finite(kind, data, scale, seed):
    recipe = data.draw(recipes(kind))
    module = recipe.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    mask = data.draw(layouts(data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2))))
    check_finite(recipe.layer_of(module, 2), random_input(seed, *mask.shape, DIM), mask)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@given(data=st.data(), seed=seeds)
def test_half_precision_layers_are_close_to_float64_with_finite_gradients(kind, dtype, data, seed):
    recipe = data.draw(recipes(kind))
    module = recipe.module().to(dtype)
    exact = deepcopy(module).double()
    x, layer = random_input(seed, 2, 24, DIM).to(dtype), recipe.layer_of(module, 2)
    check_near(layer, recipe.layer_of(exact, 2), x, half_precision_error(kind, dtype))
    check_finite(layer, x)


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@given(data=st.data(), seed=seeds)
def test_layers_under_autocast_are_close_to_float64_with_finite_gradients(kind, data, seed):
    recipe = data.draw(recipes(kind))
    module = recipe.module().float()
    exact = deepcopy(module).double()
    layer = recipe.layer_of(module, 2)

    def step(x, state, mask):
        with torch.autocast("cpu", torch.bfloat16):
            y, state = layer.step(x, state, mask)
        return y.float(), state

    x = random_input(seed, 2, 24, DIM).float()
    automatic = Layer(step, layer.parameters, layer.start)
    check_near(automatic, recipe.layer_of(exact, 2), x, half_precision_error(kind, torch.bfloat16))
    check_finite(automatic, x)


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@settings(max_examples=10)
@given(data=st.data(), seed=seeds)
def test_autocast_leaves_layers_in_float64_alone(kind, data, seed):
    recipe = data.draw(recipes(kind))
    layer, x = recipe.layer_of(recipe.module().double(), 2), random_input(seed, 2, 24, DIM)
    y, _ = layer.step(x, layer.start(), None)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = layer.step(x, layer.start(), None)
    torch.testing.assert_close(found, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_slow_decays_over_8192_steps_are_accurate_in_half_precision(dtype):
    module = DampedEMA(DIM, 4)
    with torch.no_grad():
        module.alpha.fill_(-2.0)
        module.delta.fill_(-8.0)
        module.eta.mul_(4.0)
    module = module.to(dtype)
    x = (random_input(1, 2, 8192, DIM) + 0.5).to(dtype)
    check_near(with_state(module), with_state(deepcopy(module).double()), x, 1e-2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("truncation", [None, 5])
def test_the_ema_state_is_float32_in_half_precision_from_the_first_token_on(dtype, truncation):
    config = GatedAttentionConfig(DIM, shared_dim=2, ndim=3, chunk_size=4, truncation=truncation)
    module = MovingAverageGatedAttention(config).to(dtype)
    state = None
    for length in (1, 3, 1, 6):
        y, state = module(torch.randn(2, length, DIM).to(dtype), state)
        assert state.ema.dtype == torch.float32
        assert y.dtype == dtype
        assert {leaf.dtype for leaf in leaves(state.cache) if isinstance(leaf, torch.Tensor)} == {dtype}
