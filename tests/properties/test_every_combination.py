"""All combinations of attention functions, position biases and kinds of chunk, causal and bidirectional."""

import pytest
import torch

from mega_fairseq.modules import POSITION_BIASES, GatedAttentionConfig, MovingAverageGatedAttention
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS
from tests.properties import reference
from tests.properties.contracts import (
    check_batch_independence,
    check_equals_reference,
    check_split_anywhere,
    gradients,
)
from tests.properties.layers import DIM, random_input, randomise, stateless, with_state

CHUNK = 3
EDGES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 11]
SEED = 6  # relu2 then has positive scores with every bias
DIRECTIONS = {"causal": True, "bidirectional": False}

every_function = pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
every_bias = pytest.mark.parametrize("bias", POSITION_BIASES)
every_chunk = pytest.mark.parametrize("chunk_size", [None, CHUNK])


def module_of(function, bias, chunk_size, causal):
    widths = {"shared_dim": 4, "value_dim": 8, "ndim": 2}
    options = {"attention": function, "position_bias": bias, "chunk_size": chunk_size, "causal": causal}
    return randomise(MovingAverageGatedAttention(GatedAttentionConfig(DIM, **widths, **options)), SEED)


@pytest.mark.parametrize("causal", DIRECTIONS.values(), ids=DIRECTIONS)
@every_chunk
@every_bias
@every_function
def test_any_length_padding_and_pieces_equal_the_equations(function, bias, chunk_size, causal):
    module = module_of(function, bias, chunk_size, causal)
    layer = with_state(module) if causal else stateless(module)
    slow = reference.per_sequence(reference.gated_attention, module)
    for length in EDGES if chunk_size else (1, 11):
        check_equals_reference(layer, slow, random_input(length, 1, length, DIM))
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[0, 2:], mask[1, 1::3] = False, False  # left, scattered, all padding
    rows = [random_input(i, n, DIM) for i, n in enumerate((9, 4, 0))]
    check_batch_independence(layer, rows, mask, random_input(9, 3, 2, DIM) if causal else None)
    if causal:
        check_split_anywhere(layer, random_input(1, 2, 9, DIM), [4, 1, 4])


@every_bias
@every_function
def test_every_parameter_affects_the_outputs(function, bias):
    """Otherwise a reference that ignored a parameter would not be detected."""
    module = module_of(function, bias, None, True)
    y, _ = module(random_input(3, 1, 7, DIM))
    named = dict(module.named_parameters())
    for name, grad in zip(named, gradients(y.square().sum(), list(named.values()))):
        assert grad.abs().max() > 1e-6, f"{name} has no effect"
