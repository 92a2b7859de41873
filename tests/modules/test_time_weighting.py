"""Attention and gMLP with tables over places: first values of the tables, learned curves."""

import pytest
import torch

from mega_fairseq.modules import MIXERS

ATTENTION, GMLP = MIXERS["attention"], MIXERS["gmlp"]


@pytest.mark.parametrize("options", [{"time_weight": "before"}, {"time_weight": "after"}])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_time_weighting_starts_with_the_same_curves_before_and_after_the_softmax(options, causal):
    module = ATTENTION(8, heads=4, chunk_size=9, causal=causal, **options).build()
    table = module.time_weight.log() if module.log_weight is None else module.log_weight
    assert table.shape == (4, 9 if causal else 17)
    assert torch.equal(table, table.flip(-1)) != causal
    zero = 0 if causal else 8  # index of distance 0
    expected = [-3.0 * 9 ** (-(head + 1) / 3) for head in range(3)] + [0.0]
    torch.testing.assert_close(table[:, zero + 3], torch.tensor(expected))


@torch.no_grad()
def test_attention_starts_as_plain_attention_if_all_places_weigh_the_same():
    x = torch.randn(2, 7, 8)
    plain = ATTENTION(8, heads=2, chunk_size=4).build()
    expected, _ = plain(x)
    for time_weight in ("before", "after"):
        options = {"alpha": time_weight == "after", "beta": True, "gamma": True, "talking_heads": True}
        module = ATTENTION(8, heads=2, chunk_size=4, time_weight=time_weight, **options).build()
        module.load_state_dict(plain.state_dict(), strict=False)
        (module.log_weight if time_weight == "before" else module.time_weight).fill_(time_weight == "after")
        torch.testing.assert_close(module(x)[0], expected)


@torch.no_grad()
def test_gmlp_starts_as_an_average_of_the_past_or_with_a_bias_as_a_feed_forward_layer():
    plain = GMLP(8, heads=2, chunk_size=5).build()
    torch.testing.assert_close(plain.time_weight.sum(-1), torch.ones(2))
    gated = GMLP(8, heads=2, chunk_size=5, spatial_bias=True).build()
    assert gated.time_weight.abs().max() <= 1e-3 / 5
    assert torch.equal(gated.spatial_bias, torch.ones(2, 5))


def test_attention_without_tables_takes_any_chunk_size_and_with_tables_only_that_of_training():
    x = torch.randn(1, 6, 8)
    free = ATTENTION(8, heads=2, chunk_size=4).build()
    assert free.with_chunk(None)(x)[0].shape == x.shape
    for options in ({"time_weight": "before"}, {"gamma": True}):
        fixed = ATTENTION(8, heads=2, chunk_size=4, causal=False, **options).build()
        with pytest.raises(ValueError, match="chunk_size is None and this model learned tables over the 4 places"):
            fixed.with_chunk(None)
