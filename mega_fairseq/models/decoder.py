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
from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.models.beam import DecoderState, PackedWeights, PackedWeightsCache, reorder
from mega_fairseq.models.embedding import TokenEmbedding
from mega_fairseq.models.encoder_out import EncoderOut, aligned_source, in_given_order
from mega_fairseq.models.options import DecoderOptions
from mega_fairseq.models.sequence_parallel import piece_in_slices, share_sequences
from mega_fairseq.models.stack import Stack
from mega_fairseq.models.step_graph import GraphState, StepGraphs
from mega_fairseq.models.train_graph import TrainGraphs
from mega_fairseq.modules import Block, BlockState
from mega_fairseq.modules.projection import is_plain, packed
from mega_fairseq.ops.attention.segments import Segments, places
from mega_fairseq.ops.linear import FORMATS, ready_linear, weights_in
from mega_fairseq.ops.log_probs import target_log_probs
from mega_fairseq.ops.padding import Alignment, Padding
from mega_fairseq.ops.sequence_parallel import SequenceGroup

Blocks = Tuple[BlockState, ...]
Source = Tuple[Optional[Tensor], Optional[Padding]]  # of aligned_source, for layers that project it themselves
Extra = Dict[str, List[Optional[Tensor]]]
NO_SOURCE: Source = (None, None)
STATE = "state"  # key of the DecoderState in fairseq's incremental state
TARGETS_ONLY = "targets_only"  # key of `extra` if forward returned log-probabilities of targets
UNCHECKED = "unchecked"  # key of `extra` if get_normalized_probs need not wait for the GPU to check these scores
STEPS_BETWEEN_CHECKS = 8  # NaN stays in the state, so a later check finds it
MOST_SCORES = 2**30  # in memory at once: 4 GB in float32


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
        if cfg.generation_weights not in FORMATS:
            raise ValueError(f"generation_weights is {cfg.generation_weights!r}; choose one of {', '.join(FORMATS)}")
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
        self.cache: Optional[PackedWeightsCache] = None  # once prepared for generation
        self.graphs: Optional[StepGraphs] = None  # once prepared for generation, with --cuda-graphs auto

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        if self.graphs is not None and incremental_state is not None and not features_only:
            state = self.get_incremental_state(incremental_state, STATE)
            scores, state = self.graphs.step(self, prev_output_tokens, state)
            if scores is not None:
                self.set_incremental_state(incremental_state, STATE, state)
                extra = {"attn": [None], UNCHECKED: []} if state.length % STEPS_BETWEEN_CHECKS else {"attn": [None]}
                return scores.unsqueeze(1), extra
        x, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        if features_only:
            return x, extra
        state = None if incremental_state is None else self.get_incremental_state(incremental_state, STATE)
        if state is not None and state.packed is not None:
            return state.packed.output(x.squeeze(1)).unsqueeze(1), extra  # (R, 1, D) -> (R, 1, V)
        return self.output_layer(x), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[EncoderOut] = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        """Tokens (B, L) -> features (B, L, D); with an incremental state, only of new tokens."""
        tokens, carry, source = prev_output_tokens, incremental_state is not None, NO_SOURCE
        state = self.get_incremental_state(incremental_state, STATE) if carry else None
        if isinstance(state, GraphState):
            state = state.eager()
        if state is not None:  # callers pass all tokens so far, as fairseq's generator does, or only the newest one
            tokens = tokens[:, -max(1, tokens.size(1) - state.length) :]
        elif carry or not self.training:
            state = self.first_state(encoder_out)
        else:
            # Each layer projects the source itself: a dropped layer need not do so, a recomputed one does so again.
            *source, source_tokens = aligned_source(encoder_out)
            before = self.first_segments(source_tokens)
        # After a search, fairseq aligns the whole targets (--print-alignment); steps are faster without weights.
        need_attn = not carry and encoder_out is not None and (self.need_attn or self.cache is not None)

        trains = self.training and not carry and not need_attn

        padding = tokens.eq(self.padding_idx)  # (B, L)
        graphs = self.graphs_for(tokens) if trains else None
        align = self.alignment(padding, graphs)
        single = carry and tokens.size(1) == 1 and align is None
        weights = None
        if single and all(layer.takes_step(past) for layer, past in zip(self.layers, state.blocks)):
            weights = state.packed or self.packed_weights()
        # Pads come last, where no real token attends to them, so the mask is only needed for a carried state.
        mask = align.done() if align is not None and carry else None
        front = tokens if align is None else align.front(tokens)  # (B, width)
        segments = self.segments(front, before if state is None else state.segments)
        if trains:
            x, attn = self.train_pass(front, source, graphs, segments), None
        else:
            blocks, embedded = self.start() if state is None else state.blocks, self.embed(front)
            x, blocks, attn = self.run(embedded, blocks, weights, mask, source, segments, need_attn, drop=not carry)
        if align is not None:
            x = align.back(x).masked_fill(padding.unsqueeze(-1), 0.0)
            attn = None if attn is None else align.back(attn).masked_fill(padding.unsqueeze(-1), 0.0)

        if carry:
            segments = None if segments is None else segments.last()
            state = DecoderState(blocks, state.length + x.size(1), state.shared, weights, segments)
            self.set_incremental_state(incremental_state, STATE, state)
        return x, {"attn": [None if attn is None else in_given_order(attn, encoder_out)]}

    def first_state(self, encoder_out: Optional[EncoderOut]) -> DecoderState:
        """The state before the first token."""
        *source, tokens = aligned_source(encoder_out)
        return DecoderState(self.start(*source), 0, segments=self.first_segments(tokens))

    def start(self, source: Optional[Tensor] = None, padding: Optional[Padding] = None) -> Blocks:
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
        weights: Optional[PackedWeights] = None,
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
            layer = layer if weights is None else weights.blocks[i]
            if need_attn and i == len(self.layers) - 1:
                x, after[i], attn = layer(x, blocks[i], mask, *source, segments, need_weights=True)
            else:
                x, after[i] = layer(x, blocks[i], mask, *source, segments)
        if self.final_norm_has_state:
            x, after[-1] = (self.final_norm if weights is None else weights.blocks[-1])(x, blocks[-1], mask)
        elif self.final_norm is not None:
            x = self.final_norm(x)
        return x, tuple(after), attn

    def train_pass(
        self,
        tokens: Tensor,
        source: Source,
        graphs: Optional[TrainGraphs],
        segments: Optional[Segments] = None,
    ) -> Tensor:
        """Whole sequences (B, L), pads last -> features (B, L, D)."""
        lengths = None if source[1] is None else source[1].lengths
        inputs = self.embed(tokens), source[0], lengths, *(segments or (None, None))
        return self._whole(*inputs) if graphs is None else graphs.run(self._whole, *inputs)

    def _whole(
        self,
        x: Tensor,
        source: Optional[Tensor],
        lengths: Optional[Tensor],
        queries: Optional[Tensor],
        keys: Optional[Tensor],
    ) -> Tensor:
        padding = None if lengths is None else Alignment(lengths, source.size(1))
        segments = None if queries is None else Segments(queries, keys)
        return self.run(x, self.start(), source=(source, padding), segments=segments)[0]

    def packed_weights(self) -> PackedWeights:
        """The weights prepared for single tokens: once, if fairseq has said that training is over."""
        return self._pack() if self.cache is None else self.cache.get(self, self._pack)

    def _pack(self) -> PackedWeights:
        with weights_in(self.cfg.generation_weights):
            if self.adaptive_softmax is not None or self.output_dense is not None:
                output = self.output_layer
            elif self.output_projection is None:
                tied = type(self.embed_tokens) is TokenEmbedding
                output = ready_linear(self.embed_tokens.weight, self.output_bias) if tied else self.output_layer
            else:
                output = packed(self.output_projection)
            return PackedWeights(tuple(block.step() for block in self.blocks), output)

    def output_layer(self, features: Tensor) -> Tensor:
        """Features (..., D) -> scores (..., V), or the features themselves for an adaptive softmax."""
        if self.adaptive_softmax is not None:
            return features
        x = self.before_projection(features)
        if self.output_projection is None:
            return F.linear(x, self.embed_tokens.weight, self.output_bias)
        return self.output_projection(x)

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
        if not self.training and UNCHECKED not in net_output[1]:  # in training, fairseq checks gradients
            check_numbers(probs.amin(-1))  # NaN if any score of the row is NaN
        return probs

    def reorder_incremental_state(self, incremental_state: Dict[str, Any], new_order: Tensor) -> None:
        """Replaces row i by row new_order[i], in place; callers that fork a search must clone the tensors first."""
        state = self.get_incremental_state(incremental_state, STATE)
        if isinstance(state, GraphState):
            state.reorder(new_order)
        elif state is not None:
            drops = self.dropout_module.on or any(layer.dropout_module.on for layer in self.layers)
            self.set_incremental_state(incremental_state, STATE, reorder(state, new_order, alike=not drops))

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
        self.cache = PackedWeightsCache()
        self.graphs = StepGraphs() if self.cfg.cuda_graphs == "auto" else None


def check_numbers(log_probs: Tensor) -> None:
    """Raises an error where fairseq would report NaN or infinity as the loss, or ignore the tokens that cause it."""
    if not log_probs.sum(dtype=torch.float32).isfinite():
        raise FloatingPointError(
            "the model gives probabilities that are not finite (NaN or infinity): its training has diverged; take an "
            "earlier checkpoint, and train with a smaller --lr"
        )


class MegaLanguageDecoder(MegaDecoder):
    """Tokens (B, L) -> scores (B, L, V); with `target` (B, L), its log-probabilities (B, L, 1).

    In eval mode a sequence is processed in pieces: only the activations of one piece are in memory at a time, and with
    `target` only one number per token is kept.
    """

    group: Optional[SequenceGroup] = None  # the processes that share each sequence (models/sequence_parallel.py)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        features_only: bool = False,
        target: Optional[Tensor] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        if incremental_state is not None:
            return super().forward(prev_output_tokens, None, incremental_state, features_only)
        if target is not None:
            return self.run_in_pieces(prev_output_tokens, target).unsqueeze(-1), {"attn": [None], TARGETS_ONLY: []}
        if not features_only and self.adaptive_softmax is None:
            self._check_size(prev_output_tokens.numel())
        x = self.run_in_pieces(prev_output_tokens)
        return (x if features_only else self.output_layer(x)), {"attn": [None]}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: Optional[Dict[str, Any]] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Extra]:
        """Tokens (B, L) -> features (B, L, D)."""
        if incremental_state is not None:
            return super().extract_features(prev_output_tokens, None, incremental_state)
        return self.run_in_pieces(prev_output_tokens), {"attn": [None]}

    def run_in_pieces(self, tokens: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Features (B, L, D) or, with targets, their log-probabilities (B, L). Pieces do not change the result."""
        padding = tokens.eq(self.padding_idx)
        graphs = self.graphs_for(tokens)
        align = self.alignment(padding, graphs)
        if align is not None:  # then no real token follows a pad, and no piece needs a mask
            tokens, target = align.front(tokens), None if target is None else align.front(target)
        (batch, length), blocks, out = tokens.shape, self.start(), None
        size = length if self.training else self.piece_length(batch)
        for start in range(0, length, size):
            piece = slice(start, start + size)
            if self.group is not None and target is not None:
                x, blocks = piece_in_slices(self, tokens[:, piece], target[:, piece], blocks)
            elif self.training:
                x = self.train_pass(tokens, NO_SOURCE, graphs)
            else:
                x, blocks, _ = self.run(self.embed(tokens[:, piece]), blocks)
            if self.group is None and target is not None:
                x = self.target_log_probs(x, target[:, piece])
            if size >= length:
                out = x
                break
            if out is None:  # one tensor for all pieces: many small ones would fragment the heap
                out = x.new_empty(batch, length, *x.shape[2:])
            out[:, piece] = x
        if align is None:
            return out
        return align.back(out).masked_fill(padding.view(*padding.shape, *[1] * (out.dim() - 2)), 0.0)

    def piece_length(self, batch: int) -> int:
        """The length of a piece: whole chunks if at least one fits, or a slice with whole chunks for each process."""
        size, chunk = max(1, self.cfg.piece_tokens // batch), self.cfg.decoder_chunk_size
        if self.group is not None:
            return self.group.size * (size if chunk == -1 else max(chunk, size - size % chunk))
        return size if chunk == -1 or size < chunk else size - size % chunk

    def target_log_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Features (B, L, D), targets (B, L) -> log-probabilities (B, L) in float32, without a (B, L, V) tensor."""
        x, wanted = features.flatten(0, 1), target.flatten()
        if self.adaptive_softmax is not None:
            return adaptive_log_probs(self.adaptive_softmax, x, wanted).view(target.shape)
        x, projection = self.before_projection(x), self.output_projection
        if projection is None:
            log_probs = target_log_probs(x, [self.embed_tokens.weight], wanted, self.output_bias)
        elif is_plain(projection):
            log_probs = target_log_probs(x, [projection.weight], wanted, projection.bias)
        else:
            log_probs = -F.cross_entropy(projection(x).float(), wanted, reduction="none")
        return log_probs.view(target.shape)

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Extra], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        """Probabilities (B, L, V); if only those of targets are computed, the others are not valid.

        fairseq's scorers pass a sample and only read the probabilities of its targets, so they get one number per
        token, expanded to V without a copy.
        """
        x, extra = net_output[0], net_output[1]
        if TARGETS_ONLY in extra:
            of_targets = x
        elif self.adaptive_softmax is not None and sample is not None:
            of_targets = self.target_log_probs(x, sample["target"]).unsqueeze(-1)
        else:
            self._check_size(x.numel() // x.size(-1))
            return super().get_normalized_probs(net_output, log_probs)
        check_numbers(of_targets)
        return (of_targets if log_probs else of_targets.exp()).expand(*of_targets.shape[:-1], len(self.dictionary))

    def set_chunk_size(self, chunk_size: int) -> None:
        """Changes the chunk size, -1 for none; --model-overrides does so when a model is loaded."""
        mixers = [layer.mixer.with_chunk(None if chunk_size == -1 else chunk_size) for layer in self.layers]
        for layer, mixer in zip(self.layers, mixers):
            layer.mixer = mixer
        self.cfg.decoder_chunk_size = chunk_size
        if self.group is not None:
            share_sequences(self, self.group)

    def share_sequences(self, group: SequenceGroup) -> None:
        """Divides each sequence with targets among the processes of `group`, which must all get the same batches."""
        share_sequences(self, group)

    def _check_size(self, tokens: int) -> None:
        """Raises an error if the scores of all types for a long stream would not fit into memory."""
        if not self.training and tokens * len(self.dictionary) > MOST_SCORES:
            raise ValueError(
                f"scores of {len(self.dictionary):,} types for each of {tokens:,} tokens do not fit into memory; "
                "choose --criterion mega_lm_cross_entropy, which only needs those of targets, or --valid-block size:N"
            )
