"""Documents: links have targets, options exist, README's commands and the pages' Python code run; the reference."""

import os
import re
import runpy
import shutil
import sys
from importlib import import_module
from pathlib import Path

import fairseq
import numpy as np
import pytest

from mega_fairseq import modules
from mega_fairseq.cli.options import architectures, options_of, tasks
from tests.helpers.commands import FORKS, ROOT, fresh
from tests.helpers.documented import DOCS, README, blocks, commands_with, documented_place, output_of, run
from tests.helpers.recipes import run_program

PLACES = ("*.md", "docs/*.md", "examples/**/*.md", "pretrained/**/*.md", "tests/**/*.md")
DOCUMENTS = sorted(path for places in PLACES for path in ROOT.glob(places))
SQUARES = ROOT / "examples/pictures/squares.py"
# Options of pip, torchrun, srun, hydra and curl.
OTHER_PROGRAMS = {
    *["--no-deps", "--no-build-isolation", "--standalone", "--no-python", "--nproc_per_node", "--nnodes"],
    *["--node_rank", "--master_addr", "--master_port", "--nodes", "--ntasks-per-node", "--gpus-per-node"],
    *["--config-dir", "--config-name", "--data-binary", "--strip-components"],
}


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


@pytest.fixture(scope="module")
def options():
    """Options of our models and tasks, and all that the programs here and fairseq define."""
    names = {option.name for config in [*architectures().values(), *tasks().values()] for option in options_of(config)}
    ours = (ROOT / name for name in ("mega_fairseq", "runtime", "benchmarks", "examples"))
    for folder in (*ours, Path(fairseq.__path__[0])):
        for path in folder.rglob("*.py"):
            arguments = re.findall(r"[\"']--([\w-]+)[\"']|^    (\w+): ", path.read_text(), re.MULTILINE)
            names.update("--" + (typed or field.replace("_", "-")) for typed, field in arguments)
    return names | OTHER_PROGRAMS


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_options_in_documents_exist(document, options):
    unknown = set(re.findall(r"(?<![\w-])--[a-z](?:[\w-]*\w)?", document.read_text())) - options
    assert not unknown, unknown


# ------------------------------------------------------------------------------------------------ reference


@pytest.fixture
def reference():
    return runpy.run_path(str(DOCS / "reference.py"))["reference"]


@pytest.mark.parametrize(
    "package", ["mega_runtime", *(f"mega_fairseq.{name}" for name in ("modules", "models", "tasks", "criterions"))]
)
def test_the_reference_has_every_public_class(package, reference):
    names = {name for name, value in vars(import_module(package)).items() if isinstance(value, type)}
    assert names
    assert names <= set(re.findall("^## (.*)$", reference()[package], re.MULTILINE))


def test_a_public_class_without_a_docstring_is_detected(reference, monkeypatch):
    monkeypatch.setattr(modules.DampedEMA, "__doc__", None)
    with pytest.raises(ValueError, match="no docstring: ## DampedEMA$"):
        reference()


# ------------------------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def place():
    return documented_place()


@pytest.fixture(scope="module")
def translated():
    return output_of("bible")


@pytest.fixture(scope="module")
def evaluated():
    return output_of("addresses") + output_of("sweep")


@pytest.fixture(scope="module")
def classified():
    return output_of("digits") + output_of("classified")


@pytest.mark.slow
def test_readme_commands_translate_a_sentence(translated):
    assert "done training" in translated
    assert re.search(r"^D-0\t\S+\t", translated, re.MULTILINE)


@pytest.mark.slow
def test_readme_commands_translate_with_an_exported_model(translated, place):
    said = run(commands_with(README, "mega-fairseq export"), place)
    assert re.search(r"^differences from the checkpoint: rms .*\n.*\S.*\n1 line in", said, re.MULTILINE)


@pytest.mark.slow
def test_readme_commands_translate_with_a_trained_model(place):
    said = run(commands_with(README, "mega-runtime translate pretrained").replace(".try/bin/", ""), place)
    assert said.startswith("Ich bin der Weg")


@pytest.mark.slow
def test_readme_commands_continue_a_text(evaluated, place):
    assert "done training" in evaluated
    assert re.search(r"^D-0\t\S+\tFellow citizens", evaluated, re.MULTILINE)
    assert (place / "addresses/sweep.png").exists()


@pytest.mark.slow
def test_documented_commands_compare_mixers(evaluated, place, tmp_path):
    (tmp_path / "data-lm").symlink_to(place / "addresses/bytes/bin")
    block = commands_with(DOCS / "mixers.md", "compare/").replace("mega megalodon gmlp attention", "mega gmlp")
    said = run(block, place, cwd=tmp_path)
    found = re.findall(r"^([\d.]+) compare/(\w+)-[\de-]+\.log$", said, re.MULTILINE)
    assert sorted({mixer for _, mixer in found}) == ["gmlp", "mega"]
    losses = [float(loss) for loss, _ in found]
    assert len(losses) == 4
    assert losses == sorted(losses)


@pytest.mark.slow
def test_documented_commands_classify_digits(classified, place):
    assert "done training" in classified
    assert re.search(r"^\d\t[\d.]+$", classified, re.MULTILINE)
    assert re.search(r"accuracy [\d.]+% of 200 examples", classified)
    assert (place / "digits/classified.png").exists()


@pytest.mark.slow
def test_own_pairs_are_translated_and_scored(place, tmp_path):
    """From few sentences, none of which may be left without a split."""
    for language in ("en", "de"):
        lines = (place / f"corpus/train.{language}").read_text().splitlines(keepends=True)
        (tmp_path / f"corpus.{language}").write_text("".join(lines[:300]))
        (tmp_path / f"new.{language}").write_bytes("".join([*lines[300:302], "a\rb\0c\n"]).encode())
    steps = "".join(blocks(DOCS / "own-data.md", "bash")[1:7]).replace("--beam 5", "--beam 5 --max-len-b 9")
    output = run(steps, place, cwd=tmp_path)
    assert "Translated 15 sentences" in output
    assert re.search(r"BLEU = [\d.]+", output)
    assert len((tmp_path / "new.out").read_text().splitlines()) == 3
    assert '"verbose_score"' in output


def test_own_pictures_become_the_same_grey_squares_with_8_and_16_bits_or_transparent(tmp_path, monkeypatch, capsys):
    image = pytest.importorskip("PIL.Image", reason="the program needs Pillow")
    grey = np.random.default_rng(1).integers(0, 256, (28, 28), np.uint8)
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        (tmp_path / "pictures" / label / ".DS_Store").touch()
        for number in range(5):
            image.fromarray(grey).save(tmp_path / f"pictures/{label}/{number}-8.png")
            image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / f"pictures/{label}/{number}-16.png")
            ink = np.dstack([np.zeros((28, 28, 3), np.uint8), 255 - grey])  # black, on no background
            image.fromarray(ink).save(tmp_path / f"pictures/{label}/{number}-ink.png")
    monkeypatch.chdir(tmp_path)
    run_program(SQUARES, "pictures", "data-pictures")
    for split, count in (("train", 24), ("valid", 3), ("test", 3)):
        assert (np.load(f"data-pictures/{split}.npy") == grey.ravel()).all()
        assert len(Path(f"data-pictures/{split}.label").read_text().split()) == count
    assert "--values-mean" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="data-pictures is not empty"):
        run_program(SQUARES, "pictures", "data-pictures")
    run_program(SQUARES, "pictures/cat/0-ink.png")
    assert capsys.readouterr().out.split() == list(map(str, grey.ravel()))


@pytest.mark.parametrize("number", [np.float32, np.int32])
def test_pictures_of_32_bits_are_refused(tmp_path, number):
    image = pytest.importorskip("PIL.Image", reason="the program needs Pillow")
    image.fromarray(np.arange(28 * 28, dtype=number).reshape(28, 28)).save(tmp_path / "picture.tif")
    with pytest.raises(SystemExit, match="32 bits"):
        run_program(SQUARES, tmp_path / "picture.tif")


@pytest.mark.parametrize(
    ("name", "share", "words"),
    [
        ("cat/notes.txt", 0, "cat/notes.txt is no whole picture"),
        ("cat/half.png", 0.5, "cat/half.png is no whole picture"),
        ("cat/more/1.png", 1, "cat/more is no whole picture"),
        ("a cat/1.png", 1, "one word"),
    ],
)
def test_pictures_that_cannot_be_read_are_named_before_any_work(tmp_path, name, share, words):
    image = pytest.importorskip("PIL.Image", reason="the program needs Pillow")
    for each in ("dog/1.png", "dog/2.png", "dog/3.png", name):
        (tmp_path / "pictures" / each).parent.mkdir(parents=True, exist_ok=True)
        image.effect_noise((28, 28), 50).save(tmp_path / "picture.png")
        picture = (tmp_path / "picture.png").read_bytes()
        (tmp_path / "pictures" / each).write_bytes(picture[: int(len(picture) * (share if each == name else 1))])
    with pytest.raises(SystemExit, match=words):
        run_program(SQUARES, tmp_path / "pictures", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["translation", "language-modelling", "classification", "modules"])
def test_documented_python_code_runs(page, translated, evaluated, classified, place):
    for program in blocks(DOCS / f"{page}.md", "python"):
        process = FORKS.Process(target=execute, args=(program.replace("/tmp/", f"{place}/"), place))
        process.start()
        process.join()
        assert process.exitcode == 0


def execute(program, folder):
    os.chdir(folder)
    exec(compile(program, "a document", "exec"), {})


@pytest.mark.slow
def test_plain_torch_example_evaluates_in_pieces(tmp_path):
    output = fresh(sys.executable, ROOT / "examples/plain_torch/train_few_updates.py", "--updates", 12, cwd=tmp_path)
    first, last, whole, pieces = map(float, re.findall(r"\d\.\d+(?!.* nats)", output))
    assert last < 0.9 * first
    assert whole == pytest.approx(pieces, abs=1e-4)


# ------------------------------------------------------------------------------------------------ make


def test_make_clean_keeps_the_environment_and_the_sources(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/lib/__pycache__", "mega_fairseq/__pycache__", "build", ".pytest_cache"):
        (tmp_path / name).mkdir(parents=True)
    fresh("env", "-u", "MAKEFLAGS", "make", "clean", cwd=tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"Makefile", "mega_fairseq", ".venv", ".venv/lib", ".venv/lib/__pycache__"}
