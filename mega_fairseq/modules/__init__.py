"""Mega's layers for any PyTorch program: batch-first (B, L, D), bool masks with True at padding, state as a value."""

from mega_fairseq.modules.block import MegaBlock, MegaBlockState
from mega_fairseq.modules.config import FeedForwardConfig, GatedAttentionConfig, GatedCrossAttentionConfig
from mega_fairseq.modules.cross_attention import CrossAttentionState, GatedCrossAttention
from mega_fairseq.modules.ema import DampedEMA
from mega_fairseq.modules.feed_forward import NormalizedFeedForward
from mega_fairseq.modules.gated_attention import GatedAttentionState, MovingAverageGatedAttention
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.position import POSITION_BIASES
from mega_fairseq.modules.step import BlockStep, can_step

__all__ = [
    "POSITION_BIASES",
    "BlockStep",
    "CrossAttentionState",
    "DampedEMA",
    "FeedForwardConfig",
    "GatedAttentionConfig",
    "GatedAttentionState",
    "GatedCrossAttention",
    "GatedCrossAttentionConfig",
    "MegaBlock",
    "MegaBlockState",
    "MovingAverageGatedAttention",
    "NormalizedFeedForward",
    "SequenceNorm",
    "can_step",
]
