"""AFT's forms: options, initialisation, huge keys through whole layers, learned curves."""

import pytest
import torch

from mega_fairseq.models import MegaLMConfig
from mega_fairseq.models.options import from_options
from mega_fairseq.modules import Block
from mega_fairseq.modules.mixers.aft import AFTConfig
from tests.properties.contracts import leaves

DIM, LENGTH = 8, 23
FORMS = {
    "window": {"chunk_size": 5, "heads": 2, "beta": True, "gamma": True},
    "local": {"form": "local", "reach": 3, "heads": 2},
    "simple": {"form": "simple"},
}
every_form = pytest.mark.parametrize("form", FORMS)


def mixer(form, seed=0, **options):
    torch.manual_seed(seed)
    return AFTConfig(DIM, **{**FORMS[form], **options}).build().eval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "recent"}, "form is 'recent'; choose one of window, local, simple"),
        ({}, "chunk_size is None"),
        ({"chunk_size": 4, "heads": 3}, "heads is 3 and does not divide the width of the model, 8"),
        ({"form": "local"}, "reach is None and form local"),
        ({"form": "local", "reach": 0}, "reach is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AFTConfig(DIM, **options)


def test_errors_name_the_options_of_the_command_line():
    cfg = MegaLMConfig(decoder_aft_form="local", decoder_aft_reach=8, decoder_time_beta=True)
    with pytest.raises(ValueError, match="--decoder-time-beta is True and has no effect with --decoder-aft-form local"):
        from_options(AFTConfig, cfg, "decoder", causal=True)


@every_form
@torch.no_grad()
def test_another_chunk_size_is_refused(form):
    with pytest.raises(ValueError, match="chunk_size is 4 and (this model learned tables over the 5|has no effect)"):
        mixer(form).with_chunk(4)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_another_reach_than_in_training_is_refused(causal):
    stored = mixer("local", reach=3, causal=causal).state_dict()
    message = "reach is 5 and this model learned weights for the last 3 tokens; evaluate with reach 3"
    with pytest.raises(ValueError, match=message):
        mixer("local", reach=5, causal=causal).adapt(stored, "")


@torch.no_grad()
def test_tables_start_as_curves_from_local_to_uniform():
    weight = mixer("window", heads=4, chunk_size=27).log_weight
    distances = torch.arange(27.0)
    for head, slope in enumerate((1 / 3, 1 / 9, 1 / 27, 0.0)):
        torch.testing.assert_close(weight[head], -slope * distances)
    made = mixer("window")
    assert not made.log_beta.any()
    assert bool((made.gamma == 1).all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@torch.no_grad()
def test_tables_of_local_start_above_the_weight_of_older_tokens_and_end_at_it(causal):
    weight = mixer("local", heads=2, reach=4, causal=causal).log_weight
    distances = torch.arange(4) if causal else torch.arange(-3, 4).abs()
    torch.testing.assert_close(weight[0], (3 - distances) / 4)
    assert not weight[1].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_form
def test_keys_up_to_1000_give_finite_outputs_states_and_gradients(form, causal):
    made, x = mixer(form, causal=causal), torch.randn(2, LENGTH, DIM, requires_grad=True)
    with torch.no_grad():
        made.key.weight.mul_(400.0 / made.key(made.norm(x)).std())
    y = made(x)
    y, state = y if causal else (y, ())
    assert made.key(made.norm(x)).abs().max() > 800
    y.square().sum().backward()
    assert all(
        t.isfinite().all() for t in [y, x.grad, *(p.grad for p in made.parameters()), *leaves(state)] if t is not None
    )


@every_form
@torch.no_grad()
def test_a_step_equals_the_block_token_by_token_beyond_the_window(form):
    block = Block(AFTConfig(DIM, **FORMS[form], token_shift=True)).eval()
    x = torch.randn(3, LENGTH, DIM)
    whole, _ = block(x)
    _, state = block(x[:, :1])
    step = block.step()
    for t in range(1, LENGTH):
        y, state = step(x[:, t : t + 1], state)
        torch.testing.assert_close(y, whole[:, t : t + 1])
