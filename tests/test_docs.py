"""Documented commands work, links and named tests exist, and the options page is up to date."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT, as_words, fairseq, fresh, on_each_side, preprocess_pairs
from tests.helpers.documents import DOCUMENTS, blocks, commands, options_document, paste
from tests.helpers.released import READS_SAFELY

README, DOCS = ROOT / "README.md", ROOT / "docs"
TRANSLATION, LANGUAGE = DOCS / "translation.md", DOCS / "language-modelling.md"
CLASSIFICATION = DOCS / "classification.md"
NEW_TORCH = pytest.mark.skipif(not READS_SAFELY, reason="needs torch 2.6")
PYTHON = [TRANSLATION, LANGUAGE, CLASSIFICATION, DOCS / "modules.md", pytest.param(DOCS / "export.md", marks=NEW_TORCH)]


def name_of(document):
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_have_targets(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        place, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = (document.parent / place).resolve() if place else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target / "README.md" if target.is_dir() else target), link


def anchors(document):
    headings = (re.sub(r"[^\w\- ]", "", line) for line in re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE))
    return {heading.strip().lower().replace(" ", "-") for heading in headings}


def test_tests_named_in_documents_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for document in DOCUMENTS:
        for name in re.findall(r"\btest_\w+\b(?!\.py|/)", document.read_text()):
            assert f"def {name}(" in tests or (ROOT / "tests" / f"{name}.py").exists(), (document, name)


def test_the_options_page_matches_the_code():
    assert options_document() == (ROOT / "docs/options.md").read_text()


# ------------------------------------------------------------------------------------------------ commands

NARROW = {"layers": 1, "embed_dim": 16, "hidden_dim": 32, "z_dim": 8, "ffn_embed_dim": 32}
FEW = ["--max-update=2", "--update-freq=1", "--warmup-updates=1", "--num-workers=0", "--cpu"]
PAIRS = {"fairseq-train": [*FEW, *as_words(on_each_side(**NARROW))], "fairseq-generate": ["--cpu"]}
TEXT = {
    "fairseq-train": [
        *[*FEW, *as_words({f"decoder_{name}": size for name, size in NARROW.items()})],
        *["--decoder-chunk-size=32", "--max-tokens=512"],
    ],
    "fairseq-eval-lm": ["--cpu"],
    "mega-fairseq": ["--cpu"],
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder with the trained translation models of both documents, and the output of the commands."""
    place = tmp_path_factory.mktemp("pairs")
    preprocess_pairs(place)
    shutil.copytree(place / "bin", place / "bible/sentencepiece/bin")
    replaced = {"/tmp/bible": "bible", "DATA": "bin", "--source-lang en --target-lang de": ""}
    return place, [
        *paste(README, "VOCABULARY=2000 ", place, replaced, PAIRS),
        *paste(TRANSLATION, "fairseq-train ", place, replaced, PAIRS),
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The same for language models; the text consists of bytes."""
    place = tmp_path_factory.mktemp("text")
    for split in ("train", "valid", "test"):
        numbers = " ".join(str(byte) for byte in (ROOT / "LICENSE").read_bytes())
        (place / split).write_text(f"{numbers}\n")
    files = [f"--{split}pref={place / split}" for split in ("train", "valid", "test")]
    fairseq("preprocess", "--only-source", *files, f"--destdir={place / 'bytes/bin'}")
    shutil.copytree(place / "bytes/bin", place / "addresses/bytes/bin")
    adaptive = {**TEXT, "fairseq-train": [*TEXT["fairseq-train"], "--adaptive-softmax-cutoff=10,20"]}
    inspected = {**adaptive, "mega-fairseq": []}
    replaced = {"/tmp/addresses": "addresses", "DATA": "bytes/bin"}
    return place, [
        *paste(README, "DATA=/tmp/addresses ", place, replaced, TEXT),
        *paste(LANGUAGE, "fairseq-train ", place, replaced, inspected),
    ]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The same for a classifier."""
    place = tmp_path_factory.mktemp("digits")
    narrow = [*FEW, *as_words({f"encoder_{name}": size for name, size in NARROW.items()})]
    return place, paste(
        CLASSIFICATION, "mega-fairseq prepare digits", place, {"/tmp/digits": "digits"}, {"fairseq-train": narrow}
    )


@pytest.mark.slow
def test_documented_commands_train_and_translate(pairs):
    outputs = pairs[1]
    assert ["done training" in output for output in outputs] == [True, False, True, False]
    for output in outputs[1::2]:
        assert len(re.findall("^H-", output, re.MULTILINE)) == 37  # sentences of the test set


def test_the_readme_scores_words_and_not_pieces():
    """`--remove-bpe` alone would score pieces of sentencepiece; test_own_data.py checks the number of words."""
    (generate,) = (c for block in blocks(README, "bash") for c in commands(block) if c.startswith("fairseq-generate"))
    assert "sentencepiece" in generate.split()[1]
    assert "--remove-bpe=sentencepiece" in generate.split()


@pytest.mark.slow
def test_documented_commands_train_evaluate_and_sweep_a_language_model(text):
    place, outputs = text
    for trained, evaluated, swept in (outputs[:3], outputs[3:6]):
        assert "done training" in trained
        assert re.search(r"Perplexity: \d", evaluated)
        assert re.search(r"\b1,?024\b", swept)
    assert "half-lives" in outputs[6]
    assert {path.name for path in place.rglob("*.png")} == {"sweep.png", "inspect.png"}


@pytest.mark.slow
def test_a_documented_command_continues_a_text(text):
    (command,) = (command for block in blocks(LANGUAGE, "bash") for command in commands(block) if "echo" in command)
    prompt = {"some text": "70 101", "DATA": "bytes/bin", "$(mega-fairseq user-dir)": str(ROOT / "mega_fairseq")}
    for written, used in {**prompt, "fairseq-interactive": f"{sys.executable} -m fairseq_cli.interactive"}.items():
        command = command.replace(written, used)
    assert re.search(r"^H-0\t-?[\d.]+\t\S", shell(f"{command} --cpu", text[0]), re.MULTILINE)


@pytest.mark.slow
def test_documented_commands_train_a_classifier_and_draw_its_predictions(digits):
    place, (prepared, trained, classified) = digits
    assert "wrote train (1,397), valid (200), test (200)" in prepared
    assert "done training" in trained
    assert re.search(r"accuracy [\d.]+% of 200 examples", classified)
    assert len(re.findall(r"^\d\t0\.\d{4}$", classified, re.MULTILINE)) == 200
    assert {path.name for path in place.rglob("*.png")} == {"examples.png", "classified.png"}


@pytest.mark.slow
@pytest.mark.parametrize("document", PYTHON, ids=name_of)
def test_documented_python_code_runs_with_models_of_the_documented_commands(document, pairs, text, digits):
    (program,) = blocks(document, "python")
    place = pairs[0] if "/tmp/bible" in program else digits[0] if "/tmp/digits" in program else text[0]
    # The text of the tests is in pieces already, and its tokens are bytes.
    program = re.sub(r"\n    bpe=.*\n    sentencepiece_model=.*", "", program).replace('"some text"', '"70 101"')
    program = program.replace("/tmp/", "").replace('"DATA"', '"bytes/bin"')
    (place / "program.py").write_text(program)
    fresh(sys.executable, "program.py", cwd=place)


@pytest.mark.slow
def test_the_plain_torch_example_trains_and_evaluates_in_pieces(tmp_path):
    output = fresh(sys.executable, ROOT / "examples/plain_torch/train_few_updates.py", "--updates", 12, cwd=tmp_path)
    first, last, whole, pieces = map(float, re.findall(r"\d\.\d+(?!.* nats)", output))
    assert last < 0.9 * first
    assert whole == pytest.approx(pieces, abs=1e-4)


# ------------------------------------------------------------------------------------------------ make


def shell(command, place):
    result = subprocess.run(
        ["bash", "-c", command], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


# Without the variables of the make command that runs these tests.
MAKE = "env -u MAKEFLAGS -u ARGS -u PYTHON -u VENV -u WORKERS make"


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (["install"], " -m venv "),
        (["PYTHON=python3.9", "install"], "python3.9 -m venv "),
        (["test", "ARGS=tests/ops"], r"/python -m pytest -n auto --dist worksteal tests/ops$"),
        (["test-fast"], "HYPOTHESIS_PROFILE=fast .*/python -m pytest -n auto --dist worksteal -m 'not slow' $"),
        (["coverage"], "--cov-branch --cov-fail-under=95"),
        (["demo"], "/python examples/demo/demo.py"),
        (["bench"], "/python benchmarks/layer.py"),
        (["lint"], "/ruff format --check ."),
        (["format"], "/ruff check --fix ."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_make_sets_up_the_environment_first(words, done, tmp_path):
    """In a dry run, in a clone with nothing installed."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    output = shell(f"{MAKE} --dry-run {shlex.join(words)}", tmp_path)
    assert re.search(done, output, re.MULTILINE)
    assert "-m venv .venv" in output


def test_make_clean_keeps_the_environment_and_the_sources(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/lib/__pycache__", "mega_fairseq/__pycache__", "build", ".pytest_cache"):
        (tmp_path / name).mkdir(parents=True)
    shell(f"{MAKE} clean", tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"Makefile", "mega_fairseq", ".venv", ".venv/lib", ".venv/lib/__pycache__"}
