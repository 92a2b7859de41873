"""Language models: the probability of texts, and texts that continue them."""

from numbers import Real
from pathlib import Path
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import onnxruntime

from mega_runtime.decoder import Decoder, TextState
from mega_runtime.folder import Folder, check_count, check_finite
from mega_runtime.search import Special
from mega_runtime.text import Types, check_text, segmenter

PIECE = 1024  # tokens that are read at once
NEAR = 8  # tokens before a continuation that tell how its text joins theirs


class Score(NamedTuple):
    """The log-probability (natural logarithm) of each token of a text."""

    pieces: List[str]
    log_probs: np.ndarray  # (n,)

    @property
    def bits(self) -> float:
        """Bits per token."""
        return float((0.0 - self.log_probs.sum(dtype=np.float64)) / np.log(2) / max(1, len(self.log_probs)))


class Reader:
    """The graph that reads pieces of a text."""

    def __init__(self, session: onnxruntime.InferenceSession):
        self.session = session
        shapes = {x.name: x.shape for x in session.get_inputs()}
        self.layers = sum(name.startswith("ema") for name in shapes)
        self.states = [[shapes[f"{kind}{layer}"] for layer in range(self.layers)] for kind in ("ema", "keys", "values")]

    def start(self) -> TextState:
        """Before the first token."""
        ema, *caches = self.states
        empty = ([np.zeros((1, 0, shape[2]), np.float32) for shape in kind] for kind in caches)
        return TextState(0, [np.zeros(shape, np.float32) for shape in ema], *empty)

    def read(self, state: TextState, tokens: Sequence[int], targets: Sequence[int]) -> Tuple[TextState, np.ndarray]:
        """Tokens after a state -> the next state, and the log-probabilities (n,) of the targets behind the tokens.

        `targets` may be fewer: those behind the last tokens.
        """
        found, skipped = [], len(tokens) - len(targets)
        for start in range(0, len(tokens), PIECE):
            piece = np.array([tokens[start : start + PIECE]], np.int64)
            wanted = np.arange(max(0, skipped - start), piece.shape[1])
            of_piece = np.array(targets[max(0, start - skipped) :][: len(wanted)], np.int64)
            one = np.zeros(int(not len(wanted)), np.int64)  # ONNX Runtime 1.20 fails at products of no rows in 8 bits
            inputs = {"tokens": piece, "wanted": np.append(wanted, one), "targets": np.append(of_piece, one)}
            for kind, arrays in zip(("ema", "keys", "values"), state[1:]):
                inputs.update({f"{kind}{layer}": array for layer, array in enumerate(arrays)})
            names = [f"new_{kind}{layer}" for kind in ("ema", "keys", "values") for layer in range(self.layers)]
            log_probs, *after = self.session.run(["target_log_probs", *names], inputs)
            parts = (after[i * self.layers : (i + 1) * self.layers] for i in range(3))
            state = TextState(state.position + piece.shape[1], *parts)
            found.append(log_probs[: len(wanted)])
        return state, np.concatenate(found) if found else np.zeros(0, np.float32)


class LanguageModel:
    """An exported language model. With `pieces`, texts are segmented already."""

    kind = "language model"

    def __init__(
        self, folder: Union[str, Path], threads: int = 1, pieces: bool = False, exact_products: Optional[bool] = None
    ):
        self.folder = Folder(folder, self.kind, threads, exact_products)
        self.config = self.folder.config
        self.special = Special(**self.config["special"])
        self.segmented = segmenter(self.folder, pieces)
        self.types = Types(self.folder.types(self.config["text"]["target"]), self.special.unk, self.special.pad)
        self.reader = Reader(self.folder.session("text.onnx"))
        self.decoder = Decoder(self.folder.session("step.onnx"), self.config["decoder_chunk"])

    def encode(self, text: str) -> List[int]:
        """The tokens of a text, without eos."""
        check_text(text, "the text")
        return self.types.encode(self.segmented.split(text))

    def score(self, text: str) -> Score:
        """The probability of a text, from its start; its end is not scored."""
        tokens = self.encode(text)
        return Score(self.types.decode(tokens), self.score_tokens(tokens))

    def score_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """The log-probability (n,) of each token of a stream."""
        self._check_length(len(tokens), "shorten it")
        return self.reader.read(self.reader.start(), [self.special.eos, *tokens[:-1]], tokens)[1]

    def score_in_steps(self, tokens: Sequence[int]) -> np.ndarray:
        """`score_tokens`, token by token, as texts are continued."""
        decoder, found = self._new_decoder(), []
        decoder.start(1, 1, 1, all_types=True)
        for before, token in zip([self.special.eos, *tokens], tokens):
            decoder.step(np.array([[before]]), np.zeros((1, 1), int))
            found.append(decoder.log_probs[0, token])
        return np.array(found, np.float32)

    def continue_text(self, text: str, max_tokens: int = 200, **options: Any) -> str:
        """The text with what follows it; see `stream` for the options."""
        return text + "".join(self.stream(text, max_tokens, **options))

    def stream(
        self,
        text: str,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        stop: Iterable[str] = (),
    ) -> Iterator[str]:
        """Parts of what follows a text, as they are found.

        `temperature` 0 takes the likeliest token each time. `top_k` leaves that many of the likeliest tokens, and
        `top_p` as many as have this probability together; 0 and 1 leave all. The text ends after `max_tokens`, before
        one of the `stop` strings, or where a text of the training would.
        """
        if isinstance(stop, str):
            raise TypeError("stop is a single text; give a list of texts")
        stop = list(stop)
        for each in stop:
            check_text(each, "a stop string")
        if "" in stop:
            raise ValueError("a stop string is empty and would end any text at once; leave it out")
        given, held, ends = self.encode(text), "", max(map(len, stop), default=0)
        growing = Growing(self, given, text)
        for token in self.sample(given, max_tokens, temperature, top_k, top_p, seed):
            if token == self.special.eos:
                break
            held += growing.add(token)
            before = before_stop(held, stop)
            if before is not None:
                yield before
                return
            safe = max(0, len(held) - max(0, ends - 1))  # the rest may be the beginning of a stop string
            yield held[:safe]
            held = held[safe:]
        held += growing.open
        before = before_stop(held, stop)
        yield held if before is None else before

    def sample(
        self, tokens: Sequence[int], max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
    ) -> Iterator[int]:
        """Tokens that follow others, with eos at the end if the text ends."""
        for name, value in (("max_tokens", max_tokens), ("top_k", top_k)):
            check_count(name, value, least=0)
        if seed is not None:
            check_count("seed", seed, 2**64, least=0)
        if not isinstance(temperature, Real) or not 0 <= temperature < np.inf:
            raise ValueError(f"temperature is {temperature!r}; give a finite number from 0")
        if not isinstance(top_p, Real) or not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p!r}; give a probability above 0 and at most 1")
        max_tokens, temperature, top_p = int(max_tokens), float(min(temperature, 1e30)), float(top_p)
        self._check_length(len(tokens) + max_tokens, "shorten it, or lower max_tokens")
        state, _ = self.reader.read(self.reader.start(), [self.special.eos, *tokens][:-1], [])
        newest, random = [self.special.eos, *tokens][-1], np.random.default_rng(seed)
        decoder = self._new_decoder()
        decoder.start(1, 1, 1, all_types=True)
        decoder.go_on(state)
        for _ in range(max_tokens):
            decoder.step(np.array([[newest]]), np.zeros((1, 1), int))
            newest = chosen(decoder.log_probs[0], self.special.pad, temperature, top_k, top_p, random)
            yield newest
            if newest == self.special.eos:
                return

    def _new_decoder(self) -> Decoder:
        """A decoder that no other text has, in another thread or between two tokens."""
        return Decoder(self.decoder.session, self.decoder.chunk)

    def join(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.segmented.join(self.types.decode(tokens))

    def _check_length(self, length: int, remedy: str) -> None:
        longest = self.config["limits"]["target"]
        if self.config["decoder_chunk"] is None and length > longest:  # it reads eos, and not the last token
            raise ValueError(f"the text would have {length:,} tokens and the model reads {longest:,}; {remedy}")


class Growing:
    """The text of tokens that come one by one after others."""

    def __init__(self, model: LanguageModel, given: List[int], text: str):
        self.model, self.near, self.newest, self.open = model, given[-NEAR:], [], ""
        self.before = model.join(self.near)
        self.blank = text[-1:].isspace() and not self.before[-1:].isspace()  # in the text, but in none of its tokens

    def add(self, token: int) -> str:
        """What is new in the text, once no other token can change it."""
        self.newest.append(token)
        tokens = [*self.near, *self.newest]
        self.open = self.model.join(tokens)[len(self.before) :]
        if self.blank:
            self.open = self.open.lstrip()
        unfinished = self.open[-1:] == "\ufffd"  # bytes of a character
        found = self.open[:-1] if unfinished else self.open
        if found:
            self.near, self.newest, self.open, self.blank = tokens[-NEAR:], [], self.open[len(found) :], False
            near = self.model.join(self.near)
            self.before = near[:-1] if unfinished else near
        return found


def before_stop(text: str, stop: List[str]) -> Optional[str]:
    """What stands before the first of these strings, if the text has one."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else None


def chosen(
    log_probs: np.ndarray, pad: int, temperature: float, top_k: int, top_p: float, random: np.random.Generator
) -> int:
    """A token drawn from log-probabilities (V,)."""
    check_finite(log_probs)
    scores = log_probs.astype(np.float64)
    scores[pad] = -np.inf
    if temperature == 0:
        return int(scores.argmax())
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    with np.errstate(over="ignore"):  # of tiny temperatures, whose other tokens have the weight 0
        weights = np.exp((scores[order] - scores[order[0]]) / temperature)
    weights /= weights.sum()
    before = weights.cumsum() - weights
    weights[before >= top_p] = 0.0
    return int(order[random.choice(len(order), p=weights / weights.sum())])
