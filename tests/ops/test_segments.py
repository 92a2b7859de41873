"""Attention between texts of several lines equals its definition pair by pair, in values and all gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS, tiles
from mega_fairseq.ops.attention.scores import laplace, relu2
from mega_fairseq.ops.attention.segments import NEAR, Bias, Segments, attention_in_segments, places
from tests.ops.helpers import assert_same, kept_for_backward, noise, with_gradients

FIRST, COLUMNS = -3, 8  # distances of offsets in the table: some pairs are outside


def inputs(queries, keys, groups=3):
    return {
        "q": noise(groups, queries, 4, seed=0, grad=True),
        "k": noise(groups, keys, 4, seed=1, grad=True),
        "v": noise(groups, keys, 5, seed=2, grad=True),
        "table": noise(2 * NEAR + 1, COLUMNS, seed=3, grad=True),
    }


def drawn_segments(queries, keys, groups=3):
    """Places in any order, since targets of a source follow each other."""
    return Segments(*(torch.randint(0, 6, (groups, n, 2), dtype=torch.int32) for n in (queries, keys)))


def pair_by_pair(segments, function, window, padding):
    def attend(q, k, v, table):
        rows = []
        for g in range(len(q)):
            for query, (line, offset) in zip(q[g], segments.queries[g].tolist()):
                scores, seen = [], []
                for j, (key_line, key_offset) in enumerate(segments.keys[g].tolist()):
                    near = max(-NEAR, min(NEAR, key_line - line)) + NEAR
                    column = max(0, min(COLUMNS - 1, key_offset - offset - FIRST))
                    if (window is None or abs(key_line - line) <= window) and not (
                        padding is not None and padding[g, j]
                    ):
                        scores.append((query @ k[g, j], table[near, column]))
                        seen.append(j)
                if not seen:
                    rows.append(0.0 * (query.sum() + k[g].sum() + table.sum() + v[g, 0]))
                    continue
                products, biases = map(torch.stack, zip(*scores))
                if function == "softmax":
                    weights = torch.softmax(products / 2 + biases, 0)
                else:
                    weights = {"relu2": relu2, "laplace": laplace}[function](products / len(seen) + biases)
                rows.append(weights @ v[g, seen])
        return torch.stack(rows).view(*q.shape[:2], -1)

    return attend


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 4), (7, 9)])
def test_tiles_equal_pairs_in_values_and_all_gradients(queries, keys, function, padded, window, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_SCORES", 24)
    torch.manual_seed(0)
    segments, x = drawn_segments(queries, keys), inputs(queries, keys)
    padding = torch.rand(3, keys) < 0.3 if padded else None

    def ours(q, k, v, table):
        return attention_in_segments(q, k, v, segments, Bias(table, FIRST, window), function, padding)

    assert_same(with_gradients(ours, x), with_gradients(pair_by_pair(segments, function, window, padding), x))


def test_dropout_leaves_the_mean_and_only_its_mask_outlives_a_tile():
    segments, (*qkv, table) = drawn_segments(20, 30), inputs(20, 30).values()
    rest = (segments, Bias(table, FIRST, None), "softmax", None)
    torch.manual_seed(1)
    mean = sum(attention_in_segments(*qkv, *rest, 0.5).detach() for _ in range(500)) / 500
    torch.testing.assert_close(mean, attention_in_segments(*qkv, *rest), atol=0.2, rtol=0)
    assert max(kept_for_backward(lambda: attention_in_segments(*qkv, *rest))) < 3 * 20 * 30


@st.composite
def texts(draw):
    """Which tokens start a segment, which are real, and sizes of pieces: (B, n), (B, n), a list."""
    length = draw(st.integers(1, 12))
    rows = [draw(st.lists(st.sampled_from("ts_"), min_size=length, max_size=length)) for _ in range(2)]
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return rows, [slice(*cut) for cut in zip(cuts, cuts[1:])]


@given(text=texts(), within=st.booleans())
def test_places_count_no_pads_and_continue_in_any_pieces(text, within):
    rows, pieces = text
    starts, real = (torch.tensor([[test(token) for token in row] for row in rows]) for test in ("s".__eq__, "_".__ne__))
    before, found = torch.tensor([[0, -1]], dtype=torch.int32), []
    for piece in pieces:
        found.append(places(starts[:, piece], real[:, piece], before, within))
        before = found[-1][:, -1]
    for row, ours in zip(rows, torch.cat(found, 1).tolist()):
        line, offset = 0, -1
        for token, place in zip(row, ours):
            if token == "s":
                line, offset = line + 1, 0 if within else offset + 1
            elif token == "t":
                offset += 1
            assert place == [line, offset]
