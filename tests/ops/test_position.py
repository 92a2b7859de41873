"""Position biases equal their published definitions, and angles are accurate after many steps."""

import pytest
import torch

from mega_fairseq.ops import precision
from mega_fairseq.ops.attention.position import rotate, t5_bucket
from mega_fairseq.ops.turns import fraction_of_turn, in_parts
from tests.ops.helpers import assert_close, noise
from tests.properties.reference import bucket, rotated

FAR = 10**6


@pytest.mark.parametrize("dim", [2, 4, 8])
def test_rotation_rotates_half_split_pairs_by_position(dim):
    positions = torch.tensor([0, 1, 2, 17, 1000, FAR, -3])
    x = noise(len(positions), dim)
    truth = torch.stack([rotated(row, p) for row, p in zip(x, positions.tolist())])
    assert_close(rotate(x, positions), truth, rtol=1e-8, atol=1e-8)


def test_rotations_beyond_position_one_million_are_accurate_in_float32():
    x, positions = noise(2, 8), torch.tensor([FAR, FAR + 1])
    single = rotate(x.float(), positions)
    assert single.dtype == torch.float32
    assert_close(single.double(), rotate(x, positions), rtol=1e-6, atol=1e-6)


def test_rotations_at_position_100_000_are_accurate_without_float64(monkeypatch):
    x, positions = noise(5, 64), torch.tensor([1, 1000, 99_999, 100_000, -100_000])
    exact = rotate(x, positions)
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", ("cpu",))
    assert_close(rotate(x.float(), positions).double(), exact, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_equal_the_published_ones(causal):
    distances = torch.arange(-300, 301)
    expected = torch.tensor([bucket(d, causal) for d in distances.tolist()])
    assert torch.equal(t5_bucket(distances, causal), expected)
    used = set(range(32)) if causal else set(range(32)) - {16}  # there is no key at distance 0 after the query
    assert set(expected.tolist()) == used


# ------------------------------------------------------------------------------------------- fractions of turns


MANY = [1, 4095, 4096, 4097, 65_537, 100_000, 2**24 - 1, -3, -100_000]


def turns():
    return torch.sigmoid(3.0 * noise(10_000, dtype=torch.float32))


@pytest.mark.parametrize("steps", MANY)
def test_fractions_in_float32_are_accurate_after_many_steps(steps):
    exact = fraction_of_turn(turns().double(), steps)
    assert exact.abs().max() <= 0.5
    for given in (steps, torch.tensor(steps)):
        error = (fraction_of_turn(turns(), given).double() - exact).abs()
        assert torch.minimum(error, 1.0 - error).max() < 1e-7  # half a turn has two fractions
    if abs(steps) > 10_000:
        assert (turns() * steps - turns().double() * steps).abs().max() > 1e-3


def test_parts_of_turns_in_float64_are_those_of_float32_and_more_digits():
    exact = noise(100).abs()
    coarse, medium, fine = (part.float().double() for part in in_parts(exact))
    assert (coarse + medium + fine - exact).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_of_a_fraction_is_the_number_of_steps(dtype):
    given = turns().to(dtype).requires_grad_()
    fraction_of_turn(given, 100_000).sum().backward()
    assert given.grad.unique().tolist() == [100_000]
