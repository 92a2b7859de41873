"""When a block takes single tokens by its faster form, and what that costs; the properties compare its results."""

import pytest
import torch

from mega_fairseq.modules import (
    BlockState,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttentionConfig,
    MegaBlock,
    position_bias,
)
from mega_fairseq.modules.cross_attention import LONG_SOURCE
from tests.helpers.parameters import perturbed
from tests.properties.contracts import leaves

DIM, SHARED, SOURCES, BEAMS, LENGTH = 16, 8, 3, 2, 13
CLOSE = {"atol": 5e-6, "rtol": 1e-5}


def block(**options):
    torch.manual_seed(0)
    attends = {"dim": DIM, "shared_dim": SHARED, "max_positions": 400, **options}
    made = MegaBlock(
        GatedAttentionConfig(ndim=4, **attends),
        FeedForwardConfig(DIM, hidden_dim=20),
        GatedCrossAttentionConfig(**attends),
    )
    return perturbed(made, 0.3)


def start(made, length=7):
    """The state after one token, and the tokens that follow."""
    source, padding = torch.randn(SOURCES, length, DIM), torch.zeros(SOURCES, length, dtype=torch.bool)
    padding[1, length - 2 :] = True
    cross = made.cross_attention.project_source(source, padding)
    x = torch.randn(SOURCES * BEAMS, LENGTH, DIM)
    _, state = made(x[:, :1], BlockState(None, cross))
    return state, x[:, 1:]


def assert_steps_equal_block(made, state, x):
    step, stepped = made.step(), state
    for t in range(x.size(1)):
        token = x[:, t : t + 1]
        assert made.takes_step(stepped)
        y, state = made(token, state)
        ours, stepped = step(token, stepped)
        torch.testing.assert_close(ours, y, **CLOSE)
        for one, other in zip(leaves(stepped), leaves(state)):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, **CLOSE)


@torch.no_grad()
def test_a_step_equals_the_block_for_long_sources_even_if_some_are_removed():
    made = block(position_bias="rotary")
    state, x = start(made, LONG_SOURCE + 3)
    assert_steps_equal_block(made, state, x[:, :2])
    step = made.step()
    step(x[:, :1], state)  # packs the values of three sources
    cross, mixer = state.cross, state.mixer
    rows = torch.tensor([2, 3, 4, 5])
    fewer = BlockState(
        BlockState(mixer).reorder(rows, None, None).mixer,
        cross._replace(keys=cross.keys[1:], values=cross.values[1:].clone(), padding=cross.padding[1:]),
    )
    torch.testing.assert_close(step(x[rows, :1], fewer)[0], made(x[rows, :1], fewer)[0], **CLOSE)


def test_a_step_is_not_used_for_training_gradients_ragged_rows_or_first_tokens():
    made = block()
    with torch.no_grad():
        state, x = start(made)
        assert made.takes_step(state)
        assert not made.takes_step(BlockState(None, state.cross))
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        assert not made.takes_step(made(x, state, padding)[1])
        assert not made.train().takes_step(state)
        with torch.autocast("cpu", torch.bfloat16):
            assert not made.eval().takes_step(state)
    assert not made.eval().takes_step(state)


@torch.no_grad()
def test_steps_compute_few_rotations(monkeypatch):
    made, computed = block(position_bias="rope"), []
    cos_sin = position_bias.cos_sin
    monkeypatch.setattr(position_bias, "cos_sin", lambda *args: computed.append(args) or cos_sin(*args))
    state, _ = start(made)
    step = made.step()
    for token in torch.randn(100, SOURCES * BEAMS, 1, DIM):
        _, state = step(token, state)
    assert len(computed) <= 2 * 7  # in self- and cross attention, for twice as many positions each time


@pytest.mark.parametrize("token_shift", [False, True])
@torch.no_grad()
def test_two_hops_add_the_feed_forward_output_to_the_input_of_the_mixer(token_shift):
    attends = GatedAttentionConfig(DIM, shared_dim=SHARED, chunk_size=4)
    one, two = (
        MegaBlock(attends, FeedForwardConfig(DIM, token_shift=token_shift, two_hop=two_hop)).eval()
        for two_hop in (False, True)
    )
    two.load_state_dict(one.state_dict())
    x, padding = torch.randn(2, LENGTH, DIM), torch.arange(LENGTH) < torch.tensor([[0], [3]])
    mixed, _ = one.mixer(x, None, padding)
    expected = (one(x, None, padding)[0] - mixed + x).masked_fill(padding.unsqueeze(-1), 0.0)
    torch.testing.assert_close(two(x, None, padding)[0], expected)
    _, state = two(x[:, :1])
    assert_steps_equal_block(two, state, x[:, 1:])
