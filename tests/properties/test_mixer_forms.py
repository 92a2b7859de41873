"""Every form of every token mixer at real lengths: half precision, memory, states, another device."""

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch

from mega_fairseq.modules import EXAMPLES, MIXERS, Mixer
from tests.helpers.parameters import perturbed
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.ops.helpers import Recorder, kept_for_backward, relative_error
from tests.properties import broken
from tests.properties.contracts import leaves

DIM, CHUNK = 32, 256
SIZES = {"shared_dim": 32, "value_dim": 64, "chunk_size": CHUNK, "stride": 64, "summary": 8, "reach": 32}


def build(name: str, causal: bool = True) -> Mixer:
    """An example whose sizes are real and whose parameters are as large as after some training."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    sizes = {f.name: SIZES[f.name] for f in fields(example) if f.name in SIZES and getattr(example, f.name)}
    for name in example.unused & sizes.keys():
        del sizes[name]
    if getattr(example, "position_bias", None) == "simple":
        sizes["position_bias"] = "t5"  # for any length
    return perturbed(replace(example, dim=DIM, init="scaled", causal=causal, **sizes).build(), 0.1)


def is_unbounded(name: str) -> bool:
    """Whether its state grows with the number of tokens."""
    return any(str(shape[:1]).endswith("so far',)") for shape in EXAMPLES[name].build().state_shapes().values())


every_form = pytest.mark.parametrize("form", EXAMPLES)
every_direction = pytest.mark.parametrize(
    ("form", "causal"),
    [(form, causal) for form, c in EXAMPLES.items() for causal in (True, False) if causal or not c.causal_only],
)


def outputs(mixer, x):
    return mixer(x)[0] if mixer.config.causal else mixer(x)


# The first example of each mixer, and causally also one with other options and token shift.
LONG = [(form, causal) for form in MIXERS for causal in (True, False) if causal or not EXAMPLES[form].causal_only]
LONG += [(form, True) for form, example in EXAMPLES.items() if example.token_shift]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "causal"), LONG)
@torch.no_grad()
def test_outputs_over_8192_tokens_in_half_precision_are_accurate_to_one_percent(form, causal):
    mixer, x = build(form, causal), torch.randn(1, 8192, DIM)
    if hasattr(mixer, "output"):  # make M(X) as large as the residual, which would hide its errors
        mixer.output.weight.div_((outputs(mixer, x) - x).std())
    rounded, x = mixer.bfloat16(), x.bfloat16()  # to numbers that float16 has, too
    truth = outputs(deepcopy(rounded).double(), x.double())
    for dtype in (torch.bfloat16, torch.float16):
        ours = outputs(deepcopy(rounded).to(dtype), x.to(dtype))
        assert ours.dtype == dtype
        assert relative_error(ours, truth) < 0.01


@every_direction
@torch.no_grad()
def test_outputs_are_in_float32_under_autocast(form, causal):
    mixer, x = build(form, causal), torch.randn(2, CHUNK + 3, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        found = [outputs(mixer, x)]
        if causal:
            found += [(mixer.step() or mixer)(x[:, :1], mixer(x)[1])[0]]
    assert {y.dtype for y in found} == {torch.float32}


# ------------------------------------------------------------------------------------------- memory


def memory(mixer, length):
    """Entries of the largest tensor in forward and backward, and of all tensors kept for backward."""
    x = torch.randn(1, length, DIM, requires_grad=True)
    with Recorder() as recorder:
        kept = kept_for_backward(lambda: outputs(mixer, x))
        outputs(mixer, x).sum().backward()
    return recorder.largest, sum(kept)


def growth(mixer, length):
    return [twice / once for once, twice in zip(memory(mixer, length), memory(mixer, 2 * length))]


@every_direction
def test_memory_of_training_grows_no_faster_than_the_number_of_tokens(form, causal):
    assert max(growth(build(form, causal), 1024)) < 2.01


def test_whole_matrices_would_be_detected():
    twin = broken.broken(build("sparse, strided"), broken.SeesOneKeyTwice)
    assert min(growth(twin, 512)) > 3.5


@every_form
def test_a_state_keeps_the_memory_of_its_bounded_size_alive_whatever_came_before(form):
    def kept(length):
        found = leaves(build(form)(torch.randn(1, length, DIM))[1])
        return sum(t.untyped_storage().nbytes() for t in found if isinstance(t, torch.Tensor))

    few, many = kept(2 * CHUNK + 1), kept(8 * CHUNK + 1)
    assert many < 4.01 * few if is_unbounded(form) else many == few


# ------------------------------------------------------------------------------------------- devices


def results(mixer, x, pads):
    """Outputs and all gradients of a sequence, and outputs of its pieces and with pads."""
    x, causal = x.requires_grad_(), mixer.config.causal
    found = [outputs(mixer, x)]
    inputs = [x, *mixer.parameters()]
    found += torch.autograd.grad(found[0].square().sum(), inputs, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        if not causal:
            return [*found, mixer(x, padding_mask=pads)]
        y, state = mixer(x[:, :-2])
        one, state = (mixer.step() or mixer)(x[:, -2:-1], state)
        return [*found, y, one, mixer(x, state, pads)[0]]


def on_another_device(mixer, *inputs):
    """The results there, copied to the CPU, and the operations at which the host waited."""
    with PretendedDevice() as device:
        mixer, *inputs = (moved(value) for value in (mixer, *inputs))
        device.waits.clear()
        found = results(mixer, *inputs)
        return [t.cpu() for t in found], device.waits[: -len(found)]


@every_direction
def test_another_device_gives_the_same_numbers_and_is_never_waited_for(form, causal):
    mixer, x = build(form, causal).double(), torch.randn(2, CHUNK + 3, DIM, dtype=torch.float64)
    pads = torch.zeros(2, CHUNK + 3, dtype=torch.bool)
    pads[0, :2] = True
    here = results(mixer, x, pads)
    there, waits = on_another_device(mixer, x.detach(), pads)
    for ours, truth in zip(there, here):
        torch.testing.assert_close(ours, truth)
    assert waits == []


def test_a_tensor_on_the_cpu_would_be_detected():
    twin, x = broken.broken(build("gau"), broken.DividesByTheLength), torch.randn(2, 5, DIM)
    with pytest.raises(AssertionError, match="tensors of the CPU and of another device"):
        on_another_device(twin, x, torch.zeros(2, 5, dtype=torch.bool))
