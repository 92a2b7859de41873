"""Mistakes that would give wrong numbers are refused, and errors of configs name the option and its value."""

from dataclasses import fields
from functools import partial

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

attends = partial(GatedAttentionConfig, DIM, shared_dim=2)
crosses = partial(GatedCrossAttentionConfig, DIM, shared_dim=2)
feeds = partial(FeedForwardConfig, DIM, hidden_dim=6)


def layer(**options):
    return MovingAverageGatedAttention(attends(**options))


def refuses(call, *parts, error=ValueError):
    """Checks that `call` raises an error of one line that contains each of `parts`."""
    with pytest.raises(error) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence, sentence
    for part in parts:
        assert part in sentence, f"{part!r} is not in {sentence!r}"


# ------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
@pytest.mark.parametrize("option", ["ndim", "chunk_size", "max_positions"])
def test_a_size_must_be_a_positive_whole_number(option, value):
    refuses(lambda: attends(**{option: value}), f"{option} is {value!r}")
    if value != "8":
        refuses(lambda: DampedEMA(DIM, ndim=value), f"ndim is {value!r}")
        refuses(lambda: FeedForwardConfig(value), f"dim is {value!r}")


WIDTHS = [(attends, "shared_dim"), (attends, "value_dim"), (crosses, "source_dim"), (feeds, "hidden_dim")]


@pytest.mark.parametrize(("make", "option"), WIDTHS)
def test_a_width_with_a_default_may_be_zero_but_not_negative(make, option):
    assert getattr(make(**{option: 0}), option) > 0
    for value in (-1, True, 2.0, "8"):
        refuses(lambda value=value: make(**{option: value}), f"{option} is {value!r}")


def test_errors_of_configs_made_from_options_name_the_options():
    refuses(lambda: attends(side="decoder", ndim=0), "--decoder-n-dim is 0")
    refuses(lambda: crosses(side="decoder", hidden_dropout=1.0), "--hidden-dropout is 1.0")
    refuses(lambda: attends(side="encoder", causal=False, truncation=-2), "--encoder-truncation-length is -2")
    refuses(lambda: crosses(side="decoder", shared_dim=3, position_bias="rope"), "--decoder-z-dim is 3")


@pytest.mark.parametrize("value", ["sofmax", "", None])
@pytest.mark.parametrize(
    ("make", "option"),
    [
        *((make, option) for make in (attends, crosses) for option in ("attention", "position_bias", "activation")),
        *((make, "norm") for make in (attends, crosses, feeds)),
        (feeds, "activation"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(make, option, value):
    refuses(lambda: make(**{option: value}), f"{option} is {value!r}", "choose one of")


def test_unknown_names_are_refused_by_norms_and_operators():
    refuses(lambda: SequenceNorm("batch", DIM), "'batch'", "layernorm, scalenorm")
    refuses(lambda: attention(X, X, X, "sofmax"), "'sofmax'", "softmax, relu2, laplace")


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), "0.1", None])
@pytest.mark.parametrize(
    ("make", "option"),
    [
        *((attends, option) for option in ("dropout", "attention_dropout", "hidden_dropout")),
        (crosses, "attention_dropout"),
        (feeds, "activation_dropout"),
    ],
)
def test_a_dropout_out_of_range_is_refused(make, option, value):
    refuses(lambda: make(**{option: value}), f"{option} is {value!r}")


@pytest.mark.parametrize("value", [-1, True, 2.5, "3"])
def test_an_invalid_truncation_is_refused(value):
    for make in (attends, partial(DampedEMA, DIM)):
        refuses(lambda make=make: make(truncation=value), f"truncation is {value!r}")


@pytest.mark.parametrize("kind", ["rotary", "rope"])
def test_rotations_of_an_odd_number_of_dimensions_are_refused(kind):
    for make in (attends, crosses):
        refuses(lambda make=make: make(shared_dim=3, position_bias=kind), kind, "shared_dim is 3")


@pytest.mark.parametrize("norm", ["batchnorm", "syncbatchnorm"])
def test_norms_that_would_see_the_future_are_refused_in_causal_layers(norm):
    attends(norm=norm, causal=False)
    MegaBlock(attends(causal=False), feeds(norm=norm))
    for make in (
        lambda: attends(norm=norm),
        lambda: crosses(norm=norm),
        lambda: MegaBlock(attends(), feeds(norm=norm)),
    ):
        refuses(make, repr(norm), "use layernorm")


def test_a_block_of_two_widths_is_refused():
    refuses(lambda: MegaBlock(attends(), FeedForwardConfig(5)), "feed_forward.dim is 5", "mixer.dim 4")
    refuses(lambda: MegaBlock(attends(), None, GatedCrossAttentionConfig(5)), "cross_attention.dim is 5")


def test_a_bidirectional_mixer_in_a_block_of_a_decoder_is_refused():
    refuses(lambda: Block(attends(causal=False), None, crosses()), "cross_attention", "causal=True")


ONLY_WITH = [(name, field) for name, config in MIXERS.items() for field in config.ONLY_WITH]


@pytest.mark.parametrize(("name", "field"), ONLY_WITH, ids=" ".join)
def test_an_option_without_effect_is_refused_unless_it_has_its_default(name, field):
    config, (other, values) = MIXERS[name], MIXERS[name].ONLY_WITH[field]
    by_name = {each.name: each for each in fields(config)}
    default = by_name[field].default
    value = {None: 2, "outer": "inner"}.get(default, not default or 2)
    for choice in set(by_name[other].metadata["choices"]) - set(values):
        effect = f"{field} is {value} and has no effect with {other} {choice}"
        refuses(lambda choice=choice: config(DIM, **{other: choice, field: value}), effect)


# ------------------------------------------------------------------------------------------- inputs and masks

MODULES = {
    "ema": lambda: DampedEMA(DIM, 2),
    "mixer": layer,
    "feed_forward": lambda: NormalizedFeedForward(feeds()),
    "block": lambda: MegaBlock(attends(causal=False), feeds()),
}


@pytest.mark.parametrize("name", MODULES)
def test_masks_other_than_bool_of_batch_and_length_are_refused(name):
    module = MODULES[name]()
    for shape in ((5, 2), (2, 4), (2, 5, 1), (1, 5)):
        mask = torch.zeros(shape, dtype=torch.bool)
        refuses(lambda mask=mask: module(X, padding_mask=mask), f"padding_mask is torch.bool of shape {shape}")
    for dtype in (torch.float32, torch.int64, torch.uint8):
        mask = torch.zeros(2, 5, dtype=dtype)
        refuses(lambda mask=mask: module(X, padding_mask=mask), f"padding_mask is {dtype}")


def test_a_source_mask_of_a_wrong_shape_or_dtype_is_refused():
    module = GatedCrossAttention(crosses())
    for mask in (torch.zeros(3, 2, dtype=torch.bool), torch.zeros(2, 3)):
        refuses(lambda mask=mask: module(X, SOURCE, source_padding_mask=mask), f"source_padding_mask is {mask.dtype}")


def test_the_simple_bias_refuses_unlearned_distances():
    for call in (
        lambda: layer(max_positions=4)(X),
        lambda: layer(max_positions=4, causal=False)(X),
        lambda: GatedCrossAttention(crosses(max_positions=4))(X, SOURCE),
    ):
        refuses(call, "position_bias 'simple'", "below 4", "5 are needed")
    streaming = layer(max_positions=6)
    _, state = streaming(X)
    _, state = streaming(X[:, :1], state)
    refuses(lambda: streaming(X[:, :1], state), "below 6", "7 are needed")
    layer(max_positions=2, chunk_size=5)(X)  # a chunk bounds the distances


# ------------------------------------------------------------------------------------------- states and sources


def test_a_bidirectional_layer_refuses_a_state():
    _, ema_state = DampedEMA(DIM, 2)(X)
    refuses(lambda: DampedEMA(DIM, 2, bidirectional=True)(X, ema_state), "bidirectional")
    _, state = layer()(X)
    refuses(lambda: layer(causal=False)(X, state), "bidirectional")
    _, state = MegaBlock(attends(), feeds())(X)
    refuses(lambda: MegaBlock(attends(causal=False), feeds())(X, state), "bidirectional")


def test_a_state_of_another_batch_is_refused():
    for module in (DampedEMA(DIM, 2), layer(ndim=2), MegaBlock(attends(ndim=2))):
        _, state = module(X)
        refuses(lambda module=module, state=state: module(X[:1], state), "state", "2", "1")


def test_an_ema_state_of_another_shape_is_refused():
    for width in (1, 5):
        state = torch.zeros(2, DIM, width)
        refuses(lambda state=state: DampedEMA(DIM, 2)(X, state), f"shape (2, 4, {width})", "(2, 4, 2)")


def test_a_state_of_another_chunk_size_is_refused():
    _, state = layer()(torch.ones(2, 9, DIM))
    refuses(lambda: layer(chunk_size=7)(X, state), "9 tokens", "chunk_size is 7")


@pytest.mark.parametrize("name", ["mixer", "block"])
def test_a_mask_given_as_the_state_is_directed_to_padding_mask(name):
    mask = torch.zeros(2, 5, dtype=torch.bool)
    refuses(lambda: MODULES[name]()(X, mask), "state is a Tensor", "padding_mask", error=TypeError)


def test_cross_attention_needs_either_a_source_or_a_state():
    for module in (GatedCrossAttention(crosses()), MegaBlock(attends(), feeds(), crosses())):
        refuses(lambda module=module: module(X), "give source")
        _, state = module(X, source=SOURCE)
        refuses(lambda module=module, state=state: module(X, state=state, source=SOURCE), "give source")


def test_a_source_of_another_batch_is_refused():
    module = GatedCrossAttention(crosses())
    _, state = module(X, SOURCE)
    for call in (lambda: module(X, SOURCE[:1]), lambda: module(X[:1], None, state)):
        refuses(call, "sequences", "source")


def test_a_source_is_refused_by_a_block_without_cross_attention():
    for block in (MegaBlock(attends(), feeds()), MegaBlock(attends(causal=False), feeds())):
        refuses(lambda block=block: block(X, source=SOURCE), "cross_attention")
