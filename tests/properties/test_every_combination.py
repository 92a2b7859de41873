"""All combinations of attention functions and position biases, with and without chunks, causal and bidirectional."""

from itertools import product

import pytest
import torch

from mega_fairseq.modules import POSITION_BIASES, GatedAttentionConfig, MovingAverageGatedAttention
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS
from tests.properties.contracts import (
    check_batch_independence,
    check_nothing_from_the_future,
    check_split_anywhere,
)
from tests.properties.layers import CHUNKS, DIM, random_input, randomise, stateless, with_state

pytestmark = pytest.mark.slow

LENGTH = 9
TABLE = list(product(ATTENTION_FUNCTIONS, POSITION_BIASES, CHUNKS))


def layer_of(function, bias, chunk_size, causal):
    config = GatedAttentionConfig(
        DIM,
        shared_dim=4,
        attention=function,
        position_bias=bias,
        value_dim=8,
        ndim=2,
        chunk_size=chunk_size,
        causal=causal,
    )
    module = randomise(MovingAverageGatedAttention(config), 7)
    return with_state(module) if causal else stateless(module)


@pytest.mark.parametrize(("function", "bias", "chunk_size"), TABLE)
def test_causal_layers_work_in_pieces_and_do_not_depend_on_later_inputs(function, bias, chunk_size):
    layer = layer_of(function, bias, chunk_size, True)
    x, other = random_input(1, 2, LENGTH, DIM), random_input(2, 2, LENGTH, DIM)
    for pieces in ([1] * LENGTH, [4, 1, 4], [LENGTH - 1, 1]):
        check_split_anywhere(layer, x, pieces)
    for cut in (1, 5, LENGTH - 1):
        check_nothing_from_the_future(layer, x, other, cut)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("function", "bias", "chunk_size"), TABLE)
def test_layers_are_batch_independent(function, bias, chunk_size, causal):
    counts = (LENGTH, 4, 0)
    mask = torch.ones(3, LENGTH + 2, dtype=torch.bool)
    mask[0, 2:], mask[1, 1::3] = False, False  # left, scattered, all padding
    rows = [random_input(i, n, DIM) for i, n in enumerate(counts)]
    tails = random_input(9, 3, 2, DIM) if causal else None
    check_batch_independence(layer_of(function, bias, chunk_size, causal), rows, mask, tails)
