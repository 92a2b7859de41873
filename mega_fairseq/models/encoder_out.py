"""The dictionary that fairseq passes from encoder to decoder, with sources shared by the rows of a beam search."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.padding import Alignment, Padding

EncoderOut = Dict[str, List[Any]]


def encoder_out(
    x: Tensor, tokens: Tensor, padding: Tensor, align: Optional[Alignment], states: Sequence[Tensor]
) -> EncoderOut:
    """The dictionary for an encoder's output and states (B, L, D), its tokens (B, L), and its pads if it has any."""
    return {
        "encoder_out": [x.transpose(0, 1)],  # (L, B, D), fairseq's order
        "encoder_padding_mask": [] if align is None else [padding],
        "alignment": [] if align is None else [align],  # of the padding
        "encoder_embedding": [],
        "encoder_states": [state.transpose(0, 1) for state in states],
        "src_tokens": [tokens],
        "src_lengths": [],
        "rows": [],  # (R,) the sentence of each row, in beam search
    }


def aligned_source(out: Optional[EncoderOut]) -> Tuple[Optional[Tensor], Optional[Padding], Optional[Tensor]]:
    """The encoder's output (S, m, D) with real tokens first, its pads, and its tokens (S, m).

    Consecutive rows may share a source.
    """
    if out is None:
        return None, None, None
    source, tokens = out["encoder_out"][0].transpose(0, 1), out["src_tokens"][0]  # (m, S, D) -> (S, m, D)
    padding = out["encoder_padding_mask"][0] if out["encoder_padding_mask"] else None
    rows = out["rows"][0] if out["rows"] else None
    if rows is not None and not _in_beams(rows, source.size(0)):
        source, tokens = source.index_select(0, rows), tokens.index_select(0, rows)
        padding = None if padding is None else padding.index_select(0, rows)
    if padding is None:
        return source, None, tokens
    align = out["alignment"][0]
    if padding is not out["encoder_padding_mask"][0]:
        align = Alignment.of(padding)._replace(width=align.width)
    return align.front(source), align.done(), align.front(tokens)


def _in_beams(rows: Tensor, sources: int) -> bool:
    """Whether all sources have the same number of consecutive rows."""
    beams, rest = divmod(rows.numel(), sources)
    return rest == 0 and torch.equal(rows, torch.arange(sources, device=rows.device).repeat_interleave(beams))


def over_given_source(attn: Tensor, out: EncoderOut) -> Tensor:
    """Attention (B, n, width) over aligned sources -> (B, n, m) over the sources as given."""
    if not out["encoder_padding_mask"]:
        return attn
    padding = out["encoder_padding_mask"][0]
    if out["rows"]:
        padding = padding.index_select(0, out["rows"][0])
    align = Alignment.of(padding)._replace(width=attn.size(2))  # of the aligned batch
    return align.back(attn.transpose(1, 2)).transpose(1, 2).contiguous()  # fairseq's criteria view it
