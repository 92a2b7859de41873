"""No stale caches: the outputs of a module depend only on its current parameters, whatever happened before."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.profiles import examples
from tests.properties.contracts import assert_close, check_nothing_is_stale
from tests.properties.layers import BIDIRECTIONAL, CAUSAL, DIM, random_input, recipes, seeds

KINDS = [*CAUSAL, *BIDIRECTIONAL]


@pytest.mark.parametrize("kind", KINDS)
@examples(4)  # each builds several modules
@given(data=st.data(), length=st.sampled_from((1, 4, 9)), seed=seeds)
def test_after_any_change_a_module_equals_a_fresh_one_with_its_parameters(kind, data, length, seed):
    recipe, number = data.draw(recipes(kind)), count(seed)

    def make():
        return replace(recipe, seed=next(number)).module()

    check_nothing_is_stale(make, lambda module: recipe.layer_of(module, 2), random_input(seed, 2, length, DIM))


@pytest.mark.parametrize("kind", KINDS)
@examples(5)
@given(data=st.data(), seed=seeds)
def test_two_graphs_of_one_module_do_not_disturb_each_other(kind, data, seed):
    recipe = data.draw(recipes(kind))
    layer = recipe.layer_of(recipe.module(), 2)
    inputs = [random_input(seed + i, 2, length, DIM).requires_grad_() for i, length in enumerate((9, 4))]

    def outputs(x):
        return layer.step(x, layer.start(), None)[0].square().sum()

    expected = [torch.autograd.grad(outputs(x), x)[0] for x in inputs]
    both = [outputs(x) for x in inputs]  # two graphs alive at once, differentiated in the other order
    actual = [torch.autograd.grad(loss, x)[0] for loss, x in zip(both[::-1], inputs[::-1])][::-1]
    for a, b in zip(actual, expected):
        assert_close(a, b, "gradient", 0.0)
