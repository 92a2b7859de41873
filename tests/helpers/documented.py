"""The commands of the README and of the pages in docs/, as they stand there, on a small corpus and for two updates."""

import os
import re
from pathlib import Path
from typing import Any, List

from tests.helpers.commands import ROOT, fresh, once
from tests.helpers.forking import python, write_script
from tests.helpers.recipes import write

DOCS, README = ROOT / "docs", ROOT / "README.md"
SMALL = "--max-update 2 --warmup-updates 1 --num-workers 0"
# What several tests read: the README's models and what pages make of them, each with words that only its commands have.
COMMANDS = {
    "bible": (README, "bible/prepare.sh"),
    "addresses": (README, "addresses/prepare.sh"),
    "sweep": (DOCS / "language-modelling.md", "/tmp/addresses/sweep"),
    "digits": (README, "prepare digits"),
    "classified": (DOCS / "classification.md", "--out"),
}


def blocks(page: Path, language: str) -> List[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands_with(page: Path, words: str) -> str:
    """The one block of shell commands of a page that contains these words."""
    (block,) = (block for block in blocks(page, "bash") if words in block)
    return block


def run(block: str, place: Path, cwd: Path = ROOT) -> str:
    """Runs shell commands as they stand in a page, but with `place` instead of /tmp."""
    path = f"PATH={place / 'bin'}:{os.environ['PATH']}"
    settings = [path, f"PYTHON={python()}", "OMP_NUM_THREADS=1", f"CORPUS={place / 'corpus'}", f"REPO={ROOT}"]
    return fresh("env", *settings, f"PLACE={place}", "bash", "-euc", block.replace("/tmp/", '"$PLACE"/'), cwd=cwd)


def documented_place() -> Path:
    """A folder with a small corpus, our pages and their words reversed, and with the commands in `bin`.

    They are forked from a process that has imported fairseq, and train for two updates.
    """

    def make(place: Path) -> Path:
        lines = [(page.stem, line) for page in sorted(DOCS.glob("*.md")) for line in page.read_text().splitlines()]
        lines = [(name, line) for name, line in lines if line]
        for split, part in (("train", lines[20:]), ("valid", lines[:10]), ("test", lines[10:20])):
            names, text = zip(*part)
            write(place / f"corpus/{split}.docs", names)
            write(place / f"corpus/{split}.txt", text)
            write(place / f"corpus/{split}.en", text)
            write(place / f"corpus/{split}.de", (" ".join(line.split()[::-1]) for line in text))
        (place / "bin").mkdir()
        programs = {"fairseq-preprocess": "fairseq_cli.preprocess", "sacrebleu": "sacrebleu"}
        programs.update({"mega-fairseq": "mega_fairseq.cli", "mega-runtime": "mega_runtime"})
        for command, module in programs.items():
            script = f'exec "$PYTHON" -m {module} "$@"'
            if command == "mega-fairseq":  # with the README's learning rate, all translations would soon be the same
                translators = "--encoder-layers 1 --decoder-layers 1 --lr 1e-4"
                small = f'case "$*" in *mega_transformer*) set -- "$@" {translators} ;; esac; set -- "$@" {SMALL}'
                script = f'case "$1" in train) {small} ;; esac\n{script}'
            write_script(place / "bin" / command, script)
        write_script(place / "bin/python", 'exec "$PYTHON" "$@"')
        return place

    return once("documented", make)


def output_of(name: str) -> str:
    """What these COMMANDS say, which run once, in `documented_place`."""

    def follow(_: Any) -> str:
        return run(commands_with(*COMMANDS[name]), documented_place())

    return once(f"documented-{name}", follow)
