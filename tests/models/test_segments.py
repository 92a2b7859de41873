"""Cross attention that depends on lines: positions in each line, and windows of lines (broken twins included)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.models import MegaTransformerConfig, MegaTransformerModel
from mega_fairseq.models import decoder as decoders
from mega_fairseq.ops.attention.segments import Segments, places
from tests.helpers.golden_models import task
from tests.helpers.profiles import examples
from tests.helpers.small_models import EOS, SEPARATORS, TYPES, padded, translation_model

BIASES = ("simple", "rotary", "rope", "alibi", "t5", "none")
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
words = st.lists(st.integers(7, 30), min_size=1, max_size=4)


def texts(most=4):
    return st.lists(words, min_size=1, max_size=most)


def source(*rows):
    return batch([[*sum(([*line, SEPARATORS[0]] for line in lines), [])[:-1], EOS] for lines in rows])


def target(*rows):
    """The decoder's input."""
    return batch([[EOS, *sum(([*line, SEPARATORS[1]] for line in lines), [])[:-1]] for lines in rows])


def batch(rows):
    return padded(list(map(torch.tensor, rows)), left=True)


def model(positions="sentence", window=-1, **options):
    return translation_model(cross_attention_positions=positions, cross_attention_window=window, **options)


def twin(original, **options):
    """A model with the same weights and other options."""
    made = model(**options)
    made.load_state_dict({k: v.clone() for k, v in original.state_dict().items() if "segment_scores" not in k}, False)
    return made


@torch.no_grad()
def logits(made, source, target):
    return made(source, None, target)[0]


@pytest.mark.parametrize("bias", BIASES)
@given(sources=texts(2), targets=texts(2))
@examples(4)
def test_positions_in_the_only_line_equal_those_in_the_text(bias, sources, targets):
    options = {"rel_pos_bias": bias, "decoder_chunk_size": 3}
    original = model(**options)
    x = source(sources[:1]), target(targets[:1])
    ours, theirs = logits(original, *x), logits(twin(original, positions="token", **options), *x)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("positions", ["token", "sentence"])
@given(sources=texts(), targets=texts(6))
@examples(5)
def test_a_window_of_all_lines_equals_none(positions, sources, targets):
    window, whole = model(positions, len(sources) - 1), model(positions)
    torch.testing.assert_close(
        logits(window, source(sources), target(targets)), logits(whole, source(sources), target(targets)), **CLOSE
    )


def test_a_smaller_window_and_several_lines_change_the_outputs():
    x = source([[7, 8], [9], [10, 11]]), target([[7], [9, 8], [10]])
    whole = model()
    for other in (model(window=1), twin(whole, positions="token")):
        assert (logits(whole, *x) - logits(other, *x)).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------- the band


def attended(made, sources, targets):
    """Which lines of the source each target token attends to: a set for each line of the target."""
    x, out = target(targets), made.encoder(source(sources))
    keys = out["encoder_out"][0].detach().requires_grad_()  # (m, 1, D)
    features, _ = made.decoder.extract_features(x, {**out, "encoder_out": [keys]})
    ends = source(sources)[0].eq(SEPARATORS[0])
    lines, found = (ends.cumsum(0) - ends.long()).tolist(), {}
    for line, feature in zip(x[0].eq(SEPARATORS[1]).cumsum(0).tolist(), features[0]):
        (grad,) = torch.autograd.grad(feature.square().sum(), keys, retain_graph=True)
        seen = {place for place, size in zip(lines, grad.abs().sum((1, 2)).tolist()) if size}
        found[line] = found.get(line, set()) | seen
    return found


def check_band(window, sources, targets):
    made, last = model(window=window, decoder_layers=1, decoder_chunk_size=1, decoder_n_dim=1), len(sources) - 1
    found = attended(made, sources, targets)
    for line, seen in found.items():
        here = min(line, last)
        band = set(range(max(0, here - window), min(last, here + window) + 1))
        assert seen == band


@given(window=st.integers(0, 2), sources=texts(), targets=texts(6))
@examples(10)
def test_tokens_attend_to_lines_in_the_window_only_whatever_the_number_of_lines(window, sources, targets):
    check_band(window, sources, targets)


LINES = [[7], [8, 9], [10], [11]]


def test_places_of_other_lines_are_detected(monkeypatch):
    with monkeypatch.context() as patch:  # separators belong to the line before them
        patch.setattr(decoders, "places", lambda starts, *rest: places(starts.roll(1, 1), *rest))
        with pytest.raises(AssertionError):
            check_band(0, LINES, LINES)
    with monkeypatch.context() as patch:  # lines beyond the last of the source see nothing
        patch.setattr(torch, "minimum", lambda a, b: a)
        with pytest.raises(AssertionError):
            check_band(0, LINES[:2], LINES)


# ------------------------------------------------------------------------------------------- time and batches


@given(sources=texts(), targets=texts(6), data=st.data())
@examples(10)
def test_later_tokens_and_separators_change_nothing_before_them(sources, targets, data):
    made, x = model(window=1, decoder_chunk_size=3), target(targets)
    cut = data.draw(st.integers(1, x.size(1)))
    other = x.clone()
    other[:, cut:] = SEPARATORS[1]
    torch.testing.assert_close(
        logits(made, source(sources), x)[:, :cut], logits(made, source(sources), other)[:, :cut], rtol=0, atol=1e-6
    )


@torch.no_grad()
def check_pieces(sources, targets, others, stops):
    made, x = model(window=1, decoder_chunk_size=3), target(targets)
    whole, out = logits(made, source(sources), x), made.encoder(source(sources, others))
    state, batch = {}, torch.cat([x, x.roll(1, 1)])
    for stop in sorted({*(stop for stop in stops if stop < x.size(1)), x.size(1)}):
        piece = made.decoder(batch[:, :stop], out, state)[0][:1]
        torch.testing.assert_close(piece, whole[:, stop - piece.size(1) : stop], **CLOSE)


@given(sources=texts(), targets=texts(6), others=texts(), stops=st.sets(st.integers(1, 8)))
@examples(10)
def test_pieces_with_pads_equal_the_whole_text_alone(sources, targets, others, stops):
    check_pieces(sources, targets, others, stops)


def test_places_that_start_anew_in_each_piece_are_detected(monkeypatch):
    monkeypatch.setattr(Segments, "last", lambda places: places._replace(queries=0 * places.queries[:, -1:] - 1))
    with pytest.raises(AssertionError):
        check_pieces(LINES, LINES, LINES, range(1, 9))


# ------------------------------------------------------------------------------------------- limits


def test_a_table_of_scores_for_a_line_serves_texts_of_any_length():
    sizes = {"max_source_positions": 4, "max_target_positions": 4, "encoder_chunk_size": 3, "decoder_chunk_size": 3}
    made = model(**sizes)
    assert min(made.max_positions()) > 1_000_000
    assert logits(made, source(LINES * 3), target(LINES * 3)).isfinite().all()


def test_a_model_with_positions_in_the_text_may_be_the_start():
    made, start, line = model(), model("token"), (source([[7, 8, 9]]), target([[10, 7]]))
    made.load_state_dict(start.state_dict())
    torch.testing.assert_close(logits(made, *line), logits(start, *line), **CLOSE)


def test_a_task_without_lines_is_refused():
    cfg = MegaTransformerConfig(cross_attention_window=1, max_source_positions=9, max_target_positions=9)
    with pytest.raises(ValueError, match="--cross-attention-window"):
        MegaTransformerModel.build_model(cfg, task(TYPES))
