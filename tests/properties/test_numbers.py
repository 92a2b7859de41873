"""Numerical stability: finite for any finite parameters, and close to float64 in half precision."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.modules import DampedEMA
from tests.properties.contracts import Layer, check_finite, check_near
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
dtypes = st.sampled_from((torch.bfloat16, torch.float32, torch.float64))
SUBLAYERS = {"block": 2, "bidirectional_block": 2, "decoder_block": 3}  # each rounds six times


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
@given(data=st.data(), length=st.sampled_from((1, 2, 24, 70)), truncation=st.sampled_from((None, 1, 5)), dtype=dtypes)
def test_any_finite_ema_parameters_give_finite_outputs_states_and_gradients(
    bidirectional, data, length, truncation, dtype
):
    module = DampedEMA(2, 2, bidirectional, truncation).to(dtype)
    for parameter in module.parameters():
        values = data.draw(st.lists(numbers, min_size=parameter.numel(), max_size=parameter.numel()))
        parameter.data.copy_(torch.tensor(values).view(parameter.shape))
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


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@given(data=st.data(), dtype=st.sampled_from((torch.bfloat16, torch.float16)), autocast=st.booleans(), seed=seeds)
def test_half_precision_and_autocast_are_close_to_float64_with_finite_gradients(kind, data, dtype, autocast, seed):
    recipe = data.draw(recipes(kind))
    module = recipe.module().to(torch.float32 if autocast else dtype)
    exact, layer = recipe.layer_of(deepcopy(module).double(), 2), recipe.layer_of(module, 2)

    def step(x, state, mask):
        with torch.autocast("cpu", dtype, enabled=autocast):
            y, state = layer.step(x, state, mask)
        return y.to(x.dtype), state

    x = random_input(seed, 2, 23, DIM).to(torch.float32 if autocast else dtype)
    half = Layer(step if autocast else layer.step, layer.parameters, layer.start)
    check_near(half, exact, x, 6 * SUBLAYERS.get(kind, 1) * torch.finfo(dtype).eps)
    check_finite(half, x)
    y, _ = exact.step(x.double(), exact.start(), None)
    with torch.autocast("cpu", dtype):
        found, _ = exact.step(x.double(), exact.start(), None)
    torch.testing.assert_close(found, y, rtol=0, atol=1e-10, msg="autocast changed a layer in float64")
