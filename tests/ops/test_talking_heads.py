"""Talking heads: attention whose weights are mixed between heads, with factors of rows and keys."""

import pytest
import torch

from mega_fairseq.ops.attention import Talking, attention, attention_naive
from mega_fairseq.ops.attention import tiles as attention_tiles
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

HEADS, WIDTH, VALUES = 2, 4, 3
SHAPES = [(1, 1), (1, 7), (5, 9), (17, 17)]
FACTORS = [(), ("rows",), ("keys",), ("rows", "keys"), ("multiplier",), ("multiplier", "rows", "keys")]


def inputs_of(queries, keys, factors, sequences=3, heads=HEADS, dtype=torch.float64):
    shapes = {
        "q": (sequences * heads, queries, WIDTH),
        "k": (sequences * heads, keys, WIDTH),
        "v": (sequences * heads, keys, VALUES),
        "mixing": (heads, heads),
        "bias": (heads, queries + keys - 1),
        "multiplier": (heads, queries + keys - 1),
        "rows": (heads, queries),
        "keys": (heads, keys),
    }
    left_out = {"multiplier", "rows", "keys"} - set(factors)
    return {
        name: noise(*shape, seed=i, dtype=dtype, grad=True)
        for i, (name, shape) in enumerate(shapes.items())
        if name not in left_out
    }


def padding_of(kind, groups, keys):
    """(G, m) bool, True = pad."""
    count = torch.arange(groups).unsqueeze(1) * 3 % (keys + 1)
    return None if kind == "none" else torch.arange(keys) >= keys - count


def definition(causal, padding):
    """The weights of each head, as outputs for the values of an identity matrix, and then their mixture."""

    def attend(q, k, v, mixing, bias, multiplier=None, rows=None, keys=None):
        identity = torch.eye(k.size(1), dtype=v.dtype).expand(k.size(0), -1, -1)
        scaled = q * q.size(-1) ** -0.5
        weights = attention_naive(scaled, k, identity, "softmax", causal, bias, padding, multiplier=multiplier)
        outputs = []
        for group in range(len(q)):
            head, first = group % len(mixing), group - group % len(mixing)
            mixed = torch.zeros_like(weights[0])
            for other in range(len(mixing)):
                own = weights[first + other]
                own = own if rows is None else own * rows[other].unsqueeze(1)
                own = own if keys is None else own * keys[other]
                mixed = mixed + mixing[head, other] * own
            outputs.append(mixed @ v[group])
        return torch.stack(outputs)

    return attend


def naive(causal, padding):
    def attend(q, k, v, mixing, bias, multiplier=None, rows=None, keys=None):
        talking = Talking(mixing, rows, keys)
        q = q * q.size(-1) ** -0.5
        return attention_naive(q, k, v, "softmax", causal, bias, padding, multiplier=multiplier, talking=talking)

    return attend


def chosen(causal, padding=None, dropout=0.0):
    def attend(q, k, v, mixing, bias, multiplier=None, rows=None, keys=None):
        options = {"bias": bias, "multiplier": multiplier, "talking": Talking(mixing, rows, keys)}
        return attention(q, k, v, "softmax", causal, key_padding=padding, dropout=dropout, **options)

    return attend


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("factors", FACTORS, ids=", ".join)
@pytest.mark.parametrize("form", [naive, chosen])
def test_every_form_equals_the_definition_in_values_and_all_gradients(form, factors, causal, padding):
    for queries, keys in SHAPES:
        inputs = inputs_of(queries, keys, factors)
        pads = padding_of(padding, len(inputs["q"]), keys)
        ours = with_gradients(form(causal, pads), inputs)
        assert_same(ours, with_gradients(definition(causal, pads), inputs))


@pytest.mark.parametrize("tile", [1, 100, 1000, 5000])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_tiles_of_any_size_give_the_values_and_gradients_of_whole_matrices(monkeypatch, tile, causal):
    inputs = inputs_of(23, 31, FACTORS[-1], heads=4)
    expected = with_gradients(naive(causal, None), inputs)
    monkeypatch.setattr(attention_tiles, "TILE_SCORES", tile)
    assert_same(with_gradients(chosen(causal), inputs), expected)


def test_gradients_are_those_of_the_weights_kept_by_dropout():
    inputs = inputs_of(4, 5, FACTORS[-1], sequences=1)

    def attend(*tensors):
        torch.manual_seed(7)  # the same mask in every evaluation
        return chosen(True, dropout=0.4)(**dict(zip(inputs, tensors)))

    assert torch.autograd.gradcheck(attend, tuple(inputs.values()))


def test_no_tensor_of_queries_times_keys_is_created_or_kept_for_backward():
    size = 2048
    inputs = inputs_of(size, size, FACTORS[-1], sequences=1, dtype=torch.float32)
    assert max(kept_for_backward(lambda: chosen(True)(**inputs))) <= HEADS * size * WIDTH
    with Recorder() as recorder:
        chosen(True)(**inputs).sum().backward()
    assert recorder.largest <= size * size // 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_gradients_in_half_precision_are_accurate_to_one_percent(dtype):
    given = {name: t.detach().bfloat16() for name, t in inputs_of(600, 600, FACTORS[-1], sequences=1).items()}
    truth, results = (
        with_gradients(chosen(True), {name: t.to(kind).requires_grad_() for name, t in given.items()})
        for kind in (torch.float64, dtype)
    )
    for name, expected in truth.items():
        assert relative_error(results[name], expected) < 0.01, name
