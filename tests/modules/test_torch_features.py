"""Hooks, adapters, quantisation and functional_call take effect on every block (contract 12)."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as of_all_modules

from mega_fairseq.modules import EXAMPLES, MIXERS, Block, BlockState, FeedForwardConfig, GatedCrossAttentionConfig
from mega_fairseq.ops import precision
from tests.helpers.parameters import perturbed
from tests.helpers.pretended_device import DEVICE, PretendedDevice, moved

DIM, LENGTH = 4, 13
CROSS = "mega, cross attention"
every_block = pytest.mark.parametrize("name", [*EXAMPLES, CROSS])
every_mixer = pytest.mark.parametrize("name", [*MIXERS, CROSS])


def block(name):
    """A block in eval mode, with large random parameters."""
    torch.manual_seed(1)
    cross = GatedCrossAttentionConfig(DIM, shared_dim=4) if name == CROSS else None
    made = Block(EXAMPLES["mega" if name == CROSS else name], FeedForwardConfig(DIM, activation="geglu"), cross)
    return perturbed(made, 0.3)


def inputs(length=LENGTH):
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(2))


def start(made, source=None):
    if made.cross_attention is None:
        return BlockState(None)
    return BlockState(None, made.cross_attention.project_source(inputs(5) if source is None else source))


def outputs(made, x=None):
    return made(inputs() if x is None else x, start(made))[0]


@torch.no_grad()
def generated(made):
    """Outputs of single tokens after a prefix."""
    x, steps = inputs(), []
    _, state = made(x[:, :4], start(made))
    step = made.step()
    for t in range(4, LENGTH):
        y, state = step(x[:, t : t + 1], state)
        steps.append(y)
    return torch.cat(steps, 1)


def projections(made):
    return {name: module for name, module in made.named_modules() if isinstance(module, nn.Linear)}


def replace(made, name, module):
    parent, _, child = name.rpartition(".")
    setattr(made.get_submodule(parent), child, module)


OF_SOURCE = {"cross_attention.keys", "cross_attention.values"}  # called once, before the first token


HOOKS = [("each", name) for name in (*EXAMPLES, CROSS)]
HOOKS += [(kind, CROSS) for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")]  # of all modules


@pytest.mark.parametrize(("kind", "name"), HOOKS)
def test_hooks_see_every_projection_in_sequences_and_in_single_tokens(kind, name):
    made, calls = block(name), set()
    expected = outputs(made)
    _, state = made(inputs(4), start(made))
    if kind == "each":
        for module in projections(made).values():
            handle = module.register_forward_hook(lambda module, *_: calls.add(module))
    else:
        handle = getattr(of_all_modules, f"register_module_{kind}_hook")(lambda module, *_: calls.add(module))
    try:
        y = outputs(made)
        y.sum().backward()
        seen = set(calls)
        calls.clear()
        with torch.no_grad():
            made.step()(inputs(1), state)
    finally:
        handle.remove()
    torch.testing.assert_close(y, expected)
    assert {path for path, module in projections(made).items() if module not in seen} == set()
    missed = {path for path, module in projections(made).items() if module not in calls}
    assert missed == (set(projections(made)) if "backward" in kind else OF_SOURCE & set(projections(made)))


class LowRank(nn.Module):
    """An adapter in the place of a projection, which holds it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(linear.in_features, 1, False), nn.Linear(1, linear.out_features, False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


class Scaled(nn.Module):
    """An adapter as a parametrisation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight):
        return self.scale * weight


def adapt(made):
    """Puts an adapter into the place of each projection; returns the new parameters."""
    adapters = {path: LowRank(module) for path, module in projections(made).items()}
    for path, adapter in adapters.items():
        replace(made, path, adapter)
    return [part.weight for adapter in adapters.values() for part in (adapter.up, adapter.down)]


def parametrise(made):
    modules = list(projections(made).values())
    for module in modules:
        nn.utils.parametrize.register_parametrization(module, "weight", Scaled())
    return [module.parametrizations.weight[0].scale for module in modules]


def add_lora(made):
    """Puts PEFT's adapters into the places of all projections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchaudio", None)  # which transformers imports, though it may not fit this torch
        peft = pytest.importorskip("peft", reason="make test installs it, where pip has it")
    config = peft.LoraConfig(r=1, target_modules=list(projections(made)), init_lora_weights=False)
    peft.inject_adapter_in_model(config, made)
    return [parameter for name, parameter in made.named_parameters() if "lora_" in name]


class Larger(Tensor):
    """A weight that counts one and a half times, as a subclass of torch's tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, 1.5 * weight.as_subclass(Tensor), *bias)
        return super().__torch_function__(func, types, args, kwargs)


def subclass(made):
    for module in projections(made).values():
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Larger))
    return [module.weight for module in projections(made).values()]


CHANGES = [(name, adapt) for name in (*EXAMPLES, CROSS)]
CHANGES += [(name, change) for name in (CROSS, "gau", "megalodon") for change in (parametrise, subclass)]
CHANGES += [pytest.param(name, add_lora, marks=pytest.mark.slow) for name in (CROSS, "megalodon")]


@pytest.mark.parametrize(("name", "change"), CHANGES)  # one function asks whether a projection is plain
def test_changes_of_all_projections_change_outputs_and_get_gradients(name, change):
    made = block(name)
    before, added = generated(made), change(made)
    y = outputs(made)
    assert not torch.allclose(y[:, 4:], before, atol=1e-3)
    torch.testing.assert_close(generated(made), y[:, 4:].detach(), atol=1e-4, rtol=1e-4)
    y.square().sum().backward()
    assert all(parameter.grad.any() for parameter in added)


@every_mixer
@torch.no_grad()
def test_projections_without_a_bias_equal_those_with_a_bias_of_zero(name):
    made = block(name)
    for module in projections(made).values():
        if module.bias is not None:
            module.bias.zero_()
    before, steps = outputs(made), generated(made)
    for path, module in projections(made).items():
        plain = nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight = module.weight
        replace(made, path, plain)
    torch.testing.assert_close(outputs(made), before)
    torch.testing.assert_close(generated(made), steps)


@every_mixer
@torch.no_grad()
def test_dynamic_quantisation_of_projections_takes_effect(name):
    made = block(name)
    quantised = torch.ao.quantization.quantize_dynamic(made, {nn.Linear})
    assert not projections(quantised)
    for run in (outputs, generated):
        error = (run(quantised) - run(made)).abs().max()
        assert 1e-6 < error < 0.3 * run(made).abs().max()


QUANTISED = {
    "int8": lambda q: q.Int8WeightOnlyConfig(),
    "int8, dynamic": lambda q: q.Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda q: q.IntxWeightOnlyConfig(torch.int4, q.PerAxis(0)),  # Int4WeightOnlyConfig has no form for CPUs
}


@pytest.mark.slow  # importing torchao
@pytest.mark.parametrize(
    ("name", "config"), [*((name, "int8") for name in MIXERS), *((CROSS, config) for config in QUANTISED)]
)
@torch.no_grad()
def test_weights_that_torchao_quantises_take_effect(name, config):
    quantization = pytest.importorskip("torchao.quantization")
    made, quantised = block(name), block(name)
    quantization.quantize_(quantised, QUANTISED[config](quantization))
    assert all(type(module.weight) not in (Tensor, nn.Parameter) for module in projections(quantised).values())
    for run in (outputs, generated):
        error = (run(quantised) - run(made)).abs().max()
        assert 1e-6 < error < 0.3 * run(made).abs().max()
    torch.testing.assert_close(generated(quantised), outputs(quantised)[:, 4:], atol=0.05, rtol=0.05)


@every_mixer
def test_functional_call_uses_the_parameters_it_is_given(name):
    made, other = block(name), block(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    state = start(other)
    y, _ = torch.func.functional_call(made, dict(other.named_parameters()), (inputs(), state))
    assert torch.equal(y, other(inputs(), state)[0])


@every_mixer
def test_meta_and_fake_tensors_pass_through_a_block(name):
    made, x = block(name).to("meta"), torch.empty(2, LENGTH, DIM, device="meta")
    y, state = made(x, start(made, x))
    assert made(x, state)[0].shape == y.shape
    with FakeTensorMode():
        made, x = block(name), torch.empty(2, LENGTH, DIM)
        made(x, start(made, x))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in made.feed_forward.parameters())


def results(made, x, source):
    """Outputs with a padded row and their gradient, then outputs of single tokens."""
    x, padding = x.requires_grad_(), torch.ones_like(x[..., 0], dtype=torch.bool).tril(8)
    y, _ = made(x, start(made, source), padding)
    y.square().sum().backward()
    with torch.no_grad():
        _, state = made(x[:, :4], start(made, source))
        step, outputs = made.step(), [y.detach(), x.grad]
        for token in x.detach()[:, 4:].split(1, 1):
            y, state = step(token, state)
            outputs.append(y)
    return outputs


@every_block
def test_blocks_need_no_float64_on_a_device_without_it(name, monkeypatch):
    expected = results(block(name), inputs(), inputs(5))
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", (DEVICE.type,))
    with PretendedDevice(float64=False):
        found = results(*(moved(part) for part in (block(name), inputs(), inputs(5))))
        for there, here in zip(found, expected):
            torch.testing.assert_close(there.cpu(), here, atol=1e-3, rtol=1e-3)
