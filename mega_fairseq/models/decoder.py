"""Causal Mega decoders with fairseq's interface, for translation and for language models.

Whole sequences, pieces of them and single tokens take the same path: `run` maps tokens and the states of the blocks to
features and the next states.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor, nn

from mega_fairseq.fairseq_options import UNBOUNDED
from mega_fairseq.models.attach import attach_steps
from mega_fairseq.models.encoder_out import EncoderOut, aligned_source, over_given_source
from mega_fairseq.models.options import DecoderOptions
from mega_fairseq.models.passes import PASSES, STEPS
from mega_fairseq.models.stack import Stack
from mega_fairseq.modules import Block, BlockState
from mega_fairseq.modules.adaptive_input import TokenEmbedding
from mega_fairseq.modules.decoder_state import DecoderState, PackedWeights
from mega_fairseq.modules.finite import check_numbers
from mega_fairseq.modules.projection import plain_weights
from mega_fairseq.ops.attention.segments import Segments, places
from mega_fairseq.ops.gates.projection import Weights
from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.padding import Alignment, Padding

Blocks = Tuple[BlockState, ...]
Source = Tuple[Optional[Tensor], Optional[Padding]]  # of aligned_source, for layers that project it themselves
Extra = Dict[str, List[Any]]
NO_SOURCE: Source = (None, None)
STATE = "state"  # key of the DecoderState in fairseq's incremental state
CHECK = "check"  # key of `extra` if scores are not of the layers as they are: how get_normalized_probs checks them


class MegaDecoder(Stack, FairseqIncrementalDecoder):
    """Target tokens (B, L) and, in translation, the encoder's output -> scores (B, L, V)."""

    side = "decoder"

    def __init__(
        self,
        cfg: DecoderOptions,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        max_positions: int,
        source_dim: Optional[int] = None,
        adaptive_softmax: Optional[AdaptiveSoftmax] = None,
        affine_final_norm: bool = True,
    ):
        super().__init__(dictionary)
        self.build_stack(cfg, embed_tokens, max_positions, source_dim, affine_final_norm)
        self.padding_idx = dictionary.pad()
        self.adaptive_softmax, self.output_projection = adaptive_softmax, None
        dim, types = cfg.decoder_embed_dim, len(dictionary)
        if adaptive_softmax is not None and (cfg.output_bias or cfg.output_dense):
            raise ValueError(
                "--output-bias and --output-dense are for one output projection; leave out --adaptive-softmax-cutoff"
            )
        self.output_dense = nn.Linear(dim, dim) if cfg.output_dense else None
        tied_bias = cfg.output_bias and cfg.share_decoder_input_output_embed
        self.output_bias = nn.Parameter(torch.zeros(types)) if tied_bias else None
        if adaptive_softmax is None and not cfg.share_decoder_input_output_embed:
            self.output_projection = nn.Linear(dim, types, bias=cfg.output_bias)
            nn.init.normal_(self.output_projection.weight, std=dim**-0.5)
            if cfg.output_bias:
                nn.init.zeros_(self.output_projection.bias)
        self.separators: Optional[Tuple[int, int]] = None  # types in source and target, if attention depends on lines
        self.need_attn = False  # whether to return the last layer's attention to the source in training, too
        self.steps = STEPS  # others once it is prepared for generation

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        """Scores (B, L, V), or features (B, L, D); with an incremental state, of new tokens only."""
        if incremental_state is not None:
            return self.next_tokens(prev_output_tokens, encoder_out, incremental_state, features_only)
        # After a search, fairseq aligns the whole targets (--print-alignment); steps are faster without weights.
        need_attn = encoder_out is not None and (self.need_attn or self.steps.prepared)
        passes = PASSES if need_attn else self.passes.for_batch(self, prev_output_tokens)
        padding = prev_output_tokens.eq(self.padding_idx)  # (B, L)
        align = self.alignment(padding, passes)  # no real token attends to pads at the end, so it needs no mask
        tokens = prev_output_tokens if align is None else align.front(prev_output_tokens)  # (B, width)
        *source, source_tokens = aligned_source(encoder_out)
        source, segments = tuple(source), self.segments(tokens, self.first_segments(source_tokens))
        x, attn = self.embed(tokens), None
        if need_attn:
            x, _, attn = self.run(x, self.first_blocks(), source=source, segments=segments, need_attn=True)
        else:
            x = passes.form_of(self.whole)(x, source, segments)
        if align is not None:
            x = align.back(x).masked_fill(padding.unsqueeze(-1), 0.0)
            attn = None if attn is None else align.back(attn).masked_fill(padding.unsqueeze(-1), 0.0)
        extra = {"attn": [None if attn is None else over_given_source(attn, encoder_out)]}
        return (x if features_only else self.output_layer(x)), extra

    def extract_features(self, *inputs: Any, **options: Any) -> Tuple[Tensor, Extra]:
        """`forward` without the output projection."""
        return self.forward(*inputs, **options, features_only=True)

    def whole(self, x: Tensor, source: Source = NO_SOURCE, segments: Optional[Segments] = None) -> Tensor:
        """Embeddings (B, L, D) of whole sequences, pads last -> features (B, L, D).

        Each layer projects the source itself: a dropped layer need not do so, a recomputed one does so again.
        """
        return self.run(x, self.first_blocks(), source=source, segments=segments)[0]

    def next_tokens(
        self,
        tokens: Tensor,
        encoder_out: Optional[EncoderOut],
        incremental_state: Dict[str, Any],
        features_only: bool = False,
    ) -> Tuple[Tensor, Extra]:
        """`forward` for new tokens, after which it keeps the state.

        `tokens` are all so far, as fairseq's generator gives them, or only the newest one of each row.
        """
        state = self.get_incremental_state(incremental_state, STATE)
        if not features_only:
            scores, state = self.steps.scores(self, tokens, state)
            if scores is not None:
                self.set_incremental_state(incremental_state, STATE, state)
                return scores.unsqueeze(1), {"attn": [None], CHECK: [state.check]}
        state = self.first_state(encoder_out) if state is None else state.eager()
        tokens = tokens[:, -max(1, tokens.size(1) - state.length) :]
        padding = tokens.eq(self.padding_idx)  # (B, L)
        align, packed = Alignment.where_needed(padding), None
        single = tokens.size(1) == 1 and align is None
        if single and all(layer.takes_step(past) for layer, past in zip(self.layers, state.blocks)):
            packed = state.packed or self.steps.packed(self)
        mask = None if align is None else align.done()
        front = tokens if align is None else align.front(tokens)  # (B, width)
        segments = self.segments(front, state.segments)
        x, blocks, _ = self.run(self.embed(front), state.blocks, packed, mask, segments=segments, drop=False)
        if align is not None:
            x = align.back(x).masked_fill(padding.unsqueeze(-1), 0.0)
        segments = None if segments is None else segments.last()
        state = DecoderState(blocks, state.length + x.size(1), state.shared, packed, segments)
        self.set_incremental_state(incremental_state, STATE, state)
        if not features_only:
            # (R, 1, D) -> (R, 1, V)
            x = self.output_layer(x) if packed is None else packed.output(x.squeeze(1)).unsqueeze(1)
        return x, {"attn": [None]}

    def first_state(self, encoder_out: Optional[EncoderOut]) -> DecoderState:
        """The state before the first token."""
        *source, tokens = aligned_source(encoder_out)
        return DecoderState(self.first_blocks(*source), 0, segments=self.first_segments(tokens))

    def first_blocks(self, source: Optional[Tensor] = None, padding: Optional[Padding] = None) -> Blocks:
        """The states of the blocks before the first token. In translation, each layer projects each source once."""
        if source is None:
            return (BlockState(None),) * len(self.blocks)
        of_layers = [BlockState(None, b.cross_attention.project_source(source, padding)) for b in self.layers]
        return (*of_layers, *[BlockState(None)] * self.final_norm_has_state)

    @property
    def blocks(self) -> List[Block]:
        """The layers, and the final norm if it carries a state."""
        return [*self.layers, *[self.final_norm] * self.final_norm_has_state]

    def first_segments(self, source: Optional[Tensor]) -> Optional[Segments]:
        """The places of the source's tokens (S, m), pads last, and of any target before its first token."""
        if self.separators is None:
            return None
        starts, real = source.roll(1, 1).eq(self.separators[0]), source.ne(self.padding_idx)
        starts[:, 0] = False
        before = torch.arange(0, -2, -1, dtype=torch.int32, device=source.device)  # segment 0, offset -1
        return Segments(before.view(1, 1, 2), places(starts & real, real, before.view(1, 2), self._within_lines))

    @property
    def _within_lines(self) -> bool:
        """Whether positions for cross attention start at each line."""
        return self.layers[0].cross_attention.config.positions == "sentence"

    def segments(self, tokens: Tensor, before: Optional[Segments]) -> Optional[Segments]:
        """The places of tokens (B, n); lines beyond the last of the source count as this one."""
        if before is None:
            return None
        starts, real = tokens.eq(self.separators[1]), tokens.ne(self.padding_idx)
        queries, keys = places(starts, real, before.queries[:, -1], self._within_lines), before.keys
        last = keys[..., 0].amax(1)
        segment = torch.minimum(queries[..., :1], last.repeat_interleave(len(queries) // len(last)).view(-1, 1, 1))
        return Segments(torch.cat([segment, queries[..., 1:]], -1), keys)

    def run(
        self,
        x: Tensor,
        blocks: Blocks,
        packed: Optional[PackedWeights] = None,
        mask: Optional[Padding] = None,
        source: Source = NO_SOURCE,
        segments: Optional[Segments] = None,
        need_attn: bool = False,
        drop: bool = True,
    ) -> Tuple[Tensor, Blocks, Optional[Tensor]]:
        """Embeddings (B, n, D), pads last, after `blocks` -> features (B, n, D), the next states, attention (B, n, m).

        Attention is that of the last layer to the source, if needed. `drop`: whether layerdrop may drop layers.
        """
        after, attn = list(blocks), None
        for i, layer in self.layers_to_run(drop):
            layer = layer if packed is None else packed.blocks[i]
            if need_attn and i == len(self.layers) - 1:
                x, after[i], attn = layer(x, blocks[i], mask, *source, segments, need_weights=True)
            else:
                x, after[i] = layer(x, blocks[i], mask, *source, segments)
        if self.final_norm_has_state:
            x, after[-1] = (self.final_norm if packed is None else packed.blocks[-1])(x, blocks[-1], mask)
        elif self.final_norm is not None:
            x = self.final_norm(x)
        return x, tuple(after), attn

    def pack(self) -> PackedWeights:
        """The weights prepared for single tokens."""
        weights = None if self.output_dense is not None else self.output_weights()
        output = self.output_layer if weights is None else ready_linear(*weights)
        return PackedWeights(tuple(block.step() for block in self.blocks), output)

    def output_layer(self, features: Tensor) -> Tensor:
        """Features (..., D) -> scores (..., V), or the features themselves for an adaptive softmax."""
        if self.adaptive_softmax is not None:
            return features
        x = self.before_projection(features)
        if self.output_projection is None:
            return F.linear(x, self.embed_tokens.weight, self.output_bias)
        return self.output_projection(x)

    def output_weights(self) -> Optional[Weights]:
        """The weight (V, D) and bias of the output layer, after `before_projection`, if they may be read."""
        if self.adaptive_softmax is not None:
            return None
        if self.output_projection is not None:
            return plain_weights(self.output_projection)
        tied = plain_weights(self.embed_tokens, (TokenEmbedding,))
        return None if tied is None else (tied[0], self.output_bias)

    def before_projection(self, features: Tensor) -> Tensor:
        return features if self.output_dense is None else torch.tanh(self.output_dense(features))

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Extra], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        if self.training and self.adaptive_softmax is not None:
            raise ValueError(
                "--criterion needs the probability of every type, which an adaptive softmax does not give in training; "
                "choose adaptive_loss, or for language models mega_lm_cross_entropy"
            )
        probs = self.get_normalized_probs_scriptable(net_output, log_probs, sample)
        check = (net_output[1] or {}).get(CHECK)
        if check is not None:
            check[0]()
        elif not self.training:  # in training, fairseq checks gradients
            check_numbers(probs.amin(-1))  # NaN if any score of the row is NaN
        return probs

    def reorder_incremental_state(self, incremental_state: Dict[str, Any], new_order: Tensor) -> None:
        """Replaces row i by row new_order[i], in place; callers that fork a search must clone the tensors first."""
        state = self.get_incremental_state(incremental_state, STATE)
        if state is not None:
            drops = self.dropout_module.on or any(layer.dropout_module.on for layer in self.layers)
            self.set_incremental_state(incremental_state, STATE, state.reorder(new_order, alike=not drops))

    def max_positions(self) -> int:
        """The longest target that it can process; only limited if layers learn a score for each distance."""
        return UNBOUNDED if self.longest is None else self.cfg.max_target_positions

    def max_source_positions(self) -> int:
        """The longest source that it can process, limited in the same way."""
        cross = self.layers[0].cross_attention
        return UNBOUNDED if cross is None or cross.longest is None else self.cfg.max_source_positions

    def make_generation_fast_(self, **options: Any) -> None:
        """Called by fairseq before generation, after which it no longer trains the model."""
        super().make_generation_fast_(**options)
        attach_steps(self)
