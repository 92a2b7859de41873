"""Text to the numbers of types, and back."""

import logging
import re
from itertools import groupby
from pathlib import Path
from typing import Any, Iterable, List, NamedTuple, Sequence, Set

from mega_runtime.folder import Folder

logger = logging.getLogger(__name__)
SPACE = "\u2581"  # SentencePiece's
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # its pieces of characters that have none, such as <0xE2> <0x82> <0xAC>
MANY = 20  # unknown pieces, of which some are in any text


def check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is of type {type(text).__name__}; give str")
    try:
        text.encode()
    except UnicodeEncodeError:  # such as "\ud83d" in JSON
        raise ValueError(f"{name} has a surrogate, which is half of a character; replace or remove it") from None


class Words:
    """Text that is segmented already: types separated by blanks."""

    def split(self, text: str) -> List[str]:
        return text.split()

    def join(self, types: Sequence[str]) -> str:
        return " ".join(types)


class Pieces:
    """Pieces of a SentencePiece model, as fairseq's --bpe sentencepiece makes them."""

    def __init__(self, path: Path):
        import sentencepiece  # here, since models of other texts do not need it

        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.has_bytes = self.model.is_byte(self.model.piece_to_id("<0x00>"))

    def split(self, text: str) -> List[str]:
        return " ".join(self.model.encode(text, out_type=str)).split()

    def join(self, types: Sequence[str]) -> str:
        """Bytes that are not UTF-8 become replacement characters. fairseq leaves pieces of bytes as they are."""
        if self.has_bytes:
            runs = groupby(types, key=lambda piece: BYTE.fullmatch(piece) is not None)
            types = [_characters(run) if of_bytes else "".join(run) for of_bytes, run in runs]
        return "".join(types).replace(SPACE, " ").strip()


def _characters(pieces: Iterable[str]) -> str:
    return bytes(int(BYTE.fullmatch(piece)[1], 16) for piece in pieces).decode(errors="replace")


class Bytes:
    """The numbers of UTF-8 bytes, as mega_fairseq's --bpe byte_numbers makes them."""

    def split(self, text: str) -> List[str]:
        return [str(number) for number in text.encode()]

    def join(self, types: Sequence[str]) -> str:
        """Types that are no bytes and bytes that are not UTF-8 become replacement characters."""
        return bytes(int(n) if n.isascii() and n.isdigit() and int(n) < 256 else 0xFF for n in types).decode(
            errors="replace"
        )


def segmenter(folder: Folder, segmented: bool) -> Any:
    """How a model's text becomes types; with `segmented`, it consists of types already."""
    kind = "words" if segmented else folder.config["text"]["kind"]
    if kind == "pieces":
        return Pieces(folder.path / "pieces.model")
    return {"words": Words, "bytes": Bytes}[kind]()


class Types:
    """The types of a dictionary, by number."""

    def __init__(self, types: Sequence[str], unk: int, pad: int):
        self.types, self.unk, self.pad = list(types), unk, pad
        self.read, self.unknown = 0, 0  # pieces of all texts
        self.warned: Set[str] = set()  # of which texts
        self.numbers = {name: number for number, name in enumerate(self.types)}

    def encode(self, types: Sequence[str], name: str = "the text") -> List[int]:
        """Numbers of types, with a warning if most pieces of a text are unknown, or a tenth of all pieces so far."""
        numbers = [self.numbers.get(each, self.unk) for each in types]
        if self.pad in numbers:  # training masks pads
            raise ValueError(f"{name} has the word {self.types[self.pad]}; remove it")
        unknown = numbers.count(self.unk)
        self.read, self.unknown = self.read + len(numbers), self.unknown + unknown
        if self.unknown >= MANY and 10 * self.unknown >= self.read:
            self._warn("all texts", self.unknown, self.read)
        elif unknown and 2 * unknown >= len(numbers):
            self._warn("a text", unknown, len(numbers))
        return numbers

    def _warn(self, where: str, unknown: int, read: int) -> None:
        if where not in self.warned:
            self.warned.add(where)
            logger.warning(
                f"{unknown:,} of {read:,} pieces of {where} are unknown to the model, so the answer is a guess; give "
                "text in the language of the training, split by its SentencePiece model, or segmented as there"
            )

    def decode(self, numbers: Sequence[int]) -> List[str]:
        return [self.types[number] for number in numbers]


# ------------------------------------------------------------------------------------------- sentences


# An end of a sentence: punctuation with closing quotes or brackets, before blanks and what may begin the next one. All
# punctuation marks at one place are tried once, from the first on.
END = re.compile(
    r"""(?<![.!?\u2026])([.!?\u2026]+['"\u2019\u201d\u201c\u00bb)\]]*)(\s+)(?=\u2581?['"\u2018\u201c\u201e\u00ab(\[]*([^\W_]))"""
)
# What ends with a full stop within a sentence: initials, abbreviations, and whole numbers of one or two digits, which
# are German ordinals ("am 3. Oktober") or count points. Longer numbers, such as years, end sentences.
WITHIN = re.compile(
    r"(?:(?:^|\W)(?:[^\W\d_]|[Mm]rs?|[Mm]s|[Dd]r|[Pp]rof|[Ss]t|[Nn]o|[Nn]r|[Vv]gl|[Bb]zw|[Cc]a|vs|etc|e\.g|i\.e|z\.B|d\.h)"
    r"|(?:^|\s)\d{1,2})\.$"
)
LONGEST = 24  # characters; what WITHIN finds is shorter, also in pieces


class Sentence(NamedTuple):
    text: str
    after: str  # the white space behind it


def sentences(paragraph: str) -> List[Sentence]:
    """Cuts a paragraph behind the ends of its sentences; joined again, they are the paragraph."""
    found, start = [], 0
    for end in END.finditer(paragraph):
        first = end.group(3)
        if first != first.title():  # in lower case; islower() is also true of Georgian, which has one case
            continue
        before = paragraph[max(start, end.end(1) - LONGEST) : end.end(1)]
        if SPACE in before:  # pieces
            before = before.replace(" ", "").replace(SPACE, " ")
        if end.group(1) == "." and WITHIN.search(before):
            continue
        found.append(Sentence(paragraph[start : end.end(1)], end.group(2)))
        start = end.end()
    return [*found, Sentence(paragraph[start:], "")] if start < len(paragraph) or not found else found
