"""The commands and programs of docs/deploy.md run, with models that had two updates."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection

import numpy as np
import pytest

from mega_fairseq.cli.main import main as mega_fairseq
from mega_runtime import Translator
from tests.helpers.commands import PLUGIN, ROOT, as_words, fairseq, fresh, on_each_side
from tests.helpers.forking import benchmark, python
from tests.helpers.recipes import bible_recipe, small_bible, text, write

PAGE = (ROOT / "docs/deploy.md").read_text()
UPDATES = [*PLUGIN, "--cpu", "--max-update=2", "--warmup-updates=1", "--num-workers=0", "--optimizer=adam", "--lr=1e-3"]
TRANSLATION = ["--arch=mega_transformer_tiny", *as_words(on_each_side(layers=1)), "--rel-pos-bias=rotary"]
TRANSLATION += ["--share-all-embeddings", "--max-tokens=2048", "--required-batch-size-multiple=1"]
LANGUAGE = [
    "--task=mega_language_modeling",
    "--arch=mega_lm_small",
    "--criterion=mega_lm_cross_entropy",
    "--max-tokens=2048",
]
DIGITS = ["--task=mega_classification", "--arch=mega_classifier_small", "--criterion=sentence_prediction"]
DIGITS += ["--input-kind=values", "--normalization-type=batchnorm", "--batch-size=32"]
SENTENCES = ["In the beginning God created the heaven and the earth.", "", "And the earth was without form, and void."]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The README's models, one of documents, and the page's commands in `bin`."""
    place = tmp_path_factory.mktemp("deploy")
    bible_recipe(place, small_bible(place / "corpus")).run("prepare.sh", DATA=place / "bible")
    pairs, own = place / "bible/sentencepiece", place / "own/documents"
    shutil.copytree(pairs / "bin", own / "data")
    shutil.copy(pairs / "codes", own / "pieces.model")
    bytes_of_text = place / "addresses/bytes"
    bytes_of_text.mkdir(parents=True)
    line = " ".join(map(str, b"Fellow citizens, the state of the Union is sound.\n"))
    (bytes_of_text / "text").write_text(f"{line}\n" * 40)
    texts = [f"--{split}pref={bytes_of_text}/text" for split in ("train", "valid")]
    fairseq("preprocess", "--only-source", *texts, f"--destdir={bytes_of_text}/bin")
    assert mega_fairseq(["prepare", "digits", str(place / "digits")]) == 0
    for data, folder, words in (
        (pairs / "bin", place / "bible", ["--task=translation", *TRANSLATION]),
        (own / "data", own, ["--task=mega_document_translation", "--cross-attention-positions=sentence", *TRANSLATION]),
        (bytes_of_text / "bin", place / "addresses", LANGUAGE),
        (place / "digits", place / "digits", DIGITS),
    ):
        fairseq("train", data, *words, *UPDATES, "--save-dir", folder / "checkpoints")
    (place / "bin").mkdir()
    for command, module in (("mega-fairseq", "mega_fairseq.cli"), ("mega-runtime", "mega_runtime")):
        script = f'#!/bin/sh\nexec {shlex.quote(python())} -m {module} "$@"\n'
        (place / "bin" / command).write_text(script)
        (place / "bin" / command).chmod(0o755)
    (place / "server").mkdir()
    texts = {"new.en": SENTENCES, "letter.en": [" ".join(SENTENCES)], "book.en": SENTENCES}
    texts["digits.txt"] = [" ".join(map(str, np.load(place / "digits/test.npy")[0]))]
    for name, lines in texts.items():
        write(place / "server" / name, lines)
    return place


def here(block, place):
    return block.replace("/tmp/", f"{place}/")


@pytest.fixture(scope="module")
def server(place):
    """A folder with the exported models."""
    for block in blocks("bash"):
        if "mega-" in block:  # not those that install or serve
            path = f"PATH={shlex.quote(str(place))}/bin:$PATH PYTHONPATH={shlex.quote(f'{ROOT}:{ROOT}/runtime')}"
            fresh("bash", "-euc", f"export {path}\n{here(block, place)}", cwd=place / "server")
    return place / "server"


@pytest.mark.slow
def test_documented_commands_translate_continue_score_and_classify(server):
    assert all((server / name / "config.json").exists() for name in ("bible", "documents", "addresses", "digits"))
    assert [bool(line) for line in text(server / "new.de")] == [bool(line) for line in SENTENCES]
    assert len(text(server / "scored.tsv")) == 2 * len(SENTENCES)
    assert len(text(server / "letter.de")) == 1
    assert [bool(line) for line in text(server / "book.de")] == [bool(line) for line in SENTENCES]
    assert len(text(server / "bits.tsv")) == len(SENTENCES)
    assert re.fullmatch(r"\d\t[\d.]+", *text(server / "labels.tsv"))


@pytest.mark.slow
def test_documented_programs_run(server, place, monkeypatch):
    monkeypatch.chdir(server)
    for program in blocks("python"):
        exec(compile(here(program, place), "docs/deploy.md", "exec"), {})


@pytest.fixture
def service(server):
    """The address of the example of a service."""
    command = [sys.executable, ROOT / "examples/serve/serve.py", server / "bible", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process.stdout.readline().split()[0]
        process.terminate()


def answer(service, data):
    """Status and text."""
    try:
        with urllib.request.urlopen(service, data, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answer_to_headers(service, length, content=None):
    """Status before any content was sent, or after a part of it."""
    connection = HTTPConnection(service.partition("//")[2], timeout=60)
    connection.putrequest("POST", "/")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders(content)
    if content is not None:
        connection.sock.shutdown(socket.SHUT_WR)
    with closing(connection):
        return connection.getresponse().status


@pytest.mark.slow
def test_the_service_answers_clients_at_once_and_after_errors(server, service):
    expected = [line.text for line in Translator(server / "bible").translate(SENTENCES)]
    for refused, words in ((b"\xff", "UTF-8"), (b"God " * 10_000, "tokens")):
        status, said = answer(service, refused)
        assert (status, words in said) == (400, True), said
    for length, refusal in ((None, 411), ("0x1", 411), ("100001", 413), ("9" * 5000, 413)):
        assert answer_to_headers(service, length) == refusal
    assert answer_to_headers(service, "9", b"God is") == 400
    with ThreadPoolExecutor(40) as clients:
        for status, said in clients.map(partial(answer, service), ["\n".join(SENTENCES).encode()] * 40):
            assert (status, said.split("\n")) == (200, expected)


@pytest.mark.slow
def test_a_trained_model_is_compared_with_its_export(place, tmp_path):
    corpus, model = place / "corpus", place / "own/documents/pieces.model"
    words = [corpus / "test.en", corpus / "test.de", "--sentencepiece-model", model, "--json", tmp_path / "found.json"]
    for name, of_documents in (("bible", []), ("own/documents", ["--docs", corpus / "test.docs"])):
        words += [*of_documents, "--name", name]
        data = place / "own/documents/data"
        benchmark("deploy_trained.py", place / name / "checkpoints/checkpoint_best.pt", data, *words)
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("bible", "own/documents"):
        pytorch, float32, int8 = (found[name][n] for n in ("PyTorch", "mega_runtime, float32", "mega_runtime, int8"))
        assert float32["lines as in PyTorch"] == pytorch["lines as in PyTorch"] == 10
        assert 0 <= int8["lines as in PyTorch"] <= 10
