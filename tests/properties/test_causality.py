"""Causality: no causal output depends on a later input, by value or by gradient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.contracts import check_nothing_from_the_future
from tests.properties.layers import CAUSAL, DIM, layouts, random_input, recipes, seeds


@pytest.mark.parametrize("kind", CAUSAL)
@given(data=st.data(), counts=st.lists(st.integers(0, 24), min_size=1, max_size=3), seed=seeds)
def test_outputs_do_not_depend_on_later_inputs_by_value_or_gradient(kind, data, counts, seed):
    mask, scale = data.draw(layouts(counts)), data.draw(st.sampled_from((1.0, 1e3, 1e6)))
    layer = data.draw(recipes(kind)).layer(len(counts))
    x, other = random_input(seed, *mask.shape, DIM), scale * random_input(seed + 1, *mask.shape, DIM)
    cut = data.draw(st.integers(0, mask.size(1)))
    check_nothing_from_the_future(layer, x, other, cut, mask if mask.any() else None)
