"""Beam search for hypotheses with as many lines as their sources, whatever the model prefers."""

from typing import NamedTuple, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.search import BeamSearch
from torch import Tensor

NEVER = -float("inf")


class Lines(NamedTuple):
    """The lines that the hypotheses of S sources must have."""

    left: Tensor  # (S,) separators
    longest: Tensor  # (S, L) most tokens of a line, the last line first
    limit: int  # of tokens before eos


def keep_lines(
    log_probs: Tensor, ends: Tuple[int, int], left: Tensor, length: Tensor, longest: Tensor, steps: Tensor
) -> None:
    """Sets the log-probabilities (S, b, V) of tokens to -inf after which the lines could not become those of `Lines`.

    `ends` are the separator and eos. A beam misses `left` (S, b) separators, and its line has `length` (S, b) tokens so
    far. `steps` (S, 1) tokens can follow this one: each further line takes one token and its end, at least.
    """
    blank, last = length == 0, left <= 0
    full = (length >= longest.gather(1, left.clamp(min=0))) | (2 * left >= steps)
    separator, eos = (log_probs[..., end].masked_fill(blank, NEVER) for end in ends)
    log_probs.masked_fill_(full.unsqueeze(2), NEVER)
    log_probs[..., ends[0]] = separator.masked_fill_(last, NEVER)
    log_probs[..., ends[1]] = eos.masked_fill_(~last, NEVER)


class LineSearch(BeamSearch):
    """fairseq's beam search, limited by `keep_lines`; a line has at most a n + b tokens for n of the source."""

    def __init__(self, dictionary: Dictionary, separators: Tuple[int, int], a: float, b: float):
        super().__init__(dictionary)
        self.separators, self.a, self.b = separators, a, b
        self.ends = separators[1], dictionary.eos()
        self.lines: Optional[Lines] = None

    def begin(self, sources: Tensor, limit: int) -> int:
        """Reads the lines of a batch; returns the most tokens before eos, at most `limit`."""
        ends = sources.eq(self.separators[0])
        left, tokens = ends.sum(1), ends | sources.eq(self.pad) | sources.eq(self.eos)
        lengths = left.new_zeros(len(sources), int(left.max()) + 1)
        lengths.scatter_add_(1, left.unsqueeze(1) - ends.cumsum(1), (~tokens).long())
        longest = (self.a * lengths + self.b).long().clamp(min=1)
        whole = (longest + 1).cumsum(1).gather(1, left.unsqueeze(1)) - 1
        if 2 * lengths.size(1) - 1 > limit:
            raise ValueError(
                f"a source has {lengths.size(1):,} lines and the model writes {limit:,} tokens; lower --window-tokens, "
                "or give --sentence-counts free"
            )
        self.lines = Lines(left, longest, min(limit, int(whole.max())))
        return self.lines.limit

    def prune_sentences(self, batch_idxs: Tensor) -> None:
        left, longest, limit = self.lines
        self.lines = Lines(left[batch_idxs], longest[batch_idxs], limit)

    def step(
        self,
        step: int,
        lprobs: Tensor,
        scores: Optional[Tensor],
        prev_output_tokens: Optional[Tensor] = None,
        original_batch_idxs: Optional[Tensor] = None,
        candidate_multiple: int = 2,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        left, longest, limit = self.lines
        ends = prev_output_tokens.eq(self.ends[0]).view(*lprobs.shape[:2], step + 1)
        length = step - (ends * torch.arange(step + 1, device=ends.device)).amax(2)
        steps = left.new_full((1, 1), limit - step)
        keep_lines(lprobs, self.ends, left.unsqueeze(1) - ends.sum(2), length, longest, steps)
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs, candidate_multiple)
