"""How far a sweep has come."""

import contextlib
import sys
import time
from typing import Any, Iterator

from torch import nn
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Tokens done in all points: a bar, or a line now and then where stderr is no terminal."""

    def __init__(self, points: int, tokens: int):
        self.points, self.tokens = points, tokens  # tokens of one point
        self.started = self.done = 0
        self.bar = tqdm(total=points * tokens, unit="token", unit_scale=True, disable=None)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def start(self, title: str) -> None:
        """The next point."""
        self._add(self.started * self.tokens - self.done)  # what a point that failed has left
        self.started += 1
        self.title, self.said = f"point {self.started} of {self.points}: {title}", time.monotonic()
        self.bar.set_description(self.title)

    def say(self, what: str) -> None:
        """What this point has come to."""
        tqdm.write(f"{self.title}: {what}", file=sys.stderr)

    @contextlib.contextmanager
    def batch(self, layer: nn.Module, tokens: int) -> Iterator[None]:
        """Counts the tokens of a batch while pieces of it leave `layer`, for a stream may be as long as the split."""
        left = tokens

        def count(module: nn.Module, given: Any, found: Any) -> None:
            nonlocal left
            piece = min(found[0].shape[:2].numel(), left)  # which has pads too
            left -= piece
            self._add(piece)

        hook = layer.register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()
        self._add(left)

    def _add(self, tokens: int) -> None:
        self.done += tokens
        self.bar.update(tokens)
        if self.bar.disable and self.started and time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.say(f"{self.done - (self.started - 1) * self.tokens:,} of {self.tokens:,} tokens")
            self.said = time.monotonic()
