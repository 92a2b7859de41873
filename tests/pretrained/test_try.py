"""`make try`: its jobs, with and without a terminal, in an environment that is made of the runtime's packages alone."""

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers.commands import LIMIT, ROOT

PROGRAM = [sys.executable, ROOT / "examples/try/try.py"]
LAST = re.compile(r"^[\d,]+ tokens in [\d.]+ s; .* (\d+) MB of memory\.\s*$")


def labelled(said):
    """The texts by what stands before them, such as a verse's number."""
    return dict(re.findall(r"^    ?(\w+) +(\S.*?)\s*$", said, re.MULTILINE))


def test_without_a_terminal_it_takes_its_own_texts():
    said = subprocess.run(PROGRAM, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert said.stderr == ""
    found = labelled(said.stdout)
    assert [found[str(n)] for n in range(1, 23)]
    assert found["German"].startswith("Und Gott sprach")
    assert int(LAST.match(said.stdout.splitlines()[-1]).group(1)) < 200


def test_a_typed_sentence_is_translated():
    ours, theirs = pty.openpty()
    with subprocess.Popen(PROGRAM, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        os.write(ours, b"And the king said unto his servants\n\n")
        said = b""
        while True:
            try:
                said += os.read(ours, 4096)
            except OSError:  # the end, on Linux
                break
    os.close(ours)
    assert running.returncode == 0
    text = re.sub(r"\r\x1b\[K", "", said.decode()).replace("\r\n", "\n")
    assert re.search(r"German +Und der König", text)
    assert "22 of 22 verses" in said.decode()  # the bar


@pytest.mark.slow
def test_the_environment_has_the_packages_of_the_runtime_alone(tmp_path):
    """With a pip that only notes what it is asked to install."""
    for name in ("Makefile", "runtime/setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "examples/try").mkdir(parents=True)
    (tmp_path / "examples/try/try.py").write_text("print('tried')")
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1"}
    silent = "--no-print-directory"  # which it prints below `make test`
    words = ["make", silent, "try", f"PYTHON={shlex.quote(sys.executable)}"]
    made = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert made.returncode  # without an index, and nothing is left that looks ready
    assert not (tmp_path / ".try/.ready").exists()
    (tmp_path / ".try/.ready").touch()
    made = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert made.stdout == "tried\n"
