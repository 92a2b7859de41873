"""Padding on any side is converted to padding on the right, and back."""

import pytest
import torch

from mega_fairseq.ops.padding import Alignment, padding_from_lengths
from tests.ops.helpers import noise

MASKS = {
    "none": [[0, 0, 0, 0]],
    "right": [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]],
    "left": [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    "both": [[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]],
    "all": [[1, 1, 1, 1], [0, 0, 0, 0]],
}


@pytest.fixture(params=MASKS)
def mask(request):
    return torch.tensor(MASKS[request.param], dtype=torch.bool)


@pytest.mark.parametrize("extra", [(), (3,), (3, 2)])
def test_real_tokens_move_to_the_front_in_order_with_all_trailing_dimensions(mask, extra):
    x, align = noise(*mask.shape, *extra), Alignment.of(mask)
    front = align.front(x)
    assert front.shape == x.shape
    assert torch.equal(front[~padding_from_lengths(align.lengths, mask.size(1))], x[~mask])


@pytest.mark.parametrize("way", ["front", "back"])
def test_gradients_return_to_their_tokens(mask, way):
    align, other = Alignment.of(mask), {"front": "back", "back": "front"}[way]
    x, weight = noise(*mask.shape, 3, grad=True), noise(*mask.shape, 3, seed=1)
    (getattr(align, way)(x) * weight).sum().backward()
    assert torch.equal(x.grad, getattr(align, other)(weight))
    assert torch.autograd.gradcheck(getattr(align, way), x)


def test_second_derivatives_are_right(mask):
    x = noise(*mask.shape, 2, grad=True)
    assert torch.autograd.gradgradcheck(lambda x: Alignment.of(mask).front(x).pow(3), x)


def test_cropping_removes_columns_of_padding_and_back_restores_the_length():
    mask = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1]], dtype=torch.bool)
    x, align = noise(2, 5, 3, grad=True), Alignment.of(mask, crop=True)
    front = align.front(x)
    assert align.width == 2
    assert torch.equal(front, Alignment.of(mask).front(x)[:, :2])
    assert torch.equal(align.back(front)[~mask], x[~mask])
    weight = noise(2, 2, 3, seed=1)
    (front * weight).sum().backward()
    assert torch.equal(x.grad[~mask], weight[~padding_from_lengths(align.lengths, 2)])
