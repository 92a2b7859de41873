"""The options that all Mega models share, named like the released ones, and the module configs made from them.

fairseq turns a dataclass into command-line options and hydra keys, which requires plain field types: no deferred
annotations and no `int | None`.
"""

import logging
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from enum import Enum
from typing import Any, Iterator, List, Optional, Sequence, Set, Type, TypeVar

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY

from mega_fairseq.fairseq_options import AFTER_TRAINING, ALWAYS, changes, option, typed
from mega_fairseq.modules import (
    MIXERS,
    POSITION_BIASES,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttentionConfig,
    MixerConfig,
)
from mega_fairseq.modules.config import ModuleConfig
from mega_fairseq.modules.feed_forward import FEED_FORWARD_ACTIVATIONS
from mega_fairseq.modules.normalization import BATCH_NORMS, NORMS
from mega_fairseq.modules.projection import INITS
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS

logger = logging.getLogger(__name__)


def mirror(config: Type[ModuleConfig], name: str, default: Any, note: str = "", **stated: Any) -> Any:
    """The option that sets a field of a module's config, with the help text of that field."""
    return option(default, config.metadata(name)["help"] + note, **stated)


@dataclass
class StackOptions(FairseqDataclass):
    """Options of any Mega model."""

    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option(
        "silu", "activation of values, candidate and feed-forward", released=True, huggingface="activation"
    )
    ffn_activation_fn: Optional[str] = option(
        None, f"activation of feed-forward layers ({', '.join(FEED_FORWARD_ACTIVATIONS)}); by default --activation-fn"
    )
    attention_activation_fn: ChoiceEnum(list(ATTENTION_FUNCTIONS)) = option(
        "softmax", "attention function", released=True, huggingface="attention_activation"
    )
    rel_pos_bias: ChoiceEnum(list(POSITION_BIASES)) = option(
        "simple",
        "relative position bias; simple is limited to a chunk or the longest sequence of training",
        released=True,
        huggingface="relative_positional_bias",
    )
    normalization_type: ChoiceEnum([kind for kind in NORMS if kind not in BATCH_NORMS]) = option(
        "layernorm",
        "kind of norm; hf_rmsnorm only scales, as in Hugging Face's Mega",
        released=True,
        huggingface="normalization_type",
    )
    normalize_before: bool = option(
        False,
        "normalise the input of each layer (pre-norm) and the output of the last",
        released=True,
        huggingface="normalize_before_mega",
    )
    no_affine_norm: bool = option(
        False, "no learned scale and offset in the norms of layers", huggingface="norm_affine"
    )
    no_final_norm: bool = option(
        False, "with --normalize-before, do not normalise the output of the last layer", needs="normalize_before"
    )
    opposite_ffn_norm: bool = option(
        False,
        "feed-forward layers have post-norm if mixers have pre-norm, or vice versa",
        huggingface="normalize_before_ffn",
    )
    normalize_embedding: bool = option(False, "normalise embeddings", released=True)
    init: ChoiceEnum(list(INITS)) = option(
        "released", "weight initialisation; scaled learns faster in small models", change=ALWAYS
    )
    truncation_length: int = option(
        0,
        "how many steps the EMA looks back; 0 for no limit",
        least=0,
        change=AFTER_TRAINING,
        released=True,
        huggingface="truncation",
    )

    dropout: float = option(
        0.1,
        "dropout of embeddings and of each layer's output",
        change=ALWAYS,
        released=True,
        huggingface="dropout_prob",
    )
    attention_dropout: float = mirror(
        GatedAttentionConfig,
        "attention_dropout",
        0.0,
        change=ALWAYS,
        released=True,
        huggingface="attention_probs_dropout_prob",
    )
    hidden_dropout: float = mirror(
        GatedAttentionConfig, "hidden_dropout", 0.0, change=ALWAYS, released=True, huggingface="hidden_dropout_prob"
    )
    activation_dropout: float = mirror(
        FeedForwardConfig,
        "activation_dropout",
        0.0,
        change=ALWAYS,
        released=True,
        huggingface="nffn_activation_dropout_prob",
    )
    feature_dropout: bool = mirror(
        ModuleConfig, "feature_dropout", False, change=ALWAYS, released=True, huggingface="use_feature_dropout"
    )

    checkpoint_activations: bool = option(
        False, "save memory in training: recompute activations in backward", change=ALWAYS
    )
    offload_activations: bool = option(
        False, "keep the inputs of layers in CPU memory; implies checkpoint_activations", change=ALWAYS
    )
    cuda_graphs: ChoiceEnum(["auto", "off"]) = option(
        "auto", "on a GPU, whether training and generation may replay their steps as CUDA graphs", change=ALWAYS
    )


@dataclass
class SideOptions:
    """Options that encoders and decoders each have: `layers` is --encoder-layers and --decoder-layers."""

    embed_dim: int = mirror(ModuleConfig, "dim", 512, least=1, released=True, huggingface="hidden_size")
    hidden_dim: int = mirror(
        GatedAttentionConfig, "value_dim", 1024, least=1, released=True, huggingface="intermediate_size"
    )
    z_dim: int = mirror(
        GatedAttentionConfig, "shared_dim", 128, least=1, released=True, huggingface="shared_representation_size"
    )
    n_dim: int = mirror(GatedAttentionConfig, "ndim", 16, released=True, huggingface="ema_projection_size")
    ffn_embed_dim: int = mirror(
        FeedForwardConfig, "hidden_dim", 1024, "; 0 leaves them out", released=True, huggingface="nffn_hidden_size"
    )
    layers: int = option(6, "number of layers", least=1, released=True, huggingface="num_hidden_layers")
    chunk_size: int = mirror(
        GatedAttentionConfig,
        "chunk_size",
        -1,
        "; -1 attends to everything",
        change=AFTER_TRAINING,
        released=True,
        huggingface="chunk_size",
    )
    truncation_length: int = mirror(
        GatedAttentionConfig,
        "truncation",
        -1,
        "; 0 for no limit; -1 follows --truncation-length",
        change=AFTER_TRAINING,
        huggingface="truncation",
    )
    layerdrop: float = option(
        0.0, "probability of leaving out each layer in a training step", least=0, below=1, change=ALWAYS
    )
    embed_path: Optional[str] = option(None, "file of pre-trained embeddings", change=ALWAYS, released=True)


def options_of_side(side: str) -> Type[StackOptions]:
    """Options of any stack and, named after "encoder" or "decoder", of one side.

    These are SideOptions, and then those that only a setting of a token mixer or of the feed-forward layer declares.
    """
    found = {f.name: (f.type, field(default=f.default, metadata=f.metadata)) for f in fields(SideOptions)}
    mixers = [mixer for mixer in MIXERS.values() if side == "decoder" or not mixer.causal_only]
    for config in (FeedForwardConfig, *mixers):
        for setting in fields(config):
            _, _, name = (setting.metadata.get("option") or "").partition("{side}_")
            if name and name not in found:
                default, choices = -1 if setting.default is None else setting.default, setting.metadata["choices"]
                kind = ChoiceEnum(list(choices)) if choices else type(default)
                found[name] = kind, option(default, setting.metadata["help"])
    named = [(f"{side}_{name}", *declared) for name, declared in found.items()]
    return make_dataclass(f"{side.title()}SideOptions", named, bases=(StackOptions,))


EncoderOptions = options_of_side("encoder")


@dataclass
class DecoderOptions(options_of_side("decoder")):
    """Options of any Mega decoder."""

    no_scale_embedding: bool = option(
        False, "do not multiply embeddings by the square root of their size", released=True
    )
    share_decoder_input_output_embed: bool = option(
        False, "tie the decoder's embeddings and output projection", released=True, huggingface="tie_word_embeddings"
    )
    output_bias: bool = option(False, "a bias in the output projection")
    output_dense: bool = option(
        False, "a linear layer and tanh before the output projection", huggingface="add_lm_hidden_dense_layer"
    )

    adaptive_softmax_cutoff: Optional[str] = option(
        None,
        "ends of the clusters of an adaptive softmax, as in 20000,60000; needs --criterion adaptive_loss with "
        "--ddp-backend legacy_ddp, or mega_lm_cross_entropy for language models",
        released=True,
    )
    adaptive_softmax_dropout: float = option(
        0.0,
        "dropout inside the tail clusters",
        least=0,
        below=1,
        needs="adaptive_softmax_cutoff",
        change=ALWAYS,
        released=True,
    )
    adaptive_softmax_factor: float = option(
        4.0, "each cluster is narrower than the one before by this factor", least=1, needs="adaptive_softmax_cutoff"
    )


Config = TypeVar("Config", bound=ModuleConfig)


def from_options(config: Type[Config], cfg: FairseqDataclass, side: str, **known: Any) -> Config:
    """The config of a module of the "encoder" or "decoder": each field from `known` or from its option."""
    values = {f.name: known[f.name] for f in fields(config) if f.name in known}
    values.update({f.name: _value(cfg, side, f) for f in fields(config) if f.metadata.get("option")})
    return config(side=side, **values)


def _value(cfg: FairseqDataclass, side: str, setting: Field) -> Any:
    value = getattr(cfg, setting.metadata["option"].format(side=side))
    fallback = setting.metadata.get("fallback")
    if fallback and value in (None, -1):
        value = getattr(cfg, fallback)
    if setting.default is None and value == setting.metadata["unlimited"]:
        return None
    return value.value if isinstance(value, Enum) else value


def mixer_of(cfg: FairseqDataclass, side: str) -> Type[MixerConfig]:
    """The config class of the token mixer of a stack."""
    return MIXERS[getattr(cfg, "token_mixer" if hasattr(cfg, "token_mixer") else f"{side}_token_mixer")]


def layer_configs(
    cfg: FairseqDataclass, side: str, max_positions: int, source_dim: Optional[int] = None
) -> List[tuple]:
    """The module configs of each layer of the "encoder" or "decoder", as Block takes them."""
    layers = getattr(cfg, f"{side}_layers")
    mixer, causal = mixer_of(cfg, side), side == "decoder"
    mixer.check_direction(causal, side)
    known = {"causal": causal, "max_positions": max_positions, "source_dim": source_dim, "layers": layers}
    known["norm_affine"] = not cfg.no_affine_norm
    cross = None if source_dim is None else from_options(GatedCrossAttentionConfig, cfg, side, **known)

    def feed_forward(layer: int) -> Optional[FeedForwardConfig]:
        if not getattr(cfg, f"{side}_ffn_embed_dim"):
            return None
        config = from_options(FeedForwardConfig, cfg, side, **known, layer=layer)
        return replace(config, prenorm=config.prenorm != cfg.opposite_ffn_norm)

    return [
        (from_options(mixer, cfg, side, **known, layer=layer), feed_forward(layer), cross) for layer in range(layers)
    ]


def check_unused(cfg: FairseqDataclass, sides: Sequence[str]) -> None:
    """Refuses options of token mixers and feed-forward layers that have no effect in this model, if they were given."""
    defaults = MODEL_DATACLASS_REGISTRY.get(getattr(cfg, "_name", None), type(cfg))()
    given = {name for name in vars(defaults) if getattr(cfg, name) != getattr(defaults, name)}
    changeable = {name for name, change in changes(type(defaults)).items() if change == AFTER_TRAINING}
    used = {name for side in sides for config in _configs(cfg, side) for name in _read(config, cfg, side, changeable)}
    of_modules = {name for config in (FeedForwardConfig, *MIXERS.values()) for name in config.option_names(*sides)}
    for name in sorted(given & of_modules - used - {f"{side}_ffn_embed_dim" for side in sides}):
        raise ValueError(f"{typed(name)} is {getattr(cfg, name)} and has no effect in this model; leave it out")
    for f in fields(defaults):
        needed = f.metadata.get("needs")
        if needed and f.name in given and not getattr(cfg, needed):
            logger.warning(f"{typed(f.name)} has no effect without {typed(needed)}")


def _configs(cfg: FairseqDataclass, side: str) -> List[Type[ModuleConfig]]:
    translates = side == "decoder" and hasattr(cfg, "encoder_layers")
    feed_forward = [FeedForwardConfig] if getattr(cfg, f"{side}_ffn_embed_dim") else []
    return [mixer_of(cfg, side), *feed_forward, *([GatedCrossAttentionConfig] if translates else [])]


def _read(config: Type[ModuleConfig], cfg: FairseqDataclass, side: str, changeable: Set[str]) -> Iterator[str]:
    """The options that the fields of a config get their values from."""
    for f in fields(config):
        if f.metadata.get("option"):
            name = f.metadata["option"].format(side=side)
            yield name
            fallback = f.metadata.get("fallback")
            # An override may replace an option that can change.
            if fallback and (getattr(cfg, name) in (None, -1) or name in changeable):
                yield fallback
