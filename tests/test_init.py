"""Weight initialisation: at the released scale by default, at the scale of the width with `scaled`."""

import pytest
import torch

from mega_fairseq.modules import FeedForwardConfig, GatedAttentionConfig, GatedCrossAttentionConfig, MegaBlock

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


def test_an_unknown_init_is_refused():
    with pytest.raises(ValueError, match="init is 'xavier'; choose one of released, scaled"):
        block(init="xavier")
