"""fairseq's generator, with a beam search that need not wait for the GPU at each step.

On a GPU, a step of the decoder and a step of the search are two CUDA graphs; the host only looks every few steps which
sentences are done. Elsewhere the same search runs around the decoder's usual steps.
"""

import logging
from functools import partial
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from fairseq import search as fairseq_search
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from mega_fairseq.acceleration.cuda_graph import try_capture
from mega_fairseq.acceleration.step_graph import GraphState, StepGraph
from mega_fairseq.models.decoder import STATE, MegaDecoder
from mega_fairseq.modules.finite import check_numbers
from mega_fairseq.tasks.beam_search import BeamSearch, Rules
from mega_fairseq.tasks.line_counts import LineSearch

logger = logging.getLogger(__name__)

OPTIONS = {  # of searches that run in fairseq's generator
    fairseq_search.Sampling: "--sampling",
    fairseq_search.DiverseBeamSearch: "--diverse-beam-groups",
    fairseq_search.DiverseSiblingsSearch: "--diversity-rate",
    fairseq_search.LengthConstrainedBeamSearch: "--match-source-len",
    fairseq_search.LexicallyConstrainedBeamSearch: "--constraints",
}
logged: Set[str] = set()


def steps_between_looks(device: torch.device) -> int:
    """How many steps to take before the host, which then waits for a GPU, looks which sentences are done."""
    return 1 if device.type == "cpu" else 8


class MegaGenerator(SequenceGenerator):
    """Gives the same hypotheses and scores as fairseq's generator, which runs with options that this one lacks."""

    def _generate(
        self,
        sample: Dict[str, Any],
        prefix_tokens: Optional[Tensor] = None,
        constraints: Optional[Tensor] = None,
        bos_token: Optional[int] = None,
    ) -> List[List[Dict[str, Any]]]:
        if prefix_tokens is not None and not prefix_tokens.size(1):
            prefix_tokens = None
        option = self._missing_option(sample, prefix_tokens, constraints)
        if option is not None:
            if option not in logged:
                logger.info("generating with fairseq's search, since the faster one does not support %s", option)
                logged.add(option)
            found = super()._generate(sample, prefix_tokens, constraints, bos_token)
            for model in self.model.models:
                graphs = getattr(getattr(getattr(model, "decoder", None), "steps", None), "graphs", None)
                if graphs is not None:
                    graphs.check()
            return found

        source = sample["net_input"]["src_tokens"]
        longest = min(int(self.max_len_a * source.size(1) + self.max_len_b), self.max_len - 1)
        assert self.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"
        separator = self.search.ends[0] if isinstance(self.search, LineSearch) else None
        rules = Rules(self.pad, self.unk, self.eos, self.min_len, self.unk_penalty, separator)
        search = BeamSearch(source.size(0), self.beam_size, longest + 1, rules, source.device)
        if separator is not None:
            search.set_lines(self.search.lines)
        search.tokens.fill_(self.eos if bos_token is None else bos_token)
        encoder_out = self.model.forward_encoder(sample["net_input"])
        if encoder_out is not None:
            of_rows = torch.arange(source.size(0), device=source.device).repeat_interleave(self.beam_size)
            encoder_out = self.model.reorder_encoder_out(encoder_out, of_rows)[0]
        steps = Steps(self.model.single_model.decoder, encoder_out, search, self.temperature)

        penalty = self.len_penalty if self.normalize_scores else 0.0
        between_looks = steps_between_looks(source.device)
        found: List[Any] = [None] * source.size(0)
        remaining = list(range(source.size(0)))  # the sentences of the search
        while remaining:
            for _ in range(min(between_looks, longest + 1 - steps.count)):
                steps.run(last=steps.count == longest)
            done = steps.search.done().tolist()[: len(remaining)]
            check_numbers(steps.search.numbers)
            staying = [i for i, is_done in enumerate(done) if not is_done and steps.count <= longest]
            if len(staying) == len(remaining) or staying and between_looks > 1 and 2 * len(staying) > len(remaining):
                continue
            leaving = [i for i in range(len(remaining)) if i not in staying]
            for i, hypotheses in zip(leaving, steps.search.hypotheses(leaving, steps.count, penalty)):
                found[remaining[i]] = hypotheses
            remaining = [remaining[i] for i in staying]
            if remaining:
                steps.keep(staying)
        return found

    def _missing_option(
        self, sample: Dict[str, Any], prefix_tokens: Optional[Tensor], constraints: Optional[Tensor]
    ) -> Optional[str]:
        """An option, or another property of this call, that only fairseq's generator has."""
        if type(self.search) not in (fairseq_search.BeamSearch, LineSearch):
            return OPTIONS.get(type(self.search), type(self.search).__name__)
        if self.model.models_size > 1:
            return "ensembles (several models in --path)"
        if not isinstance(getattr(self.model.single_model, "decoder", None), MegaDecoder):
            return f"models like {type(self.model.single_model).__name__}"
        missing = {
            "prefixes (--prefix-size, or text to continue)": prefix_tokens is not None,
            "--constraints": constraints is not None,
            "--match-source-len": self.match_source_len,
            "--no-repeat-ngram-size": self.repeat_ngram_blocker is not None,
            "--lm-path": self.lm_model is not None,
            "tokens_to_suppress": self.token_indices_to_suppress is not None,
            "a beam of more than half of the dictionary": 2 * self.beam_size >= self.vocab_size,
            "inputs other than tokens": "src_tokens" not in sample["net_input"],
        }
        return next((option for option, applies in missing.items() if applies), None)


def log_probs(decoder: MegaDecoder, temperature: float, scores: Tensor) -> Tensor:
    """Of all types (R, V) in float32, without the check of `get_normalized_probs`, which waits for the GPU."""
    scores = scores if temperature == 1.0 else scores / temperature
    return decoder.get_normalized_probs_scriptable((scores.unsqueeze(1), None), True)[:, -1].float()


class Steps:
    """Steps of a decoder and a search, one after the other."""

    def __init__(self, decoder: MegaDecoder, encoder_out: Any, search: BeamSearch, temperature: float):
        self.decoder, self.encoder_out, self.search, self.temperature = decoder, encoder_out, search, temperature
        self.log_probs = partial(log_probs, decoder, temperature)
        self.incremental: Dict[str, Any] = {}
        self.count = 0
        self.moving = False  # whether the decoder's state has not followed `search.order` yet

    def run(self, last: bool) -> None:
        decoder, state = self.decoder, self.decoder.get_incremental_state(self.incremental, STATE)
        graphs = decoder.steps.graphs
        if graphs is not None:
            if state is None:
                ready = graphs.begin(decoder, self.encoder_out, self.search.rows.numel())
            else:
                ready = graphs.ready(decoder, state, self.search.rows.device)
            if ready is not None:
                decoder.set_incremental_state(self.incremental, STATE, ready)
                self._replay(ready, last)
                return
        if self.moving:
            decoder.reorder_incremental_state(self.incremental, self.search.order.view(-1))
        scores = decoder.forward(self.search.tokens.view(-1, 1), self.encoder_out, self.incremental)[0][:, -1]
        self.search.step(self.log_probs(scores), first=self.count == 0, last=last)
        self.count, self.moving = self.count + 1, True

    def _replay(self, state: GraphState, last: bool) -> None:
        graph = state.graph
        stored, choose_first, choose = self._stored(graph)
        if self.search is not stored:
            rows = self.search.rows.numel()
            graph.tokens[:rows] = self.search.tokens.view(-1, 1)
            if self.moving:
                graph.order[:rows] = self.search.order.view(-1)
            self.search, self.moving = stored.load(self.search), False
        state.advance()
        if last:
            stored.step(self.log_probs(graph.scores[: stored.rows.numel()]), first=self.count == 0, last=True)
        elif self.count == 0:
            choose_first()
        else:
            choose()
        self.count += 1

    def _stored(self, graph: StepGraph) -> Tuple[BeamSearch, Any, Any]:
        """A search with storage of its own that reads and writes that of a graph; replays of its steps."""
        search, key = self.search, (self.search.beams, self.search.rules, self.temperature)
        if graph.search is not None and graph.search[0] == key and graph.search[1].steps >= search.steps:
            return graph.search[1:]
        most = max(64, 1 << (search.steps - 1).bit_length())
        stored = BeamSearch(graph.size.rows // search.beams, search.beams, most, search.rules, search.rows.device)
        rows, log_probs = stored.rows.numel(), self.log_probs

        def choose(first: bool = False) -> None:  # without this object, which holds the state that uses the graph
            stored.step(log_probs(graph.scores[:rows]), first)
            graph.tokens[:rows] = stored.tokens.view(-1, 1)
            graph.order[:rows] = stored.order.view(-1)

        steps = [partial(choose, True), choose]
        replays, reason = try_capture(lambda: graph.capture(steps))
        if replays is None:
            logger.warning("searching without CUDA graphs, which is slower: %s", reason)
        graph.order.copy_(graph.rows)  # capturing runs the step
        graph.search = (key, stored, *(replays or steps))
        return graph.search[1:]

    def keep(self, sentences: List[int]) -> None:
        """Ends the search of all other sentences."""
        search, kept = self.search, torch.tensor(sentences, device=self.search.rows.device)
        order = search.order if self.moving else search.rows
        self.decoder.reorder_incremental_state(self.incremental, order.index_select(0, kept).view(-1))
        self.moving = False
        smaller = BeamSearch(len(sentences), search.beams, search.steps, search.rules, kept.device)
        self.search = smaller.load(search, kept)


def generator_class(args: Any) -> Optional[type]:
    """The class for fairseq's `build_generator`; None lets fairseq choose its own."""
    return None if getattr(args, "print_alignment", False) else MegaGenerator
