"""The decoder of a language model: sequences of any length, in pieces with a carried state."""

import logging
import time
from typing import Any, Callable, Dict, Optional, Tuple

from torch import Tensor

from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.models.beam import DecoderState, ReadyOnce
from mega_fairseq.models.decoder import Extra, MegaDecoder, check_numbers
from mega_fairseq.modules.sequence_parallel import SequenceParallelState, check_shareable, share_sequences
from mega_fairseq.ops.log_probs import target_log_probs
from mega_fairseq.ops.padding import Alignment
from mega_fairseq.ops.sequence_parallel import SequenceGroup

logger = logging.getLogger(__name__)
TARGETS_ONLY = "targets_only"  # key of `extra` if forward returned log-probabilities of targets
SECONDS_BETWEEN_REPORTS = 30.0
MOST_SCORES = 2**30  # in memory at once: 4 GB in float32


class MegaLanguageDecoder(MegaDecoder):
    """Tokens (B, L) -> scores (B, L, V); with `target` (B, L), its log-probabilities (B, L, 1).

    In eval mode a sequence is processed in pieces: only the activations of one piece are in memory at a time, and with
    `target` only one number per token is kept.
    """

    DICTIONARY = "dict.txt"
    group: Optional[SequenceGroup] = None  # the processes that share each sequence

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
            x = self._piece_by_piece(prev_output_tokens, target)  # (B, L)
            return x.unsqueeze(-1), {"attn": [None], TARGETS_ONLY: []}
        if not features_only and self.adaptive_softmax is None:
            self._check_size(prev_output_tokens.numel())
        x, extra = self.extract_features(prev_output_tokens)
        return (x if features_only else self.output_layer(x)), extra

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
        return self._piece_by_piece(prev_output_tokens), {"attn": [None]}

    def _piece_by_piece(self, tokens: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Features (B, L, D) or, with targets, their log-probabilities (B, L). Pieces do not change the result."""
        if target is not None and self.group is not None:
            align = Alignment.where_needed(tokens.eq(self.padding_idx))
            if align is not None:  # slices are cut where no real token follows a pad
                return align.back(self._pieces(align.front(tokens), align.front(target), self._slice_of_piece))
            return self._pieces(tokens, target, self._slice_of_piece)
        return self._pieces(tokens, target, self._piece)

    def _pieces(self, tokens: Tensor, target: Optional[Tensor], compute: Callable[..., Any]) -> Tensor:
        (batch, length), found = tokens.shape, None
        size = length if self.training else self.piece_length(batch)
        if size >= length:
            return compute(tokens, target, self.start(), False)[0]
        state, reported = self.start(), time.monotonic()
        for start in range(0, length, size):
            stop = min(start + size, length)
            wanted = None if target is None else target[:, start:stop]
            piece, state = compute(tokens[:, start:stop], wanted, state, stop < length)
            if found is None:  # one tensor for all pieces: many small ones would fragment the heap
                found = piece.new_empty(batch, length, *piece.shape[2:])
            found[:, start:stop] = piece
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                logger.info(f"{stop * batch:,} of {length * batch:,} tokens")
                reported = time.monotonic()
        return found

    def _piece(
        self, tokens: Tensor, target: Optional[Tensor], state: DecoderState, more: bool
    ) -> Tuple[Tensor, DecoderState]:
        """Features or log-probabilities of a piece after `state`, and the next state; `more` pieces may follow."""
        x, _, state = self._advance(tokens, state, carry=more)
        return x if target is None else self.target_log_probs(x, target), state

    def _slice_of_piece(
        self, tokens: Tensor, target: Tensor, state: DecoderState, more: bool
    ) -> Tuple[Tensor, DecoderState]:
        """`_piece` with a slice computed in each process of `group`. All processes get all log-probabilities."""
        slices = self.group.divide(tokens.size(1), max(1, self.cfg.decoder_chunk_size))
        start, stop = slices.bounds
        own = slice(start, stop) if start < stop else slice(0, 1)  # with an empty slice, any token takes part
        blocks = [SequenceParallelState(slices, block) for block in state.blocks]
        x, _, state = self._advance(tokens[:, own], DecoderState(tuple(blocks), state.length), carry=False)
        log_probs = self.target_log_probs(x, target[:, own])
        return slices.join(log_probs[:, : stop - start]), state

    def piece_length(self, batch: int) -> int:
        """The length of a piece: whole chunks if at least one fits, or a slice with whole chunks for each process."""
        size, chunk = max(1, self.cfg.piece_tokens // batch), self.cfg.decoder_chunk_size
        if self.group is not None:
            return self.group.size * (size if chunk == -1 else max(chunk, size - size % chunk))
        return size if chunk == -1 or size < chunk else size - size % chunk

    def share_sequences(self, group: SequenceGroup) -> None:
        """Divides each sequence with targets among the processes of `group`, which must all get the same batches."""
        for layer in self.layers:
            share_sequences(layer)
        if self.cfg.decoder_layerdrop > 0.0:
            raise ValueError(
                "--decoder-layerdrop drops other layers in each process, and processes that share a sequence exchange "
                "states in each layer; leave it out, or leave out --sequence-parallel-size"
            )
        self.group = group

    def target_log_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Features (B, L, D), targets (B, L) -> log-probabilities (B, L) in float32, without a (B, L, V) tensor."""
        x, wanted = features.flatten(0, 1), target.flatten()
        if self.adaptive_softmax is not None:
            found = adaptive_log_probs(self.adaptive_softmax, x, wanted)
        else:
            found = target_log_probs(x, [self._output_weight()], wanted)
        return found.view(target.shape)

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Extra], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        """Probabilities (B, L, V); if only those of targets are computed, the others are not valid.

        fairseq's scorers pass a sample and only read the probabilities of its targets, so they get one number per
        token, expanded to V without a copy.
        """
        x, extra = net_output[0], net_output[1]
        if TARGETS_ONLY in extra:
            found = x
        elif self.adaptive_softmax is not None and sample is not None:
            found = self.target_log_probs(x, sample["target"]).unsqueeze(-1)
        else:
            self._check_size(x.numel() // x.size(-1))
            return super().get_normalized_probs(net_output, log_probs)
        check_numbers(found)
        return (found if log_probs else found.exp()).expand(*found.shape[:-1], len(self.dictionary))

    def make_generation_fast_(self, need_attn: Any = False, **options: Any) -> None:
        if need_attn:
            raise ValueError(
                "--print-alignment prints which source tokens each target token attends to, and a language model has "
                "no source; leave it out"
            )
        super().make_generation_fast_(**options)

    def _check_size(self, tokens: int) -> None:
        """Raises an error if the scores of all types for a long stream would not fit into memory."""
        if not self.training and tokens * len(self.dictionary) > MOST_SCORES:
            raise ValueError(
                f"scores of {len(self.dictionary):,} types for each of {tokens:,} tokens do not fit into memory; "
                "choose --criterion mega_lm_cross_entropy, which only needs those of targets, or --valid-block size:N"
            )

    def set_chunk_size(self, chunk_size: int) -> None:
        """Changes the chunk size, -1 for none; --model-overrides does so when a model is loaded."""
        mixers = [layer.mixer.with_chunk(None if chunk_size == -1 else chunk_size) for layer in self.layers]
        for layer, mixer in zip(self.layers, mixers):
            if self.group is not None:
                check_shareable(mixer)
            layer.mixer = mixer
        self.cfg.decoder_chunk_size = chunk_size
        if self.kept is not None:
            self.kept = ReadyOnce()  # the mixers are others, with the same parameters
