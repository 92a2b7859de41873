"""Every hypothesis has as many lines as its source, for any model, batch and search, in graphs too."""

import functools
import math
from argparse import Namespace
from typing import Any, List

import pytest
import torch
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_fairseq.models import step_graph
from mega_fairseq.tasks import MegaDocumentTranslationConfig, MegaDocumentTranslationTask, generator
from tests.helpers.commands import on_each_side
from tests.helpers.golden_models import PAD, dictionary, task
from tests.helpers.recorder import recorded
from tests.helpers.small_models import EOS, TYPES, padded, translation_model

SEPARATOR = TYPES - 1


def documents_task(**options: Any) -> MegaDocumentTranslationTask:
    words = [dictionary(SEPARATOR) for _ in range(2)]
    return MegaDocumentTranslationTask(MegaDocumentTranslationConfig(**options), *words)


@functools.lru_cache(maxsize=None)
def prepared(name: str) -> Any:
    """A random model; `model.bias` is added to the log-probabilities of the separator and eos."""
    if name == "transformer":
        torch.manual_seed(0)
        sizes = Namespace(**on_each_side(layers=1, embed_dim=16, ffn_embed_dim=16, attention_heads=2))
        base_architecture(sizes)
        model = TransformerModel.build_model(sizes, task(TYPES)).eval()
    else:
        model = translation_model(decoder_chunk_size=8, encoder_chunk_size=8, rel_pos_bias="rotary")
    model.make_generation_fast_()
    probs, model.bias = model.decoder.get_normalized_probs_scriptable, torch.zeros(TYPES)
    model.decoder.get_normalized_probs_scriptable = lambda *call: probs(*call) + model.bias
    return model


def batch(documents: List[List[int]], left: bool = True, seed: int = 0) -> Any:
    """Sources with lines of these lengths."""
    rows = []
    for number, lengths in enumerate(documents):
        random = torch.Generator().manual_seed(100 * seed + number)
        lines = [[*torch.randint(4, SEPARATOR, (n,), generator=random).tolist(), SEPARATOR] for n in lengths]
        rows.append(torch.tensor(sum(lines, [])[:-1] + [EOS]))
    tokens = padded(rows, left)
    return {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}}


def search(name: str, sample: Any, options: Any, kind: Any = None) -> Any:
    """The hypotheses of a generator of fairseq, or of ours."""
    ours, model = documents_task(line_length_a=options["a"], line_length_b=options["b"]), prepared(name)
    model.bias[SEPARATOR], model.bias[EOS] = options["bias"]
    args = Namespace(beam=options["beam"], max_len_b=options["max_len_b"])
    generator = ours.build_generator([model], args, seq_gen_cls=kind)
    lines = int(sample["net_input"]["src_tokens"].eq(SEPARATOR).sum(1).max()) + 1
    generator.max_len = min(generator.max_len, 2 * lines + options["room"])
    return ours.inference_step(generator, [model], sample)


def split(tokens: List[int]) -> List[List[int]]:
    *tokens, end = tokens
    assert end == EOS
    assert EOS not in tokens
    lines: List[List[int]] = [[]]
    for token in tokens:
        lines.append([]) if token == SEPARATOR else lines[-1].append(token)
    return lines


def assert_lines(documents: List[List[int]], found: Any, options: Any) -> None:
    assert len(found) == len(documents)
    for lengths, hypotheses in zip(documents, found):
        assert len(hypotheses) == options["beam"]
        for hypothesis in hypotheses:
            assert hypothesis["positional_scores"].isfinite().all()
            assert math.isfinite(hypothesis["score"])
            lines = split(hypothesis["tokens"].tolist())
            assert len(lines) == len(lengths)
            for line, length in zip(lines, lengths):
                assert 0 < len(line) <= max(1, int(options["a"] * length + options["b"]))


def assert_equal(found: Any, other: Any) -> None:
    for one, two in zip(found, other):
        assert [each["tokens"].tolist() for each in one] == [each["tokens"].tolist() for each in two]
        scores = [torch.stack([torch.as_tensor(each["score"]) for each in hypotheses]) for hypotheses in (one, two)]
        torch.testing.assert_close(*scores, atol=2e-5, rtol=1e-5)


DOCUMENTS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)
PREFERENCES = st.sampled_from([0.0, 0.0, 2.0, 50.0, -50.0])
OPTIONS = st.fixed_dictionaries(
    {
        "beam": st.integers(1, 5),
        "a": st.sampled_from([0.0, 0.5, 2.0]),
        "b": st.sampled_from([0.0, 1.5, 4.0]),
        "bias": st.tuples(PREFERENCES, PREFERENCES),
        "max_len_b": st.sampled_from([1, 200]),
        "room": st.integers(0, 40),  # in the model's positions
    }
)


def check(name: str, kinds: Any, examples: int = 40) -> None:
    @given(DOCUMENTS, OPTIONS, st.booleans(), st.integers(0, 9))
    @settings(max_examples=examples, deadline=None)
    def property_of(documents, options, left, seed):
        sample = batch(documents, left, seed)
        found = [search(name, sample, options, kind) for kind in kinds]
        assert_lines(documents, found[0], options)
        if len(found) > 1:
            assert_equal(*found)

    property_of()


@pytest.fixture
def graphs(monkeypatch):
    """Stands in for a GPU: replays the recorded operations of each step."""
    monkeypatch.setattr(step_graph, "capture_on", lambda device: recorded)
    monkeypatch.setattr(generator, "steps_between_looks", lambda device: 3)


@pytest.mark.parametrize("name", ["transformer", "mega"])
def test_each_hypothesis_of_fairseqs_search_has_the_lines_of_its_source(name):
    check(name, [SequenceGenerator])


def test_our_search_finds_the_hypotheses_of_fairseqs():
    check("mega", [None, SequenceGenerator])


def test_our_search_in_graphs_finds_the_hypotheses_of_fairseqs(graphs):
    check("mega", [None, SequenceGenerator])
