"""AFT: first values of its tables."""

import pytest
import torch

from mega_fairseq.modules.mixers.aft import AFTConfig
from mega_fairseq.ops.aft import tiles
from tests.helpers.pretended_device import PretendedDevice, moved


def mixer(form, **options):
    return AFTConfig(8, form=form, **options).build()


@torch.no_grad()
def test_tables_start_as_curves_from_local_to_uniform():
    weight = mixer("window", heads=4, chunk_size=27).log_weight
    distances = torch.arange(27.0)
    for head, slope in enumerate((1 / 3, 1 / 9, 1 / 27, 0.0)):
        torch.testing.assert_close(weight[head], -slope * distances)
    made = mixer("window", chunk_size=5, beta=True, gamma=True)
    assert not made.log_beta.any()
    assert bool((made.gamma == 1).all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@torch.no_grad()
def test_tables_of_local_start_above_the_weight_of_older_tokens_and_end_at_it(causal):
    weight = mixer("local", heads=2, reach=4, causal=causal).log_weight
    distances = torch.arange(4) if causal else torch.arange(-3, 4).abs()
    torch.testing.assert_close(weight[0], (3 - distances) / 4)
    assert not weight[1].any()


def test_slowness_on_a_gpu_is_logged_once(caplog):
    tiles._log_slowness.cache_clear()
    with PretendedDevice():
        for _ in range(2):
            tiles._forward(*(moved(torch.ones(shape)) for shape in ((1, 7, 8), (1, 7, 8), (2, 5))), None, True)
    assert caplog.text.count("aft is slow on a GPU") == 1
