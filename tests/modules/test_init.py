"""Weight initialisation: at the released scale by default, at the scale of the width with `scaled`."""

import pytest
import torch

from mega_fairseq.modules import MIXERS, FeedForwardConfig, GatedAttentionConfig, GatedCrossAttentionConfig, MegaBlock
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
