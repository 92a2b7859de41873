"""Presets of classifiers: the recipes of the Mega paper (table 8) for the Long Range Arena and raw speech.

Where the released architectures differ from the released commands, these are the commands. Each recipe with full
attention also exists in chunks, as NAME_chunk; those of speech are in chunks already.
"""

from typing import Any, Dict

from mega_fairseq.models.mega_classifier import MegaClassifier, MegaClassifierConfig
from mega_fairseq.models.presets import preset, register_with_presets


def _sizes(layers: int, embed_dim: int, hidden_dim: int, z_dim: int) -> Dict[str, Any]:
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": embed_dim,
        "encoder_hidden_dim": hidden_dim,
        "encoder_ffn_embed_dim": hidden_dim,
        "encoder_z_dim": z_dim,
    }


def _positions(longest: int, truncation: int = 1024) -> Dict[str, Any]:
    return {"max_positions": longest, "truncation_length": truncation}


# Real numbers. Tokens have post-norm, softmax and dropout 0.1, which are the defaults.
_values = {
    "normalization_type": "batchnorm",
    "normalize_before": True,
    "attention_activation_fn": "laplace",
    "dropout": 0.0,
}
_chunks = {"encoder_chunk_size": 128}
_speech = {**_positions(16000, 1000), **_values, "encoder_chunk_size": 1000}
_six_heads = {"encoder_attention_heads": 6}  # of other mixers: eight do not divide the width


@preset(**_sizes(6, 80, 160, 64), **_positions(2002))
class MegaLRAListOpsConfig(MegaClassifierConfig):
    """ListOps: the value of a nested expression."""


@preset(**_chunks)
class MegaLRAListOpsChunkConfig(MegaLRAListOpsConfig):
    """ListOps, in chunks."""


@preset(**_sizes(4, 128, 256, 64), **_positions(4002), normalization_type="scalenorm")
class MegaLRATextConfig(MegaClassifierConfig):
    """Text: reviews as bytes."""


@preset(**_chunks)
class MegaLRATextChunkConfig(MegaLRATextConfig):
    """Text, in chunks."""


@preset(**_sizes(6, 128, 256, 64), **_positions(4002), normalization_type="scalenorm", pairs=True)
class MegaLRARetrievalConfig(MegaClassifierConfig):
    """Retrieval: does one paper cite the other."""


@preset(**_chunks)
class MegaLRARetrievalChunkConfig(MegaLRARetrievalConfig):
    """Retrieval, in chunks."""


@preset(**_sizes(8, 160, 320, 96), **_positions(1024), **_values)
class MegaLRAImageConfig(MegaClassifierConfig):
    """Image: CIFAR-10, grey pixel by pixel."""


@preset(**_chunks)
class MegaLRAImageChunkConfig(MegaLRAImageConfig):
    """Image, in chunks."""


@preset(**_sizes(6, 128, 256, 64), **_positions(1024), **_values)
class MegaLRAPathfinderConfig(MegaClassifierConfig):
    """Pathfinder: are two points of a 32 x 32 picture connected."""


@preset(**_chunks)
class MegaLRAPathfinderChunkConfig(MegaLRAPathfinderConfig):
    """Pathfinder, in chunks."""


@preset(**_sizes(4, 64, 128, 32), **_positions(16384, 4096), **_values)
class MegaLRAPathXConfig(MegaClassifierConfig):
    """Path-X: Pathfinder with pictures of 128 x 128."""


@preset(encoder_chunk_size=4096)
class MegaLRAPathXChunkConfig(MegaLRAPathXConfig):
    """Path-X, in chunks."""


@preset(**_sizes(6, 60, 120, 30), **_speech, **_six_heads)
class MegaSCRawConfig(MegaClassifierConfig):
    """Speech Commands, from raw samples."""


@preset(**_sizes(6, 72, 144, 36), **_speech, **_six_heads)
class MegaSCRawBigConfig(MegaClassifierConfig):
    """Speech Commands, larger."""


@preset(**_sizes(2, 64, 128, 32), **_positions(1024), encoder_chunk_size=128)
class MegaClassifierSmallConfig(MegaClassifierConfig):
    """For small data sets and laptops."""


PRESETS = {
    "mega_lra_listops": MegaLRAListOpsConfig,
    "mega_lra_listops_chunk": MegaLRAListOpsChunkConfig,
    "mega_lra_text": MegaLRATextConfig,
    "mega_lra_text_chunk": MegaLRATextChunkConfig,
    "mega_lra_retrieval": MegaLRARetrievalConfig,
    "mega_lra_retrieval_chunk": MegaLRARetrievalChunkConfig,
    "mega_lra_image": MegaLRAImageConfig,
    "mega_lra_image_chunk": MegaLRAImageChunkConfig,
    "mega_lra_pathfinder": MegaLRAPathfinderConfig,
    "mega_lra_pathfinder_chunk": MegaLRAPathfinderChunkConfig,
    "mega_lra_pathx": MegaLRAPathXConfig,
    "mega_lra_pathx_chunk": MegaLRAPathXChunkConfig,
    "mega_sc_raw": MegaSCRawConfig,
    "mega_sc_raw_chunk": MegaSCRawConfig,
    "mega_sc_raw_big": MegaSCRawBigConfig,
    "mega_sc_raw_big_chunk": MegaSCRawBigConfig,
    "mega_classifier_small": MegaClassifierSmallConfig,
}
register_with_presets("mega_classifier", MegaClassifier, MegaClassifierConfig, PRESETS)
