"""Presets of language models: the paper's Mega models, and other token mixers in the same block."""

from typing import Any, Dict

from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.presets import preset, register_with_presets


def _sizes(layers: int, embed_dim: int, hidden_dim: int, z_dim: int) -> Dict[str, Any]:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": embed_dim,
        "decoder_hidden_dim": hidden_dim,
        "decoder_ffn_embed_dim": hidden_dim,
        "decoder_z_dim": z_dim,
    }


# Chunks with a position bias that works at any length and context, as in the released models.
_streaming = {"rel_pos_bias": "rotary", "normalize_before": True, "no_affine_final_norm": True}
_adaptive = {
    "adaptive_input": True,
    "adaptive_softmax_cutoff": "20000,60000",
    "adaptive_softmax_dropout": 0.2,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
}


@preset(**_sizes(16, 1024, 2048, 256), **_streaming, **_adaptive, decoder_chunk_size=1024)
class MegaLMWt103Config(MegaLMConfig):
    """The paper's WikiText-103 model; v and feed-forward as released (the paper's table says 1536)."""


@preset(**_sizes(12, 512, 1024, 128), **_streaming, share_decoder_input_output_embed=True, decoder_chunk_size=2048)
class MegaLMEnwik8Config(MegaLMConfig):
    """The paper's enwik8 model."""


@preset(**_sizes(16, 768, 1536, 128), **_streaming, **_adaptive, decoder_chunk_size=1024)
class MegaLMBaseConfig(MegaLMConfig):
    """Words, as released for one machine."""


@preset(**_sizes(16, 1024, 2048, 256), **_streaming, share_decoder_input_output_embed=True, decoder_chunk_size=1024)
class MegaLMBigConfig(MegaLMConfig):
    """One softmax over a vocabulary of BPE."""


@preset(
    **_sizes(4, 128, 256, 64), **_streaming, share_decoder_input_output_embed=True, decoder_chunk_size=256, dropout=0.0
)
class MegaLMSmallConfig(MegaLMConfig):
    """For small corpora, laptops and the demo."""


# ------------------------------------------------------------------------------------------- other token mixers


def _layers(layers: int, embed_dim: int, ffn_embed_dim: int, **options: Any) -> Dict[str, Any]:
    """Pre-norm layers with untied embeddings unless said otherwise."""
    sizes = {"decoder_layers": layers, "decoder_embed_dim": embed_dim, "decoder_ffn_embed_dim": ffn_embed_dim}
    return {**sizes, "normalize_before": True, "share_decoder_input_output_embed": True, **options}


def _gau(layers: int, embed_dim: int, hidden_dim: int, z_dim: int, **options: Any) -> Dict[str, Any]:
    """Layers that are attention and feed-forward in one."""
    widths = {"decoder_hidden_dim": hidden_dim, "decoder_z_dim": z_dim, "rel_pos_bias": "rope"}
    return _layers(layers, embed_dim, 0, **{**widths, **options})


_bytes = {"dropout": 0.0, "init": "scaled"}  # for small corpora, as in mega_lm_small


@preset(token_mixer="gau", **_gau(24, 768, 1536, 128))
class FlashQuadLMBaseConfig(MegaLMConfig):
    """FLASH-Quad of 110M parameters (Hua et al. 2022): 24 gated attention units with full attention."""


@preset(token_mixer="flash", **_gau(24, 768, 1536, 128, decoder_chunk_size=256))
class FlashLMBaseConfig(MegaLMConfig):
    """FLASH of 110M parameters (Hua et al. 2022)."""


@preset(token_mixer="gau", **_bytes, **_gau(8, 128, 256, 64, decoder_chunk_size=256))
class FlashQuadLMSmallConfig(MegaLMConfig):
    """FLASH-Quad in chunks, for small corpora."""


@preset(token_mixer="flash", **_bytes, **_gau(8, 128, 256, 64, decoder_chunk_size=256))
class FlashLMSmallConfig(MegaLMConfig):
    """FLASH for small corpora."""


@preset(token_mixer="attention", **_layers(12, 768, 3072, decoder_attention_heads=12, decoder_rotary_dims=64))
class AttentionLMBaseConfig(MegaLMConfig):
    """Multi-head attention with RoPE, of the size of GPT-2's smallest model."""


@preset(
    token_mixer="attention",
    **_bytes,
    **_layers(4, 128, 576, decoder_attention_heads=4, decoder_rotary_dims=32, decoder_chunk_size=256),
)
class AttentionLMSmallConfig(MegaLMConfig):
    """Multi-head attention with RoPE in chunks, for small corpora."""


_weighted = {"token_mixer": "attention", "decoder_time_weight": "before", "decoder_time_beta": True}
_weighted.update(decoder_time_gamma=True, decoder_token_shift=True)


@preset(
    **_weighted,
    **_layers(12, 768, 3072, decoder_attention_heads=12, decoder_rotary_dims=32, decoder_chunk_size=512),
)
class TimeWeightedLMBaseConfig(MegaLMConfig):
    """Multi-head attention with time weighting, RoPE on half of each head and token shift."""


@preset(
    **_weighted,
    **_bytes,
    **_layers(4, 128, 576, decoder_attention_heads=4, decoder_rotary_dims=16, decoder_chunk_size=256),
)
class TimeWeightedLMSmallConfig(MegaLMConfig):
    """Attention with time weighting, for small corpora."""


PRESETS = {
    "mega_lm_wt103": MegaLMWt103Config,
    "mega_lm_enwik8": MegaLMEnwik8Config,
    "mega_lm_base": MegaLMBaseConfig,
    "mega_lm_big": MegaLMBigConfig,
    "mega_lm_small": MegaLMSmallConfig,
    "flash_quad_lm_base": FlashQuadLMBaseConfig,
    "flash_quad_lm_small": FlashQuadLMSmallConfig,
    "flash_lm_base": FlashLMBaseConfig,
    "flash_lm_small": FlashLMSmallConfig,
    "attention_lm_base": AttentionLMBaseConfig,
    "attention_lm_small": AttentionLMSmallConfig,
    "time_weighted_lm_base": TimeWeightedLMBaseConfig,
    "time_weighted_lm_small": TimeWeightedLMSmallConfig,
}
register_with_presets("mega_lm", MegaLanguageModel, MegaLMConfig, PRESETS)
