"""Documents keep their word: each command that they show works, each link leads somewhere, each option exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, fairseq, preprocess_text, write_corpus
from tests.documents import COMMANDS, DOCUMENTS, README, SHOWN, blocks, options_document

NARROW = {"layers": 1, "embed-dim": 16, "hidden-dim": 32, "z-dim": 8, "ffn-embed-dim": 32}
FEW = ["--max-update=2", "--update-freq=1", "--warmup-updates=1", "--cpu"]
# Behind the README's own words, so that what they train takes seconds.
SMALLER = {
    "translation": [*FEW, *(f"--{side}-{name}={n}" for side in ("encoder", "decoder") for name, n in NARROW.items())],
    "mega_language_modeling": [
        *[*FEW, *(f"--decoder-{name}={n}" for name, n in NARROW.items())],
        *["--decoder-chunk-size=32", "--max-tokens=512", "--adaptive-softmax-cutoff=10,20", "--num-workers=0"],
    ],
}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_run_by_a_test_or_it_is_said_why_not(command):
    found = [shown for pattern, shown in SHOWN.items() if re.fullmatch(pattern, command.words)]
    assert len(found) == 1, found
    for file, test in re.findall(r"(test_\w+\.py)::(\w+)", " ".join(found[0])):
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), (file, test)


def test_what_is_run_stands_in_a_document():
    for pattern in SHOWN:
        assert any(re.fullmatch(pattern, command.words) for command in COMMANDS), pattern


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_names_of_tests_lead_somewhere(document):
    text = document.read_text()
    headings = (re.sub(r"[^\w\- ]", "", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    anchors = {heading.strip().lower().replace(" ", "-") for heading in headings}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = link.partition("#")
        if not link.startswith("http"):
            assert (document.parent / place).exists(), link
            assert place or anchor in anchors, link
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), (file, test)


def test_the_tests_readme_names_every_file_of_tests():
    text = (ROOT / "tests/README.md").read_text()
    missing = [path.name for path in (ROOT / "tests").rglob("test_*.py") if path.name not in text]
    assert not missing


# Whatever the make that runs the tests was told.
MAKE = "env -u MAKEFLAGS -u ARGS -u PYTHON -u VENV -u WORKERS make"


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (["install"], " -m venv "),
        (["PYTHON=python3.9", "install"], "python3.9 -m venv "),
        (["test", "ARGS=tests/ops"], r"/python -m pytest -n auto tests/ops$"),
        (["test-fast"], "HYPOTHESIS_PROFILE=fast .*/python -m pytest -n auto -m 'not slow' $"),
        (["coverage"], "--cov-branch --cov-fail-under=95"),
        (["demo"], "/python examples/demo/demo.py"),
        (["bench"], "/python benchmarks/layer.py"),
        (["lint"], "/ruff format --check ."),
        (["format"], "/ruff check --fix ."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_make_does_what_is_said(words, done, tmp_path):
    """In a clone with nothing installed, so that each target begins by that: what make would do, and does not here."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    said = shell(f"{MAKE} --dry-run {shlex.join(words)}", tmp_path)
    assert re.search(done, said, re.MULTILINE)
    assert "-m venv .venv" in said


def test_make_clean_leaves_what_is_worth_something(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/lib/__pycache__", "mega_fairseq/__pycache__", "build", ".pytest_cache"):
        (tmp_path / name).mkdir(parents=True)
    shell(f"{MAKE} clean", tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"Makefile", "mega_fairseq", ".venv", ".venv/lib", ".venv/lib/__pycache__"}


def test_the_table_of_options_is_that_of_the_code():
    assert options_document() == (ROOT / "docs/options.md").read_text()


# ------------------------------------------------------------------------------------------------ executed


def shell(words, place):
    """A command line as somebody pastes it, with `place` as the current folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", words],
        cwd=place,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, f"{words}\n{result.stdout}"
    return result.stdout


def pasted(task, place):
    """Runs the README's block that trains for `task`, one command after the other; what each of them says."""
    ours = [command for command in COMMANDS if command.document == README]
    (block,) = {command.block for command in ours if f"--task {task} " in command.words and "-train" in command.words}
    said = []
    for command in ours:
        if command.block == block:
            more = SMALLER[task] if "-train" in command.words else ["--cpu"] * ("inspect" not in command.words)
            said.append(shell(" ".join([command.words, *more]), place))
    return said


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    place = tmp_path_factory.mktemp("translation")
    write_corpus(place)
    files = [f"--{split}pref={place / split}" for split in ("train", "valid", "test")]
    languages = ["--source-lang=en", "--target-lang=de", "--joined-dictionary"]
    fairseq("preprocess", *languages, *files, "--destdir", place / "DATA")
    return place, pasted("translation", place)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    place = tmp_path_factory.mktemp("language")
    preprocess_text(place).rename(place / "DATA")
    return place, pasted("mega_language_modeling", place)


@pytest.mark.slow
def test_the_readme_trains_and_translates(translation):
    trained, translated = translation[1]
    assert "done training" in trained
    assert len(re.findall("^H-", translated, re.MULTILINE)) == 37  # sentences of the test set


@pytest.mark.slow
def test_the_readme_trains_evaluates_and_sweeps_a_language_model(language):
    place, (trained, evaluated, swept, inspected) = language
    assert "done training" in trained
    assert re.search(r"Perplexity: \d", evaluated)
    assert re.search(r"\b3,?072\b", swept)
    assert "half-lives" in inspected
    assert (place / "sweep.png").exists()
    assert (place / "inspect.png").exists()


@pytest.mark.slow
def test_the_readme_goes_on_with_a_text(language):
    (command,) = (command for command in COMMANDS if command.document == README and "interactive" in command.words)
    said = shell(f"{command.words} --cpu", language[0])
    assert re.search(r"^H-0\t-?[\d.]+\t\S", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_the_python_of_the_readme_runs_on_what_its_commands_have_trained(translation, language, number):
    programs = blocks(ROOT / README, "python")
    assert len(programs) == 3
    # the corpora of the tests are in pieces already
    program = programs[number].replace(', bpe="sentencepiece", sentencepiece_model="data/sentencepiece/codes"', "")
    place = translation[0] if "Transformer" in program else language[0]
    (place / "program.py").write_text(program)
    shell("python program.py", place)


def test_plain_torch_trains_and_reads_in_pieces(tmp_path):
    said = shell(f"python {ROOT}/examples/plain_torch/train_few_updates.py --updates 12", tmp_path)
    first, last, whole, pieces = map(float, re.findall(r"\d\.\d+(?!.* nats)", said))
    assert last < 0.9 * first
    assert whole == pytest.approx(pieces, abs=1e-4)
