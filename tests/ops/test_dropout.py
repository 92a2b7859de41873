"""Dropout preserves the mean, drops the right entries, and has the same mask in forward and backward."""

import math

import pytest
import torch

from mega_fairseq.ops.dropout import SHARES, dropped, keep_mask

CPU = torch.device("cpu")
FEATURES = [False, True]


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.5, 0.999])
def test_a_mask_keeps_the_expected_fraction_and_the_factor_preserves_the_mean(dropout):
    torch.manual_seed(0)
    keep, scale = keep_mask((1000, 1001), dropout, CPU)
    assert (keep.dtype, keep.shape) == (torch.bool, (1000, 1001))
    share, deviation = 1 / scale, math.sqrt(dropout * (1 - dropout) / keep.numel())
    assert abs(share - (1 - dropout)) <= 0.5 / SHARES
    assert abs(keep.double().mean().item() - share) < 4 * deviation


def test_a_mask_that_keeps_almost_nothing_has_a_finite_factor():
    _, scale = keep_mask((2, 3), 1 - 1e-9, CPU)
    assert scale == SHARES


def test_entries_of_a_mask_are_independent():
    """Four consecutive entries are drawn from the same random bits."""
    torch.manual_seed(0)
    keep = keep_mask((250_000, 4), 0.3, CPU)[0].double() - 0.7
    together = keep.t() @ keep / len(keep)  # covariances
    assert (together - 0.21 * torch.eye(4)).abs().max() < 4 * 0.21 / math.sqrt(len(keep))
    assert abs((keep[1:, 0] * keep[:-1, 3]).mean().item()) < 4 * 0.21 / math.sqrt(len(keep))


def test_plain_dropout_drops_single_entries():
    torch.manual_seed(0)
    zeros = dropped(torch.ones(8, 50, 40), 0.5, False) == 0
    assert not zeros.all(1).any()
    assert not (~zeros).all(1).any()


def test_feature_dropout_drops_some_whole_channels_of_each_sentence():
    """The release drops whole chunks of values instead."""
    torch.manual_seed(0)
    zeros = dropped(torch.ones(8, 50, 40), 0.5, True) == 0
    assert torch.equal(zeros, zeros[:, :1].expand_as(zeros))  # the same at every position
    share = zeros[:, 0].double().mean(1)
    assert ((share > 0.1) & (share < 0.9)).all()  # some channels of each sentence
    assert len({tuple(row) for row in zeros[:, 0].tolist()}) == 8  # not the same in all sentences


@pytest.mark.parametrize("features", FEATURES)
def test_the_default_device_does_not_matter(features):
    x = torch.randn(2, 3, 4)
    with torch.device("meta"):
        assert dropped(x, 0.5, features).device == CPU
