"""The options that all Mega models share, named like the released ones, and what they mean for the modules below.

fairseq turns a dataclass into command-line options and hydra keys and asks plain field types for it: no deferred
annotations, no `int | None`.
"""

import logging
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from mega_fairseq.modules import POSITION_BIASES, FeedForwardConfig, GatedAttentionConfig, GatedCrossAttentionConfig
from mega_fairseq.modules.config import check_positive
from mega_fairseq.modules.linear import INITS
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS

logger = logging.getLogger(__name__)

UNBOUNDED = 1_000_000_000  # what a model without a longest sequence answers: fairseq wants a whole number
WIDEST, DEEPEST = 1_000_000, 10_000  # larger ones are slips, which would be found out when all memory is full


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class MegaOptions(FairseqDataclass):
    """Options of any Mega decoder; the encoder's mirror them."""

    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("silu", "activation of values, candidate and feed-forward")
    attention_activation_fn: ChoiceEnum(list(ATTENTION_FUNCTIONS)) = option("softmax", "attention function")
    rel_pos_bias: ChoiceEnum(list(POSITION_BIASES)) = option(
        "simple", "relative position bias; simple reaches as far as a chunk (or the longest sequence), the others on"
    )
    normalization_type: ChoiceEnum(["layernorm", "scalenorm", "rmsnorm"]) = option("layernorm", "kind of norm")
    normalize_before: bool = option(False, "norm the input of each layer (pre-norm) and what leaves the last")
    normalize_embedding: bool = option(False, "norm embeddings")
    no_scale_embedding: bool = option(False, "do not multiply embeddings by the square root of their size")
    init: ChoiceEnum(list(INITS)) = option("released", "how weights start; scaled learns faster in small models")
    truncation_length: int = option(0, "taps of the EMA kernels; 0 keeps them all")

    dropout: float = option(0.1, "dropout of embeddings and of each layer's output")
    attention_dropout: float = option(0.0, "dropout of attention weights")
    hidden_dropout: float = option(0.0, "dropout of attention's values")
    activation_dropout: float = option(0.0, "dropout inside feed-forward layers")
    feature_dropout: bool = option(False, "drop whole features of a sequence, not single entries")

    decoder_embed_dim: int = option(512, "width D of the decoder")
    decoder_hidden_dim: int = option(1024, "width v of attention's values in the decoder")
    decoder_z_dim: int = option(128, "width z of queries and keys in the decoder")
    decoder_n_dim: int = option(16, "order h of the EMA in the decoder")
    decoder_ffn_embed_dim: int = option(1024, "width of the decoder's feed-forward layers; 0 leaves them out")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_chunk_size: int = option(-1, "chunk size of the decoder's attention; -1 attends to everything")
    decoder_truncation_length: int = option(-1, "taps of the decoder's EMA; -1 follows --truncation-length")
    decoder_embed_path: Optional[str] = option(None, "file of pre-trained target embeddings")
    share_decoder_input_output_embed: bool = option(False, "tie the decoder's embeddings and output projection")

    adaptive_softmax_cutoff: Optional[str] = option(
        None,
        "ends of the clusters of an adaptive softmax, as in 20000,60000; needs --criterion adaptive_loss with "
        "--ddp-backend legacy_ddp, or mega_lm_cross_entropy for language models",
    )
    adaptive_softmax_dropout: float = option(0.0, "dropout inside the tail clusters")
    adaptive_softmax_factor: float = option(4.0, "how much narrower each next cluster is")


@contextmanager
def named_as_options(side: str) -> Iterator[None]:
    """Errors of the module configs, with the names that the user typed in place of theirs."""
    names = {
        "dim": f"--{side}-embed-dim",
        "shared_dim": f"--{side}-z-dim",
        "value_dim": f"--{side}-hidden-dim",
        "hidden_dim": f"--{side}-ffn-embed-dim",
        "ndim": f"--{side}-n-dim",
        "chunk_size": f"--{side}-chunk-size",
        "truncation": f"--truncation-length or --{side}-truncation-length",
        "layers": f"--{side}-layers",
        "max_positions": "--max-source-positions or --max-target-positions",
        "dropout": "--dropout",
        "attention_dropout": "--attention-dropout",
        "hidden_dropout": "--hidden-dropout",
        "activation_dropout": "--activation-dropout",
        "position_bias": "--rel-pos-bias",
        "init": "--init",
    }
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"\w+", lambda word: names.get(word.group(), word.group()), str(error))) from None


def check_sizes(cfg: FairseqDataclass, side: str) -> None:
    """What no layer's config would notice, or only after embeddings are made."""
    names = {"dim": "embed_dim", "value_dim": "hidden_dim", "layers": "layers"}
    positions = ("max_source_positions", "max_target_positions") if side == "encoder" else ("max_target_positions",)
    with named_as_options(side):
        check_positive(**{name: getattr(cfg, f"{side}_{option}") for name, option in names.items()})
        if side == "encoder":
            check_positive(max_positions=min(getattr(cfg, name) for name in positions))
    chunk = getattr(cfg, f"{side}_chunk_size")
    if chunk < 1 and chunk != -1:
        raise ValueError(f"--{side}-chunk-size is {chunk}; give a number of tokens, or -1 for no chunks")
    widths = ("embed_dim", "hidden_dim", "z_dim", "n_dim", "ffn_embed_dim")
    lengths = (f"{side}_chunk_size", f"{side}_truncation_length", "truncation_length", *positions)
    check_at_most(WIDEST, **{f"{side}_{name}": getattr(cfg, f"{side}_{name}") for name in widths})
    check_at_most(DEEPEST, **{f"{side}_layers": getattr(cfg, f"{side}_layers")})
    check_at_most(UNBOUNDED, **{name: getattr(cfg, name) for name in lengths})


def check_at_most(most: int, **options: int) -> None:
    for name, value in options.items():
        if value > most:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at most {most:,}")


def say_idle(cfg: FairseqDataclass, defaults: MegaOptions, needed: str, *names: str) -> None:
    """Options that were given and change nothing, for want of another: more often a slip than a wish."""
    for name in names:
        if getattr(cfg, name) != getattr(defaults, name):
            logger.warning(f"--{name.replace('_', '-')} changes nothing without {needed}")


def layer_configs(cfg: FairseqDataclass, side: str, max_positions: int, source_dim: Optional[int] = None) -> tuple:
    """The module configs of one layer of the "encoder" or "decoder", as MegaBlock takes them."""
    with named_as_options(side):
        return _layer_configs(cfg, side, max_positions, source_dim)


def _layer_configs(cfg: FairseqDataclass, side: str, max_positions: int, source_dim: Optional[int]) -> tuple:
    def of(name: str) -> Any:
        return getattr(cfg, f"{side}_{name}")

    truncation = of("truncation_length")
    common = {
        "dim": of("embed_dim"),
        "norm": str(cfg.normalization_type),
        "prenorm": cfg.normalize_before,
        "activation": str(cfg.activation_fn),
        "dropout": cfg.dropout,
        "feature_dropout": cfg.feature_dropout,
        "init": str(cfg.init),
    }
    attending = {
        "shared_dim": of("z_dim"),
        "attention": str(cfg.attention_activation_fn),
        "position_bias": str(cfg.rel_pos_bias),
        "attention_dropout": cfg.attention_dropout,
        "hidden_dropout": cfg.hidden_dropout,
    }
    attention = GatedAttentionConfig(
        value_dim=of("hidden_dim"),
        ndim=of("n_dim"),
        chunk_size=None if of("chunk_size") == -1 else of("chunk_size"),
        causal=side == "decoder",
        max_positions=max_positions,
        truncation=cfg.truncation_length if truncation == -1 else truncation,
        **common,
        **attending,
    )
    feed_forward = None
    if of("ffn_embed_dim"):
        hidden, dropout = of("ffn_embed_dim"), cfg.activation_dropout
        feed_forward = FeedForwardConfig(hidden_dim=hidden, activation_dropout=dropout, **common)
    cross = None
    if source_dim is not None:
        cross = GatedCrossAttentionConfig(source_dim=source_dim, max_positions=max_positions, **common, **attending)
    return attention, feed_forward, cross
