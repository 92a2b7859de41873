"""The page of examples/page under Node.js, and small models for it."""

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from fairseq.data import Dictionary

from mega_fairseq.export.folder import write_classifier, write_language_model, write_translation
from tests.helpers.commands import ROOT
from tests.helpers.exported import CHUNKS, LINES, project_classifier, sharpened
from tests.helpers.recipes import program
from tests.helpers.small_models import language_model, translation_model

PAGE = ROOT / "examples/page"
CHAPTER = PAGE / "texts/genesis-6.en.txt"  # of the test set
SEPARATOR = "<sep>"
MISSING = None if (PAGE / "ort/VERSION").is_file() else "onnxruntime-web is missing: run python examples/page/bring.py"


class Node:
    """Node.js with the modules of a folder; `ask` has the tasks of tests/page/run.mjs."""

    def __init__(self, folder: Path = PAGE):
        program = ROOT / "tests/page/run.mjs"
        words = ["node", "--no-warnings", str(program), str(folder)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, task: str, **request: Any) -> Any:
        self.process.stdin.write(json.dumps({"task": task, **request}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["found"]

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def twin(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the page with another text at one place of a file."""
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("*.wasm"))
    source = (folder / name).read_text()
    assert source.count(old) == 1, source.count(old)
    (folder / name).write_text(source.replace(old, new))
    return folder


class Served:
    """A folder of models behind the server."""

    def __init__(self, models: Path):
        self.running = program("page/serve.py").server(models, 0)
        self.address = f"http://127.0.0.1:{self.running.server_address[1]}/"
        self.thread = threading.Thread(target=self.running.serve_forever)

    def __enter__(self) -> "Served":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.running.shutdown()
        self.thread.join()
        self.running.server_close()


# ------------------------------------------------------------------------------------------------ models


def write_documents(folder: Path, pieces: Path, number_format: str = "float32", ends: float = 2.0, **options: Any):
    """A model of documents with random weights, with pieces as types; returns the model."""
    types = Dictionary()
    model = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    for number in range(3, len(model)):
        types.add_symbol(model.id_to_piece(number))
    separator = types.add_symbol(SEPARATOR)
    made = sharpened(translation_model(len(types), output_bias=True, **{**CHUNKS, **LINES, **options}), 2.0, ends)
    with torch.no_grad():
        made.decoder.output_projection.bias[separator] += ends
    made.encoder.dictionary = made.decoder.dictionary = types
    made.decoder.separators = (separator, separator)
    words = {"separator": SEPARATOR, "line_length_a": 0.1, "line_length_b": 3.0, "window_tokens": 200}
    words["source_separator"] = separator
    write_translation(folder, made, number_format, pieces, words, made.decoder.separators)
    return made


def write_text_of_bytes(folder: Path, number_format: str = "float32") -> None:
    """A language model of bytes with random weights."""
    made = language_model(260)
    types = Dictionary()
    for number in range(256):
        types.add_symbol(str(number))
    made.decoder.dictionary = types
    write_language_model(folder, made, number_format, of_bytes=True)


def write_digits(folder: Path) -> None:
    """A classifier of 64 values with random weights."""
    classifier = project_classifier("values", "uint8")
    classifier.task.length = 64
    write_classifier(folder, classifier)
