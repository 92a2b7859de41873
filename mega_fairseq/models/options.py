"""The options that all Mega models share, named like the released ones, and the module configs made from them.

fairseq turns a dataclass into command-line options and hydra keys, which requires plain field types: no deferred
annotations and no `int | None`.
"""

import logging
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY

from mega_fairseq.fairseq_options import UNBOUNDED, check_at_most, option, typed
from mega_fairseq.models.same_model import CHANGEABLE
from mega_fairseq.modules import (
    MIXERS,
    POSITION_BIASES,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttentionConfig,
    MixerConfig,
)
from mega_fairseq.modules.config import ModuleConfig, check_positive
from mega_fairseq.modules.damped_ema import check_truncation
from mega_fairseq.modules.feed_forward import FEED_FORWARD_ACTIVATIONS
from mega_fairseq.modules.projection import INITS
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS
from mega_fairseq.ops.linear import FORMATS

logger = logging.getLogger(__name__)

POSITIONS = {  # options of a model or of its task
    "encoder": ("max_source_positions", "max_target_positions", "max_positions"),
    "decoder": ("max_target_positions",),
}
WIDEST, DEEPEST = 1_000_000, 10_000  # larger values are mistakes that would fill the memory


def mirror(config: Type[ModuleConfig], name: str, default: Any, note: str = "") -> Any:
    """The option that sets a field of a module's config, with the help text of that field."""
    return option(default, config.help(name) + note)


def stack_options(side: str, language: str) -> Callable[[Type[FairseqDataclass]], Type[FairseqDataclass]]:
    """Decorates a dataclass: adds the options of an "encoder" or "decoder"."""
    options = {
        "embed_dim": (int, mirror(ModuleConfig, "dim", 512)),
        "hidden_dim": (int, mirror(GatedAttentionConfig, "value_dim", 1024)),
        "z_dim": (int, mirror(GatedAttentionConfig, "shared_dim", 128)),
        "n_dim": (int, mirror(GatedAttentionConfig, "ndim", 16)),
        "ffn_embed_dim": (int, mirror(FeedForwardConfig, "hidden_dim", 1024, "; 0 leaves them out")),
        "layers": (int, option(6, "number of layers")),
        "chunk_size": (int, mirror(GatedAttentionConfig, "chunk_size", -1, "; -1 attends to everything")),
        "truncation_length": (int, mirror(GatedAttentionConfig, "truncation", -1, "; -1 follows --truncation-length")),
        "layerdrop": (float, option(0.0, f"probability of leaving out each {side} layer in a training step")),
        "layers_to_keep": (
            Optional[str],
            option(
                None,
                f"numbers of the {side} layers to keep of a checkpoint, as in 0,2,4; works best after "
                f"--{side}-layerdrop",
            ),
        ),
        "embed_path": (Optional[str], option(None, f"file of pre-trained {language} embeddings")),
    }
    options.update({name: o for name, o in mixer_options().items() if name not in options})

    def add(cls: Type[FairseqDataclass]) -> Type[FairseqDataclass]:
        kinds = {f"{side}_{name}": kind for name, (kind, _) in options.items()}
        cls.__annotations__ = {**kinds, **cls.__annotations__}
        for name, (_, default) in options.items():
            setattr(cls, f"{side}_{name}", default)
        return cls

    return add


def mixer_options() -> Dict[str, Tuple[type, Any]]:
    """Types and defaults of the options of one stack, without its name, that set fields of the mixers' configs."""
    found = {}
    for config in MIXERS.values():
        for f in fields(config):
            side, _, name = (f.metadata.get("option") or "").partition("}_")
            if side == "{side" and name not in found:
                kind = ChoiceEnum(list(f.metadata["choices"])) if f.metadata.get("choices") else f.type
                default = (int, -1) if f.default is None else (kind, f.default)
                found[name] = (default[0], mirror(config, f.name, default[1]))
    return found


@dataclass
class StackOptions(FairseqDataclass):
    """Options of any Mega model, with those of its stacks added by `stack_options`."""

    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("silu", "activation of values, candidate and feed-forward")
    ffn_activation_fn: Optional[str] = option(
        None, f"activation of feed-forward layers ({', '.join(FEED_FORWARD_ACTIVATIONS)}); by default --activation-fn"
    )
    attention_activation_fn: ChoiceEnum(list(ATTENTION_FUNCTIONS)) = option("softmax", "attention function")
    rel_pos_bias: ChoiceEnum(list(POSITION_BIASES)) = option(
        "simple", "relative position bias; simple is limited to a chunk or the longest sequence of training"
    )
    normalization_type: ChoiceEnum(["layernorm", "scalenorm", "rmsnorm"]) = option("layernorm", "kind of norm")
    normalize_before: bool = option(False, "normalise the input of each layer (pre-norm) and the output of the last")
    normalize_embedding: bool = option(False, "normalise embeddings")
    init: ChoiceEnum(list(INITS)) = option("released", "weight initialisation; scaled learns faster in small models")
    truncation_length: int = option(0, "how many steps the EMA looks back; 0 for no limit")

    dropout: float = option(0.1, "dropout of embeddings and of each layer's output")
    attention_dropout: float = mirror(GatedAttentionConfig, "attention_dropout", 0.0)
    hidden_dropout: float = mirror(GatedAttentionConfig, "hidden_dropout", 0.0)
    activation_dropout: float = mirror(FeedForwardConfig, "activation_dropout", 0.0)
    feature_dropout: bool = mirror(ModuleConfig, "feature_dropout", False)

    checkpoint_activations: bool = option(False, "save memory in training: recompute activations in backward")
    offload_activations: bool = option(False, "keep the inputs of layers in CPU memory; implies checkpoint_activations")


@dataclass
@stack_options("decoder", "target")
class MegaOptions(StackOptions):
    """Options of any Mega decoder."""

    no_scale_embedding: bool = option(False, "do not multiply embeddings by the square root of their size")
    share_decoder_input_output_embed: bool = option(False, "tie the decoder's embeddings and output projection")
    generation_weights: ChoiceEnum(list(FORMATS)) = option(
        "float32", "number format of the decoder's weights in generation; int8 is faster, on CPUs only"
    )

    adaptive_softmax_cutoff: Optional[str] = option(
        None,
        "ends of the clusters of an adaptive softmax, as in 20000,60000; needs --criterion adaptive_loss with "
        "--ddp-backend legacy_ddp, or mega_lm_cross_entropy for language models",
    )
    adaptive_softmax_dropout: float = option(0.0, "dropout inside the tail clusters")
    adaptive_softmax_factor: float = option(4.0, "each cluster is narrower than the one before by this factor")


def check_sizes(cfg: FairseqDataclass, side: str) -> None:
    """Checks options that no layer's config checks, or checks only after embeddings are allocated."""
    positions = [name for name in POSITIONS[side] if hasattr(cfg, name)]
    for name in (*(f"{side}_{size}" for size in ("embed_dim", "hidden_dim", "z_dim", "layers")), *positions):
        check_positive(**{typed(name): getattr(cfg, name)})
    check_truncation(cfg.truncation_length, "--truncation-length")
    chunk = getattr(cfg, f"{side}_chunk_size")
    if chunk < 1 and chunk != -1:
        raise ValueError(f"--{side}-chunk-size is {chunk}; give a number of tokens, or -1 for no chunks")
    widths = {"ffn_embed_dim", *(name for name, (kind, _) in mixer_options().items() if kind is int)}
    widths -= {"chunk_size", "truncation_length"}
    lengths = (f"{side}_chunk_size", f"{side}_truncation_length", "truncation_length", *positions)
    check_at_most(WIDEST, **{f"{side}_{name}": getattr(cfg, f"{side}_{name}") for name in sorted(widths)})
    check_at_most(DEEPEST, **{f"{side}_layers": getattr(cfg, f"{side}_layers")})
    check_at_most(UNBOUNDED, **{name: getattr(cfg, name) for name in lengths})


def warn_unused(cfg: FairseqDataclass, defaults: StackOptions, needed: str, *names: str) -> None:
    """Warns about given options that have no effect without another one."""
    for name in names:
        if getattr(cfg, name) != getattr(defaults, name):
            logger.warning(f"{typed(name)} has no effect without {needed}")


Config = TypeVar("Config", bound=ModuleConfig)


def from_options(config: Type[Config], cfg: FairseqDataclass, side: str, **known: Any) -> Config:
    """The config of a module of the "encoder" or "decoder": each field from `known` or from its option."""
    given = {f.name: known[f.name] for f in fields(config) if f.name in known}
    given.update({f.name: _value(cfg, side, f) for f in fields(config) if f.metadata.get("option")})
    return config(side=side, **given)


def _value(cfg: FairseqDataclass, side: str, setting: Field) -> Any:
    value = getattr(cfg, setting.metadata["option"].format(side=side))
    fallback = setting.metadata.get("fallback")
    if value in (None, -1) and (fallback or setting.default is None):
        value = getattr(cfg, fallback) if fallback else None
    return value.value if isinstance(value, Enum) else value


def mixer_of(cfg: FairseqDataclass, side: str) -> Type[MixerConfig]:
    """The config class of the token mixer of a stack."""
    option = _mixer_option(cfg, side)
    name = getattr(cfg, option)
    if name not in MIXERS:
        raise ValueError(f"{typed(option)} is {name!r}; choose one of {', '.join(MIXERS)}")
    return MIXERS[name]


def _mixer_option(cfg: FairseqDataclass, side: str) -> str:
    return "token_mixer" if hasattr(cfg, "token_mixer") else f"{side}_token_mixer"


def layer_configs(
    cfg: FairseqDataclass, side: str, max_positions: int, source_dim: Optional[int] = None
) -> List[tuple]:
    """The module configs of each layer of the "encoder" or "decoder", as Block takes them."""
    layers = getattr(cfg, f"{side}_layers")
    known = {"causal": side == "decoder", "max_positions": max_positions, "source_dim": source_dim, "layers": layers}
    feed_forward = cross = None
    if getattr(cfg, f"{side}_ffn_embed_dim"):
        feed_forward = from_options(FeedForwardConfig, cfg, side)
    if source_dim is not None:
        cross = from_options(GatedCrossAttentionConfig, cfg, side, **known)
    mixers = [from_options(mixer_of(cfg, side), cfg, side, **known, layer=layer) for layer in range(layers)]
    _check_kept_layers(cfg, side, mixers[0].period)
    return [(mixer, feed_forward, cross) for mixer in mixers]


def _check_kept_layers(cfg: FairseqDataclass, side: str, period: int) -> None:
    """Refuses to prune layers if one that remains would then mix in another pattern than in training."""
    given = getattr(cfg, f"{side}_layers_to_keep")
    numbers = sorted(map(int, given.split(","))) if given else []
    if any((number - place) % period for place, number in enumerate(numbers)):
        raise ValueError(
            f"--{side}-layers-to-keep is {given!r} and layers of this token mixer alternate between {period} patterns; "
            "keep layers that still alternate, as in 0,1,4,5"
        )


def check_mixer_options(cfg: FairseqDataclass, sides: Sequence[str]) -> None:
    """Refuses options of token mixers that the model does not use, if they were given."""
    defaults = MODEL_DATACLASS_REGISTRY.get(getattr(cfg, "_name", None), type(cfg))()
    used = {name for side in sides for config in _configs(cfg, side) for name in _read(config, cfg, side)}
    for side in sides:
        size, mixer = f"{side}_ffn_embed_dim", _mixer_option(cfg, side)
        other = size if not getattr(cfg, size) else "ffn_activation_fn"
        of_mixers = {name for config in MIXERS.values() for name in config.option_names(side)}
        for name in sorted((of_mixers | FeedForwardConfig.option_names(side)) - used - {size}):
            if getattr(cfg, name) != getattr(defaults, name):
                beside = other if name in FeedForwardConfig.option_names(side) else mixer
                raise ValueError(
                    f"{typed(name)} is {getattr(cfg, name)} and has no effect with {typed(beside)} "
                    f"{getattr(cfg, beside)}; leave it out"
                )


def _configs(cfg: FairseqDataclass, side: str) -> List[Type[ModuleConfig]]:
    translates = side == "decoder" and hasattr(cfg, "encoder_layers")
    feed_forward = [FeedForwardConfig] if getattr(cfg, f"{side}_ffn_embed_dim") else []
    return [mixer_of(cfg, side), *feed_forward, *([GatedCrossAttentionConfig] if translates else [])]


def _read(config: Type[ModuleConfig], cfg: FairseqDataclass, side: str) -> Iterator[str]:
    """The options that the fields of a config get their values from."""
    for f in fields(config):
        if f.metadata.get("option"):
            name = f.metadata["option"].format(side=side)
            yield name
            fallback = f.metadata.get("fallback")
            # An override may replace an option that can change.
            if fallback and (getattr(cfg, name) in (None, -1) or CHANGEABLE.fullmatch(name)):
                yield fallback
