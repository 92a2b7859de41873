"""The commands and programs of docs/deploy.md run, with models that had two updates."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection

import numpy as np
import pytest

from mega_runtime import Translator
from tests.helpers.commands import PLUGIN, ROOT, as_words, fairseq, on_each_side, once
from tests.helpers.documented import DOCS, blocks, documented_place, output_of, run
from tests.helpers.forking import benchmark
from tests.helpers.recipes import text, write

PAGE = DOCS / "deploy.md"
SENTENCES = ["In the beginning God created the heaven and the earth.", "", "And the earth was without form, and void."]


def train_documents(place):
    """A model of documents, with the data and pieces of the README's translation model."""
    pairs, own = place / "bible/sentencepiece", place / "own/documents"
    shutil.copytree(pairs / "bin", own / "data", dirs_exist_ok=True)
    shutil.copy(pairs / "codes", own / "pieces.model")
    words = ["--task=mega_document_translation", "--cross-attention-positions=sentence", "--rel-pos-bias=rotary"]
    words += ["--arch=mega_transformer_tiny", *as_words(on_each_side(layers=1)), "--share-all-embeddings"]
    words += ["--max-tokens=2048", "--required-batch-size-multiple=1", "--optimizer=adam", "--lr=1e-3"]
    words += ["--max-update=2", "--warmup-updates=1", "--num-workers=0", "--cpu", f"--save-dir={own}/checkpoints"]
    fairseq("train", own / "data", *PLUGIN, *words)


@pytest.fixture(scope="module")
def place():
    """A folder with the README's models, one of documents, and the page's commands in `bin`."""
    for name in ("bible", "addresses", "digits"):
        output_of(name)
    place = documented_place()
    once("documented-documents", lambda _: train_documents(place))
    return place


@pytest.fixture(scope="module")
def server(place, tmp_path_factory):
    """A folder with the exported models, in which the page's commands have run."""
    server = tmp_path_factory.mktemp("server")
    write(server / "new.en", SENTENCES)
    write(server / "letter.en", [" ".join(SENTENCES)])
    (server / "books").mkdir()
    for name in "12":
        write(server / f"books/{name}.en", SENTENCES)
    write(server / "digits.txt", [" ".join(map(str, np.load(place / "digits/test.npy")[0]))])
    for block in blocks(PAGE, "bash"):
        if "mega-" in block:  # not those that install or serve
            run(block, place, cwd=server)
    return server


@pytest.mark.slow
def test_documented_commands_translate_continue_score_and_classify(server):
    assert all((server / name / "config.json").exists() for name in ("bible", "documents", "addresses", "digits"))
    assert [bool(line) for line in text(server / "new.de")] == [bool(line) for line in SENTENCES]
    assert len(text(server / "scored.tsv")) == 2 * len(SENTENCES)
    assert len(text(server / "letter.de")) == 1
    for name in "12":
        assert [bool(line) for line in text(server / f"books/{name}.de")] == [bool(line) for line in SENTENCES]
    assert len(text(server / "bits.tsv")) == len(SENTENCES)
    assert re.fullmatch(r"\d\t[\d.]+", *text(server / "labels.tsv"))


@pytest.mark.slow
def test_documented_programs_run(server, place, monkeypatch):
    monkeypatch.chdir(server)
    for program in blocks(PAGE, "python"):
        exec(compile(program.replace("/tmp/", f"{place}/"), "docs/deploy.md", "exec"), {})


@contextmanager
def started(folder):
    """The example of a service: its process and its address."""
    command = [sys.executable, ROOT / "examples/serve/serve.py", folder, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process, process.stdout.readline().split()[0]
        process.terminate()


@pytest.fixture
def service(server):
    with started(server / "bible") as (_, address):
        yield address


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
def test_an_interrupted_service_answers_the_requests_that_it_has(server):
    with started(server / "bible") as (process, address):
        connection = HTTPConnection(address.partition("//")[2], timeout=60)
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", "7")
        connection.endheaders(b"God ")
        assert answer(address, b"God")[0] == 200  # the request before has a thread, too
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        with pytest.raises(urllib.error.URLError):
            answer(address, b"God")
        connection.send(b"is.")
        with closing(connection):
            assert connection.getresponse().status == 200
        assert process.wait(60) == 0


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
