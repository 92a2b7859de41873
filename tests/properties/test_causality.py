"""Causality: no causal output depends on a later input, by value or by gradient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.contracts import check_nothing_from_the_future
from tests.properties.layers import CAUSAL, DIM, layouts, random_input, recipes, seeds

batches = st.integers(1, 3)


@pytest.mark.parametrize("kind", CAUSAL)
@given(data=st.data(), batch=batches, length=st.integers(2, 24), seed=seeds, scale=st.sampled_from((1.0, 1e3, 1e6)))
def test_outputs_do_not_depend_on_later_inputs_by_value_or_gradient(kind, data, batch, length, seed, scale):
    layer = data.draw(recipes(kind)).layer(batch)
    x, other = random_input(seed, batch, length, DIM), scale * random_input(seed + 1, batch, length, DIM)
    check_nothing_from_the_future(layer, x, other, data.draw(st.integers(1, length - 1)))


@pytest.mark.parametrize("kind", CAUSAL)
@given(data=st.data(), batch=batches, seed=seeds)
def test_outputs_of_padded_batches_do_not_depend_on_later_inputs(kind, data, batch, seed):
    mask = data.draw(layouts(data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))))
    layer = data.draw(recipes(kind)).layer(batch)
    x, other = random_input(seed, *mask.shape, DIM), random_input(seed + 1, *mask.shape, DIM)
    check_nothing_from_the_future(layer, x, other, data.draw(st.integers(0, mask.size(1))), mask)
