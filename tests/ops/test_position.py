"""Position biases equal their published definitions."""

import math

import pytest
import torch

from mega_fairseq.modules import POSITION_BIASES
from mega_fairseq.ops.attention.position import rotary_distances, rotate, t5_bucket
from mega_fairseq.ops.diagonals import toeplitz_matrix
from tests.ops.helpers import assert_close, noise

FAR = 10**6


def rotated(x, position):
    """Pair (i, i + half) of x, rotated by position / 10000^(i / half), one pair at a time."""
    half, y = x.size(0) // 2, torch.empty_like(x)
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y


def published_t5_bucket(distance, bidirectional, buckets=32, max_distance=128):
    """Raffel et al., 2020: `_relative_position_bucket` for one distance, key minus query position."""
    bucket, n = 0, -distance
    if bidirectional:
        buckets //= 2
        bucket += buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return bucket + n
    large = exact + int(math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact))
    return bucket + min(large, buckets - 1)


@pytest.mark.parametrize("dim", [2, 4, 8])
def test_rotation_rotates_half_split_pairs_by_position(dim):
    positions = torch.tensor([0, 1, 2, 17, 1000, FAR, -3])
    x = noise(len(positions), dim)
    truth = torch.stack([rotated(row, p) for row, p in zip(x, positions.tolist())])
    assert_close(rotate(x, positions), truth, rtol=1e-8, atol=1e-8)
    single = torch.stack([rotated(x[0], p) for p in positions.tolist()])
    assert_close(rotate(x[0], positions), single, rtol=1e-8, atol=1e-8)


def test_rotations_beyond_position_one_million_are_accurate_in_float32():
    x, positions = noise(8), torch.tensor([FAR, FAR + 1])
    single = rotate(x.float(), positions)
    assert single.dtype == torch.float32
    assert_close(single.double(), rotate(x, positions), rtol=1e-6, atol=1e-6)


def test_the_rotary_bias_is_the_inner_product_of_rotated_vectors():
    a, b = noise(6), noise(6, seed=1)
    truth = [rotated(a, 7) @ rotated(b, 7 + distance) for distance in range(-7, 11)]
    assert_close(rotary_distances(a, b, torch.arange(-7, 11)), torch.stack(truth))


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_equal_the_published_ones(causal):
    distances = torch.arange(-300, 301)
    expected = torch.tensor([published_t5_bucket(d, not causal) for d in distances.tolist()])
    assert torch.equal(t5_bucket(distances, causal), expected)
    used = set(range(32)) if causal else set(range(32)) - {16}  # there is no key at distance 0 after the query
    assert set(expected.tolist()) == used


@pytest.mark.parametrize("causal", [False, True])
def test_the_t5_bias_has_one_weight_per_bucket(causal):
    module = POSITION_BIASES["t5"](8, 16, causal)
    bias = toeplitz_matrix(module(1 - 40, 200, torch.device("cpu")), 40, 200)
    for i, j in [(0, 0), (39, 0), (0, 39), (0, 199), (5, 7), (20, 4)]:
        assert bias[i, j] == module.weight[published_t5_bucket(j - i, not causal)]


def test_the_simple_bias_has_one_weight_per_distance():
    module = POSITION_BIASES["simple"](8, 16, True)
    bias = toeplitz_matrix(module(1 - 16, 16, torch.device("cpu")), 16, 16)
    for i, j in [(0, 0), (15, 0), (0, 15), (3, 9)]:
        assert bias[i, j] == module.weight[15 + j - i]


def test_rope_rotates_and_the_others_do_not():
    x = noise(2, 3, 8)
    for kind, biases in POSITION_BIASES.items():
        turned = biases(8, 16, True).rotate(x, 5)
        assert torch.equal(turned, x) == (kind != "rope")
    truth = torch.stack([torch.stack([rotated(row, 5 + i) for i, row in enumerate(sentence)]) for sentence in x])
    assert_close(POSITION_BIASES["rope"](8, 16, True).rotate(x, 5), truth, rtol=1e-8, atol=1e-8)
