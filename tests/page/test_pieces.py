"""The page cuts text into the pieces that SentencePiece finds."""

import random

import pytest
import sentencepiece

from tests.helpers.page import Node, twin
from tests.helpers.pieces import pieces_model
from tests.helpers.recipes import small_bible

ODD = [
    "",
    "   ",
    " a  b ",
    "haaa baaa baaaaa",
    "\u2581a \u2581",
    "a\u3000b",
    "x\ty\nz\r\n",
    "e\u0301a\u0308 \u00e4 a\u0327\u0301",
    "\ufb01n",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 x",
    "\u200bzero\ufeffwidth",
    "\u2460\u2167 \u3300\u337f",
    "\uff76\uff9e \uff8a\uff9e",
    "\u1100\u1161\u11a8",
    "<s> </s> <unk>",
    "\ufffd\uffff\U0010ffff",
    "\U0001f1e9\U0001f1ea",
]
RANGES = [
    (0, 0x250),
    (0x300, 0x370),
    (0x1100, 0x1200),
    (0x2000, 0x2070),
    (0x3300, 0x3400),
    (0xFB00, 0x10000),
    (0x1F600, 0x1F640),
]


def texts(folder):
    chance = random.Random(1)
    signs = [chr(code) for first, stop in RANGES for code in range(first, stop)] + [" ", "\u2581"] * 200
    mixed = ["".join(chance.choices(signs, k=chance.randint(1, 30))) for _ in range(500)]
    plain = (small_bible(folder) / "train.de").read_text().split("\n")
    return [*ODD, *plain, *mixed, *(f"a{sign}b" for sign in signs)]


def test_blanks_that_are_kept_are_pieces(node, tmp_path):
    path = pieces_model(tmp_path, model_type="bpe", remove_extra_whitespaces=False)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode([*ODD, "\x1f"], out_type=str)
    assert node.ask("pieces", model=str(path), texts=[*ODD, "\x1f"]) == expected


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_are_those_of_sentencepiece(node, tmp_path, kind):
    given, path = texts(tmp_path), pieces_model(tmp_path, model_type=kind)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(given, out_type=str)
    found = node.ask("pieces", model=str(path), texts=given)
    assert [each for each in zip(given, found, expected) if each[1] != each[2]] == []


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("unigram", "sum > ends[end].score", "sum >= ends[end].score - 1"),
        ("unigram", '(this.addsSpace ? SPACE : "")', '""'),
        ("unigram", "found = { length: place + 1 - start,", "return { length: place + 1 - start,"),
        ("bpe", "scores[n] > scores[best]", "scores[n] >= scores[best]"),
        ("bpe", "if (best > 0) scores[best - 1]", "if (best < 0) scores[best - 1]"),
        ("bpe", "if (known || before)", "if (true)"),
    ],
)
def test_other_pieces_are_detected(tmp_path, kind, old, new):
    with Node(twin(tmp_path / "page", "pieces.js", old, new)) as node, pytest.raises(AssertionError):
        test_pieces_are_those_of_sentencepiece(node, tmp_path, kind)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"user_defined_symbols": "unto"}, "pieces of users or bytes"),
        ({"byte_fallback": True, "vocab_size": 400}, "pieces of users or bytes"),
        ({"treat_whitespace_as_suffix": True}, "blanks behind words"),
        ({"model_type": "char", "vocab_size": 60, "hard_vocab_limit": False}, "neither unigram nor BPE"),
    ],
)
def test_models_that_the_page_does_not_read_are_refused(node, tmp_path, options, words):
    with pytest.raises(RuntimeError, match=words):
        node.ask("pieces", model=str(pieces_model(tmp_path, **options)), texts=["a"])
