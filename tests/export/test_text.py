"""Text to types and back as fairseq does it; lines, paragraphs and batches keep their order and white space."""

import time

import pytest
import sentencepiece
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.data.byte_numbers import ByteNumbers
from mega_fairseq.export.folder import write_translation
from mega_runtime import Translator
from mega_runtime.text import Bytes, Pieces, Types, Words, sentences
from mega_runtime.translator import BLANK, in_order
from tests.helpers.exported import CHUNKS, SEARCHED, language, new_folder, ours, translation
from tests.helpers.pieces import pieces_model as pieces_of_chapters
from tests.helpers.profiles import examples
from tests.helpers.small_models import TYPES, translation_model

# ------------------------------------------------------------------------------------------- types


TEXTS = st.text(st.sampled_from("der HausHae \t\u2581\u00a0\u20ac\u0308"), max_size=20)


@given(text=TEXTS)
@examples(60)
def test_pieces_are_those_of_fairseq(pieces_model, text):
    theirs, here = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(pieces_model))), Pieces(pieces_model)
    types = theirs.encode(text).split()
    assert here.split(text) == types
    assert here.join(types) == theirs.decode(" ".join(types))


@given(text=TEXTS)
@examples(30)
def test_bytes_are_those_of_the_project(text):
    types = ByteNumbers(None).encode(text).split()
    assert Bytes().split(text) == types
    for given_types in (types, types[1:], ["<unk>", *types], [*types, "madeupword0000"]):
        assert Bytes().join(given_types) == ByteNumbers(None).decode(" ".join(given_types))


def test_words_are_separated_by_any_white_space():
    assert Words().split(" a\tb  c\u00a0d\u2028e ") == ["a", "b", "c", "d", "e"]
    assert Words().join(["a", "b"]) == "a b"


def test_types_that_are_not_known_are_unknown():
    types = translation()[1].source
    assert types.encode(["w1", "other", "w35", "</s>"]) == [5, 3, 39, 2]
    assert types.decode([5, 3, 39]) == ["w1", "<unk>", "w35"]


def test_many_unknown_pieces_of_all_texts_are_told_once(caplog):
    """As with a SentencePiece model of another training, where few pieces of each text are unknown."""
    for rate, expected in ((11, 0), (9, 1)):
        types = Types(["<s>", "<pad>", "</s>", "<unk>", "w1"], 3, 1)
        caplog.clear()
        for _ in range(60):
            types.encode(["other", *["w1"] * rate])
        assert [record.getMessage()[:20] for record in caplog.records] == ["20 of 200 pieces of "] * expected


def test_a_text_of_unknown_pieces_does_not_hide_those_of_all_texts(caplog):
    types = Types(["<s>", "<pad>", "</s>", "<unk>", "w1"], 3, 1)
    for text in (["other"], *[["other", "w1", "w1"]] * 60):
        types.encode(text)
    assert [record.getMessage()[:16] for record in caplog.records] == ["1 of 1 pieces of", "20 of 58 pieces "]


@pytest.mark.parametrize(
    ("given_text", "kind", "words"),
    [
        ("a\ud83d", ValueError, "surrogate"),
        ("w1 <pad>", ValueError, "<pad>; remove it"),
        (b"w1", TypeError, "is of type bytes; give str"),
        (None, TypeError, "is of type NoneType; give str"),
        (1, TypeError, "is of type int; give str"),
    ],
)
def test_what_is_no_text_is_refused(given_text, kind, words):
    """JSON, file names and arguments of commands can have surrogates."""
    for call in (translation()[1].translate, translation()[1].translate_paragraphs):
        with pytest.raises(kind, match=f"line 2 (.* )?{words}"):
            call(["w1", given_text])
    for call in (language()[1].continue_text, language()[1].score):
        with pytest.raises(kind, match=f"the text (.* )?{words}"):
            call(given_text)


# ------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        ("", [("", "")]),
        ("  ", [("  ", "")]),
        ("One.", [("One.", "")]),
        ("One. Two!  Three?\tFour", [("One.", " "), ("Two!", "  "), ("Three?", "\t"), ("Four", "")]),
        ("He said: \u201cYes.\u201d \u201cNo.\u201d", [("He said: \u201cYes.\u201d", " "), ("\u201cNo.\u201d", "")]),
        ("Mr. Smith met Dr. Jones. They left.", [("Mr. Smith met Dr. Jones.", " "), ("They left.", "")]),
        ("J. S. Bach lived. So what", [("J. S. Bach lived.", " "), ("So what", "")]),
        ("It cost 3.50 euros. e.g. this", [("It cost 3.50 euros. e.g. this", "")]),
        ("Am Tag, z.B. Um 9.", [("Am Tag, z.B. Um 9.", "")]),
        ("Am 3. Oktober 1990. Im 19. Jh.", [("Am 3. Oktober 1990.", " "), ("Im 19. Jh.", "")]),
        (
            "1. Eat. It cost \u20ac5. They ate 128. Ok",
            [("1. Eat.", " "), ("It cost \u20ac5.", " "), ("They ate 128.", " "), ("Ok", "")],
        ),
        ("Er kam usw. \u00fcber den Berg. \u00c4h", [("Er kam usw. \u00fcber den Berg.", " "), ("\u00c4h", "")]),
        ("\u10d0\u10d0. \u10d0\u10d0.", [("\u10d0\u10d0.", " "), ("\u10d0\u10d0.", "")]),
        ("\u2581Jesus \u2581wept . \u2581He", [("\u2581Jesus \u2581wept .", " "), ("\u2581He", "")]),
        (
            "\u2581am \u2581 3 . \u2581Tage . \u2581Mr . \u2581He",
            [("\u2581am \u2581 3 . \u2581Tage .", " "), ("\u2581Mr . \u2581He", "")],
        ),
        ("Wait\u2026 What?! (Really?) Yes", [("Wait\u2026", " "), ("What?!", " "), ("(Really?)", " "), ("Yes", "")]),
    ],
)
def test_paragraphs_are_cut_behind_sentences(paragraph, expected):
    assert [tuple(sentence) for sentence in sentences(paragraph)] == expected


@pytest.mark.parametrize("text", ["." * 100_000, "Z. B. " * 20_000, "1. A " * 20_000, '"!" ' * 20_000])
def test_floods_of_punctuation_take_no_longer_than_as_much_text(text):
    """In time that grows with the square of the length, they took a minute or more."""
    start = time.process_time()
    cut = sentences(text)
    assert time.process_time() - start < 5
    assert "".join(sentence.text + sentence.after for sentence in cut) == text


@given(st.text(st.sampled_from('Ab. !?\u2026"\u201d(\u00c4 \n\t1'), max_size=30))
@examples(60)
def test_the_sentences_of_a_paragraph_are_the_paragraph(paragraph):
    cut = sentences(paragraph)
    assert "".join(sentence.text + sentence.after for sentence in cut) == paragraph
    assert all(sentence.text.strip() for sentence in cut) or not paragraph.strip()


# ------------------------------------------------------------------------------------------- lines


LINES = ["w1 w2 w3", "", "w4", "w5 " * 30, " \t", "unknown", "w6 w7 w8 w9 w1"]


def test_short_lines_do_not_fill_a_batch_with_sentences(monkeypatch):
    ours, sizes = translation()[1], []
    monkeypatch.setattr(ours, "search", lambda batch: sizes.append(len(batch)) or [BLANK] * len(batch))
    ours.translate(["w1"] * 100 + ["w1 " * 31] * 40)
    assert sizes == [64, 36, 32, 8]


def test_lines_are_translated_in_their_order_each_as_alone():
    model, translator = translation(**SEARCHED["chunks"])
    found = translator.translate(LINES)
    assert [line.number for line in found] == list(range(len(LINES)))
    for text, line in zip(LINES, found):
        if not text.strip():
            assert (line.text, line.pieces, len(line.hypotheses), line.score) == ("", [], 1, 0.0)
            continue
        (alone,) = ours(translator, [translator.encode(text)])
        texts = [model.decoder.dictionary.string(tokens) for tokens, _ in alone]
        assert [t.text for t in line.hypotheses] == [" ".join(t.pieces) for t in line.hypotheses] == texts
        assert [t.score for t in line.hypotheses] == pytest.approx([score for _, score in alone], abs=1e-5)
    assert translator.translate([]) == []
    assert translator.translate([""])[0].text == ""


def test_parts_come_in_order_in_a_time_that_grows_with_their_number():
    count, start = 30_000, time.process_time()
    parts = [((0, 1), "b"), ((2, 0), "d"), ((0, 0), "a"), *(((3, place), "e") for place in reversed(range(count)))]
    found = list(in_order(parts, [range(2), range(0), range(1), range(count)]))
    assert found == [(range(2), ["a", "b"]), (range(0), []), (range(1), ["d"]), (range(count), ["e"] * count)]
    assert time.process_time() - start < 2  # a minute if each part asked for all others


def test_a_stream_gives_lines_before_it_reads_all():
    translator, read = translation(**SEARCHED["chunks"])[1], []

    def lines():
        for number in range(2500):
            read.append(number)
            yield "w1 w2"

    found = translator.stream(lines(), beam=1, max_len_b=1)
    next(found)
    assert len(read) == 1000
    assert len(list(found)) == 2499


def test_a_single_text_is_refused():
    translator = translation()[1]
    for call in (translator.translate, translator.translate_paragraphs, lambda text: list(translator.stream(text))):
        with pytest.raises(TypeError, match="give a list of texts"):
            call("w1 w2")


def test_a_line_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="line 2 has 401 tokens and the model reads 400; shorten it"):
        translation()[1].translate(["w1", "w1 " * 400])
    assert len(translation()[1].translate(["w1 " * 399], beam=1, max_len_b=3)) == 1


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_what_precedes_an_error_in_a_stream_is_translated(monkeypatch, size):
    translator, found = translation(**SEARCHED["chunks"])[1], []
    monkeypatch.setattr(translator, "buffer_size", size)

    def read():
        for line in translator.stream(iter(["w1 w2", "", "w3", "w1 " * 9000, "w4"])):
            found.append(line.number)

    with pytest.raises(ValueError, match="line 4 has 9,001 tokens"):
        read()
    assert sorted(found) == [0, 1, 2]


def test_an_error_in_a_list_comes_before_any_work(monkeypatch):
    translator = translation(**SEARCHED["chunks"])[1]
    monkeypatch.setattr(translator, "search", None)
    for call in (translator.translate, translator.translate_paragraphs, lambda lines: next(translator.stream(lines))):
        with pytest.raises(ValueError, match="line 2 has 9,001 tokens"):
            call(["w1", "w1 " * 9000])


def test_paragraphs_keep_their_white_space(monkeypatch):
    translator = translation(**SEARCHED["chunks"])[1]
    monkeypatch.setattr(type(translator.segmented), "join", lambda self, types: f"<{len(types)}>")
    paragraphs = ["W1 w2.  W3!\tW4 ", "", " ", "w5"]
    expected = [line.text for line in translator.translate(["W1 w2.", "W3!", "W4 ", "w5"])]
    assert translator.translate_paragraphs(paragraphs) == [
        f"{expected[0]}  {expected[1]}\t{expected[2]}", "<0>", "<0>", expected[3]
    ]  # fmt: skip


def test_pieces_of_bytes_are_joined_to_characters(pieces_model, monkeypatch, tmp_path):
    pieces = Pieces(pieces_of_chapters(tmp_path, vocab_size=400, byte_fallback=True))
    for text in ("der \u20ac Hase", "\U0001f600\u6c34", "der Hase"):
        assert pieces.join(pieces.split(text)) == text
    assert pieces.join(pieces.split("\u20ac")[:-1]) == "\ufffd"
    ours, given = translation()[1], ["\u2581der", "<0x0A>", "<0x09>", "\u2581Hase"]
    monkeypatch.setattr(ours, "segmented", pieces)
    monkeypatch.setattr(ours.target, "decode", lambda tokens: given)
    assert ours.decode(BLANK[0]).text == "der   Hase"
    assert pieces.join(given) == "der\n\t Hase"
    assert pieces.join(["\u2581der", "<0", "x", "41>", "<0x41>"]) == "der<0x41>A"
    assert Pieces(pieces_model).join(["<0x41>"]) == "<0x41>"


def test_pieces_are_joined_to_text(pieces_model):
    model, folder = translation_model(**CHUNKS), new_folder()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces_model))
    symbols = [processor.id_to_piece(number) for number in range(3, processor.vocab_size())]
    for dictionary in (model.encoder.dictionary, model.decoder.dictionary):
        dictionary.symbols[4 : 4 + len(symbols)] = symbols
    write_translation(folder, model, pieces=pieces_model)
    text = "der Hase  ist"
    (line,) = Translator(folder).translate([text], max_len_b=9)
    (pieces,) = Translator(folder, pieces=True).translate([" ".join(processor.encode(text, out_type=str))], max_len_b=9)
    assert line.pieces == pieces.pieces
    assert line.text == "".join(line.pieces).replace("\u2581", " ").strip()
    assert pieces.text == " ".join(pieces.pieces)
    assert len(symbols) < TYPES
