"""Mega's layers for any PyTorch program: batch-first (B, L, D), bool masks with True at padding, state as a value.

`MIXERS` has the config of each token mixer by name, `EXAMPLES` small configs of all of them, and `POSITION_BIASES` the
position biases. `MixerState` is the state of any mixer, and `BlockStep` what `Block.step()` returns.
"""

from mega_fairseq.modules.block import Block, BlockState, BlockStep, MegaBlock
from mega_fairseq.modules.cross_attention import CrossAttentionState, GatedCrossAttention, GatedCrossAttentionConfig
from mega_fairseq.modules.feed_forward import FeedForwardConfig, NormalizedFeedForward
from mega_fairseq.modules.mixer import Mixer, MixerConfig, MixerStep
from mega_fairseq.modules.mixer_state import MixerState
from mega_fairseq.modules.mixers import EXAMPLES, MIXERS
from mega_fairseq.modules.mixers.aft import AFTConfig
from mega_fairseq.modules.mixers.flash import FlashConfig
from mega_fairseq.modules.mixers.gau import GAUConfig
from mega_fairseq.modules.mixers.gmlp import GatedMLPConfig
from mega_fairseq.modules.mixers.mega import (
    DampedEMA,
    GatedAttentionConfig,
    GatedAttentionState,
    MovingAverageGatedAttention,
)
from mega_fairseq.modules.mixers.megalodon import MegalodonConfig
from mega_fairseq.modules.mixers.multi_head import AttentionConfig
from mega_fairseq.modules.mixers.sparse import SparseConfig
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.position_bias import POSITION_BIASES

__all__ = [
    "EXAMPLES",
    "MIXERS",
    "POSITION_BIASES",
    "AFTConfig",
    "AttentionConfig",
    "Block",
    "BlockState",
    "BlockStep",
    "CrossAttentionState",
    "DampedEMA",
    "FeedForwardConfig",
    "FlashConfig",
    "GAUConfig",
    "GatedAttentionConfig",
    "GatedAttentionState",
    "GatedCrossAttention",
    "GatedCrossAttentionConfig",
    "GatedMLPConfig",
    "MegaBlock",
    "MegalodonConfig",
    "Mixer",
    "MixerConfig",
    "MixerState",
    "MixerStep",
    "MovingAverageGatedAttention",
    "NormalizedFeedForward",
    "SequenceNorm",
    "SparseConfig",
]
