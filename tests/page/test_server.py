"""The server of the page gives its files and those of the models, to this machine, and nothing else."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.helpers.page import PAGE
from tests.helpers.recipes import program

serve = program("page/serve.py")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Host and port of a server whose folder of models has a model, and files that are none of its."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("one/config.json", "one/weights.bin", "empty/other.json", "one/notes.py", "secret.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "one/away.json").symlink_to("/etc/hostname")
    (folder / "away").symlink_to(tmp_path_factory.mktemp("away"))
    (folder / "away/config.json").write_text("away")
    with serve.server(folder, 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running.server_address
        running.shutdown()
        thread.join()


def ask(address, path, method="GET"):
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/app.js", "text/javascript; charset=utf-8"),
        ("/style.css?x=1", "text/css; charset=utf-8"),
        ("/texts/genesis-6.de.txt", "text/plain; charset=utf-8"),
    ],
)
def test_files_of_the_page_have_their_types(address, path, kind):
    status, headers, content = ask(address, path)
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, kind, "no-store")
    assert content == (PAGE / (path.partition("?")[0][1:] or "index.html")).read_bytes()


def test_models_are_listed_and_served(address):
    assert json.loads(ask(address, "/models/")[2]) == ["one"]
    assert ask(address, "/models/one/weights.bin")[2] == b"one/weights.bin"


@pytest.mark.parametrize(
    "path",
    [
        *("/serve.py", "/README.md", "/none.js", "/texts", "/models/one/notes.py", "/models/two/config.json"),
        *("/../demo/report.py", "/..%2f..%2fsetup.py", "/models/../app.js", "/models/one/%00.json", "//etc/hostname"),
        *("/models/one/away.json", "/models//etc/hostname", "/models/away/config.json", "/texts/../../lra/README.md"),
        *(f"/models/{'long' * 1000}.json", "HTTP://[/x"),
    ],
)
def test_nothing_else_is_served(address, path):
    assert ask(address, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_is_answered(address, method):
    assert ask(address, "/", method)[0] == 501


def test_it_listens_to_this_machine_only(address):
    assert address[0] == "127.0.0.1"


# ------------------------------------------------------------------------------------------- the command


def start(*words, **options):
    """The server as a program, with nothing but Python's own library."""
    command = [sys.executable, "-I", "-S", str(PAGE / "serve.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_a_second_server_takes_another_port_and_both_end_quietly():
    ports = []
    running = [start() for _ in range(2)]
    for process in running:
        ports.append(int(re.search(r"http://127\.0\.0\.1:(\d+) ", process.stdout.readline())[1]))
    assert len(set(ports)) == 2
    for process, port in zip(running, ports):
        assert ask(("127.0.0.1", port), "/")[0] == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out.strip(), err) == (0, "", "")


@pytest.mark.slow
def test_a_given_port_that_is_taken_is_refused_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("--port", port)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.fullmatch(rf"port {port} cannot be used \(.*\): choose another one, or none\n", err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port=99999"], r"port 99999 cannot be used \(.*0-65535.*\): choose another one, or none\n"),
        (["--models=none"], r"there is no folder none: give one with exported models as --models\n"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(words, said):
    process = start(*words)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.fullmatch(said, err)


@pytest.mark.slow
def test_without_npm_the_page_says_what_to_do(tmp_path):
    """From a copy, which has no onnxruntime-web."""
    copy = tmp_path / "bring.py"
    copy.write_text((PAGE / "bring.py").read_text())
    done = subprocess.run([sys.executable, str(copy)], env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "npm was not found: install Node.js, or copy" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_says_why_it_could_not_bring_the_package(tmp_path):
    (tmp_path / "bring.py").write_text((PAGE / "bring.py").read_text())
    environment = {**os.environ, "npm_config_registry": "http://127.0.0.1:1", "npm_config_fetch_retries": "0"}
    done = subprocess.run([sys.executable, "bring.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ECONNREFUSED" in done.stderr
