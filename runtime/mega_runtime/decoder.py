"""Single tokens through the decoder, and the state of a search: a tree of tokens under a mask.

All rows of a sentence share one tree. A step appends the keys and values of its tokens as new places, and a mask says
which places a row sees: those of the tokens that it continues. So nothing is copied when beams are reordered. When the
storage is full, places that no row sees are dropped.
"""

from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import onnxruntime

MASKED = np.float32(-1e30)
FREE, FREE_OF_BATCHES = 24, 6  # steps for which storage is free after places were dropped: one sentence, several


class Candidates(NamedTuple):
    """Log-probabilities of the likeliest next tokens of each row, and of special ones."""

    top: np.ndarray  # (R, k)
    types: np.ndarray  # (R, k)
    special: np.ndarray  # (R, s), in the order of the exporter


class TextState(NamedTuple):
    """What a language model remembers of a text: the states of its EMAs, and the keys and values of the open chunk."""

    position: int  # tokens read
    ema: List[np.ndarray]  # (N, D) of each layer
    keys: List[np.ndarray]  # (1, m, z)
    values: List[np.ndarray]  # (1, m, v)


class Storage:
    """Arrays that keep their memory from one sentence to the next: new memory costs as much as a step."""

    def __init__(self) -> None:
        self.flat: Dict[str, np.ndarray] = {}

    def array(self, name: str, shape: Tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """An array of this shape whose content is arbitrary, but finite."""
        size, flat = int(np.prod(shape)), self.flat.get(name)
        if flat is None or flat.size < size:
            flat = self.flat[name] = np.zeros(size + size // 2, dtype)
        return flat[:size].reshape(shape)


class Decoder:
    """The step graph of a model, for one search at a time: `start`, then `step` for each token."""

    def __init__(self, session: onnxruntime.InferenceSession, chunk: Optional[int]):
        self.session, self.chunk = session, chunk
        widths = {x.name: x.shape for x in session.get_inputs()}
        self.layers = sum(name.startswith("ema") for name in widths)
        self.ema = [tuple(widths[f"ema{layer}"][1:]) for layer in range(self.layers)]  # (N, D) of each layer
        self.widths = [(widths[f"keys{layer}"][2], widths[f"values{layer}"][2]) for layer in range(self.layers)]
        self.shapes = {y.name: y.shape for y in session.get_outputs()}
        self.storages = Storage(), Storage()

    # ---------------------------------------------------------------------------------------- a search

    def start(
        self,
        sentences: int,
        beams: int,
        candidates: int,
        sources: Optional[Dict[str, np.ndarray]] = None,
        all_types: bool = False,
    ) -> None:
        """Begins before the first token of S sentences with b rows each. `sources` are inputs for all steps.

        With `all_types`, each step also writes `log_probs` (R, V).
        """
        self.all_types = all_types
        self.beams, self.sources = beams, dict(sources or {})
        self.candidates = np.array([min(candidates, self.shapes["log_probs"][1])])
        self.position, self.used, self.current = 0, 0, 0
        self.own = False  # whether the last places are those of the last step's tokens
        self._allocate(sentences, self._free(sentences))
        for state in self.states:
            state[...] = 0.0
        self._bind()

    def go_on(self, state: "TextState") -> None:
        """Puts all rows, after `start` with one sentence, behind a text that was read."""
        self.position, self.used = state.position, state.keys[0].shape[1]
        if self.used > self.mask.shape[2]:
            self._allocate_tree(1, self.used + self._free(1))
            self._bind()
        for now, ema in zip(self._now(), state.ema):
            now[...] = ema
        for tree, read in zip(self.trees, (t for pair in zip(state.keys, state.values) for t in pair)):
            tree[:, : self.used] = read
        self.mask[...] = MASKED
        self.mask[:, :, : self.used] = 0.0
        self.at[:, : self.used] = np.arange(self.position - self.used, self.position)

    @property
    def place(self) -> int:
        """The place of the next token in its chunk."""
        return self.position if self.chunk is None else self.position % self.chunk

    def step(self, tokens: np.ndarray, parents: np.ndarray) -> Candidates:
        """The next token (S, b) of each row, which continues row parents (S, b) of its sentence."""
        sentences, beams = tokens.shape
        if self.place == 0:
            self.used = 0
            self.mask[...] = MASKED
        elif self.own:  # a row sees what its parent saw, and the parent's own token
            last = self.used - beams
            self.mask[...] = np.take_along_axis(self.mask, parents[:, :, None], 1)
            np.put_along_axis(self.mask, (last + parents)[:, :, None], np.float32(0.0), 2)
        if self.used + beams > self.mask.shape[2]:
            self._drop_unseen()
        np.subtract(self.position, self.at, out=self.distance)
        np.clip(self.distance, 0, self.place, out=self.distance)
        self.tokens[...] = tokens.ravel()
        self.order[...] = (parents + beams * np.arange(sentences)[:, None]).ravel()
        self.numbers["place"][0], self.numbers["position"][0] = self.place, self.position
        self.session.run_with_iobinding(self.bindings[self.current])
        self.current = 1 - self.current
        self.position += 1
        self.own = self.place > 0
        if self.own:  # no later token sees the last one of a chunk
            new = slice(self.used, self.used + beams)
            for tree, token in zip(self.trees, self.new):
                tree[:, new] = token.reshape(sentences, beams, -1)
            self.at[:, new] = self.position - 1
            self.used += beams
        return Candidates(self.top, self.types, self.special)

    def keep(self, sentences: np.ndarray) -> None:
        """Goes on with these sentences only, numbers (S',), after a step."""
        rows = (sentences[:, None] * self.beams + np.arange(self.beams)).ravel()
        states, trees = [state[rows] for state in self._now()], [tree[sentences] for tree in self.trees]
        mask, at = self.mask[sentences], self.at[sentences]
        self.sources = {name: source[sentences] for name, source in self.sources.items()}
        self._allocate(len(sentences), self.mask.shape[2])
        for new, old in zip((*self._now(), *self.trees, self.mask, self.at), (*states, *trees, mask, at)):
            new[...] = old
        self._bind()

    # ---------------------------------------------------------------------------------------- storage

    def _free(self, sentences: int) -> int:
        return self.beams * (FREE if sentences == 1 else FREE_OF_BATCHES)

    def _now(self) -> List[np.ndarray]:
        """The states of the EMAs, (R, N, D) for each layer, that the next step reads."""
        return self.states[self.current :: 2]

    def _allocate(self, sentences: int, places: int) -> None:
        rows, array = sentences * self.beams, self.storages[0].array
        self.states = [array(f"ema{n}.{i}", (rows, *self.ema[n])) for n in range(self.layers) for i in range(2)]
        self.new = [array(f"new{n}.{i}", (rows, self.widths[n][i])) for n in range(self.layers) for i in range(2)]
        self.tokens, self.order = (array(name, (rows,), np.int64) for name in ("tokens", "order"))
        self.numbers = {name: np.zeros(1, np.int64) for name in ("place", "position")}
        self._allocate_tree(sentences, places)

    def _allocate_tree(self, sentences: int, places: int) -> None:
        array = self.storages[0].array
        shape = sentences, places
        self.trees = [array(f"tree{n}.{i}", (*shape, self.widths[n][i])) for n in range(self.layers) for i in range(2)]
        self.mask = array("mask", (sentences, self.beams, places))
        self.at, self.distance = (array(name, shape, np.int64) for name in ("at", "distance"))

    def _drop_unseen(self) -> None:
        """Moves the places that any row of a sentence sees into new storage, with free storage for more."""
        seen = (self.mask == 0.0).any(1)  # (S, n)
        most = int(seen.sum(1).max())
        index = np.argsort(~seen, axis=1, kind="stable")[:, :most]
        trees, mask, at = self.trees, self.mask, self.at
        self.storages = self.storages[::-1]
        self._allocate_tree(len(seen), most + self._free(len(seen)))
        flat = (index + np.arange(len(index))[:, None] * seen.shape[1]).ravel()
        for new, old in zip(self.trees, trees):
            new[:, :most] = old.reshape(-1, old.shape[2])[flat].reshape(*index.shape, -1)
        self.mask[...] = MASKED
        self.mask[:, :, :most] = np.take_along_axis(mask, index[:, None], 2)
        self.at[...] = 0
        self.at[:, :most] = np.take_along_axis(at, index, 1)
        self.used = most
        self._bind()

    # ---------------------------------------------------------------------------------------- bindings

    def _bind(self) -> None:
        """Binds all arrays to the graph, which then reads and writes them in place: once, and whenever they move.

        Two bindings take turns: each writes the states that the other reads.
        """
        rows, known = len(self.tokens), {x.name for x in self.session.get_inputs()}
        array = self.storages[0].array
        self.top = array("top", (rows, int(self.candidates[0])))
        self.types = array("types", self.top.shape, np.int64)
        self.special = array("special", (rows, self.shapes["special"][1]))
        inputs = {"tokens": self.tokens, "order": self.order, "mask": self.mask, "distance": self.distance}
        inputs.update(k=self.candidates, **self.numbers, **self.sources)
        outputs = {"top": self.top, "top_types": self.types, "special": self.special}
        if self.all_types:
            self.log_probs = outputs["log_probs"] = array("log_probs", (rows, self.shapes["log_probs"][1]))
        for layer in range(self.layers):
            inputs[f"keys{layer}"], inputs[f"values{layer}"] = self.trees[2 * layer : 2 * layer + 2]
            outputs[f"new_key{layer}"], outputs[f"new_value{layer}"] = self.new[2 * layer : 2 * layer + 2]
        self.bindings = []
        for turn in range(2):
            binding = self.session.io_binding()
            for layer in range(self.layers):
                inputs[f"ema{layer}"] = self.states[2 * layer + turn]
                outputs[f"new_ema{layer}"] = self.states[2 * layer + 1 - turn]
            for name, value in inputs.items():
                if name in known:
                    binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
            for name, value in outputs.items():
                binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
            self.bindings.append(binding)
