"""Mistakes that would give wrong numbers are refused, and errors of configs name the option and its value."""

from dataclasses import fields
from functools import partial
from itertools import product

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


ema = partial(DampedEMA, DIM)
WIDTHS, SIZES = [-1, True, 2.0, "8"], [0, -1, True, 2.0, "8"]  # a width of 0 is the default
NAMES, RATES, TAPS = ["sofmax", "", None], [1.0, -0.1, float("nan"), "0.1", None], [-1, 0, True, 2.5, "3"]
INVALID = [
    (attends, SIZES, ["ndim", "chunk_size"]),
    (crosses, SIZES, ["max_positions"]),
    (ema, SIZES, ["ndim"]),
    (attends, WIDTHS, ["shared_dim", "value_dim"]),
    (crosses, WIDTHS, ["source_dim"]),
    (feeds, WIDTHS, ["hidden_dim"]),
    (attends, NAMES, ["attention", "position_bias", "activation", "norm", "init"]),
    (crosses, NAMES, ["attention", "position_bias", "activation", "norm"]),
    (feeds, NAMES, ["activation", "norm"]),
    (attends, RATES, ["dropout", "attention_dropout"]),
    (crosses, RATES, ["hidden_dropout"]),
    (feeds, RATES, ["activation_dropout"]),
    (attends, TAPS, ["truncation"]),
    (ema, TAPS, ["truncation"]),
]


@pytest.mark.parametrize(("make", "values", "options"), INVALID)
def test_invalid_values_of_options_are_refused(make, values, options):
    for option, value in product(options, values):
        refuses(lambda option=option, value=value: make(**{option: value}), f"{option} is {value!r}")


def test_errors_of_configs_made_from_options_name_the_options():
    refuses(lambda: attends(side="decoder", ndim=0), "--decoder-n-dim is 0")
    refuses(lambda: crosses(side="decoder", hidden_dropout=1.0), "--hidden-dropout is 1.0")
    refuses(lambda: attends(side="encoder", causal=False, truncation=-2), "--encoder-truncation-length is -2")
    refuses(lambda: crosses(side="decoder", shared_dim=3, position_bias="rope"), "--decoder-z-dim is 3")


def test_unknown_attention_functions_are_refused():
    refuses(lambda: attention(X, X, X, "sofmax"), "'sofmax'", "softmax, relu2, laplace")


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


def test_parts_that_do_not_fit_into_one_block_are_refused():
    refuses(lambda: MegaBlock(attends(), FeedForwardConfig(5)), "feed_forward.dim is 5", "mixer.dim 4")
    refuses(lambda: MegaBlock(attends(), None, GatedCrossAttentionConfig(5)), "cross_attention.dim is 5")

    refuses(lambda: Block(attends(causal=False), None, crosses()), "cross_attention", "causal=True")
    two_hop = feeds(two_hop=True, side="decoder")
    refuses(lambda: Block(attends(), two_hop, crosses()), "--decoder-two-hop is True", "cross attention")


LIMITED = [(config, f) for config in MIXERS.values() for f in fields(config) if f.metadata.get("only_with")]


@pytest.mark.parametrize(("config", "field"), LIMITED, ids=lambda part: getattr(part, "__name__", None) or part.name)
def test_an_option_without_effect_is_refused_unless_it_has_its_default(config, field):
    other, *values = field.metadata["only_with"]
    value = {None: 2, "outer": "inner"}.get(field.default, not field.default or 2)
    for choice in set(config.metadata(other)["choices"]) - set(values):
        effect = f"{field.name} is {value} and has no effect with {other} {choice}"
        refuses(lambda choice=choice: config(DIM, **{other: choice, field.name: value}), effect)


# ------------------------------------------------------------------------------------------- inputs and masks

MODULES = {
    "ema": lambda: DampedEMA(DIM, 2),
    "mixer": layer,
    "feed_forward": lambda: NormalizedFeedForward(feeds()),
    "block": lambda: MegaBlock(attends(causal=False), feeds()),
    "cross_attention": lambda: partial(GatedCrossAttention(crosses()), source=SOURCE),
}


@pytest.mark.parametrize("name", MODULES)
def test_masks_other_than_bool_of_batch_and_length_are_refused(name):
    module = MODULES[name]()
    masks = [torch.zeros(shape, dtype=torch.bool) for shape in ((5, 2), (2, 4), (2, 5, 1), (1, 5))]
    for mask in (*masks, torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64)):
        said = f"padding_mask is {mask.dtype} of shape {tuple(mask.shape)}"
        refuses(lambda mask=mask: module(X, padding_mask=mask), said)


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


def test_states_of_another_layer_or_batch_are_refused():
    _, of_ema = DampedEMA(DIM, 2)(X)
    refuses(lambda: DampedEMA(DIM, 2, bidirectional=True)(X, of_ema), "bidirectional")
    _, state = layer()(X)
    refuses(lambda: layer(causal=False)(X, state), "bidirectional")
    refuses(lambda: DampedEMA(DIM, 5)(X, of_ema), "shape (2, 4, 2)", "(2, 4, 5)")
    for module in (DampedEMA(DIM, 2), layer(ndim=2), MegaBlock(attends(ndim=2))):
        _, state = module(X)
        refuses(lambda module=module, state=state: module(X[:1], state), "state", "2", "1")
    _, state = layer()(torch.ones(2, 9, DIM))
    refuses(lambda: layer(chunk_size=7)(X, state), "9 tokens", "chunk_size is 7")


def test_weights_of_cross_attention_with_too_short_a_reach_are_refused():
    stored = GatedCrossAttention(crosses(max_positions=8)).state_dict()
    GatedCrossAttention(crosses(max_positions=5)).adapt(stored, "")
    assert stored["position_bias.weight"].numel() == 9
    refuses(lambda: GatedCrossAttention(crosses(max_positions=6)).adapt(stored, ""), "max_positions is 6", "5 tokens")


@pytest.mark.parametrize("name", ["mixer", "block"])
def test_a_mask_given_as_the_state_is_directed_to_padding_mask(name):
    mask = torch.zeros(2, 5, dtype=torch.bool)
    refuses(lambda: MODULES[name]()(X, mask), "state is a Tensor", "padding_mask", error=TypeError)


def test_sources_that_are_missing_given_twice_or_of_another_batch_are_refused():
    for module in (GatedCrossAttention(crosses()), MegaBlock(attends(), feeds(), crosses())):
        refuses(lambda module=module: module(X), "give source")
        _, state = module(X, source=SOURCE)
        refuses(lambda module=module, state=state: module(X, state=state, source=SOURCE), "give source")
    module = GatedCrossAttention(crosses())
    refuses(lambda: module(X, SOURCE[:1]), "sequences", "source")
    refuses(lambda: module(X[:1], None, module.project_source(SOURCE)), "sequences", "source")
    mask = torch.zeros(2, 3)
    refuses(lambda: module(X, SOURCE, source_padding_mask=mask), f"source_padding_mask is {mask.dtype}")
    refuses(lambda: MegaBlock(attends(), feeds())(X, source=SOURCE), "cross_attention")
