"""Language decoders whose sequences are divided over processes (--sequence-parallel-size)."""

from typing import Any, Tuple

from torch import Tensor

from mega_fairseq.modules.sequence_parallel import SequenceParallelState
from mega_fairseq.modules.sequence_parallel import share_sequences as share_sequences_of_block
from mega_fairseq.ops.sequence_parallel import SequenceGroup


def share_sequences(decoder: Any, group: SequenceGroup) -> None:
    """Divides each sequence with targets among the processes of `group`, which must all get the same batches."""
    for block in decoder.blocks:
        share_sequences_of_block(block)
    if decoder.cfg.decoder_layerdrop > 0.0:
        raise ValueError(
            "--decoder-layerdrop drops other layers in each process, and processes that share a sequence exchange "
            "states in each layer; leave it out, or leave out --sequence-parallel-size"
        )
    decoder.group = group


def piece_in_slices(decoder: Any, tokens: Tensor, target: Tensor, blocks: Tuple) -> Tuple[Tensor, Tuple]:
    """Log-probabilities (B, L) of a piece's targets and the next states. Each process computes a slice of the piece."""
    slices = decoder.group.divide(tokens.size(1), max(1, decoder.cfg.decoder_chunk_size))
    start, stop = slices.bounds
    own = slice(start, stop) if start < stop else slice(0, 1)  # with an empty slice, any token takes part
    before = tuple(SequenceParallelState(slices, block) for block in blocks)
    x, after, _ = decoder.run(decoder.embed(tokens[:, own]), before)
    log_probs = decoder.target_log_probs(x, target[:, own])
    return slices.join(log_probs[:, : stop - start]), after
