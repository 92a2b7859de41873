"""The token mixer interface: every mixer in MIXERS implements it, and other code uses nothing else."""

from dataclasses import fields, replace
from functools import reduce
from typing import NamedTuple

import pytest
import torch

from mega_fairseq.models import MegaTransformerConfig
from mega_fairseq.modules import EXAMPLES, MIXERS, Block, Mixer, MixerConfig
from mega_fairseq.modules.mixer_state import batch_size
from tests.helpers.parameters import perturbed

BATCH, LENGTH = 3, 14
DIM = 4  # of all EXAMPLES
every_example = pytest.mark.parametrize("name", EXAMPLES)


def mixer(name, **options):
    torch.manual_seed(0)
    return perturbed(replace(EXAMPLES[name], **options).build(), 0.3)


@pytest.mark.parametrize("name", MIXERS)
def test_config_fields_have_help_texts_and_name_options_of_the_models(name):
    config, options = MIXERS[name], {field.name for field in fields(MegaTransformerConfig)}
    assert all(field.metadata["help"] for field in fields(config) if field.name != "side")
    for side in ("decoder",) if config.causal_only else ("encoder", "decoder"):
        assert {option.format(side=side) for option in config.options().values()} <= options


@every_example
@torch.no_grad()
def test_a_state_has_the_tensors_and_shapes_of_state_shapes(name):
    made = mixer(name)
    _, state = made(torch.randn(BATCH, LENGTH, DIM))
    if made.config.token_shift:
        assert state.last.shape == (BATCH, DIM // 2)
        state = state.mixer
    assert isinstance(state, made.State)
    assert batch_size(state) == BATCH
    for path, shape in made.state_shapes().items():
        tensor = reduce(getattr, path.split("."), state)
        assert tensor.size(0) == BATCH
        assert all(isinstance(said, str) or said == size for said, size in zip(shape, tensor.shape[1:]))
    if not made.config.causal_only:
        with pytest.raises(ValueError, match="state was given to a bidirectional"):
            mixer(name, causal=False)(torch.randn(BATCH, LENGTH, DIM), state)


@every_example
@torch.no_grad()
def test_with_chunk_equals_a_mixer_built_with_that_chunk_size(name):
    made, x = mixer(name), torch.randn(BATCH, LENGTH, DIM)
    before, _ = made(x)
    chunk = getattr(made.config, "chunk_size", None)
    with pytest.raises(ValueError, match="chunk"):
        made.with_chunk(0)
    try:
        other = made.with_chunk(chunk // 2 if chunk else 3)
    except ValueError:
        other = None
    if other is None and chunk:
        with pytest.raises(RuntimeError, match="size mismatch"):
            mixer(name, chunk_size=chunk // 2).load_state_dict(made.state_dict())
    if other is None:
        return
    built, stored = mixer(name, chunk_size=other.config.chunk_size), made.state_dict()
    built.adapt(stored, "")
    built.load_state_dict(stored)
    torch.testing.assert_close(other(x)[0], built(x)[0])
    torch.testing.assert_close(made(x)[0], before)


class RunningMean(NamedTuple):
    total: torch.Tensor  # (B, D)
    tokens: torch.Tensor  # (B,)


class Centred(Mixer):
    """A norm with a state: each token minus the mean of all tokens so far."""

    State, norm_in_mix = RunningMean, True

    def mix(self, x, batch):
        total, tokens = batch.state or (x.new_zeros(x.size(0), x.size(2)), x.new_zeros(x.size(0)))
        totals = total.unsqueeze(1) + x.cumsum(1)
        counts = tokens.unsqueeze(1) + torch.arange(1, x.size(1) + 1)
        return x - totals / counts.unsqueeze(-1), RunningMean(totals[:, -1], counts[:, -1])


class CentredConfig(MixerConfig):
    causal_only = True

    def build(self):
        return Centred(self)


@pytest.mark.parametrize("prenorm", [True, False])
@torch.no_grad()
def test_a_mixer_may_carry_the_state_of_its_norm_and_have_no_step_of_its_own(prenorm):
    block, x = Block(CentredConfig(DIM, prenorm=prenorm)).eval(), torch.randn(BATCH, LENGTH, DIM)
    expected = 2 * x - x.cumsum(1) / torch.arange(1, LENGTH + 1).view(-1, 1)
    y, state = block(x[:, :5])
    step, outputs = block.step(), [y]
    for token in x[:, 5:].split(1, 1):
        y, state = step(token, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


@every_example
def test_weights_may_be_plain_attributes_as_in_replicas_and_fsdp(name):
    made, x = mixer(name), torch.randn(BATCH, LENGTH, DIM)
    expected, _ = made(x)
    for part in made.modules():
        for weight in list(part._parameters):
            tensor = part._parameters.pop(weight)
            setattr(part, weight, None if tensor is None else tensor.detach())
    torch.testing.assert_close(made(x)[0], expected)


@every_example
@torch.no_grad()
def test_states_made_in_inference_mode_continue_outside_of_it(name):
    made, x = mixer(name), torch.randn(BATCH, LENGTH, DIM)
    expected, _ = made(x)
    with torch.inference_mode():
        _, state = made(x[:, :2])
        _, state = made(x[:, 2:3], state)
    y, state = made(x[:, 3:5], state)
    torch.testing.assert_close(y, expected[:, 3:5])
    torch.testing.assert_close(made(x[:, 5:], state)[0], expected[:, 5:])


def sparse(**options):
    return MIXERS["sparse"](16, **{"heads": 4, **options}).build().double().eval()


@pytest.mark.parametrize("combine", ["merged", "heads", "interleaved"])
@pytest.mark.parametrize(("window", "sizes"), [(None, (3,)), (14, (13, 2)), (14, (40,))], ids=str)
@torch.no_grad()
def test_a_fixed_state_has_an_open_block_and_summaries(combine, window, sizes):
    stride, kept = 5, 4
    module = sparse(stride=stride, summary=2, subblocks=2, chunk_size=window, combine=combine)
    x, state, place = torch.randn(2, 40, 16).double(), None, 0
    width = 0 if combine == "interleaved" else 16  # layer 0 sees no summaries
    while place < 40:
        size = sizes[place % len(sizes)]
        _, state = module(x[:, place : place + size], state)
        place = min(40, place + size)
        blocks, rest = divmod(place % (window or 41), stride)
        assert state.open.keys.shape == state.open.values.shape == (2, rest, 16)
        assert state.summaries.keys.shape == state.summaries.values.shape == (2, blocks * kept, width)


def test_a_state_of_another_stride_is_refused():
    x = torch.randn(2, 7, 16).double()
    _, state = sparse(stride=8, summary=2)(x)
    with pytest.raises(ValueError, match="state has another stride"):
        sparse(stride=4, summary=2)(x, state)
    _, state = sparse(stride=5, summary=1)(x)
    with pytest.raises(ValueError, match="state has another stride or summary"):
        sparse(stride=5, summary=2)(x, state)
