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
_bytes = {"dropout": 0.0, "init": "scaled"}  # for small corpora
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
    **_sizes(4, 128, 256, 64), **_streaming, **_bytes, share_decoder_input_output_embed=True, decoder_chunk_size=256
)
class MegaLMSmallConfig(MegaLMConfig):
    """For small corpora, laptops and the demo."""


# ------------------------------------------------------------------------------------------- other token mixers


def _layers(layers: int, embed_dim: int, ffn_embed_dim: int, **options: Any) -> Dict[str, Any]:
    """Pre-norm layers with tied embeddings unless said otherwise."""
    sizes = {"decoder_layers": layers, "decoder_embed_dim": embed_dim, "decoder_ffn_embed_dim": ffn_embed_dim}
    return {**sizes, "normalize_before": True, "share_decoder_input_output_embed": True, **options}


def _gau(layers: int, embed_dim: int, hidden_dim: int, z_dim: int, **options: Any) -> Dict[str, Any]:
    """Layers that are attention and feed-forward in one."""
    widths = {"decoder_hidden_dim": hidden_dim, "decoder_z_dim": z_dim, "rel_pos_bias": "rope"}
    return _layers(layers, embed_dim, 0, **{**widths, **options})


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


@preset(
    token_mixer="gmlp",
    **_layers(12, 768, 2304, decoder_attention_heads=12, decoder_time_alpha=True, decoder_time_beta=True),
    decoder_chunk_size=512,
    decoder_token_shift=True,
)
class GMLPLMBaseConfig(MegaLMConfig):
    """gMLP with weights by distance and token shift."""


@preset(
    token_mixer="gmlp",
    **_bytes,
    **_layers(4, 128, 440, decoder_attention_heads=4, decoder_time_alpha=True, decoder_time_beta=True),
    decoder_chunk_size=256,
    decoder_token_shift=True,
)
class GMLPLMSmallConfig(MegaLMConfig):
    """gMLP for small corpora."""


_local = {"token_mixer": "aft", "decoder_aft_form": "local", "decoder_aft_reach": 32}


@preset(**_local, **_layers(24, 256, 1024))
class AFTLMEnwik8Config(MegaLMConfig):
    """The deep AFT-local of Zhai et al. (2021) for bytes."""


@preset(**_local, **_layers(12, 512, 2048))
class AFTLMEnwik8WideConfig(MegaLMConfig):
    """The wide AFT-local of Zhai et al. (2021) for bytes."""


@preset(**_local, **_bytes, **_layers(4, 128, 576, decoder_attention_heads=4))
class AFTLMSmallConfig(MegaLMConfig):
    """AFT-local for small corpora."""


@preset(
    token_mixer="sparse",
    **_layers(30, 512, 2048, init="scaled", ffn_activation_fn="gelu_sigmoid", decoder_rotary_dims=64),
    decoder_sparse_stride=128,
    decoder_sparse_summary=32,
    decoder_chunk_size=12288,
)
class SparseLMEnwik8Config(MegaLMConfig):
    """The Sparse Transformer of Child et al. (2019) for bytes, with RoPE in place of learned positions."""


@preset(
    token_mixer="sparse",
    **_bytes,
    **_layers(4, 128, 576, decoder_attention_heads=4, decoder_rotary_dims=32),
    decoder_sparse_stride=64,
    decoder_chunk_size=1024,
)
class SparseLMSmallConfig(MegaLMConfig):
    """Sparse attention for small corpora."""


def _seed(mixer: str, **options: Any) -> Dict[str, Any]:
    """One layer with tables over 128 places, a gated feed-forward layer and token shift in both."""
    layer = _layers(1, 512, 1536, ffn_activation_fn="geglu", share_decoder_input_output_embed=False)
    tables = {"decoder_chunk_size": 128, "decoder_time_beta": True, "decoder_time_gamma": True}
    return {**layer, **tables, "token_mixer": mixer, "decoder_token_shift": True, **options}


# In MHA+ and AFT, alpha would cancel. The experiment counts it all the same: 1,024 parameters more than here.
@preset(**_seed("attention", decoder_time_weight="before", decoder_rotary_dims=32, decoder_talking_heads=True))
class TimeWeightedLMSeedConfig(MegaLMConfig):
    """MHA+ of the time weighting experiment."""


@preset(**_seed("gmlp", decoder_time_alpha=True))
class GMLPLMSeedConfig(MegaLMConfig):
    """gMLP of the time weighting experiment."""


@preset(**_seed("aft"))
class AFTLMSeedConfig(MegaLMConfig):
    """AFT of the time weighting experiment."""


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
    "time_weighted_lm_seed": TimeWeightedLMSeedConfig,
    "gmlp_lm_base": GMLPLMBaseConfig,
    "gmlp_lm_small": GMLPLMSmallConfig,
    "gmlp_lm_seed": GMLPLMSeedConfig,
    "aft_lm_enwik8": AFTLMEnwik8Config,
    "aft_lm_enwik8_wide": AFTLMEnwik8WideConfig,
    "aft_lm_small": AFTLMSmallConfig,
    "aft_lm_seed": AFTLMSeedConfig,
    "sparse_lm_enwik8": SparseLMEnwik8Config,
    "sparse_lm_small": SparseLMSmallConfig,
}
register_with_presets("mega_lm", MegaLanguageModel, MegaLMConfig, PRESETS)
