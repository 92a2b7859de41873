"""All forms of attention equal the definition in values and all gradients; dropout; memory."""

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules import POSITION_BIASES
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS, attention, attention_fused, weighted_sum
from mega_fairseq.ops.attention import tiles as attention_tiles
from mega_fairseq.ops.attention.naive import attention_weights
from mega_fairseq.ops.attention.one_position import weights_at_one_position
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.ops.helpers import Recorder, assert_close, assert_same, kept_for_backward, noise, with_gradients

WIDTH, VALUES = 4, 6
SHAPES = [(1, 1), (1, 7), (2, 2), (5, 9), (16, 17), (17, 17), (31, 64)]
PADDINGS = ["none", "right", "left", "scattered", "a row of pads"]


def with_bias(q, k, v, bias, first, function, causal, padding=None):
    q, k, vector = bias.positioned(q, k, first)
    return attention(q, k, v, function, causal, vector, padding)


def qkv(queries, keys, groups=3, width=WIDTH, values=VALUES, bias=True, heads=None, multiplier=False):
    """`heads` is the first dimension of bias and multiplier; None for vectors."""
    inputs = {
        "q": noise(groups, queries, width, seed=0, grad=True),
        "k": noise(groups, keys, width, seed=1, grad=True),
        "v": noise(groups, keys, values, seed=2, grad=True),
    }
    distances = (queries + keys - 1,) if heads is None else (heads, queries + keys - 1)
    if bias:
        inputs["bias"] = noise(*distances, seed=3, grad=True)
    if multiplier:
        inputs["multiplier"] = noise(*distances, seed=6, grad=True)
    return inputs


def padding_of(kind, groups, keys):
    """(G, m) bool, True = pad."""
    columns, count = torch.arange(keys), torch.arange(groups).unsqueeze(1) * 3 % keys
    if kind == "none":
        return None
    if kind == "scattered":
        return (columns + torch.arange(groups).unsqueeze(1)) % 3 == 1
    if kind == "a row of pads":
        return (torch.arange(groups) == 1).unsqueeze(1).expand(-1, keys).contiguous()
    return columns >= keys - count if kind == "right" else columns < count


def naive(function, causal, padding=None):
    def attend(q, k, v, bias=None, multiplier=None):
        return weighted_sum(attention_weights(q, k, function, causal, bias, padding, multiplier), v)

    return attend


def chosen(function, causal, padding=None, **options):
    def attend(q, k, v, bias=None, multiplier=None):
        return attention(q, k, v, function, causal, bias, padding, multiplier=multiplier, **options)

    return attend


def fused(causal, padding=None):
    def attend(q, k, v, bias=None):
        return attention_fused(q, k, v, causal, None if bias is None else torch.atleast_2d(bias), padding)

    return attend


@pytest.mark.parametrize(
    ("heads", "padding"), [*((None, padding) for padding in PADDINGS), (2, "none"), (2, "scattered")]
)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_tiles_equal_the_definition_in_values_and_all_gradients(heads, function, causal, padding):
    groups = 3 if heads is None else 2 * heads
    for queries, keys in SHAPES:
        pads, inputs = padding_of(padding, groups, keys), qkv(queries, keys, groups, heads=heads, multiplier=True)
        ours = with_gradients(chosen(function, causal, pads), inputs)
        assert_same(ours, with_gradients(naive(function, causal, pads), inputs))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("bias", "heads"), [(False, None), (True, None), (True, 2)], ids=["plain", "bias", "heads"])
def test_the_fused_form_equals_the_definition_in_values_and_all_gradients(bias, heads, causal, padding):
    for queries, keys in SHAPES:
        pads, inputs = padding_of(padding, 4, keys), qkv(queries, keys, 4, bias=bias, values=WIDTH, heads=heads)
        ours = with_gradients(fused(causal, pads), inputs)
        assert_same(ours, with_gradients(naive("softmax", causal, pads), inputs))


@pytest.mark.parametrize("padding", [None, [0, 3, 7, 1]])
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
@pytest.mark.parametrize("heads", [None, 2])
def test_queries_at_one_position_equal_single_queries_in_values_and_all_gradients(heads, function, padding):
    groups, beams, keys = 4, 3, 7
    pads = None if padding is None else torch.arange(keys) >= keys - torch.tensor(padding).unsqueeze(1)

    def together(q, k, v, bias, multiplier):
        return weighted_sum(weights_at_one_position(q, k, function, bias, pads, multiplier), v)

    def alone(q, **others):
        attend = naive(function, False, pads)
        return torch.cat([attend(q[:, i : i + 1], **others) for i in range(beams)], 1)

    inputs = {**qkv(1, keys, groups, heads=heads, multiplier=True), "q": noise(groups, beams, WIDTH, grad=True)}
    assert_same(with_gradients(together, inputs), with_gradients(alone, inputs))
    with torch.no_grad():
        single = {**inputs, "q": inputs["q"][:, :1]}
        assert_close(chosen(function, False, pads)(**single), together(**single))


@pytest.mark.parametrize("values", [VALUES, 2 * WIDTH], ids=["tiled", "fused"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_both_forms_of_the_rotary_bias_have_the_same_values_and_gradients(function, causal, values):
    module = POSITION_BIASES["rotary"](WIDTH, 1, causal).double()
    for queries, keys in SHAPES:
        inputs = {**qkv(queries, keys, bias=False, values=values), "a": module.a, "b": module.b}
        first = keys - queries

        def ours(q, k, v, a, b, first=first):
            return with_bias(q, k, v, module, first, function, causal)

        def truth(q, k, v, a, b):
            vector = module(1 - k.size(1), q.size(1), q.device)
            return naive(function, causal)(q, k, v, vector)

        assert_same(with_gradients(ours, inputs), with_gradients(truth, inputs))


SEVERAL_TILES = [  # 8, 3, 6, 32 groups fit into a tile
    ("softmax", 1, None, 255, 257),
    ("laplace", 4, 4, 513, 513),
    ("relu2", 9, 3, 257, 300),
    ("softmax", 70, 7, 128, 128),
]


@pytest.mark.parametrize(("causal", "padding"), [(False, "left"), (True, "none"), (True, "right")])
@pytest.mark.parametrize(("function", "groups", "heads", "queries", "keys"), SEVERAL_TILES)
def test_several_tiles_equal_whole_matrices_in_values_and_all_gradients(
    function, groups, heads, queries, keys, causal, padding
):
    pads = padding_of(padding, groups, keys)
    inputs = qkv(queries, keys, groups, heads=heads, multiplier=heads is not None)
    ours = with_gradients(chosen(function, causal, pads), inputs)
    assert_same(ours, with_gradients(naive(function, causal, pads), inputs))


# ---------------------------------------------------------------------------------- dropout


def weights_of(function, dropout, queries=12, groups=3):
    """Attention weights as outputs: the values are the identity."""
    inputs = qkv(queries, queries, groups)
    inputs["v"] = torch.eye(queries, dtype=torch.float64).repeat(groups, 1, 1).requires_grad_()
    return inputs, chosen(function, True, dropout=dropout)(**inputs)


@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_dropout_either_drops_a_weight_or_scales_it(function):
    torch.manual_seed(0)
    _, dropped = weights_of(function, 0.25)
    _, weights = weights_of(function, 0.0)
    kept = dropped != 0
    assert_close(dropped[kept], weights[kept] / 0.75)
    seen = weights != 0
    assert 0.15 < 1 - kept[seen].double().mean().item() < 0.35


@pytest.mark.parametrize(("causal", "padding"), [(False, "left"), (True, "none")], ids=["all, padded", "causal"])
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_gradients_are_those_of_the_weights_kept_by_dropout(function, causal, padding):
    pads, inputs = padding_of(padding, 2, 5), qkv(4, 5, groups=2, width=2, values=3, heads=2, multiplier=True)

    def attend(*tensors):
        torch.manual_seed(7)  # the same mask in every evaluation
        return chosen(function, causal, pads, dropout=0.4)(**dict(zip(inputs, tensors)))

    assert torch.autograd.gradcheck(attend, tuple(inputs.values()))


# ---------------------------------------------------------------------------------- memory


def float_qkv(size, width, values, heads=None):
    tensors = qkv(size, size, heads or 1, width, values, heads=heads, multiplier=heads is not None)
    return {name: t.detach().float().requires_grad_() for name, t in tensors.items()}


@pytest.mark.parametrize("padding", ["none", "right"])
def test_a_later_piece_of_a_sequence_needs_no_mask_of_all_queries_and_keys(padding):
    queries, keys = 1024, 4096
    given = {name: t.detach().float() for name, t in qkv(queries, keys, 2, 8, 8, bias=False).items()}
    with Recorder() as recorder, torch.no_grad():
        chosen("softmax", True, padding_of(padding, 2, keys))(**given)
    assert recorder.largest <= queries * keys // 4


def test_dropout_keeps_a_mask_of_one_byte_per_entry_and_no_other_matrix():
    size = 512
    inputs = float_qkv(size, 8, 12)
    kept = kept_for_backward(lambda: chosen("softmax", True, dropout=0.1)(**inputs))
    assert sorted(kept)[-1] == size * size
    assert sorted(kept)[-2] <= size * 16


# ------------------------------------------------------------------------------------------- GPUs


def masks_of_the_fused_kernel(monkeypatch):
    """The sizes of the masks that it will be called with, 0 without one."""
    fused_kernel, found = F.scaled_dot_product_attention, []

    def recorded(q, k, v, mask=None, *options, **more):
        found.append(0 if mask is None else mask.numel())
        return fused_kernel(q, k, v, mask, *options, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return found


@pytest.mark.parametrize(
    ("causal", "padding", "values"),
    [(False, "none", 24), (False, "right", 16), (True, "none", 16), (True, "right", 16)],
)
@pytest.mark.parametrize("name", POSITION_BIASES)
def test_on_gpus_no_position_bias_becomes_a_matrix_of_queries_times_keys(name, causal, padding, values, monkeypatch):
    groups, size = 2, 1024
    monkeypatch.setattr(attention_tiles, "TILE_ROWS_GPU", size // 4)
    bias, pads = POSITION_BIASES[name](16, size, causal), padding_of(padding, groups, size)
    inputs = [noise(groups, size, width, seed=width, dtype=torch.float32) for width in (16, 16, values)]
    here = with_bias(*inputs, bias, 0, "softmax", causal, pads)
    masks = masks_of_the_fused_kernel(monkeypatch)
    with Recorder() as recorder, PretendedDevice():
        q, k, v, pads = (moved(t) for t in (*inputs, pads))
        there = with_bias(q.requires_grad_(), k, v, moved(bias), 0, "softmax", causal, pads)
        there.sum().backward()
        torch.testing.assert_close(there.detach().cpu(), here, rtol=1e-4, atol=1e-5)
    fused = values == 16 and name in ("rope", "none") and not (causal and padding == "right")
    assert masks == [groups * size if padding == "right" else 0] * fused
    if not fused:
        assert recorder.largest <= size * size // 2  # of a tile
