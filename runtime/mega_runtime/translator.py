"""Translation of lines and of documents."""

import logging
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Collection, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mega_runtime.decoder import MASKED, Decoder
from mega_runtime.folder import Folder, check_count
from mega_runtime.lines import LineRules, Places, longest_line, split
from mega_runtime.search import Hypothesis, Options, Search, Special
from mega_runtime.text import Sentence, Types, check_text, segmenter, sentences

logger = logging.getLogger(__name__)
BOS = "<s>"  # which fairseq leaves out of texts
BLANKS = str.maketrans("\t\n\r", "   ")
BLANK = [Hypothesis([2], 0.0)]  # of a source without tokens; the last token, eos, is never read
LOOK = 8  # steps from one look for lines that can no longer change to the next
LEAST = 16  # tokens that a sentence counts for in a batch: the scores of its next token take memory at any length
LEAVING = 8  # sentences that are done leave a batch when they are more than one in so many


class Translation(NamedTuple):
    """One hypothesis for a line."""

    text: str
    score: float
    pieces: List[str]


@dataclass(frozen=True)
class Line:
    """A translated line: its number, from 0, and its hypotheses, the best first."""

    number: int
    hypotheses: List[Translation]

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """Its score."""
        return self.hypotheses[0].score

    @property
    def pieces(self) -> List[str]:
        """Its tokens."""
        return self.hypotheses[0].pieces


class Translator:
    """An exported translation model, for any number of threads.

    `options` are those of `search.Options`, by default the folder's. With `pieces`, texts are segmented already.
    `buffer_size` texts are read before the first is translated, and batches of at most `batch_tokens` made of them.
    """

    kind = "translation model"

    def __init__(
        self,
        folder: Union[str, Path],
        threads: int = 1,
        batch_tokens: int = 1024,
        buffer_size: int = 1000,
        pieces: bool = False,
        exact_products: Optional[bool] = None,
        **options: Any,
    ):
        self.folder = Folder(folder, self.kind, threads, exact_products)
        self.config, self.batch_tokens, self.buffer_size = self.folder.config, batch_tokens, buffer_size
        for name, value in (("batch_tokens", batch_tokens), ("buffer_size", buffer_size)):
            check_count(name, value)
        self.special = Special(**self.config["special"])
        self.segmented, names = segmenter(self.folder, pieces), self.config["text"]
        self.source, self.target = (
            Types(self.folder.types(names[side]), self.special.unk, self.special.pad) for side in ("source", "target")
        )
        self.options = Options(**self.config["search"])
        self.options = self._chosen(options)
        self.encoder = self.folder.session("encoder.onnx")
        self.steps = self.folder.session("step.onnx")
        self.idle: List[Decoder] = []  # which no search uses; they keep their storage

    @contextmanager
    def _decoder(self) -> Iterator[Decoder]:
        """A decoder that no other search has, in another thread or between two lines of a stream."""
        try:
            decoder = self.idle.pop()
        except IndexError:
            decoder = Decoder(self.steps, self.config["decoder_chunk"])
        try:
            yield decoder
        except GeneratorExit:  # of a stream that is not read to its end
            self.idle.append(decoder)
            raise
        self.idle.append(decoder)  # not after an error: its storage may have numbers that are not finite

    # ---------------------------------------------------------------------------------------- lines

    def translate(self, texts: Iterable[str], **options: Any) -> List[Line]:
        """Translates texts, each alone, and returns them in their order. Blank ones stay blank."""
        return sorted(self.stream(texts, **options), key=lambda line: line.number)

    def stream(self, texts: Iterable[str], **options: Any) -> Iterator[Line]:
        """The same, in the order in which they are finished: some are there while others are not read yet."""
        if isinstance(texts, str):
            raise TypeError("texts is a single text; give a list of texts")

        def sources() -> Iterator[Tuple[int, List[int]]]:
            for number, text in enumerate(texts):
                yield number, self.encode(text, f"line {number + 1:,}")

        for number, hypotheses in self._in_batches(ready(texts, sources()), options):
            yield Line(number, [self.decode(each) for each in hypotheses])

    def translate_paragraphs(self, paragraphs: Iterable[str], **options: Any) -> List[str]:
        """Translates the sentences of each paragraph alone, and joins them with the same white space."""
        return list(self.stream_paragraphs(paragraphs, **options))

    def stream_paragraphs(self, paragraphs: Iterable[str], **options: Any) -> Iterator[str]:
        """The same, each as soon as it and all before it are finished."""
        if isinstance(paragraphs, str):
            raise TypeError("paragraphs is a single text; give a list of texts")
        cut: List[List[Sentence]] = []

        def sources() -> Iterator[Tuple[Tuple[int, int], List[int]]]:
            for number, paragraph in enumerate(paragraphs):
                check_text(paragraph, f"line {number + 1:,}")
                cut.append(sentences(paragraph))
                for place, sentence in enumerate(cut[-1]):
                    yield (number, place), self.encode(sentence.text, f"line {number + 1:,}")

        found = self._in_batches(ready(paragraphs, sources()), options)
        parts = ((key, self.decode(hypotheses[0]).text) for key, hypotheses in found)
        for each, texts in in_order(parts, cut):
            yield "".join(text + sentence.after for text, sentence in zip(texts, each))

    # ---------------------------------------------------------------------------------------- documents

    def translate_documents(self, documents: Iterable[Sequence[str]], **options: Any) -> List[List[str]]:
        """Translates documents, lists of lines; each has as many lines as before, and blank ones stay blank."""
        documents = list(documents)
        for document in documents:
            _check_document(document)
        found = [[""] * len(document) for document in documents]
        for number, line, text in self.stream_documents(documents, **options):
            found[number][line] = text
        return found

    def stream_documents(self, documents: Iterable[Sequence[str]], **options: Any) -> Iterator[Tuple[int, int, str]]:
        """Number of a document, number of a line in it, and its translation, as soon as it can no longer change."""
        settings = self.config["documents"]
        if settings is None:
            raise ValueError("the model translates single lines; give one of --task mega_document_translation")
        self._chosen(options)

        def sources() -> Iterator[Tuple[Tuple[int, List[int]], List[int]]]:
            line = 0  # in all documents, for errors
            for number, document in enumerate(documents):
                _check_document(document)
                encoded = [self.encode(text, f"line {line + n:,}") for n, text in enumerate(document, 1)]
                line += len(document)
                filled = [n for n, tokens in enumerate(encoded) if len(tokens) > 1]
                yield from (((number, [n]), tokens) for n, tokens in enumerate(encoded) if len(tokens) == 1)
                for window in windows([encoded[n] for n in filled], settings["window_tokens"]):
                    places, filled = filled[: len(window)], filled[len(window) :]
                    joined = [token for tokens in window for token in (*tokens[:-1], self.source_separator)]
                    yield (number, places), [*joined[:-1], self.special.eos]

        for keys, batch in self._batches(ready(documents, sources())):
            for window, line, tokens in self._lines(batch, options):
                number, places = keys[window]
                yield number, places[line], self._text(self._pieces(tokens))

    @property
    def source_separator(self) -> int:
        """The separator of lines in the source."""
        return self.config["documents"]["source_separator"]

    # ---------------------------------------------------------------------------------------- text and tokens

    def encode(self, text: str, name: str = "the text") -> List[int]:
        """The tokens of a text, with eos; only eos if it is blank."""
        check_text(text, name)
        tokens = [*self.source.encode(self.segmented.split(text), name), self.special.eos]
        longest = self.config["limits"]["source"]
        if len(tokens) > longest:
            raise ValueError(f"{name} has {len(tokens):,} tokens and the model reads {longest:,}; shorten it")
        if self.config["documents"] is not None and self.source_separator in tokens:
            raise ValueError(
                f"{name} has {self.config['documents']['separator']}, which stands between lines; remove it"
            )
        return tokens

    def decode(self, hypothesis: Hypothesis) -> Translation:
        """The text of what `search` found."""
        pieces = self._pieces(hypothesis.tokens[:-1])
        return Translation(self._text(pieces), hypothesis.score, pieces)

    def _text(self, pieces: Sequence[str]) -> str:
        """One line, also of pieces of bytes, and without tabs, which separate scores."""
        return self.segmented.join(pieces).translate(BLANKS)

    def _pieces(self, tokens: Sequence[int]) -> List[str]:
        return [piece for piece in self.target.decode(tokens) if piece != BOS]

    # ---------------------------------------------------------------------------------------- search

    def _in_batches(
        self, sources: Iterable[Tuple[Any, List[int]]], options: Dict[str, Any]
    ) -> Iterator[Tuple[Any, List[Hypothesis]]]:
        """The hypotheses of each source, with its key, in the order in which they are found."""
        self._chosen(options)  # also checks them if no source has tokens
        for keys, batch in self._batches(sources):
            filled = [n for n, tokens in enumerate(batch) if len(tokens) > 1]
            found = dict(zip(filled, self.search([batch[n] for n in filled], **options))) if filled else {}
            yield from ((key, found.get(n, BLANK)) for n, key in enumerate(keys))

    def _batches(self, sources: Iterable[Tuple[Any, List[int]]]) -> Iterator[Tuple[List[Any], List[List[int]]]]:
        """Keys and sources: of `buffer_size` at once, those of similar length, at most `batch_tokens` with pads."""
        for window in in_windows(sources, self.buffer_size):
            window.sort(key=lambda each: len(each[1]))
            start = 0
            while start < len(window):
                stop = start + 1
                while stop < len(window) and (stop + 1 - start) * max(LEAST, len(window[stop][1])) <= self.batch_tokens:
                    stop += 1
                keys, batch = map(list, zip(*window[start:stop]))
                yield keys, batch
                start = stop

    def search(self, sources: Sequence[Sequence[int]], **options: Any) -> List[List[Hypothesis]]:
        """Translates a batch of sources, tokens with eos; for models of documents, into as many lines as each has."""
        *_, search = self._steps(sources, options)
        return [search.hypotheses(sentence) for sentence in range(len(sources))]

    def _lines(
        self, sources: Sequence[Sequence[int]], options: Dict[str, Any]
    ) -> Iterator[Tuple[int, int, Sequence[int]]]:
        """Number of a source, number of a line in it, and its tokens, as soon as they can no longer change."""
        separator, filled = self.special.separator, [n for n, tokens in enumerate(sources) if len(tokens) > 1]
        yield from ((n, 0, []) for n in range(len(sources)) if n not in filled)
        if not filled:
            return
        certain, lines, last = [0] * len(filled), [0] * len(filled), [[] for _ in filled]
        for search in self._steps([sources[n] for n in filled], options):
            for sentence in search.active if search.number % LOOK == 0 else ():
                new = search.settled(sentence, certain[sentence])
                certain[sentence] += len(new)
                *done, last[sentence] = split([*last[sentence], *new], separator)
                for tokens in done:
                    yield filled[sentence], lines[sentence], tokens
                    lines[sentence] += 1
        for sentence, n in enumerate(filled):
            new = search.hypotheses(sentence)[0].tokens[certain[sentence] : -1]
            rest = split([*last[sentence], *new], separator)
            yield from ((n, line, tokens) for line, tokens in enumerate(rest, lines[sentence]))

    def _steps(self, sources: Sequence[Sequence[int]], options: Dict[str, Any]) -> Iterator[Search]:
        """The search for a batch of sources, after each of its steps."""
        chosen, limit = self._chosen(options), self.config["limits"]["target"] - 1
        settings, lines = self.config["documents"], None
        if settings is None:
            longest = np.array([chosen.max_len(len(each), limit) for each in sources])
        else:
            of_lines = settings["line_length_a"], settings["line_length_b"]
            lines = LineRules(sources, self.source_separator, self.special.separator, *of_lines, limit, chosen.beam)
            longest = lines.limit
        full = [] if lines is None else np.flatnonzero(longest == limit)
        search = Search(longest, chosen, self.special, lines)
        inputs, places = self._sources(sources, chosen.beam)
        going = np.ones(len(sources), bool)
        with self._decoder() as decoder:
            decoder.start(len(sources), chosen.beam, search.candidates, inputs)
            while going.any():
                if LEAVING * (~going).sum() > len(going):
                    staying = going.nonzero()[0]
                    for each in (search, decoder, *([] if places is None else [places])):
                        each.keep(staying)
                if places is not None:
                    places.advance(search.tokens, search.parents, decoder.sources["source_places"])
                going = search.step(decoder.step(search.tokens, search.parents))
                yield search
        shortened = sum(len(search.hypotheses(n)[0].tokens) > limit for n in full)
        if shortened:
            logger.warning(
                f"the last lines were shortened in {shortened:,} of {len(sources):,} texts, since the model writes at "
                f"most {limit:,} tokens; give shorter texts, or train the model with more --max-target-positions"
            )

    def _chosen(self, options: Dict[str, Any]) -> Options:
        """The options of this model with some others."""
        known = Options.__annotations__
        if set(options) - set(known):
            raise TypeError(f"{', '.join(set(options) - set(known))} is not an option: give {', '.join(known)}")
        documents, types = self.config["documents"], len(self.target.types)
        if documents is not None and {"max_len_a", "max_len_b"} & set(options):
            raise ValueError(
                "max_len_a and max_len_b are not for models of documents; their lines have at most "
                f"{documents['line_length_a']:g} n + {documents['line_length_b']:g} tokens for n of the source"
            )
        chosen = replace(self.options, **options)
        if chosen.beam > types - 4:
            raise ValueError(f"beam is {chosen.beam:,} and the model has {types:,} types; give at most {types - 4:,}")
        limit = self.config["limits"]["target"] - 1
        if documents is None:
            longest = chosen.max_len(2, limit)  # one token and eos
        else:
            longest = min(longest_line(1, documents["line_length_a"], documents["line_length_b"]), limit)
        if chosen.min_len > longest:
            raise ValueError(
                f"min_len is {chosen.min_len} and the translation of one token has at most {longest} tokens; lower it"
            )
        return chosen

    def score_tokens(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """The log-probability (n,) of each token of a given translation, both with eos."""
        inputs, places = self._sources([source], 1)
        parents, found = np.zeros((1, 1), int), []
        with self._decoder() as decoder:
            decoder.start(1, 1, 1, inputs, all_types=True)
            for before, token in zip([self.special.eos, *target], target):
                if places is not None:
                    places.advance(np.array([[before]]), parents, decoder.sources["source_places"])
                decoder.step(np.array([[before]]), parents)
                found.append(decoder.log_probs[0, token])
        return np.array(found, np.float32)

    def _sources(self, sources: Sequence[Sequence[int]], beams: int) -> Tuple[Dict[str, np.ndarray], Optional[Places]]:
        """What all steps read of their sources, and what changes it for models that attend by line."""
        tokens, real = padded(sources, self.special.pad)
        names = [y.name for y in self.encoder.get_outputs()]
        inputs = dict(zip(names, self.encoder.run(names, {"tokens": tokens, "real": real.astype(np.float32)})))
        if self.config["places"] is None:
            return {**inputs, "source_mask": np.where(real, np.float32(0.0), MASKED)[:, None]}, None
        numbers = np.zeros((len(tokens), beams, tokens.shape[1]), np.int64)
        return {**inputs, "source_places": numbers}, Places(tokens, real, self.config["places"], beams)


def _check_document(document: Any) -> None:
    if isinstance(document, str):
        raise TypeError("a document is a single text; give a list of documents, each a list of lines")
    if not isinstance(document, Collection):
        raise TypeError(f"a document is of type {type(document).__name__}; give a list of lines")


def ready(given: Iterable[Any], sources: Iterator[Any]) -> Iterator[Any]:
    """The sources of what is given: of a list, all at once, so that an error in one comes before any work."""
    return iter(list(sources)) if isinstance(given, (list, tuple)) else sources


def in_order(
    parts: Iterable[Tuple[Tuple[int, int], Any]], wholes: List[Sequence[Any]]
) -> Iterator[Tuple[Sequence[Any], List[Any]]]:
    """Each whole with its parts, as soon as they and all before them are there.

    A part has the number of its whole, and its place in it. `wholes` grows while their parts are read, and loses those
    that are done.
    """
    found: Dict[int, Dict[int, Any]] = defaultdict(dict)
    done = 0
    for (number, place), part in parts:
        found[number][place] = part
        while done < len(wholes) and len(found[done]) == len(wholes[done]):
            whole, wholes[done] = wholes[done], ()
            those = found.pop(done)
            done += 1
            yield whole, [those[place] for place in range(len(whole))]


def in_windows(sources: Iterator[Any], size: int) -> Iterator[List[Any]]:
    """Lists of so many sources; if one cannot be read, those before it, and then the error."""
    while True:
        window: List[Any] = []
        try:
            for source in islice(sources, size):
                window.append(source)
        except Exception:
            yield window
            raise
        if not window:
            return
        yield window


def padded(rows: Sequence[Sequence[Any]], pad: Any, dtype: Any = np.int64) -> Tuple[np.ndarray, np.ndarray]:
    """Rows as one array (S, m), and which of its numbers are real."""
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.full(real.shape, pad, dtype)
    tokens[real] = np.concatenate([np.asarray(row, dtype) for row in rows])
    return tokens, real


def windows(lines: List[List[int]], most: int) -> Iterator[List[List[int]]]:
    """Consecutive lines with at most `most` tokens together; a longer line is a window of its own."""
    start = 0
    while start < len(lines):
        stop, length = start + 1, len(lines[start])
        while stop < len(lines) and length + len(lines[stop]) <= most:
            length += len(lines[stop])
            stop += 1
        yield lines[start:stop]
        start = stop
