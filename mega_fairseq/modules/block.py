"""A block: a token mixer, cross attention if there is a source, and a feed-forward layer (paper, section 3.4)."""

from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mega_fairseq.modules.cross_attention import CrossAttentionState, GatedCrossAttention, GatedCrossAttentionConfig
from mega_fairseq.modules.feed_forward import FeedForwardConfig, NormalizedFeedForward
from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.modules.mixer import MixerConfig
from mega_fairseq.modules.mixer_state import MixerState, walk
from mega_fairseq.ops.attention.segments import Segments
from mega_fairseq.ops.padding import Padding
from mega_fairseq.ops.precision import AUTOCAST, autocast_is_on


class BlockState(NamedTuple):
    """The state of a causal block: its mixer's state and, in a translation decoder, the projected source."""

    mixer: Optional[MixerState]  # None before the first token
    cross: Optional[CrossAttentionState] = None
    feed_forward: Optional[Tensor] = None  # (B, floor(D / 2)) the last token before it, with token shift

    def reorder(self, order: Tensor, last: Optional[int], sources: Optional[Tensor]) -> "BlockState":
        """Replaces row i by row order[i]; this state must not be used afterwards.

        `last`: rows differ from their replacements only in this many last tokens; None if they may differ in all.
        `sources`: the sources that remain, None for all.
        """

        def of_cache(cache: Any) -> Any:  # copies only the last tokens, in place
            return cache.select(order) if last is None else cache.follow(order, last)

        cross = None if self.cross is None else self.cross.reorder(order, sources)
        return self.replaced(lambda t: t.index_select(0, order), of_cache, cross)

    def replaced(
        self,
        on_tensor: Callable[[Tensor], Tensor],
        on_cache: Callable[[Any], Any],
        cross: Optional[CrossAttentionState],
    ) -> "BlockState":
        """A state of the same structure with each tensor and each cache replaced, and with another `cross`."""
        return BlockState(walk(self.mixer, on_tensor, on_cache), cross, walk(self.feed_forward, on_tensor, on_cache))


BlockStep = Callable[[Tensor, BlockState], Tuple[Tensor, BlockState]]  # what Block.step() returns


class Block(nn.Module):
    """(B, L, D) -> (B, L, D). Causal: `y, state = block(x, state, padding_mask)`; otherwise `y = block(x, ...)`."""

    def __init__(
        self,
        mixer: MixerConfig,
        feed_forward: Optional[FeedForwardConfig] = None,
        cross_attention: Optional[GatedCrossAttentionConfig] = None,
    ):
        super().__init__()
        for name, config in (("feed_forward", feed_forward), ("cross_attention", cross_attention)):
            if config is not None and config.dim != mixer.dim:
                raise ValueError(f"{name}.dim is {config.dim} and mixer.dim {mixer.dim}; a block has one width")
        if cross_attention is not None and not mixer.causal:
            raise ValueError("cross_attention needs a causal block; build the mixer with causal=True")
        if mixer.causal and feed_forward is not None:
            feed_forward.check_causal_norm()
        self.two_hop = feed_forward is not None and feed_forward.two_hop
        if self.two_hop and cross_attention is not None:
            raise ValueError(
                f"{feed_forward.name('two_hop')} is True, and with cross attention between the token mixer and the "
                "feed-forward layer this residual is not defined; leave it out"
            )
        self.causal = mixer.causal
        self.shifts_feed_forward = feed_forward is not None and feed_forward.token_shift
        self.mixer = mixer.build()
        self.cross_attention = None if cross_attention is None else GatedCrossAttention(cross_attention)
        self.feed_forward = None if feed_forward is None else NormalizedFeedForward(feed_forward)
        self.dropout_module = DropoutSwitch()
        for part in (self.mixer, self.cross_attention, self.feed_forward):
            if part is not None:
                part.dropout_module = self.dropout_module

    def forward(
        self,
        x: Tensor,
        state: Optional[BlockState] = None,
        padding_mask: Optional[Padding] = None,
        source: Optional[Tensor] = None,
        source_padding_mask: Optional[Padding] = None,
        segments: Optional[Segments] = None,
        need_weights: bool = False,
        parts: Optional[Tuple[Callable[..., Any], ...]] = None,
    ) -> Union[Tensor, Tuple[Tensor, BlockState], Tuple[Tensor, BlockState, Optional[Tensor]]]:
        """Runs the parts in order.

        `need_weights` also returns the weights of cross attention over the source, pads last: (B, L, m). `parts` stand
        in for the block's own, as in `step()`.
        """
        if self.cross_attention is None and source is not None:
            raise ValueError("source was given to a block without cross attention; build it with cross_attention=...")
        if not (state is None or isinstance(state, BlockState)):
            raise TypeError(f"state is a {type(state).__name__}, not a BlockState (give masks as padding_mask)")
        mixer_state, cross_state, last = BlockState(None) if state is None else state
        mixer, cross_attention, feed_forward = parts or (self.mixer, self.cross_attention, self.feed_forward)
        weights, residual = None, x if self.two_hop else None

        mixed = mixer(x, mixer_state, padding_mask)
        x, mixer_state = mixed if self.causal else (mixed, None)
        if cross_attention is not None:
            arguments = (x, source, cross_state, padding_mask, source_padding_mask, segments)
            if need_weights:
                x, cross_state, weights = cross_attention(*arguments, need_weights=True)
            else:
                x, cross_state = cross_attention(*arguments)
        if self.shifts_feed_forward:
            x, last = feed_forward(x, padding_mask, last, residual)
        elif feed_forward is not None:
            x = feed_forward(x, padding_mask, None, residual)

        if not self.causal:
            return x
        state = BlockState(mixer_state, cross_state, last)
        return (x, state, weights) if need_weights else (x, state)

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Same as `Mixer.adapt`, for the tensors of a whole block."""
        self.mixer.adapt(stored, f"{prefix}mixer.")
        if self.cross_attention is not None:
            self.cross_attention.adapt(stored, f"{prefix}cross_attention.")

    def takes_step(self, state: BlockState) -> bool:
        """Whether a single token after `state` may go through `step()`.

        A step computes no gradients and no dropout, and all rows must be at the same position.
        """
        if self.dropout_module.on or torch.is_grad_enabled():
            return False
        if any(map(autocast_is_on, AUTOCAST)):
            return False
        ragged = state.cross is not None and state.cross.lengths is not None
        return self.mixer.takes_step(state.mixer) and not ragged

    def step(self) -> BlockStep:
        """This block for one token at a time, in generation: `y, state = step(x, state)` for x (R, 1, D).

        Its parts have packed projections and coefficients that are computed here, so it is valid for one generation, in
        which no weight may change.
        """
        others = (None if part is None else part.step() for part in (self.cross_attention, self.feed_forward))
        return partial(self, parts=(self.mixer.step() or self.mixer, *others))


MegaBlock = Block  # with GatedAttentionConfig, the block of the paper
