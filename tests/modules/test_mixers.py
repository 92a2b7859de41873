"""The token mixer interface: every mixer in MIXERS implements it, and other code uses nothing else."""

import ast
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import mega_fairseq
from mega_fairseq.models import MegaTransformerConfig
from mega_fairseq.modules import EXAMPLES, MIXERS, Block, Mixer, MixerConfig, MixerStep
from mega_fairseq.modules.mixer_state import batch_size

BATCH, LENGTH = 3, 14
DIM = 4  # of all EXAMPLES
PACKAGE = Path(mega_fairseq.__file__).parent
every_example = pytest.mark.parametrize("name", EXAMPLES)


def mixer(name, **options):
    torch.manual_seed(0)
    made = replace(EXAMPLES[name], **options).build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("name", MIXERS)
def test_config_fields_have_help_texts_and_name_options_of_the_models(name):
    config, options = MIXERS[name], {field.name for field in fields(MegaTransformerConfig)}
    assert all(config.help(field.name) for field in fields(config) if field.name != "side")
    for side in ("encoder", "decoder"):
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
        with pytest.raises(ValueError, match=f"evaluate at chunks of {chunk}"):
            mixer(name, chunk_size=chunk // 2).adapt(made.state_dict(), "")
    if other is None:
        return
    built, stored = mixer(name, chunk_size=other.config.chunk_size), made.state_dict()
    built.adapt(stored, "")
    built.load_state_dict(stored)
    torch.testing.assert_close(other(x)[0], built(x)[0])
    torch.testing.assert_close(made(x)[0], before)


@every_example
def test_log_decays_are_those_of_the_states(name):
    for causal in (True, False):
        for decay in mixer(name, causal=causal).log_decays().values():
            assert decay.size(0) == DIM
            assert bool((decay <= 0).all())


def test_no_code_outside_a_mixer_uses_its_fields():
    interface = {name for name in dir(Mixer) if not name.startswith("_")} | {"config", "norm", "token_shift"}
    common = {field.name for field in fields(MixerConfig)} | set(dir(MixerConfig))
    asked = []
    for path in PACKAGE.rglob("*.py"):
        if "mixers" in path.parts or path.name == "mixer.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)):
                continue
            of_mixer, of_config = node.value.attr == "mixer", False
            if node.value.attr == "config" and isinstance(node.value.value, ast.Attribute):
                of_config = node.value.value.attr == "mixer"
            if (of_mixer and node.attr not in interface) or (of_config and node.attr not in common):
                asked.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.attr}")
    assert asked == []


def test_a_mixer_without_its_own_step_decodes_with_forward():
    class Plain(MIXERS["mega"]):
        def build(self):
            made = super().build()
            made.step = lambda: None
            return made

    torch.manual_seed(0)
    block = Block(Plain(DIM, chunk_size=4)).eval()
    x = torch.randn(BATCH, 6, DIM)
    with torch.no_grad():
        whole, _ = block(x)
        _, state = block(x[:, :1])
        step = block.step()
        for t in range(1, 6):
            y, state = step(x[:, t : t + 1], state)
            torch.testing.assert_close(y, whole[:, t : t + 1])


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

    def step(self):
        def mix(x, residual, state):
            state = RunningMean(state.total + x, state.tokens + 1)
            return x - state.total / state.tokens.unsqueeze(-1), state

        return MixerStep(self, mix)


@pytest.mark.parametrize("prenorm", [True, False])
@torch.no_grad()
def test_a_mixer_with_norm_in_mix_carries_the_state_of_its_norm(prenorm):
    made, x = Centred(MixerConfig(DIM, prenorm=prenorm)), torch.randn(BATCH, LENGTH, DIM)
    whole, _ = made(x)
    means = x.cumsum(1) / torch.arange(1, LENGTH + 1).view(-1, 1)
    torch.testing.assert_close(whole, 2 * x - means)
    y, state = made(x[:, :5])
    torch.testing.assert_close(y, whole[:, :5])
    torch.testing.assert_close(made(x[:, 5:], state)[0], whole[:, 5:])
    torch.testing.assert_close(made.step()(x[:, 5:6], state)[0], whole[:, 5:6])


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
