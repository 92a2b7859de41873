"""What the tables of the documents have in common: numbers that benchmarks wrote, and how they are shown."""

import json
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
Rows = Iterable[Iterable[str]]  # the first one is the header


def numbers(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text())


def times(shown: str, value: float, baseline: float) -> str:
    return f"{shown} ({value / baseline:.2f}x)"


def ratios(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}x" for value in values)


def speeds(count: int, seconds: Dict[str, float]) -> Dict[str, float]:
    return {name: count / time for name, time in seconds.items()}


def compared(values: Dict[str, float], layers: Iterable[str]) -> Iterator[str]:
    """Values with their ratio to torch's; empty for layers that were not measured."""
    torch = values.get("torch")
    for layer in layers:
        value = values.get(layer)
        shown = "" if value is None else f"{value:,.0f}"
        yield times(shown, value, torch) if shown and torch and layer != "torch" else shown
