"""First values: projections at the released scale or, with `scaled`, at that of their width; tables over places."""

import pytest
import torch

from mega_fairseq.models import MegaLMConfig
from mega_fairseq.models.options import layer_configs
from mega_fairseq.modules import (
    MIXERS,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttentionConfig,
    MegaBlock,
    NormalizedFeedForward,
)
from mega_fairseq.modules.projection import INITS

DIM, WIDE = 256, 1024


def block(**init):
    torch.manual_seed(0)
    attends = {"dim": DIM, "shared_dim": 64, **init}
    feeds = FeedForwardConfig(dim=DIM, hidden_dim=WIDE, **init)
    return MegaBlock(GatedAttentionConfig(value_dim=WIDE, **attends), feeds, GatedCrossAttentionConfig(**attends))


def projections(made):
    found = [m for m in made.modules() if isinstance(m, torch.nn.Linear)]
    assert len(found) == 11
    return found


@pytest.mark.parametrize("init", [{}, {"init": "released"}])
def test_released_projections_and_kappa_start_with_standard_deviation_002(init):
    made = block(**init)
    for layer in projections(made):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.any()
    assert made.mixer.kappa.std().item() == pytest.approx(0.02, rel=0.3)


def test_scaled_projections_preserve_the_scale_of_their_input():
    made = block(init="scaled")
    for layer in projections(made):
        assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.05)
        assert not layer.bias.any()
    assert torch.equal(made.mixer.kappa, torch.ones(2, 64))


@pytest.mark.parametrize(("name", "scales"), [("gau", [1.0, 1.0]), ("flash", [1.0, 1.0, 1 / 8, 1 / 8])])
def test_scaled_gau_and_flash_start_with_scores_of_the_size_of_their_queries(name, scales):
    torch.manual_seed(0)
    kappa = {init: MIXERS[name](DIM, shared_dim=64, chunk_size=8, init=init).build().kappa for init in INITS}
    assert kappa["released"].std().item() == pytest.approx(0.02, rel=0.3)
    torch.testing.assert_close(kappa["scaled"], torch.tensor(scales).unsqueeze(1).expand(-1, 64))


@pytest.mark.parametrize("init", INITS)
def test_megalodon_starts_with_queries_and_keys_of_length_1(init):
    """So scores are between -1 and 1."""
    made = MIXERS["megalodon"](DIM, heads=2, init=init).build()
    for rows in made.queries_keys(torch.randn(3, 9, DIM // 4), 5):
        torch.testing.assert_close(rows.unflatten(-1, (2, -1)).norm(dim=-1), torch.ones(3, 9, 2), rtol=0.0, atol=1e-4)
    scale = DIM**-0.5 if init == "scaled" else (3 * DIM) ** -0.5
    assert made.shared.weight.std().item() == pytest.approx(scale, rel=0.05)


def test_the_scale_of_feed_forward_layers_starts_with_half_of_that_of_the_layer_before():
    configs = layer_configs(MegaLMConfig(decoder_layers=3, decoder_ffn_rescale=True), "decoder", max_positions=9)
    scales = [NormalizedFeedForward(feed_forward).rescale for _, feed_forward, _ in configs]
    assert [scale.unique().tolist() for scale in scales] == [pytest.approx([0.1 * 0.5**layer]) for layer in range(3)]


def test_sparse_attention_starts_with_the_released_deviations_or_the_papers():
    for init, std, output_std in (("released", 0.02, 0.02), ("scaled", 0.125 / 16, 0.125 / 16 / 12**0.5)):
        made = MIXERS["sparse"](256, init=init, layers=6).build()
        for layer in (made.query, made.key, made.value):
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
            assert not layer.bias.any()
        assert made.output.weight.std().item() == pytest.approx(output_std, rel=0.05)
        assert not made.output.bias.any()


@torch.no_grad()
def test_tables_of_aft_start_as_curves_from_local_to_uniform():
    weight = MIXERS["aft"](8, form="window", heads=4, chunk_size=27).build().log_weight
    distances = torch.arange(27.0)
    for head, slope in enumerate((1 / 3, 1 / 9, 1 / 27, 0.0)):
        torch.testing.assert_close(weight[head], -slope * distances)
    made = MIXERS["aft"](8, form="window", chunk_size=5, beta=True, gamma=True).build()
    assert not made.log_beta.any()
    assert bool((made.gamma == 1).all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@torch.no_grad()
def test_tables_of_local_aft_start_above_the_weight_of_older_tokens_and_end_at_it(causal):
    weight = MIXERS["aft"](8, form="local", heads=2, reach=4, causal=causal).build().log_weight
    distances = torch.arange(4) if causal else torch.arange(-3, 4).abs()
    torch.testing.assert_close(weight[0], (3 - distances) / 4)
    assert not weight[1].any()


@pytest.mark.parametrize("options", [{"time_weight": "before"}, {"time_weight": "after"}])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_time_weighting_starts_with_the_same_curves_before_and_after_the_softmax(options, causal):
    module = MIXERS["attention"](8, heads=4, chunk_size=9, causal=causal, **options).build()
    table = module.time_weight.log() if module.log_weight is None else module.log_weight
    assert table.shape == (4, 9 if causal else 17)
    assert torch.equal(table, table.flip(-1)) != causal
    zero = 0 if causal else 8  # index of distance 0
    expected = [-3.0 * 9 ** (-(head + 1) / 3) for head in range(3)] + [0.0]
    torch.testing.assert_close(table[:, zero + 3], torch.tensor(expected))


@torch.no_grad()
def test_attention_starts_as_plain_attention_if_all_places_weigh_the_same():
    x = torch.randn(2, 7, 8)
    plain = MIXERS["attention"](8, heads=2, chunk_size=4).build()
    expected, _ = plain(x)
    for time_weight in ("before", "after"):
        options = {"alpha": time_weight == "after", "beta": True, "gamma": True, "talking_heads": True}
        module = MIXERS["attention"](8, heads=2, chunk_size=4, time_weight=time_weight, **options).build()
        module.load_state_dict(plain.state_dict(), strict=False)
        (module.log_weight if time_weight == "before" else module.time_weight).fill_(time_weight == "after")
        torch.testing.assert_close(module(x)[0], expected)


@torch.no_grad()
def test_gmlp_starts_as_an_average_of_the_past_or_with_a_bias_as_a_feed_forward_layer():
    plain = MIXERS["gmlp"](8, heads=2, chunk_size=5).build()
    torch.testing.assert_close(plain.time_weight.sum(-1), torch.ones(2))
    gated = MIXERS["gmlp"](8, heads=2, chunk_size=5, spatial_bias=True).build()
    assert gated.time_weight.abs().max() <= 1e-3 / 5
    assert torch.equal(gated.spatial_bias, torch.ones(2, 5))
