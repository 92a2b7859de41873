"""A first look at the models of `pretrained/`, without PyTorch: `make try`.

It translates a sentence and a chapter, continues a text and reads digits. At a terminal, it asks for the sentence and
the beginning of the text; elsewhere it takes its own.
"""

import re
import resource
import shutil
import sys
import textwrap
import time
from functools import lru_cache
from pathlib import Path
from typing import List

START = time.perf_counter()

import numpy as np  # noqa: E402 (the time of imports is reported)

from mega_runtime import Classifier, LanguageModel, Translator  # noqa: E402

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent.parent / "pretrained"
SENTENCE, BEGINNING = "And God said, Let there be light: and there was light.", "Fellow citizens of the Senate"
SHADES = np.array(list(" .:-=+*#@"))
WIDTH = min(100, shutil.get_terminal_size().columns)


def main() -> None:
    imports, tokens, start = time.perf_counter() - START, 0, time.perf_counter()
    print("Four jobs on one CPU thread, without PyTorch. Nothing leaves this machine.")
    for number, job in enumerate((sentence, chapter, speech, digits), 1):
        print(f"\n{number}. ", end="")
        tokens += job()
    seconds = time.perf_counter() - start - Typed.seconds
    print(
        f"""
Next: `source {Path(sys.prefix).name}/bin/activate`, then `mega-runtime --help`; `make page` for the same in a browser;
or train a model of your own, as README.md says.
{tokens:,} tokens in {seconds:.1f} s; imports {imports:.1f} s; at most {peak_memory():.0f} MB of memory."""
    )


def peak_memory() -> float:
    """MiB of this process; Linux counts in ru_maxrss what the process was before it became this program."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text()).group(1)) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10))


@lru_cache(maxsize=None)
def bible() -> Translator:
    return Translator(MODELS / "bible-en-de")


def sentence() -> int:
    print("A sentence. The model has read only the Bible: the English of 1611, and Luther's German of 1912.")
    text = typed("English", SENTENCE)
    (line,) = bible().translate([text])
    show("German", line.text)
    return len(line.pieces)


def chapter() -> int:
    """Shows each verse as soon as it can no longer change."""
    verses, tokens = (HERE / "../page/texts/genesis-6.en.txt").read_text(encoding="utf-8").splitlines(), 0
    print(f"A chapter that it has not read, Genesis 6, as one text of {len(verses)} verses.")
    translator, terminal = bible(), sys.stderr.isatty()
    for _, number, text in translator.stream_documents([verses]):
        sys.stderr.write("\r\x1b[K" * terminal)
        show(f"{number + 1:2}", text)
        done = 40 * (number + 1) // len(verses)
        sys.stderr.write(f"   [{'#' * done}{'.' * (40 - done)}] {number + 1} of {len(verses)} verses" * terminal)
        sys.stderr.flush()
        tokens += len(translator.segmented.split(text)) + 1
    sys.stderr.write("\r\x1b[K" * terminal)
    return tokens


def speech() -> int:
    print("A text that goes on. The model has read State of the Union addresses.")
    beginning, model = typed("Beginning", BEGINNING), LanguageModel(MODELS / "addresses")
    text = model.continue_text(beginning, max_tokens=80, temperature=0.7, top_p=0.9)
    show("", text)
    return len(model.encode(text))


def digits() -> int:
    print("Three digits of 8 x 8 pixels, drawn by hand.")
    drawn = np.loadtxt(HERE / "digits.txt", dtype=np.uint8, ndmin=2)
    found = Classifier(MODELS / "digits").predict(drawn)
    rows = SHADES[drawn // 29].reshape(len(drawn), 8, 8).repeat(2, axis=2)  # a character is twice as high as wide
    for row in rows.transpose(1, 0, 2):
        print("   " + "     ".join("".join(part) for part in row))
    print("   " + "     ".join(f"{each.label}, {each.probability:.1%} sure".ljust(16) for each in found))
    return drawn.size


class Typed:
    """How long the answers took."""

    seconds = 0.0


def typed(what: str, example: str) -> str:
    """A line that the user types, or the example."""
    if sys.stdin.isatty():
        start = time.perf_counter()
        text = input(f"   {what} (Enter for an example): ").strip()
        Typed.seconds += time.perf_counter() - start
        if text:
            return text
    show(what, example)
    return example


def show(what: str, text: str) -> None:
    lines: List[str] = textwrap.wrap(text, WIDTH - 14) or [""]
    for label, line in zip([what, *[""] * len(lines)], lines):
        print(f"   {label:<9} {line}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
