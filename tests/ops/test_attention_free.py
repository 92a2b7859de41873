"""AFT in tiles equals its definition: values, gradients, any numbers, half precision, memory."""

import pytest
import torch

from mega_fairseq.ops.aft import aft, aft_naive, tiles
from mega_fairseq.ops.aft.sums import Sums, no_sums, with_tokens
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

DIM, TILE, SMALL_TILE = 4, 8, 4
LENGTHS = [1, 2, SMALL_TILE, TILE - 1, TILE, TILE + 1, 3 * TILE, 29]
REACHES = [*((n, reach) for n in LENGTHS for reach in (SMALL_TILE + 1, TILE + 2)), (1, 1), (29, 1), (TILE, 2), (29, 2)]
devices = pytest.mark.usefixtures("device")
directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles and slabs in short sequences."""
    monkeypatch.setattr(tiles, "TILE", TILE)
    monkeypatch.setattr(tiles, "SMALL_TILE", SMALL_TILE)
    monkeypatch.setattr(tiles, "SLAB", 70)


@pytest.fixture(params=[True, False], ids=["CPU", "GPU"])
def device(request, monkeypatch):
    """The forms of both devices, on a CPU."""
    monkeypatch.setattr(tiles, "on_cpu", lambda _: request.param)


def inputs(length, heads, reach, causal, keys=1.0, weights=1.0, older=False, batch=2):
    k = (keys * noise(batch, length, DIM)).requires_grad_()
    weight = (weights * noise(heads, reach if causal else 2 * reach - 1, seed=2)).requires_grad_()
    each = {"k": k, "v": noise(batch, length, DIM, seed=1, grad=True), "weight": weight}
    if older:
        sums = with_tokens(no_sums(k), keys * noise(batch, 3, DIM, seed=3), noise(batch, 3, DIM, seed=4))
        each.update(numerator=sums.numerator.requires_grad_(), denominator=sums.denominator.requires_grad_())
        each["largest"] = sums.largest
    return each


def compare(leaves, **options):
    def run(form):
        def call(k, v, weight, largest=None, numerator=None, denominator=None):
            older = None if largest is None else Sums(largest, numerator, denominator)
            return form(k, v, weight, older=older, **options)

        return with_gradients(call, leaves)

    assert_same(run(aft), run(aft_naive))


@devices
@directions
@pytest.mark.parametrize(("length", "heads"), [*((length, 2) for length in LENGTHS), (29, 1), (29, DIM)])
def test_windows_equal_the_definition_at_any_length(length, heads, causal):
    compare(inputs(length, heads, max(length, 9), causal), causal=causal)


@devices
@directions
@pytest.mark.parametrize(("length", "reach"), REACHES)
def test_tokens_beyond_the_table_equal_the_definition(length, reach, causal):
    compare(inputs(length, 2, reach, causal, older=causal), causal=causal)


@pytest.mark.parametrize("queries", [1, 2, TILE, 20])
@pytest.mark.parametrize("reach", [3, 29])
def test_the_last_rows_alone_equal_the_definition(queries, reach):
    compare(inputs(29, 2, reach, True), queries=queries)


@pytest.mark.parametrize("reach", [3, 29])
def test_keys_at_pads_have_no_weight_and_no_gradient(reach):
    padding = torch.arange(29) >= torch.tensor([[29], [11], [1]])
    leaves = inputs(29, 2, reach, False, batch=3)
    compare(leaves, causal=False, padding=padding)
    grads = with_gradients(lambda **t: aft(**t, causal=False, padding=padding)[~padding], leaves)
    assert not any(grads[f"gradient of {name}"][padding].any() for name in ("k", "v"))


@devices
@directions
@pytest.mark.parametrize(("keys", "weights"), [(400.0, 1.0), (1.0, 100.0), (400.0, 20.0), (1e5, 20.0)])
@pytest.mark.parametrize("reach", [3, 29])
def test_huge_keys_and_weights_equal_the_definition(reach, keys, weights, causal):
    compare(inputs(29, 2, reach, causal, keys, weights, older=causal and reach < 29), causal=causal)


@devices
@directions
def test_weights_that_vanish_in_float32_give_finite_numbers(causal):
    leaves = {name: t.detach().float().requires_grad_() for name, t in inputs(29, 2, 29, causal, 1e4, 1e4).items()}
    assert all(t.isfinite().all() for t in with_gradients(lambda **t: aft(**t, causal=causal), leaves).values())


@devices
@pytest.mark.parametrize("reach", [3, 29])
def test_keys_up_to_1000_in_single_precision(reach):
    single = {n: t.detach().float().requires_grad_() for n, t in inputs(29, 2, reach, True, 400.0).items()}
    ours = {name: t.double() for name, t in with_gradients(aft, single, seed=5).items()}
    truth = with_gradients(aft_naive, {n: t.detach().double().requires_grad_() for n, t in single.items()}, seed=5)
    assert_same(ours, truth, rtol=2e-3, atol=2e-4)  # keys of 1000 are rounded by 3e-5


def test_huge_keys_do_not_change_the_digits_of_other_rows():
    leaves = inputs(29, 2, 29, True)
    k, v, weight = (leaves[name].detach() for name in ("k", "v", "weight"))
    together, alike = (aft(torch.cat([k, size * k]), v.repeat(2, 1, 1), weight) for size in (1000, 1))
    assert torch.equal(together[:2], alike[:2])


def test_the_operator_has_a_fake_form_and_a_gradient():
    torch.library.opcheck(tiles.aft_tiles, (*inputs(3, 1, 2, True).values(), True))


# ------------------------------------------------------------------------------------------- sums of older tokens


def test_sums_do_not_depend_on_pieces_and_leave_out_pads():
    k, v = 30.0 * noise(3, 9, DIM), noise(3, 9, DIM, seed=1)
    counts = torch.tensor([9, 4, 0])
    sums = with_tokens(no_sums(k), k, v, counts)
    split = no_sums(k)
    for start, stop in ((0, 2), (2, 2), (2, 7), (7, 9)):
        split = with_tokens(split, k[:, start:stop], v[:, start:stop], (counts - start).clamp(0, stop - start))
    for name, ours, theirs in zip(Sums._fields, split, sums):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert not sums.denominator[2].any()
    torch.testing.assert_close(sums.largest[1] + torch.log(sums.denominator[1]), torch.logsumexp(k[1, :4], 0))


# ------------------------------------------------------------------------------------------- precision and memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reach", [1, 32, 512])
def test_8192_tokens_in_half_precision_are_accurate_to_one_percent(reach, dtype, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 128)
    monkeypatch.setattr(tiles, "SMALL_TILE", 32)
    groups = 16 if reach == 512 else 1
    k, v = (noise(groups, 8192 // groups, 2, seed=i).to(dtype).requires_grad_() for i in range(2))
    w, g = noise(1, reach, seed=2).to(dtype), noise(groups, 8192 // groups, 2, seed=3).to(dtype)

    def gradients(form, cast):
        leaves = [t.detach().to(cast).requires_grad_() for t in (k, v, w)]
        o = form(*leaves)
        return [o, *torch.autograd.grad((o * g.to(cast)).sum(), leaves)]

    ours, truth = gradients(aft, dtype), gradients(aft, torch.float64)
    assert ours[0].dtype == dtype
    assert all(relative_error(one, other) < 0.01 for one, other in zip(ours, truth))


@pytest.mark.parametrize("reach", [5, 1024])
def test_memory_grows_with_the_number_of_tokens(reach, monkeypatch):
    length, dim = 1024, 8
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "SLAB", 2**19)
    k, v = (noise(1, length, dim, seed=i, grad=True) for i in range(2))
    weight = (0.01 * noise(2, reach, seed=2)).requires_grad_()
    with Recorder() as recorder:
        aft(k, v, weight).sum().backward()
    assert recorder.largest <= max(2 * length * dim, 4 * 32 * length)
    kept = kept_for_backward(lambda: aft(k, v, weight))
    assert sum(kept) <= 4 * length * dim + 2 * (reach + 128)  # k, v, o, the denominators and the table


def test_slowness_on_a_gpu_is_logged_once(caplog):
    tiles._log_slowness.cache_clear()
    with PretendedDevice():
        for _ in range(2):
            tiles._forward(*(moved(torch.ones(shape)) for shape in ((1, 7, 8), (1, 7, 8), (2, 5))), True)
    assert caplog.text.count("aft is slow on a GPU") == 1
