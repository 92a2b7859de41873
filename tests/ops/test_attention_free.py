"""AFT in tiles equals its definition: values, gradients, any numbers, half precision, memory."""

import pytest
import torch

from mega_fairseq.ops import aft as attention_free
from mega_fairseq.ops.aft import Sums, aft, aft_naive, no_sums, with_tokens
from mega_fairseq.ops.aft import slabs as attention_free_slabs
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

DIM, TILE, SMALL_TILE = 4, 8, 4
LENGTHS = [1, 2, SMALL_TILE, TILE - 1, TILE, TILE + 1, 3 * TILE, 29]
HALF = [torch.float16, torch.bfloat16]
SINGLE = {"rtol": 2e-3, "atol": 2e-4}  # keys of 1000 are rounded by 3e-5


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles and slabs in short sequences."""
    monkeypatch.setattr(attention_free_slabs, "TILE", TILE)
    monkeypatch.setattr(attention_free_slabs, "SMALL_TILE", SMALL_TILE)
    monkeypatch.setattr(attention_free_slabs, "SLAB", 70)


def use_plan(monkeypatch, index):
    """Uses the fastest (0) to the most exact (-1) plan, without a check."""
    every = attention_free_slabs._plans
    monkeypatch.setattr(attention_free_slabs, "_plans", lambda *args: [every(*args)[index]])


def table(heads, reach, causal, scale=1.0, **options):
    return noise(heads, reach if causal else 2 * reach - 1, **options).mul(scale).detach().requires_grad_()


def inputs(length, heads, reach, causal, keys=1.0, weights=1.0, older=False, batch=2):
    k = (keys * noise(batch, length, DIM)).requires_grad_()
    given = {"k": k, "v": noise(batch, length, DIM, seed=1, grad=True)}
    given["weight"] = table(heads, reach, causal, weights, seed=2)
    if older:
        sums = with_tokens(no_sums(k), keys * noise(batch, 3, DIM, seed=3), noise(batch, 3, DIM, seed=4))
        given.update(numerator=sums.numerator.requires_grad_(), denominator=sums.denominator.requires_grad_())
        given["largest"] = sums.largest
    return given


def compare(given, function=aft, **options):
    def run(form):
        def call(k, v, weight, largest=None, numerator=None, denominator=None):
            older = None if largest is None else Sums(largest, numerator, denominator)
            return form(k, v, weight, older=older, **options)

        return with_gradients(call, given)

    assert_same(run(function), run(aft_naive))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_form_without_checks_keeps_all_rows_beside_a_large_key(monkeypatch, length, causal):
    """It is that of GPUs. The curves fall as far within two small tiles as float32 can represent."""
    monkeypatch.setattr(attention_free_slabs, "_is_checked", lambda k: False)
    k, v = torch.zeros(1, length, DIM), torch.ones(1, length, DIM)
    k[:, 0] = 1000.0
    weight = -torch.arange(0 if causal else 1 - length, length).abs() * torch.tensor([[12.0], [0.0]])
    torch.testing.assert_close(aft(k, v, weight, causal), v)
    if length >= 3 * TILE:  # the fastest plan would lose some
        every = attention_free_slabs._plans
        monkeypatch.setattr(attention_free_slabs, "_plans", lambda *args: [every(*args[:-1], True)[0]])
        assert not aft(k, v, weight, causal).min() >= 0.5


@pytest.mark.parametrize("slope", [3.0, 13.0, 14.0, 30.0])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_the_form_without_checks_gives_nan_in_place_of_rows_that_it_loses(monkeypatch, causal, slope):
    length = 5 * SMALL_TILE
    torch.manual_seed(0)
    k, v = torch.zeros(1, length, DIM), torch.randn(1, length, DIM)
    k[:, 0] = 400.0
    weight = -torch.arange(0 if causal else 1 - length, length).abs() * torch.full((2, 1), slope)
    exact = aft_naive(k, v, weight, causal)
    torch.testing.assert_close(aft(k, v, weight, causal), exact)
    monkeypatch.setattr(attention_free_slabs, "_is_checked", lambda k: False)
    found = aft(k, v, weight, causal)
    lost = found.isnan()
    torch.testing.assert_close(found[~lost], exact[~lost])
    assert lost.any() == (slope * (2 * SMALL_TILE - 2) > 80)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("heads", [1, 2, DIM])
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_equal_the_definition_in_windows_at_any_length(length, heads, causal):
    compare(inputs(length, heads, max(length, 9), causal), causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("reach", [1, 2, SMALL_TILE + 1, TILE + 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_equal_the_definition_with_tokens_beyond_the_table_at_any_length(length, reach, causal):
    compare(inputs(length, 2, reach, causal, older=causal), causal=causal)


@pytest.mark.parametrize("queries", [1, 2, TILE, 20])
@pytest.mark.parametrize("reach", [3, 29])
def test_the_last_rows_alone_equal_the_definition(queries, reach):
    compare(inputs(29, 2, reach, True), queries=queries)


@pytest.mark.parametrize("reach", [3, 29])
def test_keys_at_pads_have_no_weight_and_no_gradient(reach):
    padding = torch.arange(29) >= torch.tensor([[29], [11], [1]])
    given = inputs(29, 2, reach, False, batch=3)
    compare(given, causal=False, padding=padding)
    for name in ("k", "v"):
        assert not with_gradients(lambda **t: aft(**t, causal=False, padding=padding)[~padding], given)[
            f"gradient of {name}"
        ][padding].any()


@pytest.mark.parametrize(("causal", "plan"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)])
@pytest.mark.parametrize("reach", [1, 3, TILE + 2, 29])
def test_every_plan_equals_the_definition(causal, plan, reach, monkeypatch):
    use_plan(monkeypatch, plan)
    compare(inputs(29, 2, reach, causal, older=causal and reach < 29), causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("reach", [3, 29])
def test_the_form_for_compilers_equals_the_definition(reach, causal, monkeypatch):
    monkeypatch.setattr(attention_free_slabs, "is_compiling", lambda: True)
    compare(inputs(29, 2, reach, causal), causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("keys", "weights"), [(400.0, 1.0), (1.0, 100.0), (400.0, 100.0), (1e5, 1e4)])
@pytest.mark.parametrize("reach", [1, 3, 29])
def test_huge_keys_and_weights_give_the_values_and_gradients_of_the_definition(reach, keys, weights, causal):
    compare(inputs(29, 2, reach, causal, keys, weights, older=causal and reach < 29), causal=causal)


@pytest.mark.parametrize("reach", [3, 29])
def test_keys_up_to_1000_in_single_precision(reach):
    def run(dtype):
        given = inputs(29, 2, reach, True, 400.0)
        return with_gradients(aft, {n: t.detach().to(dtype).requires_grad_() for n, t in given.items()}, seed=5)

    ours = {name: t.double() for name, t in run(torch.float32).items()}
    given = {n: t.detach().float().double().requires_grad_() for n, t in inputs(29, 2, reach, True, 400.0).items()}
    truth = with_gradients(aft_naive, given, seed=5)
    assert all(t.isfinite().all() for t in ours.values())
    assert_same(ours, truth, **SINGLE)


def test_a_plan_that_is_inaccurate_is_followed_by_the_next(monkeypatch):
    tried = []
    rows = attention_free_slabs._rows
    monkeypatch.setattr(attention_free_slabs, "SLAB", 2**19)
    monkeypatch.setattr(attention_free_slabs, "_rows", lambda slab, *args: tried.append(slab.plan) or rows(slab, *args))

    def plans(keys, weights):
        tried.clear()
        given = inputs(29, 2, 29, True)
        aft(keys * given["k"], given["v"], weights * given["weight"])
        return [plan.exact for plan in tried]

    assert plans(1.0, 1.0) == [-1]
    assert plans(400.0, 1.0) == [-1, 0]
    assert plans(400.0, 400.0) == [-1, 0, 0]


@pytest.mark.parametrize("plan", [0, 1, 2])
@pytest.mark.parametrize("reach", [2, 7])
def test_gradients_equal_finite_differences(plan, reach, monkeypatch):
    use_plan(monkeypatch, plan)
    monkeypatch.setattr(attention_free_slabs, "TILE", 3)
    monkeypatch.setattr(attention_free_slabs, "SMALL_TILE", 2)
    given = inputs(7, 2, reach, True, older=reach < 7, batch=1)
    if reach < 7:
        names = ("k", "v", "weight", "numerator", "denominator")

        def call(k, v, weight, *sums):
            return aft(k, v, weight, older=Sums(given["largest"], *sums))
    else:
        names, call = ("k", "v", "weight"), aft
    assert torch.autograd.gradcheck(call, [given[name] for name in names])


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
    truth = torch.logsumexp(k[1, :4], 0)
    torch.testing.assert_close(sums.largest[1] + torch.log(sums.denominator[1]), truth)


def test_gradients_of_sums_equal_finite_differences():
    def sums(k, v):
        _, numerator, denominator = with_tokens(no_sums(k), k, v, torch.tensor([5, 2]))
        return numerator, denominator

    # With the largest keys constant: they are references, which the results do not depend on.
    largest = with_tokens(no_sums(noise(2, 5, DIM)), noise(2, 5, DIM), noise(2, 5, DIM), torch.tensor([5, 2])).largest
    padding = torch.arange(5) >= torch.tensor([[5], [2]])
    k, v = noise(2, 5, DIM, grad=True), noise(2, 5, DIM, seed=1, grad=True)
    assert torch.autograd.gradcheck(
        lambda k, v: attention_free._Added.apply(k, v, largest, padding.unsqueeze(-1)), (k, v)
    )
    assert all(t.isfinite().all() for t in sums(k, v))


# ------------------------------------------------------------------------------------------- precision and memory


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reach", [1, 32, 512])
def test_8192_tokens_in_half_precision_are_accurate_to_one_percent(reach, dtype, monkeypatch):
    monkeypatch.setattr(attention_free_slabs, "TILE", 128)
    monkeypatch.setattr(attention_free_slabs, "SMALL_TILE", 32)
    groups = 16 if reach == 512 else 1
    k, v = (noise(groups, 8192 // groups, 2, seed=i).to(dtype).requires_grad_() for i in range(2))
    w = noise(1, reach, seed=2).to(dtype).requires_grad_()
    g = noise(groups, 8192 // groups, 2, seed=3).to(dtype)

    def gradients(form, cast):
        leaves = [t.detach().to(cast).requires_grad_() for t in (k, v, w)]
        o = form(*leaves)
        return [o, *torch.autograd.grad((o * g.to(cast)).sum(), leaves)]

    ours = gradients(aft, dtype)
    assert ours[0].dtype == dtype
    truth = gradients(aft, torch.float64)
    for one, other in zip(ours, truth):
        assert relative_error(one, other) < 0.01


@pytest.mark.parametrize("reach", [5, 1024])
def test_memory_grows_with_the_number_of_tokens(reach, monkeypatch):
    length, dim = 1024, 8
    monkeypatch.setattr(attention_free_slabs, "TILE", 32)
    monkeypatch.setattr(attention_free_slabs, "SLAB", 2**19)
    k, v = (noise(1, length, dim, seed=i, grad=True) for i in range(2))
    weight = table(2, reach, True, 0.01)
    with Recorder() as recorder:
        aft(k, v, weight).sum().backward()
    assert recorder.largest <= max(2 * length * dim, 4 * 32 * length)
    kept = kept_for_backward(lambda: aft(k, v, weight))
    assert sum(kept) <= 4 * length * dim + 2 * (reach + 32)  # k, v, o, the denominators and the table
