"""Every hypothesis has as many lines as its source, for any model, batch and search, in graphs too."""

import functools
from argparse import Namespace
from typing import Any, List

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from mega_fairseq.acceleration import step_graph
from mega_fairseq.tasks import beam_search, generator, line_counts
from mega_fairseq.tasks.beam_search import BeamSearch
from mega_fairseq.tasks.line_counts import LineSearch, keep_lines
from tests.helpers.golden_models import PAD
from tests.helpers.hypotheses import assert_lines, plain
from tests.helpers.recorder import recorded
from tests.helpers.small_models import (
    EOS,
    SEPARATOR,
    TYPES,
    documents_task,
    net_input,
    stock_transformer,
    translation_model,
    windows_of,
)


@functools.lru_cache(maxsize=None)
def prepared(name: str) -> Any:
    """A random model; `model.bias` is added to the log-probabilities of the separator and eos."""
    if name == "transformer":
        model = stock_transformer()
    else:
        model = translation_model(decoder_chunk_size=8, encoder_chunk_size=8, rel_pos_bias="rotary")
    model.make_generation_fast_()
    probs, model.bias = model.decoder.get_normalized_probs_scriptable, torch.zeros(TYPES)
    model.decoder.get_normalized_probs_scriptable = lambda *call: probs(*call) + model.bias
    return model


def batch(documents: List[List[int]], left: bool = True, seed: int = 0) -> Any:
    """Sources with lines of these lengths."""
    return {"net_input": net_input(windows_of(documents, seed), left)}


def search(name: str, sample: Any, options: Any, kind: Any = None, most: int = 0) -> Any:
    """The hypotheses of a generator of fairseq, or of ours, with positions for at least `most` lines."""
    ours, model = documents_task(line_length_a=options["a"], line_length_b=options["b"]), prepared(name)
    model.bias[SEPARATOR], model.bias[EOS] = options["bias"]
    args = Namespace(beam=options["beam"], max_len_b=options["max_len_b"])
    generator = ours.build_generator([model], args, seq_gen_cls=kind)
    lines = int(sample["net_input"]["src_tokens"].eq(SEPARATOR).sum(1).max()) + 1
    generator.max_len = min(generator.max_len, 2 * max(lines, most) + options["extra"])
    return ours.inference_step(generator, [model], sample)


def assert_equal(found: Any, other: Any) -> None:
    for one, two in zip(found, other):
        assert [each["tokens"].tolist() for each in one] == [each["tokens"].tolist() for each in two]
        scores = [torch.stack([torch.as_tensor(each["score"]) for each in hypotheses]) for hypotheses in (one, two)]
        torch.testing.assert_close(*scores, atol=2e-5, rtol=1e-5)


DOCUMENTS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)
WITHOUT_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # for broken twins, which fail
PREFERENCES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 50.0, -50.0])
OPTIONS = st.fixed_dictionaries(
    {
        "beam": st.integers(1, 5),
        "a": st.sampled_from([0.0, 0.5, 2.0]),
        "b": st.sampled_from([0.0, 1.5, 4.0]),
        "bias": st.tuples(PREFERENCES, PREFERENCES),
        "max_len_b": st.sampled_from([1, 200]),
        "extra": st.integers(0, 40),  # in the model's positions
    }
)


def check(name: str, kinds: Any) -> None:
    @given(DOCUMENTS, OPTIONS, st.booleans(), st.integers(0, 9))
    @settings(max_examples=40, deadline=None, phases=WITHOUT_SHRINKING, report_multiple_bugs=False)
    def property_of(documents, options, left, seed):
        sample = batch(documents, left, seed)
        found = [search(name, sample, options, kind) for kind in kinds]
        assert_lines(documents, plain(found[0]), options["a"], options["b"])
        assert {len(hypotheses) for hypotheses in found[0]} == {options["beam"]}
        assert all(each["positional_scores"].isfinite().all() for hypotheses in found[0] for each in hypotheses)
        if len(found) > 1:
            assert_equal(*found)

    property_of()


@pytest.fixture
def graphs(monkeypatch):
    """Stands in for a GPU: replays the recorded operations of each step, which a model keeps."""
    prepared.cache_clear()
    monkeypatch.setattr(step_graph, "capture_on", lambda device: recorded)
    monkeypatch.setattr(generator, "steps_between_looks", lambda device: 3)
    yield
    prepared.cache_clear()


@pytest.mark.parametrize("name", ["transformer", "mega"])
def test_each_hypothesis_of_fairseqs_search_has_the_lines_of_its_source(name):
    check(name, [SequenceGenerator])


def test_our_search_finds_the_hypotheses_of_fairseqs():
    check("mega", [None, SequenceGenerator])


def test_our_search_in_graphs_finds_the_hypotheses_of_fairseqs(graphs):
    check("mega", [None, SequenceGenerator])


def may_be_blank(log_probs, ends, left, length, longest, steps):
    return keep_lines(log_probs, ends, left, length + 1, longest, steps)


def may_end_early(log_probs, ends, left, length, longest, steps):
    return keep_lines(log_probs, ends, 0 * left, length, longest, steps)


def may_run_out_of_steps(log_probs, ends, left, length, longest, steps):
    return keep_lines(log_probs, ends, left, length, longest, steps + 1)


@pytest.mark.parametrize("rule", [may_be_blank, may_end_early, may_run_out_of_steps])
@pytest.mark.parametrize("module", [line_counts, beam_search], ids=["fairseq", "ours"])
def test_a_rule_that_allows_too_much_is_detected(monkeypatch, rule, module):
    monkeypatch.setattr(module, "keep_lines", rule)
    with pytest.raises((AssertionError, RuntimeError)):
        check("mega", [SequenceGenerator if module is line_counts else None])


@pytest.mark.parametrize("name", ["left", "length"])
def test_lines_that_do_not_follow_the_beams_are_detected(monkeypatch, graphs, name):
    step = BeamSearch.step

    def forgetful(self, *call, **options):
        old = self.state[name].clone()
        step(self, *call, **options)
        ended = self.tokens == self.rules.separator
        new = old - ended.long() if name == "left" else (old + 1).masked_fill(ended, 0)
        self.state[name].copy_(new)

    monkeypatch.setattr(BeamSearch, "step", forgetful)
    documents = [[3, 1, 4], [2], [5, 2, 2, 1]]
    options = {"beam": 4, "a": 0.5, "b": 4.0, "bias": (2.0, 2.0), "max_len_b": 200, "extra": 40}
    ours, fairseqs = (search("mega", batch(documents), options, kind) for kind in (None, SequenceGenerator))
    with pytest.raises(AssertionError):
        assert_equal(ours, fairseqs)


# ------------------------------------------------------------------------------------------ independence of the batch


def check_alone() -> None:
    @given(DOCUMENTS, OPTIONS, st.integers(0, 9), st.randoms(use_true_random=False))
    @settings(max_examples=30, deadline=None, phases=WITHOUT_SHRINKING, report_multiple_bugs=False)
    def property_of(documents, options, seed, random):
        sample = batch(documents, True, seed)
        order = list(range(len(documents)))
        random.shuffle(order)
        others = dict(sample["net_input"])
        others["src_tokens"] = torch.stack([moved_pads(row) for row in others["src_tokens"][order]])
        others["src_lengths"] = others["src_lengths"][order]
        most = max(map(len, documents))
        together, shuffled = (search("mega", each, options, most=most) for each in (sample, {"net_input": others}))
        assert_equal([together[number] for number in order], shuffled)
        for number, row in enumerate(sample["net_input"]["src_tokens"]):
            tokens = row[row != PAD].unsqueeze(0)
            alone = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.size(1)])}}
            assert_equal([together[number]], search("mega", alone, options, most=most))

    property_of()


def moved_pads(row: Any) -> Any:
    return torch.cat([row[row != PAD], row[row == PAD]])


def test_a_document_has_the_same_translation_in_any_batch():
    check_alone()


def test_a_document_has_the_same_translation_in_any_batch_in_graphs(graphs):
    check_alone()


def test_a_limit_that_depends_on_the_batch_is_detected(monkeypatch):
    begin = LineSearch.begin

    def shortest(self, sources, limit):
        most = begin(self, sources, limit)
        self.lines = self.lines._replace(limit=max(2 * int(self.lines.left.max()) + 1, most - len(sources)))
        return self.lines.limit

    monkeypatch.setattr(LineSearch, "begin", shortest)
    with pytest.raises(AssertionError):
        check_alone()


# ------------------------------------------------------------------------------------------ a model that keeps rules


def keeping_the_rules(lines: List[int], search: Any, *call: Any) -> Any:
    """A step of a search of fairseq, where tokens that break a rule are improbable."""
    _, log_probs, _, tokens, numbers = call
    beams = tokens.view(*log_probs.shape[:2], -1).tolist()
    for sentence, (number, of_sentence) in enumerate(zip(numbers.tolist(), beams)):
        for beam, (_, *before) in enumerate(of_sentence):
            last = before.count(SEPARATOR) == lines[number] - 1
            blank = not before or before[-1] == SEPARATOR
            breaking = [SEPARATOR, EOS] if blank else [SEPARATOR if last else EOS]
            log_probs[sentence, beam, breaking] -= 1000
    found = type(search).step(search, *call)
    search.broken |= bool((found[0] < -500).any())
    return found


def check_same() -> None:
    @given(DOCUMENTS, st.integers(1, 5), st.integers(0, 9))
    @settings(max_examples=30, deadline=None, phases=WITHOUT_SHRINKING, report_multiple_bugs=False)
    def property_of(documents, beam, seed):
        model, sample, results = prepared("mega"), batch(documents, True, seed), []
        model.bias[SEPARATOR] = model.bias[EOS] = 4.0
        for counts in ("free", "exact"):
            ours = documents_task(sentence_counts=counts, line_length_b=300)
            searching = ours.build_generator([model], Namespace(beam=beam, max_len_b=400), SequenceGenerator)
            searching.search.broken = False
            searching.search.step = functools.partial(keeping_the_rules, list(map(len, documents)), searching.search)
            results.append(ours.inference_step(searching, [model], sample))
            assume(counts == "exact" or not searching.search.broken)
        for free, exact in zip(*results):
            for one, other in zip(free, exact):
                assert one["tokens"].tolist() == other["tokens"].tolist()
                assert torch.equal(one["positional_scores"], other["positional_scores"])

    property_of()


def test_a_search_whose_candidates_keep_the_rules_finds_the_same_without_them():
    check_same()


def test_a_rule_that_forbids_too_much_is_detected(monkeypatch):
    def no_single_tokens(log_probs, ends, left, length, longest, steps):
        keep_lines(log_probs, ends, left, (length - 1).clamp(min=0), longest, steps)

    monkeypatch.setattr(line_counts, "keep_lines", no_single_tokens)
    with pytest.raises(AssertionError):
        check_same()


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("constraints", "ordered"),
        ("sampling", True),
        ("diverse_beam_groups", 2),
        ("diversity_rate", 0.5),
        ("match_source_len", True),
        ("prefix_size", 1),
        ("min_len", 5),
        ("no_repeat_ngram_size", 3),
    ],
)
def test_options_that_could_break_a_rule_are_refused_only_with_exact(name, value):
    words = Namespace(beam=2, **{name: value})
    with pytest.raises(ValueError, match=f"--sentence-counts exact does not support --{name.replace('_', '-')};"):
        documents_task().build_generator([prepared("mega")], words)
    documents_task(sentence_counts="free").build_generator([prepared("mega")], words)


@pytest.mark.parametrize(("ends", "extra", "said"), [(-50.0, 0, "of 2 windows"), (-50.0, 60, ""), (50.0, 1, "")])
def test_lines_that_are_shortened_for_lack_of_positions_are_reported(caplog, ends, extra, said):
    options = {"beam": 2, "a": 0.0, "b": 4.0, "bias": (ends, ends), "max_len_b": 200, "extra": extra}
    search("transformer", batch([[3, 3, 3], [3], [1, 1]]), options)
    assert ("--max-target-positions" in caplog.text) == bool(said)
    assert said in caplog.text


def test_more_lines_than_the_model_can_write_are_refused():
    ours, model = documents_task(), prepared("transformer")
    searching = ours.build_generator([model], Namespace(beam=2))
    with pytest.raises(ValueError, match="513 lines .* 1,023 tokens; lower --window-tokens"):
        ours.inference_step(searching, [model], batch([[1] * 513]))
