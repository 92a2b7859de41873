"""AFT with the weights of an EMA equals its recurrence and its definition: values, gradients, any numbers."""

import pytest
import torch

from mega_fairseq.ops.aft import ema as ops
from mega_fairseq.ops.aft.ema import Means, bidirectional_ema_aft, ema_aft, ema_aft_naive, ema_aft_step
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

DIM, STATES, TILE_TOKENS = 3, 2, 4
LENGTHS = [1, 2, TILE_TOKENS - 1, TILE_TOKENS, TILE_TOKENS + 1, 3 * TILE_TOKENS, 13]
HALF = [torch.float16, torch.bfloat16]
PLANS = {"products": ops.FAST, "own entries": ops.OWN_ENTRIES, "entries": ops.ALL_ENTRIES}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(ops, "TILE_TOKENS", TILE_TOKENS)
    monkeypatch.setattr(ops, "SLAB", 60)


def use_plan(monkeypatch, how):
    """Always computes in this way, without a check."""
    rows = ops._rows
    monkeypatch.setattr(ops, "_rows", lambda *args: (*rows(*args[:-1], how)[:3], torch.ones(())))


def tables(seed=3, directions=(), slow=1.0, dim=DIM, states=STATES):
    log_decay = -slow * noise(*directions, dim, states, seed=seed).abs()
    return {
        "log_decay": log_decay.requires_grad_(),
        "log_mix": noise(*directions, dim, states, seed=seed + 1, grad=True),
    }


def inputs(length, keys=1.0, state=False, batch=2, **options):
    given = {
        "k": (keys * noise(batch, length, DIM)).requires_grad_(),
        "v": noise(batch, length, DIM, seed=1, grad=True),
    }
    given.update(tables(**options))
    of_state = {"log_weight": keys * noise(batch, DIM, STATES, seed=5), "mean": noise(batch, DIM, STATES, seed=6)}
    given.update({name: t.requires_grad_() for name, t in of_state.items()} if state else {})
    return given


def recurrence(k, v, log_decay, log_mix, state, lengths=None):
    outputs = []
    for t in range(k.size(1)):
        o, after = ema_aft_step(k[:, t], v[:, t], log_decay, log_mix, state)
        outputs.append(o)
        if lengths is not None:
            after = Means(*(torch.where((t < lengths).view(-1, 1, 1), a, b) for a, b in zip(after, state)))
        state = after
    return torch.stack(outputs, 1), state


def compare(given, lengths=None):
    def run(form):
        def call(k, v, log_decay, log_mix, log_weight=None, mean=None):
            state = ops.no_means(k, log_decay) if mean is None else Means(log_weight, mean)
            o, after = form(k, v, log_decay, log_mix, state, lengths)
            if lengths is not None:
                o = o * (torch.arange(k.size(1)) < lengths.unsqueeze(1)).unsqueeze(-1)
            return (o, *after)

        return with_gradients(call, given)

    assert_same(run(ema_aft), run(recurrence))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_equal_the_recurrence_at_any_length(length, state):
    compare(inputs(length, state=state))


@pytest.mark.parametrize("lengths", [(13, 1), (4, 12), (5, 8)])
@pytest.mark.parametrize("state", [False, True])
def test_rows_may_have_any_number_of_tokens(lengths, state):
    compare(inputs(13, state=state), torch.tensor(lengths))


def test_a_row_without_tokens_keeps_its_state():
    compare(inputs(13, state=True), torch.tensor([0, 6]))


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("state", [False, True])
def test_every_way_to_compute_equals_the_recurrence(how, state, monkeypatch):
    use_plan(monkeypatch, how)
    compare(inputs(13, state=state), torch.tensor([13, 6]))


@pytest.mark.parametrize(("keys", "slow"), [(400.0, 1.0), (1.0, 100.0), (400.0, 100.0), (400.0, 1e-6)])
@pytest.mark.parametrize("state", [False, True])
def test_huge_keys_and_fast_decays_give_the_values_and_gradients_of_the_recurrence(keys, slow, state):
    compare(inputs(13, keys, state, slow=slow))


@pytest.mark.parametrize("directions", [(), (2,)], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("keys", [1.0, 400.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_equal_the_definition_with_the_kernel_as_a_table(length, keys, directions):
    def tiled(k, v, log_decay, log_mix):
        if directions:
            return bidirectional_ema_aft(k, v, log_decay, log_mix)
        return ema_aft(k, v, log_decay, log_mix, ops.no_means(k, log_decay))[0]

    given = inputs(length, keys, directions=directions)
    assert_same(with_gradients(tiled, given), with_gradients(ema_aft_naive, given))


def test_keys_at_pads_have_no_weight_in_either_direction():
    padding = torch.arange(13) >= torch.tensor([[13], [7]])
    given = inputs(13, directions=(2,))
    o = bidirectional_ema_aft(**given, padding=padding)
    short = {name: t[1:, :7] if name in ("k", "v") else t for name, t in given.items()}
    torch.testing.assert_close(o[1:, :7], bidirectional_ema_aft(**short))
    grads = torch.autograd.grad(o[~padding].square().sum(), [given["k"], given["v"]])
    assert not any(g[padding].any() for g in grads)


def test_the_form_for_compilers_equals_the_recurrence(monkeypatch):
    monkeypatch.setattr(ops, "is_compiling", lambda: True)
    compare(inputs(13, state=True))


def test_sums_that_vanish_are_computed_entry_by_entry(monkeypatch):
    tried = []
    rows = ops._rows
    monkeypatch.setattr(ops, "SLAB", 2**19)
    monkeypatch.setattr(ops, "_rows", lambda *args: tried.append(args[-1]) or rows(*args))
    for keys, expected in ((1.0, [ops.FAST]), (400.0, [ops.FAST, ops.ALL_ENTRIES])):
        tried.clear()
        given = inputs(13, keys)
        ema_aft(**given, state=ops.no_means(given["k"], given["log_decay"]))
        assert tried == expected


@pytest.mark.parametrize("keys", [30.0, 100.0, 400.0])
@pytest.mark.parametrize("decay", [1e-6, 0.1, 0.5, 0.999])
def test_the_form_without_checks_keeps_sums_of_any_size(monkeypatch, keys, decay):
    monkeypatch.setattr(ops, "TILE_TOKENS", 64)
    given = {name: t.float() for name, t in inputs(200, keys).items()}
    given["log_decay"] = torch.log(torch.tensor(decay)) * torch.tensor([1.0, 4.0]).expand(DIM, STATES)
    exact = {name: t.double() for name, t in given.items()}
    expected, _ = recurrence(**exact, state=ops.no_means(exact["k"], exact["log_decay"]))

    def error(how):
        with monkeypatch.context() as patch:
            use_plan(patch, how)
            found, _ = ema_aft(**given, state=ops.no_means(given["k"], given["log_decay"]))
        return (found - expected).abs().max()

    assert error(ops.OWN_ENTRIES) < 1e-4
    if keys == 400.0 and decay <= 0.5:  # the fastest form loses some
        assert not error(ops.FAST) < 0.5


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
def test_gradients_equal_finite_differences(how, monkeypatch):
    use_plan(monkeypatch, how)
    given = inputs(6, state=True, batch=1)

    def call(k, v, log_decay, log_mix, *state):
        o, after = ema_aft(k, v, log_decay, log_mix, Means(*state))
        return (o, *after)

    assert torch.autograd.gradcheck(call, list(given.values()))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("pieces", [[8192], [1] * 200 + [4000, 3992]])
def test_8192_tokens_of_slow_decays_in_half_precision_are_accurate_to_one_percent(pieces, dtype, monkeypatch):
    monkeypatch.setattr(ops, "TILE_TOKENS", 64)
    given = tables(slow=1.0)
    log_decay = -torch.exp(noise(DIM, STATES, seed=7) - 6.0)  # memories of some hundred tokens
    k, v = (noise(1, 8192, DIM, seed=i).to(dtype) for i in range(2))
    state, outputs = ops.no_means(k, log_decay.float()), []
    with torch.no_grad():
        for a, b in zip(k.split(pieces, 1), v.split(pieces, 1)):
            o, state = ema_aft(a, b, log_decay.float(), given["log_mix"].float(), state)
            outputs.append(o)
        truth, end = ema_aft(k.double(), v.double(), log_decay, given["log_mix"], ops.no_means(k.double(), log_decay))
    assert outputs[0].dtype == dtype
    assert state.mean.dtype == torch.float32
    assert relative_error(torch.cat(outputs, 1), truth) < 0.01
    for ours, theirs in zip(state, end):
        assert relative_error(ours, theirs) < 0.01


def test_memory_grows_with_the_number_of_tokens_and_not_with_its_product_with_the_states(monkeypatch):
    length, dim, states = 2048, 8, 16
    monkeypatch.setattr(ops, "TILE_TOKENS", 64)
    monkeypatch.setattr(ops, "SLAB", 2**19)
    k, v = (noise(1, length, dim, seed=i, grad=True) for i in range(2))
    given = tables(dim=dim, states=states)
    state = ops.no_means(k, given["log_decay"])
    with Recorder() as recorder:
        ema_aft(k, v, **given, state=state)[0].sum().backward()
    assert recorder.largest <= 2 * length * dim
    kept = kept_for_backward(lambda: ema_aft(k, v, **given, state=state))
    assert sum(kept) <= 2 * length * dim + 6 * dim * states
