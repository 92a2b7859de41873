"""The page's search chooses, token by token, as the runtime's does, on candidates that hypothesis finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_runtime.decoder import Candidates
from mega_runtime.lines import LineRules
from mega_runtime.search import Options, Search, Special
from tests.helpers.page import Node, twin
from tests.helpers.profiles import examples

TYPES, PAD, EOS, UNK, SEPARATOR = 14, 1, 2, 3, 13
STEPS = 40


@st.composite
def cases(draw):
    """A search for one sentence, alone or with lines, and the log-probabilities of all types at each step."""
    beam = draw(st.integers(1, 5))
    options = {
        "beam": beam,
        "lenpen": draw(st.sampled_from([0.0, 0.6, 1.0, 1.7])),
        "unkpen": draw(st.sampled_from([0.0, -1.3, 2.0])),
    }
    longest = draw(st.integers(1, STEPS - 1))
    options["min_len"] = draw(st.integers(0, min(4, longest)))
    lines = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        source = [token for length in lengths for token in [*[4] * length, SEPARATOR]][:-1] + [EOS]
        limit = draw(st.integers(2 * len(lengths) - 1, STEPS - 1))
        lines = [
            source,
            SEPARATOR,
            SEPARATOR,
            draw(st.sampled_from([0.0, 1.0, 1.5])),
            draw(st.sampled_from([1.0, 3.0])),
            limit,
        ]
        options["min_len"] = 0
    random = np.random.default_rng(draw(st.integers(0, 9999)))
    scores = random.standard_normal((STEPS, beam, TYPES)) * draw(st.sampled_from([0.3, 2.0]))
    scores[..., EOS] += draw(st.sampled_from([-2.0, 0.0, 2.0]))
    coarse = draw(st.booleans())  # then many candidates are equal
    return options, longest, lines, (scores.round() if coarse else scores).astype(np.float32)


def python(options, longest, lines, scores):
    special = Special(PAD, EOS, UNK, None if lines is None else SEPARATOR)
    rules = None if lines is None else LineRules([lines[0]], *lines[1:], options["beam"])
    search = Search(np.array([longest]) if rules is None else rules.limit, Options(**options), special, rules)
    steps = []
    for each in scores:
        types = np.argsort(-each, axis=1, kind="stable")[:, : search.candidates]
        found = Candidates(np.take_along_axis(each, types, 1), types, each[:, special.asked])
        steps.append({name: value.ravel().tolist() for name, value in zip(("top", "types", "special"), found)})
        if not search.step(found).any():
            break
    return [[h.tokens, h.score] for h in search.hypotheses(0)], steps, int(search.longest[0])


def in_browser(node, options, longest, lines, steps):
    special = {"pad": PAD, "eos": EOS, "unk": UNK, **({} if lines is None else {"separator": SEPARATOR})}
    return node.ask("search", longest=longest, options=options, special=special, lines=lines, steps=steps)


def check(node, case, told=None):
    """Appends the number of settled tokens to `told`."""
    options, longest, lines, scores = case
    expected, steps, longest = python(options, longest, lines, scores)
    found = in_browser(node, options, longest, lines, steps)
    assert found["hypotheses"] == [[tokens, pytest.approx(score, rel=1e-12)] for tokens, score in expected]
    settled = found["settled"]
    assert all(tokens[: len(settled)] == settled for tokens, _ in expected)
    if told is not None:
        told.append(len(settled))


def test_hypotheses_and_scores_are_those_of_the_runtime(node):
    """Also what is settled before the end begins each hypothesis."""
    told = []
    given(cases())(examples(40)(lambda case: check(node, case, told)))()
    assert max(told) > 5


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("search.js", "Math.fround(score + total)", "score"),
        ("search.js", "one.score === other.score ? 0 : ", "one.score === other.score ? -1 : "),
        ("search.js", "parents[beam])", "parents[beam] * 0)"),
        ("search.js", "[token, scores[n]]", "[token, scores[n] - (n > 0)]"),
        ("lines.js", "2 * left >= this.limit - number", "2 * left > this.limit - number"),
        ("lines.js", "this.left[parent] - ", "this.left[row] - "),
    ],
)
def test_another_search_is_detected(tmp_path, file, old, new):
    with Node(twin(tmp_path / "page", file, old, new)) as node, pytest.raises((AssertionError, RuntimeError)):
        given(cases())(examples(40)(lambda case: check(node, case)))()


def test_settled_tokens_that_some_beams_do_not_share_are_detected(tmp_path):
    folder = twin(tmp_path / "page", "search.js", "while (beams.size > 1 &&", "while (beams.size > 2 &&")
    folder = folder / "search.js"
    folder.write_text(folder.read_text().replace("beams.size !== 1 ||", ""))
    with Node(folder.parent) as node, pytest.raises(AssertionError):
        given(cases())(examples(40)(lambda case: check(node, case)))()
