"""The decoder of language models: long sequences in pieces, and log-probabilities of their targets alone."""

from typing import Any, Dict, Optional, Tuple

from torch import Tensor

from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.models.decoder import Extra, MegaDecoder
from mega_fairseq.modules.finite import check_numbers
from mega_fairseq.modules.projection import projected_log_probs
from mega_fairseq.modules.sequence_parallel import SequenceParallelState, share_sequences
from mega_fairseq.ops.log_probs import target_log_probs
from mega_fairseq.ops.sequence_parallel import SequenceGroup

TARGETS_ONLY = "targets_only"  # key of `extra` if forward returned log-probabilities of targets
MOST_SCORES = 2**30  # in memory at once: 4 GB in float32


class MegaLanguageDecoder(MegaDecoder):
    """Tokens (B, L) -> scores (B, L, V); with `target` (B, L), its log-probabilities (B, L, 1).

    In eval mode a sequence is processed in pieces: only the activations of one piece are in memory at a time, and with
    `target` only one number per token is kept.
    """

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
            return self.next_tokens(prev_output_tokens, None, incremental_state, features_only)
        if target is None and not features_only and self.adaptive_softmax is None:
            self._check_size(prev_output_tokens.numel())
        tokens, padding = prev_output_tokens, prev_output_tokens.eq(self.padding_idx)  # (B, L)
        passes = self.passes.for_batch(self, tokens)
        align = self.alignment(padding, passes)
        if align is not None:  # then no real token follows a pad, and no piece needs a mask
            tokens, target = align.front(tokens), None if target is None else align.front(target)
        if self.training and (self.group is None or target is None):
            x = passes.form_of(self.whole)(self.embed(tokens))  # (B, width, D)
            x = x if target is None else self.target_log_probs(x, target)  # (B, width)
        else:
            x = self.run_in_pieces(tokens, target)
        if align is not None:
            x = align.back(x).masked_fill(padding.view(*padding.shape, *[1] * (x.dim() - 2)), 0.0)
        if target is not None:
            return x.unsqueeze(-1), {"attn": [None], TARGETS_ONLY: []}
        return (x if features_only else self.output_layer(x)), {"attn": [None]}

    def run_in_pieces(self, tokens: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Features (B, L, D) or, with targets, their log-probabilities (B, L). Pieces do not change the result."""
        (batch, length), blocks, out = tokens.shape, self.first_blocks(), None
        size = length if self.training else self.piece_length(batch)
        for start in range(0, length, size):
            piece = slice(start, start + size)
            if self.group is not None and target is not None:
                x, blocks = self.piece_in_slices(tokens[:, piece], target[:, piece], blocks)
            else:
                x, blocks, _ = self.run(self.embed(tokens[:, piece]), blocks)
                x = x if target is None else self.target_log_probs(x, target[:, piece])
            if size >= length:
                return x
            if out is None:  # one tensor for all pieces: many small ones would fragment the heap
                out = x.new_empty(batch, length, *x.shape[2:])
            out[:, piece] = x
        return out

    @property
    def chunk_size(self) -> Optional[int]:
        """Of attention in all layers; None if it is not in chunks."""
        return None if self.cfg.decoder_chunk_size == -1 else self.cfg.decoder_chunk_size

    def piece_in_slices(self, tokens: Tensor, target: Tensor, blocks: Tuple) -> Tuple[Tensor, Tuple]:
        """The log-probabilities (B, L) of a piece's targets and the next states; each process computes a slice."""
        slices = self.group.divide(tokens.size(1), self.chunk_size or 1)
        start, stop = slices.bounds
        own = slice(start, stop) if start < stop else slice(0, 1)  # with an empty slice, any token takes part
        before = tuple(SequenceParallelState(slices, block) for block in blocks)
        x, after, _ = self.run(self.embed(tokens[:, own]), before)
        log_probs = self.target_log_probs(x, target[:, own])
        return slices.join(log_probs[:, : stop - start]), after

    def piece_length(self, batch: int) -> int:
        """The length of a piece: whole chunks if at least one fits, or a slice with whole chunks for each process."""
        size = max(1, self.cfg.piece_tokens // batch)
        if self.chunk_size is not None and (size >= self.chunk_size or self.group is not None):
            size = max(self.chunk_size, size - size % self.chunk_size)
        return size if self.group is None else self.group.size * size

    def target_log_probs(self, features: Tensor, target: Tensor) -> Tensor:
        """Features (B, L, D), targets (B, L) -> log-probabilities (B, L) in float32, without a (B, L, V) tensor."""
        x, wanted = features.flatten(0, 1), target.flatten()
        if self.adaptive_softmax is not None:
            return adaptive_log_probs(self.adaptive_softmax, x, wanted).view(target.shape)
        x, projection = self.before_projection(x), self.output_projection
        if projection is None:
            log_probs = target_log_probs(x, [self.embed_tokens.weight], wanted, self.output_bias)
        else:
            log_probs = projected_log_probs([projection], x, wanted)
        return log_probs.view(target.shape)

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Extra], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        """Probabilities (B, L, V); if only those of targets are computed, the others are not valid.

        fairseq's scorers pass a sample and only read the probabilities of its targets, so they get one number per
        token, expanded to V without a copy.
        """
        x, extra = net_output[0], net_output[1] or ()
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
        """Changes --decoder-chunk-size, -1 for no chunks; --model-overrides does so when a model is loaded."""
        mixers = [layer.mixer.with_chunk(None if chunk_size == -1 else chunk_size) for layer in self.layers]
        for layer, mixer in zip(self.layers, mixers):
            layer.mixer = mixer
        self.cfg.decoder_chunk_size = chunk_size
        if self.group is not None:
            self.share_sequences(self.group)

    def share_sequences(self, group: SequenceGroup) -> None:
        """Divides each sequence with targets among the processes of `group`, which must all get the same batches."""
        for block in self.blocks:
            share_sequences(block)
        if self.cfg.decoder_layerdrop > 0.0:
            raise ValueError(
                "--decoder-layerdrop drops other layers in each process, and processes that share a sequence exchange "
                "states in each layer; leave it out, or leave out --sequence-parallel-size"
            )
        self.group = group

    def _check_size(self, tokens: int) -> None:
        """Raises an error if the scores of all types for a long stream would not fit into memory."""
        if not self.training and tokens * len(self.dictionary) > MOST_SCORES:
            raise ValueError(
                f"scores of {len(self.dictionary):,} types for each of {tokens:,} tokens do not fit into memory; "
                "choose --criterion mega_lm_cross_entropy, which only needs those of targets, or --valid-block size:N"
            )
