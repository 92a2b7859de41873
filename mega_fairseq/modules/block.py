"""A Mega block: gated attention, cross attention where there is a source, feed-forward (paper, section 3.4)."""

from typing import NamedTuple, Optional, Tuple, Union

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_state_type
from mega_fairseq.modules.config import FeedForwardConfig, GatedAttentionConfig, GatedCrossAttentionConfig
from mega_fairseq.modules.cross_attention import CrossAttentionState, GatedCrossAttention
from mega_fairseq.modules.feed_forward import NormalizedFeedForward
from mega_fairseq.modules.gated_attention import GatedAttentionState, MovingAverageGatedAttention
from mega_fairseq.modules.normalization import BATCH_NORMS
from mega_fairseq.ops.padding import Padding


class MegaBlockState(NamedTuple):
    """What a causal block remembers: its mixer's state and, in a translation decoder, the projected source."""

    mixer: Optional[GatedAttentionState]  # None at the start, where only the source is known
    cross: Optional[CrossAttentionState] = None


class MegaBlock(nn.Module):
    """(B, L, D) -> (B, L, D). Causal: `y, state = block(x, state, padding_mask)`; otherwise `y = block(x, ...)`."""

    def __init__(
        self,
        attention: GatedAttentionConfig,
        feed_forward: Optional[FeedForwardConfig] = None,
        cross_attention: Optional[GatedCrossAttentionConfig] = None,
    ):
        super().__init__()
        for name, config in (("feed_forward", feed_forward), ("cross_attention", cross_attention)):
            if config is not None and config.dim != attention.dim:
                raise ValueError(f"{name}.dim is {config.dim} and attention.dim {attention.dim}; a block has one width")
        if cross_attention is not None and not attention.causal:
            raise ValueError("cross_attention belongs to a decoder block; give it attention with causal=True")
        if attention.causal and feed_forward is not None and feed_forward.norm in BATCH_NORMS:
            raise ValueError(
                f"feed_forward.norm is {feed_forward.norm!r}, whose statistics over all positions would let a causal "
                "block see the future; use layernorm, scalenorm or rmsnorm, or attention with causal=False"
            )
        self.causal = attention.causal
        self.mixer = MovingAverageGatedAttention(attention)
        self.cross_attention = None if cross_attention is None else GatedCrossAttention(cross_attention)
        self.feed_forward = None if feed_forward is None else NormalizedFeedForward(feed_forward)

    def forward(
        self,
        x: Tensor,
        state: Optional[MegaBlockState] = None,
        padding_mask: Optional[Padding] = None,
        source: Optional[Tensor] = None,
        source_padding_mask: Optional[Padding] = None,
    ) -> Union[Tensor, Tuple[Tensor, MegaBlockState]]:
        if self.cross_attention is None and not (source is None and source_padding_mask is None):
            raise ValueError(
                "source was given to a block without cross attention; build it with "
                "cross_attention=GatedCrossAttentionConfig(...) or leave source out"
            )
        if self.causal:
            check_state_type(state, MegaBlockState)
        mixer_state = cross_state = None
        if self.causal:
            x, mixer_state = self.mixer(x, None if state is None else state.mixer, padding_mask)
        else:
            x = self.mixer(x, state, padding_mask)
        if self.cross_attention is not None:
            cross_state = None if state is None else state.cross
            x, cross_state = self.cross_attention(x, source, cross_state, padding_mask, source_padding_mask)
        if self.feed_forward is not None:
            x = self.feed_forward(x, padding_mask)
        return (x, MegaBlockState(mixer_state, cross_state)) if self.causal else x

    def with_weights(
        self, x: Tensor, state: MegaBlockState, padding_mask: Optional[Padding] = None
    ) -> Tuple[Tensor, MegaBlockState, Tensor]:
        """`forward` with cross attention from a state, and the weights (B, L, m) that it gives to its source."""
        x, mixer = self.mixer(x, state.mixer, padding_mask)
        weights = self.cross_attention.weights(x, state.cross)
        x, cross = self.cross_attention(x, None, state.cross, padding_mask)
        if self.feed_forward is not None:
            x = self.feed_forward(x, padding_mask)
        return x, MegaBlockState(mixer, cross), weights
