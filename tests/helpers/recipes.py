"""Runs the recipes of examples/ as a user does, from another folder, on data small enough for a test."""

import importlib
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Dict, Iterable, List

import pytest
from omegaconf import DictConfig

from tests.helpers.commands import ROOT
from tests.helpers.configurations import training
from tests.helpers.forking import python, write_script

EXAMPLES = ROOT / "examples"


def program(name: str) -> Any:
    """A Python program of examples/, imported as when it runs."""
    path = EXAMPLES / name
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.pop(0)


def run_program(path: Path, *words: Any) -> None:
    """Runs a Python program of examples/ in this process, with these words of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, words)])
        runpy.run_path(str(path), run_name="__main__")


BIBLE = EXAMPLES / "wmt16_en_de/bible"
BIBLE_PAIRS = {"train": 100, "valid": 10, "test": 10}
# Variables of the recipes that the environment of the tests may contain.
FOREIGN = (
    *("ARCH", "BPE", "BYTES", "CORPUS", "EXPECTED", "GPUS", "MIRROR", "PASSAGES", "SEED", "SIZE", "SOURCE", "SOURCES"),
    *("START", "UNITS", "VOCABULARY"),
)


class Recipe:
    """The scripts of one folder, which write everything under `place`."""

    def __init__(self, scripts: Path, place: Path, **variables: Any):
        self.scripts, self.place = scripts, place
        self.data, self.checkpoints, self.results = place / "data", place / "checkpoints", place / "results"
        self.variables = {
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            "PYTHON": python(),
            "WORKERS": "1",
            "GPUS": "0",
            "DATA": self.data,
            "CHECKPOINTS": self.checkpoints,
            "RESULTS": self.results,
            **variables,
        }
        place.mkdir(exist_ok=True)

    def start(self, script: str, *arguments: Any, **variables: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(self.scripts / script), *map(str, arguments)],
            cwd=self.place,
            env={name: str(value) for name, value in {**self.variables, **variables}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: Any, **variables: Any) -> str:
        """Runs a script that must succeed and returns its stdout and stderr."""
        process = self.start(script, *arguments, **variables)
        printed = "".join(process.communicate())
        assert process.returncode == 0, printed
        return printed

    def refusal(self, script: str, *arguments: Any, **variables: Any) -> str:
        """Runs a script that must fail and returns its one-sentence error."""
        process = self.start(script, *arguments, **variables)
        _, said = process.communicate()
        assert process.returncode == 1, said
        (sentence,) = re.findall(r"^error: (.*)$", said, re.MULTILINE)
        return sentence


def small_bible(folder: Path) -> Path:
    """The first sentence pairs of each split of the shipped Bible and their chapters, written to a folder."""
    for name, kinds in (("bible-ende", ("en", "de")), ("bible-ende-documents", ("docs",))):
        with tarfile.open(BIBLE / f"{name}.tar.xz") as archive:
            for split, kind in itertools.product(BIBLE_PAIRS, kinds):
                lines = archive.extractfile(f"{name}/{split}.{kind}").read().decode().split("\n")
                write(folder / f"{split}.{kind}", lines[: BIBLE_PAIRS[split]])
    return folder


def bible_recipe(place: Path, corpus: Path) -> Recipe:
    return Recipe(BIBLE, place, CORPUS=corpus, VOCABULARY=300)


def fake_python(place: Path, condition: str, action: str) -> Path:
    """A Python that runs a shell command instead if its arguments meet a shell condition."""
    wrapper = place / "python"
    write_script(wrapper, f'if {condition}; then {action}; else exec {shlex.quote(python())} "$@"; fi')
    return wrapper


def answering(place: Path, tool: str) -> Path:
    """A Python whose fairseq command `tool` only prints the file `answers`."""
    return fake_python(place, f'[ "$2" = fairseq_cli.{tool} ]', f"cat {shlex.quote(str(place))}/answers")


def configuration(recipe: Recipe, place: Path, script: str = "train.sh", **variables: Any) -> DictConfig:
    """What a script trains with, as fairseq-train parses it, without training."""
    write_words = f"printf '%s\\n' \"$@\" >{shlex.quote(str(place))}/words"
    python = fake_python(place, '[ "$2" = fairseq_cli.train ]', write_words)
    recipe.run(script, **{"PYTHON": python, "CHECKPOINTS": place / "checkpoints", **variables})
    return training(*text(place / "words")[2:])


def text(path: Path) -> List[str]:
    """The lines of a file, split at newlines only."""
    return path.read_bytes().decode().split("\n")[:-1]


def write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode())


def files(folder: Path) -> Dict[str, bytes]:
    """Name and content of all files in a folder, except fairseq's logs, which contain times."""
    return {path.name: path.read_bytes() for path in folder.rglob("*.*") if path.suffix != ".log" and path.is_file()}


def half(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: len(data) // 2]
