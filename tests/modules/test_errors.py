"""An error is one sentence that names the option, its value and the remedy, before any work starts."""

import re

import pytest
import torch

from mega_fairseq.modules import (
    MIXERS,
    Block,
    DampedEMA,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    MegaBlock,
    MovingAverageGatedAttention,
    NormalizedFeedForward,
    SequenceNorm,
)
from mega_fairseq.ops.attention import attention

DIM = 4
X, SOURCE = torch.ones(2, 5, DIM), torch.ones(2, 3, DIM)


def attends(**options):
    return GatedAttentionConfig(**{"dim": DIM, "shared_dim": 2, **options})


def crosses(**options):
    return GatedCrossAttentionConfig(**{"dim": DIM, "shared_dim": 2, **options})


def feeds(**options):
    return FeedForwardConfig(**{"dim": DIM, "hidden_dim": 6, **options})


def layer(**options):
    return MovingAverageGatedAttention(attends(**options))


def refuses(call, *parts, error=ValueError):
    """Checks that `call` raises an error of one sentence that contains each of `parts`."""
    with pytest.raises(error) as caught:
        call()
    sentence = str(caught.value)
    assert type(caught.value) is error, f"a {type(caught.value).__name__}: {sentence}"
    assert "\n" not in sentence, sentence
    assert not re.search(r"[.!?]\s+[A-Z]", sentence.rstrip(".")), f"more than one sentence: {sentence}"
    for part in parts:
        assert part in sentence, f"{part!r} is not in {sentence!r}"


# ------------------------------------------------------------------------------------------- configuration

WHOLE = "it must be a whole number of at least 1"
PROBABILITY = "it must be a probability from 0 up to, but not including, 1"


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
@pytest.mark.parametrize(
    ("make", "option"),
    [
        (attends, "dim"),
        (attends, "ndim"),
        (attends, "chunk_size"),
        (attends, "max_positions"),
        (feeds, "dim"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_size_must_be_a_whole_number_of_at_least_one(make, option, value):
    refuses(lambda: make(**{option: value}), f"{option} is {value!r}", WHOLE)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (attends, "shared_dim"),
        (attends, "value_dim"),
        (crosses, "shared_dim"),
        (crosses, "source_dim"),
        (feeds, "hidden_dim"),
    ],
)
def test_a_width_with_a_default_may_be_zero_but_not_negative(make, option):
    assert getattr(make(**{option: 0}), option) > 0
    for value in (-1, True, 2.0, "8"):
        refuses(lambda value=value: make(**{option: value}), f"{option} is {value!r}", WHOLE)


def test_errors_of_configs_made_from_options_name_the_options():
    refuses(lambda: attends(side="decoder", ndim=0), "--decoder-n-dim is 0", WHOLE)
    refuses(lambda: crosses(side="decoder", hidden_dropout=1.0), "--hidden-dropout is 1.0", PROBABILITY)
    refuses(lambda: attends(side="encoder", causal=False, truncation=-2), "--encoder-truncation-length is -2")
    refuses(
        lambda: crosses(side="decoder", shared_dim=3, position_bias="rope"),
        "--rel-pos-bias 'rope' rotates pairs of dimensions and --decoder-z-dim is 3; make --decoder-z-dim even",
    )


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_an_ema_refuses_invalid_sizes(value):
    refuses(lambda: DampedEMA(DIM, ndim=value), f"ndim is {value!r}", WHOLE)
    refuses(lambda: DampedEMA(value), f"dim is {value!r}", WHOLE)


@pytest.mark.parametrize(
    ("make", "option", "remedy"),
    [
        (attends, "attention", "softmax, relu2, laplace"),
        (attends, "position_bias", "simple, rotary, rope, alibi, t5, none"),
        (attends, "norm", "layernorm, scalenorm, rmsnorm, batchnorm, syncbatchnorm"),
        (attends, "activation", "silu, relu, gelu"),
        (crosses, "attention", "softmax, relu2, laplace"),
        (crosses, "position_bias", "simple, rotary, rope, alibi, t5, none"),
        (crosses, "norm", "layernorm, scalenorm, rmsnorm"),
        (crosses, "activation", "silu, relu, gelu"),
        (feeds, "norm", "layernorm, scalenorm, rmsnorm, batchnorm, syncbatchnorm"),
        (feeds, "activation", "silu, relu, gelu"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("value", ["sofmax", "", None])
def test_an_unknown_name_is_refused_with_the_known_ones(make, option, remedy, value):
    refuses(lambda: make(**{option: value}), f"{option} is {value!r}", "choose one of", remedy)


def test_an_unknown_norm_is_refused_by_the_norm_module():
    refuses(lambda: SequenceNorm("batch", DIM), "norm is 'batch'", "choose one of layernorm, scalenorm")


def test_an_unknown_attention_function_is_refused_by_the_operator():
    refuses(lambda: attention(X, X, X, "sofmax"), "'sofmax'", "choose one of softmax, relu2, laplace")


@pytest.mark.parametrize("value", [1.0, -0.1, 1.5, float("nan"), "0.1", None])
@pytest.mark.parametrize(
    ("make", "option"),
    [
        (attends, "dropout"),
        (attends, "attention_dropout"),
        (attends, "hidden_dropout"),
        (crosses, "attention_dropout"),
        (feeds, "dropout"),
        (feeds, "activation_dropout"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_dropout_out_of_range_is_refused(make, option, value):
    refuses(lambda: make(**{option: value}), f"{option} is {value!r}", PROBABILITY)


@pytest.mark.parametrize("value", [-1, True, 2.5, "3"])
def test_an_invalid_truncation_is_refused(value):
    for make in (lambda: attends(truncation=value), lambda: DampedEMA(DIM, truncation=value)):
        refuses(make, f"truncation is {value!r}", "number of kernel taps to keep, or 0 for all")


@pytest.mark.parametrize("make", [attends, crosses])
@pytest.mark.parametrize("kind", ["rotary", "rope"])
def test_rotations_of_an_odd_number_of_dimensions_are_refused(make, kind):
    refuses(lambda: make(shared_dim=3, position_bias=kind), kind, "shared_dim is 3", "make shared_dim even")


@pytest.mark.parametrize("norm", ["batchnorm", "syncbatchnorm"])
def test_norms_that_would_see_the_future_are_refused_in_causal_layers(norm):
    remedy = "use layernorm, scalenorm or rmsnorm"
    attends(norm=norm, causal=False)
    refuses(lambda: attends(norm=norm), f"norm {norm!r}", remedy, "causal=False")
    refuses(lambda: crosses(norm=norm), f"norm {norm!r}", remedy)
    MegaBlock(attends(causal=False), feeds(norm=norm))
    refuses(lambda: MegaBlock(attends(), feeds(norm=norm)), "feed_forward", repr(norm), remedy)


def test_a_block_of_two_widths_is_refused():
    refuses(lambda: MegaBlock(attends(), feeds(dim=5)), "feed_forward.dim is 5", "mixer.dim 4", "one width")
    refuses(lambda: MegaBlock(attends(), None, crosses(dim=5)), "cross_attention.dim is 5", "mixer.dim 4")


@pytest.mark.parametrize("name", MIXERS)
def test_a_bidirectional_mixer_in_a_block_of_a_decoder_is_refused(name):
    mixer = MIXERS[name](DIM, chunk_size=4, causal=False, **({"heads": 2} if hasattr(MIXERS[name], "heads") else {}))
    refuses(lambda: Block(mixer, None, crosses()), "cross_attention", "causal=True")


# ------------------------------------------------------------------------------------------- inputs and masks

MODULES = {
    "ema": lambda: DampedEMA(DIM, 2),
    "bidirectional_ema": lambda: DampedEMA(DIM, 2, bidirectional=True),
    "attention": layer,
    "bidirectional_attention": lambda: layer(causal=False),
    "feed_forward": lambda: NormalizedFeedForward(feeds()),
    "block": lambda: MegaBlock(attends(), feeds()),
    "bidirectional_block": lambda: MegaBlock(attends(causal=False), feeds()),
}
every_module = pytest.mark.parametrize("name", MODULES)


@every_module
def test_inputs_of_a_wrong_shape_are_refused(name):
    module = MODULES[name]()
    for shape in ((2, 5, 3), (5, DIM), (2, 0, DIM), (0, 5, DIM), (2, 2, 5, DIM)):
        refuses(
            lambda shape=shape: module(torch.ones(shape)), f"x has shape {shape}", "(batch, length, 4)", "at least 1"
        )


@every_module
def test_masks_that_are_not_bool_tensors_of_batch_and_length_are_refused(name):
    module = MODULES[name]()
    for shape in ((5, 2), (2, 4), (2, 5, 1), (1, 5)):
        mask = torch.zeros(shape, dtype=torch.bool)
        parts = (f"padding_mask has shape {shape}", "(batch, length) = (2, 5)")
        refuses(lambda mask=mask: module(X, padding_mask=mask), *parts)
    for dtype in (torch.float32, torch.int64, torch.uint8):
        mask = torch.zeros(2, 5, dtype=dtype)
        parts = (f"padding_mask has dtype {dtype}", "bool with True at padding")
        refuses(lambda mask=mask: module(X, padding_mask=mask), *parts, error=TypeError)
    refuses(lambda: module(X, padding_mask=[[False] * 5] * 2), "padding_mask is a list", "bool", error=TypeError)


@pytest.mark.parametrize("name", [name for name in MODULES if "ema" not in name])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_inputs_of_another_dtype_than_the_parameters_are_refused(name, dtype):
    refuses(lambda: MODULES[name]()(X.to(dtype)), f"x has dtype {dtype}", "torch.float32", error=TypeError)


def test_the_simple_bias_refuses_unlearned_distances_with_remedies():
    for call in (
        lambda: layer(max_positions=4)(X),
        lambda: layer(max_positions=4, causal=False)(X),
        lambda: GatedCrossAttention(crosses(max_positions=4))(X, SOURCE),
    ):
        refuses(call, "position_bias 'simple'", "below 4", "5 are needed", "larger max_positions", "'rotary'")
    streaming = layer(max_positions=6)
    _, state = streaming(X)
    _, state = streaming(X[:, :1], state)
    refuses(lambda: streaming(X[:, :1], state), "position_bias 'simple'", "below 6", "7 are needed")
    layer(max_positions=2, chunk_size=5)(X)  # a chunk bounds the distances


# ------------------------------------------------------------------------------------------- states


def test_a_bidirectional_layer_refuses_a_state():
    _, ema_state = DampedEMA(DIM, 2)(X)
    refuses(lambda: DampedEMA(DIM, 2, bidirectional=True)(X, ema_state), "bidirectional", "bidirectional=False")
    _, state = layer()(X)
    refuses(lambda: layer(causal=False)(X, state), "state", "bidirectional", "causal=True")
    _, state = MegaBlock(attends(), feeds())(X)
    refuses(lambda: MegaBlock(attends(causal=False), feeds())(X, state), "state", "bidirectional", "causal=True")


def test_a_state_of_another_batch_is_refused():
    for module, shape in (
        (DampedEMA(DIM, 2), (DIM, 2)),
        (layer(ndim=2), (DIM, 2)),
        (MegaBlock(attends(ndim=2)), (DIM, 2)),
    ):
        _, state = module(X)
        refuses(lambda m=module, s=state: m(X[:1], s), "state", str((2, *shape)), f"must be {(1, *shape)}")


def test_a_last_token_of_another_batch_is_refused():
    module = NormalizedFeedForward(feeds(token_shift=True))
    refuses(lambda: module(X, last=torch.zeros(3, DIM // 2)), "last has shape (3, 2)", "must be (2, 2)")


def test_an_ema_state_of_another_shape_is_refused():
    for width in (1, 5):
        state = torch.zeros(2, DIM, width)
        refuses(lambda state=state: DampedEMA(DIM, 2)(X, state), f"shape (2, 4, {width})", "must be (2, 4, 2)")
    _, state = DampedEMA(DIM, 2, truncation=4)(X)
    refuses(lambda: DampedEMA(DIM, 2)(X, state), "shape (2, 4, 3)", "must be (2, 4, 2)")


def test_a_cache_of_another_batch_width_or_chunk_is_refused():
    module = layer(chunk_size=7)
    _, state = module(X)
    _, chunkless = layer()(torch.ones(2, 9, DIM))
    keys, values = state.cache.keys, state.cache.values
    for cache, shape in (
        (state.cache._replace(keys=keys[:1]), (1, 5, 2)),
        (state.cache._replace(keys=keys[..., :1]), (2, 5, 1)),
        (state.cache._replace(values=values[..., :3]), (2, 5, 3)),
        (state.cache._replace(values=values[:, :2]), (2, 2, 8)),
    ):
        refuses(lambda cache=cache: module(X, state._replace(cache=cache)), "state", str(shape), "must be")
    other = state._replace(cache=chunkless.cache)
    refuses(lambda: module(X, other), "state.cache.keys has 9 keys", "chunk_size is 7", "use the chunk_size")


@pytest.mark.parametrize("name", ["ema", "attention", "block"])
def test_a_state_of_another_type_is_refused_and_masks_are_directed_to_padding_mask(name):
    module = MODULES[name]()
    _, state = layer()(X)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    if name != "ema":
        refuses(lambda: module(X, mask), "state is a Tensor", "padding_mask", error=TypeError)
    refuses(lambda: module(X, tuple(state)), "state is a tuple", "it must be", error=TypeError)
    if name == "block":
        refuses(lambda: module(X, state), "state is a GatedAttentionState", "BlockState", error=TypeError)


# ------------------------------------------------------------------------------------------- sources


def test_cross_attention_without_a_source_is_refused():
    for module in (GatedCrossAttention(crosses()), MegaBlock(attends(), feeds(), crosses())):
        refuses(lambda module=module: module(X), "source is None", "no state", "the encoder's output")


def test_a_source_beside_a_state_that_has_one_is_refused():
    for module in (GatedCrossAttention(crosses()), MegaBlock(attends(), feeds(), crosses())):
        _, state = module(X, source=SOURCE)
        refuses(
            lambda module=module, state=state: module(X, state=state, source=SOURCE), "source was given", "leave one"
        )


def test_a_source_of_a_wrong_shape_is_refused():
    module = GatedCrossAttention(crosses())
    for shape in ((2, 3, 5), (2, 0, DIM), (2, DIM)):
        refuses(lambda shape=shape: module(X, torch.ones(shape)), f"source has shape {shape}", "(batch, length, 4)")


def test_a_source_mask_of_a_wrong_shape_or_dtype_is_refused():
    module = GatedCrossAttention(crosses())
    mask = torch.zeros(3, 2, dtype=torch.bool)
    parts = ("source_padding_mask has shape (3, 2)", "(batch, length) = (2, 3)")
    refuses(lambda: module(X, SOURCE, source_padding_mask=mask), *parts)
    mask = torch.zeros(2, 3)
    parts = ("source_padding_mask has dtype torch.float32", "bool with True at padding")
    refuses(lambda: module(X, SOURCE, source_padding_mask=mask), *parts, error=TypeError)


def test_a_source_of_another_batch_is_refused_with_a_remedy():
    module = GatedCrossAttention(crosses())
    _, state = module(X, SOURCE)
    for call in (lambda: module(X, SOURCE[:1]), lambda: module(X[:1], None, state._replace(keys=SOURCE[:, :, :2]))):
        refuses(call, "sequences", "source", "; ")


def test_a_source_is_refused_by_a_block_without_cross_attention():
    for block in (MegaBlock(attends(), feeds()), MegaBlock(attends(causal=False), feeds())):
        refuses(lambda block=block: block(X, source=SOURCE), "source", "cross_attention")
