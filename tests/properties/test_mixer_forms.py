"""Every form of every token mixer at real lengths: half precision, memory, states, devices that hold no numbers."""

from copy import deepcopy

import pytest
import torch

from mega_fairseq.modules import MIXERS
from tests.ops.helpers import Recorder, kept_for_backward, relative_error
from tests.properties import broken_mixers
from tests.properties.contracts import leaves
from tests.properties.mixer_forms import CHUNK, DIM, FORMS, UNBOUNDED, build

every_form = pytest.mark.parametrize("form", FORMS)
directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def outputs(mixer, x):
    return mixer(x)[0] if mixer.config.causal else mixer(x)


def test_every_mixer_has_a_form():
    assert {name for name, _ in FORMS.values()} == set(MIXERS)


@every_form
@directions
@torch.no_grad()
def test_outputs_over_8192_tokens_in_half_precision_are_accurate_to_one_percent(form, causal):
    mixer, x = build(form, causal), torch.randn(1, 8192, DIM)
    if not mixer.gated_residual:  # make M(X) as large as the residual, which would hide its errors
        mixer.output.weight.div_((outputs(mixer, x) - x).std())
    for dtype in (torch.bfloat16, torch.float16):
        half, given = deepcopy(mixer).to(dtype), x.to(dtype)
        exact = deepcopy(half).double()
        ours, truth = outputs(half, given), outputs(exact, given.double())
        assert ours.dtype == dtype
        assert relative_error(ours, truth) < 0.01


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


@every_form
@directions
def test_memory_of_training_grows_no_faster_than_the_number_of_tokens(form, causal):
    assert max(growth(build(form, causal), 1024)) < 2.01


def test_whole_matrices_would_be_detected():
    twin = broken_mixers.broken(build("sparse, strided"), broken_mixers.SeesOneKeyTwice)
    assert min(growth(twin, 512)) > 3.5


@every_form
def test_a_state_keeps_the_memory_of_its_bounded_size_alive_whatever_came_before(form):
    def kept(length):
        found = leaves(build(form)(torch.randn(1, length, DIM))[1])
        return sum(t.untyped_storage().nbytes() for t in found if isinstance(t, torch.Tensor))

    few, many = kept(2 * CHUNK + 1), kept(8 * CHUNK + 1)
    assert many < 4.01 * few if form in UNBOUNDED else many == few


# ------------------------------------------------------------------------------------------- devices


@every_form
@directions
def test_no_form_looks_at_numbers_on_devices_where_that_would_take_time(form, causal):
    with torch.device("meta"):
        mixer, x = build(form, causal), torch.randn(2, CHUNK + 3, DIM, requires_grad=True)
        mask = torch.zeros(2, CHUNK + 3, dtype=torch.bool)
    y = outputs(mixer, x)
    if causal:
        with torch.no_grad():
            _, state = mixer(x)
            (mixer.step() or mixer)(x[:, :1], state)
            mixer(x, state, None if form in UNBOUNDED else mask)
    elif form not in UNBOUNDED:
        mixer(x, padding_mask=mask)
    y.sum().backward()
    assert x.grad.shape == x.shape
