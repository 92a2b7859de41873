"""Progress of a sweep."""

import contextlib
import sys
import time
from typing import Any, Iterator

from torch import nn
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Count the tokens of all points: with a bar in a terminal, and otherwise with a line every 30 seconds."""

    def __init__(self, points: int, tokens: int):
        self.points, self.tokens = points, tokens  # tokens of one point
        self.started = self.done = 0
        self.bar = tqdm(total=points * tokens, unit="token", unit_scale=True, disable=None)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def start(self, title: str) -> None:
        """Begin the next point."""
        self._add(self.started * self.tokens - self.done)  # the rest of a point that failed
        self.started += 1
        self.title, self.printed = f"point {self.started} of {self.points}: {title}", time.monotonic()
        self.bar.set_description(self.title)

    def say(self, text: str) -> None:
        tqdm.write(f"{self.title}: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def batch(self, layer: nn.Module, tokens: int) -> Iterator[None]:
        """Count a batch's tokens piece by piece as `layer` processes them: one stream may be the whole split."""
        left = tokens

        def count(module: nn.Module, given: Any, found: Any) -> None:
            nonlocal left
            piece = min(found[0].shape[:2].numel(), left)  # pads excluded
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
        if self.bar.disable and self.started and time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.say(f"{self.done - (self.started - 1) * self.tokens:,} of {self.tokens:,} tokens")
            self.printed = time.monotonic()
