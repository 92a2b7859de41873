"""Any length: no caller pads to a chunk, and at each length a layer equals the paper's equations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.modules import MIXERS
from tests.properties import reference, reference_mixers
from tests.properties.contracts import check_equals_reference
from tests.properties.layers import BOTH_WAYS, DIM, SOURCE_DIM, layouts, random_input, reading, recipes, seeds

lengths = st.integers(1, 13)
KINDS = {
    "ema": reference.ema,
    "bidirectional_ema": reference.ema,
    "timestep_norm": reference.timestep_norm,
    **{name: reference_mixers.MIXERS[name] for name in MIXERS},
    **{f"bidirectional_{name}": reference_mixers.MIXERS[name] for name in BOTH_WAYS},
    "feed_forward": reference.feed_forward,
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), counts=st.lists(st.integers(0, 13), min_size=1, max_size=3), seed=seeds)
def test_values_and_gradients_equal_those_of_the_equations_in_any_padded_batch(kind, data, counts, seed):
    recipe, mask = data.draw(recipes(kind)), data.draw(layouts(counts))
    module = recipe.module()
    slow, x = reference.per_sequence(KINDS[kind], module), random_input(seed, *mask.shape, DIM)
    check_equals_reference(recipe.layer_of(module), slow, x, mask if mask.any() else None)


@given(data=st.data(), length=lengths, source_length=lengths, seed=seeds)
def test_cross_attention_has_the_values_and_gradients_of_the_equations(data, length, source_length, seed):
    module = data.draw(recipes("cross_attention")).module()
    layer = reading(module, random_input(seed, 1, source_length, SOURCE_DIM), None)
    source = layer.parameters[-1]
    slow = reference.per_sequence(lambda m, x: reference.cross_attention(m, source[0], x), module)
    check_equals_reference(layer, slow, random_input(seed + 1, 1, length, DIM))
