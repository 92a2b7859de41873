"""Fractions of turns after many steps, in float64 and in float32."""

import pytest
import torch

from mega_fairseq.ops.turns import fraction_of_turn, in_parts
from tests.ops.helpers import noise

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
