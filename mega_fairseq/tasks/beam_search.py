"""Beam search as operations on tensors of fixed shapes.

It follows fairseq's `SequenceGenerator` with `search.BeamSearch` operation by operation, so hypotheses and scores are
the same. But no step waits for the GPU, so a CUDA graph can contain it: instead of copying hypotheses from row to row,
each step records which beam every beam continues, and `hypotheses` follows these records back in the end.
"""

from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor

from mega_fairseq.tasks.line_counts import NEVER, Lines, keep_lines


class Rules(NamedTuple):
    """Which tokens are possible, and which cost extra."""

    pad: int
    unk: int
    eos: int
    min_len: int  # without eos
    unk_penalty: float
    separator: Optional[int] = None  # of lines, whose number is fixed by `BeamSearch.set_lines`

    def apply(self, log_probs: Tensor, search: "BeamSearch", first: bool, last: bool) -> None:
        """Changes the log-probabilities (R, V) of the next tokens; -inf makes one impossible.

        The state of a rule is a tensor in `search.state`, one part for each beam; see `BeamSearch.step` for when beams
        move. On a GPU it must not depend on Python numbers that change, since `step` may be replayed.
        """
        log_probs[:, self.pad].fill_(NEVER)
        if self.unk_penalty:
            log_probs[:, self.unk].sub_(self.unk_penalty)
        if last:
            log_probs[:, : self.eos].fill_(NEVER)
            log_probs[:, self.eos + 1 :].fill_(NEVER)
        elif first and self.min_len > 0:
            log_probs[:, self.eos].fill_(NEVER)
        elif self.min_len > 1:
            log_probs[:, self.eos].masked_fill_(search.number < self.min_len, NEVER)
        if self.separator is not None:
            left, length, longest, limit = (search.state[name] for name in LINES)
            by_beam = log_probs.view(*search.rows.shape, -1)
            ends = self.separator, self.eos
            keep_lines(by_beam, ends, left, length, longest, limit.unsqueeze(1) - search.number)


LINES = ("left", "length", "longest", "limit")  # see `keep_lines`
BY_STEP = ("words", "scores", "longest")  # with a place for each step


class BeamSearch:
    """The state of a search for S sentences with b beams each: R = S b rows, for at most `steps` steps."""

    def __init__(self, sentences: int, beams: int, steps: int, rules: Rules, device: torch.device):
        self.beams, self.steps, self.rules = beams, steps, rules
        self.number = torch.zeros(1, dtype=torch.long, device=device)  # of the next step
        self.rows = torch.arange(sentences * beams, device=device).view(sentences, beams)
        self.places = torch.arange(2 * beams, device=device)

        def state(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(sentences, *shape, dtype=dtype, device=device)

        self.state: Dict[str, Tensor] = {
            "tokens": state(beams),  # the newest ones
            "order": self.rows.clone(),  # the row that each row continues
            "totals": state(beams, dtype=torch.float),  # scores so far
            "count": state(),  # hypotheses
            "closed": state(beams, dtype=torch.bool),  # beams that only repeat a hypothesis, or all of a sentence
            "numbers": state(beams, dtype=torch.float),  # not finite once a log-probability was not
            "words": state(steps, 4, beams),  # of each step: tokens, parents, whether a hypothesis ends, its parent
            "scores": state(steps, 2, beams, dtype=torch.float),  # of each step: totals, scores of hypotheses
        }
        self.tokens, self.order, self.numbers = (self.state[name] for name in ("tokens", "order", "numbers"))
        if rules.separator is not None:
            self.state.update(left=state(beams), length=state(beams), longest=state(steps), limit=state())

    def set_lines(self, lines: Lines) -> None:
        self.state["left"].copy_(lines.left.unsqueeze(1))
        self.state["longest"][:, : lines.longest.size(1)] = lines.longest
        self.state["limit"].fill_(lines.limit)

    def done(self) -> Tensor:
        """(S,) which sentences have all their hypotheses."""
        return self.state["count"] >= self.beams

    def step(self, log_probs: Tensor, first: bool = False, last: bool = False) -> None:
        """Chooses the next tokens and the order of rows by log-probabilities (R, V), which it overwrites.

        At the first step all beams of a sentence are alike, so one of them counts; at the last one, only eos is left.
        """
        state, beams = self.state, self.beams
        finite = log_probs[:, self.rules.pad].view_as(self.rows)
        self.numbers.add_(finite.masked_fill(self.done().unsqueeze(1), 0.0))
        self.rules.apply(log_probs, self, first, last)
        types, log_probs = log_probs.size(1), log_probs.view(*self.rows.shape, -1)
        sums = log_probs[:, 0] if first else log_probs.add_(state["totals"].unsqueeze(2)).flatten(1)
        scores, index = sums.topk(2 * beams)  # (S, 2b), since half of them may be eos
        tokens, parents = index.remainder(types), index.div(types, rounding_mode="trunc")

        ends = tokens.eq(self.rules.eos) & scores.ne(NEVER)
        hypotheses = ends[:, :beams] & ~state["closed"]
        state["count"].add_(hypotheses.sum(1))
        ends[:, :beams].logical_or_(state["closed"])
        # The first b candidates that remain; if there are fewer, candidates that have ended fill the places.
        place, active = torch.where(ends, self.places + 2 * beams, self.places).topk(beams, largest=False)
        torch.logical_or(place >= 2 * beams, self.done().unsqueeze(1), out=state["closed"])
        ended, parent = parents[:, :beams], parents.gather(1, active)
        torch.gather(tokens, 1, active, out=state["tokens"])
        torch.gather(scores, 1, active, out=state["totals"])
        torch.add(self.rows[:, :1], parent, out=state["order"])
        words = torch.stack([state["tokens"], parent, hypotheses.long(), ended], 1)
        state["words"].index_copy_(1, self.number, words.unsqueeze(1))
        state["scores"].index_copy_(1, self.number, torch.stack([state["totals"], scores[:, :beams]], 1).unsqueeze(1))
        self.number.add_(1)
        if self.rules.separator is not None:
            new = state["tokens"] == self.rules.separator
            state["left"].copy_(state["left"].gather(1, parent) - new.long())
            state["length"].copy_((state["length"].gather(1, parent) + 1).masked_fill_(new, 0))

    def load(self, other: "BeamSearch", sentences: Optional[Tensor] = None) -> "BeamSearch":
        """Continues the search of these sentences of another one, or of all; further sentences of this one are done."""
        count = len(other.rows) if sentences is None else len(sentences)
        self.state["count"].fill_(self.beams)
        self.state["closed"].fill_(True)
        self.numbers.zero_()
        self.number.copy_(other.number)
        for name, tensor in self.state.items():
            new = other.state[name] if sentences is None else other.state[name].index_select(0, sentences)
            if name in BY_STEP:
                steps = min(self.steps, other.steps)
                tensor[:count, :steps] = new[:, :steps]
            else:
                tensor[:count] = new
        return self

    def hypotheses(self, sentences: List[int], steps: int, length_penalty: float) -> List[List[Dict[str, Any]]]:
        """Those of some sentences after this many steps, sorted by score, as fairseq's generator returns them.

        Their tensors are on the CPU, where commands read them.
        """
        words, scores = (self.state[name][:, :steps].cpu()[sentences] for name in ("words", "scores"))
        sentence, end, place = words[:, :, 2].nonzero().unbind(1)  # of each of H hypotheses
        beam = words[sentence, end, 3, place]
        tokens, totals = words.new_empty(len(end), steps), scores.new_empty(len(end), steps)  # (H, steps)
        for step in range(steps - 1, -1, -1):
            tokens[:, step] = words[sentence, step, 0, beam]
            totals[:, step] = scores[sentence, step, 0, beam]
            beam = torch.where(step < end, words[sentence, step, 1, beam], beam)
        last = torch.arange(len(end)), end
        tokens[last] = self.rules.eos
        totals[last] = scores[sentence, end, 1, place]
        each = totals.diff(dim=1, prepend=totals.new_zeros(len(end), 1))
        score = totals[last] / torch.tensor([(step + 1) ** length_penalty for step in end.tolist()])
        found: List[List[Dict[str, Any]]] = [[] for _ in sentences]
        parts = zip(sentence.tolist(), end.tolist(), tokens, score, each)
        for number, step, its_tokens, its_score, its_scores in parts:
            if len(found[number]) < self.beams:
                found[number].append(
                    {
                        "tokens": its_tokens[: step + 1],
                        "score": its_score,
                        "attention": torch.empty(0),
                        "alignment": torch.empty(0),
                        "positional_scores": its_scores[: step + 1],
                    }
                )
        return [sorted(each, key=lambda hypothesis: float(hypothesis["score"]), reverse=True) for each in found]
