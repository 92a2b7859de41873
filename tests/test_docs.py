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
from tests.helpers.forking import python, write_script

DOCS = ROOT / "docs"
PLACES = ("*.md", "docs/*.md", "examples/**/*.md", "pretrained/**/*.md", "tests/**/*.md")
DOCUMENTS = sorted(path for places in PLACES for path in ROOT.glob(places))
SMALL = "--max-update 2 --warmup-updates 1 --num-workers 0"
# Options of pip, torchrun, srun, hydra and curl.
OTHER_PROGRAMS = {
    *["--no-deps", "--no-build-isolation", "--standalone", "--no-python", "--nproc_per_node", "--nnodes"],
    *["--node_rank", "--master_addr", "--master_port", "--nodes", "--ntasks-per-node", "--gpus-per-node"],
    *["--config-dir", "--config-name", "--data-binary", "--strip-components"],
}


def name_of(document):
    return str(document.relative_to(ROOT))


def blocks(document, language):
    """The code blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


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


def run(block, place, cwd=ROOT):
    """Runs shell commands as they stand in a page, but with `place` instead of /tmp."""
    path = f"PATH={place / 'bin'}:{os.environ['PATH']}"
    settings = [path, f"PYTHON={python()}", "OMP_NUM_THREADS=1", f"CORPUS={place / 'corpus'}", f"REPO={ROOT}"]
    return fresh("env", *settings, f"PLACE={place}", "bash", "-euc", block.replace("/tmp/", '"$PLACE"/'), cwd=cwd)


def commands(page, word):
    (block,) = (block for block in blocks(page, "bash") if word in block)
    return block


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small corpus, our documents and their words reversed, and with the commands in `bin`.

    They are forked from a process that has imported fairseq, and train for two updates.
    """
    place = tmp_path_factory.mktemp("commands")
    (place / "corpus").mkdir()
    lines = [line for page in DOCS.glob("*.md") for line in page.read_text().splitlines() if line]
    for split, part in (("train", lines[20:]), ("valid", lines[:10]), ("test", lines[10:20])):
        (place / f"corpus/{split}.txt").write_text("".join(f"{line}\n" for line in part))
        (place / f"corpus/{split}.en").write_text("".join(f"{line}\n" for line in part))
        (place / f"corpus/{split}.de").write_text("".join(f"{' '.join(line.split()[::-1])}\n" for line in part))
    (place / "bin").mkdir()
    programs = {"fairseq-preprocess": "fairseq_cli.preprocess", "sacrebleu": "sacrebleu"}
    programs.update({"mega-fairseq": "mega_fairseq.cli", "mega-runtime": "mega_runtime"})
    for command, module in programs.items():
        script = f'exec "$PYTHON" -m {module} "$@"'
        if command == "mega-fairseq":
            layers = "--encoder-layers 1 --decoder-layers 1"
            small = f'case "$*" in *mega_transformer*) set -- "$@" {layers} ;; esac; set -- "$@" {SMALL}'
            script = f'case "$1" in train) {small} ;; esac\n{script}'
        write_script(place / "bin" / command, script)
    (place / "bin/python").symlink_to(python())
    return place


@pytest.fixture(scope="module")
def translated(place):
    return run(commands(ROOT / "README.md", "bible/prepare.sh"), place)


@pytest.fixture(scope="module")
def evaluated(place):
    language = commands(DOCS / "language-modelling.md", "/tmp/addresses/sweep")
    return run(commands(ROOT / "README.md", "addresses/prepare.sh") + language, place)


@pytest.fixture(scope="module")
def classified(place):
    return run(commands(ROOT / "README.md", "prepare digits") + commands(DOCS / "classification.md", "--out"), place)


@pytest.mark.slow
def test_readme_commands_translate_a_sentence(translated):
    assert "done training" in translated
    assert re.search(r"^D-0\t\S+\t", translated, re.MULTILINE)


@pytest.mark.slow
def test_readme_commands_translate_with_an_exported_model(translated, place):
    said = run(commands(ROOT / "README.md", "mega-fairseq export"), place)
    assert re.search(r"^differences from the checkpoint: rms .*\n.*\S.*\n1 line in", said, re.MULTILINE)


@pytest.mark.slow
def test_readme_commands_translate_with_a_trained_model(place):
    said = run(commands(ROOT / "README.md", "mega-runtime translate pretrained").replace(".try/bin/", ""), place)
    assert said.startswith("Ich bin der Weg")


@pytest.mark.slow
def test_readme_commands_continue_a_text(evaluated, place):
    assert "done training" in evaluated
    assert re.search(r"^D-0\t\S+\tFellow citizens", evaluated, re.MULTILINE)
    assert (place / "addresses/sweep.png").exists()


@pytest.mark.slow
def test_documented_commands_compare_mixers(evaluated, place):
    (place / "compared").mkdir()
    (place / "compared/data-lm").symlink_to(place / "addresses/bytes/bin")
    block = commands(DOCS / "mixers.md", "compare/").replace("mega megalodon gmlp attention", "mega gmlp")
    said = run(block, place, cwd=place / "compared")
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
def test_own_pairs_are_translated_and_scored(place):
    """From few sentences, none of which may be left without a split."""
    (place / "own").mkdir()
    for language in ("en", "de"):
        lines = (place / f"corpus/train.{language}").read_text().splitlines(keepends=True)
        (place / f"own/corpus.{language}").write_text("".join(lines[:300]))
        (place / f"own/new.{language}").write_bytes("".join([*lines[300:302], "a\rb\0c\n"]).encode())
    steps = "".join(blocks(DOCS / "own-data.md", "bash")[1:7]).replace("--beam 5", "--beam 5 --max-len-b 9")
    output = run(steps, place, cwd=place / "own")
    assert "Translated 15 sentences" in output
    assert re.search(r"BLEU = [\d.]+", output)
    assert len((place / "own/new.out").read_text().splitlines()) == 3
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
    program = str(ROOT / "examples/pictures/squares.py")
    monkeypatch.setattr(sys, "argv", [program, "pictures", "data-pictures"])
    runpy.run_path(program, run_name="__main__")
    for split, count in (("train", 24), ("valid", 3), ("test", 3)):
        assert (np.load(f"data-pictures/{split}.npy") == grey.ravel()).all()
        assert len(Path(f"data-pictures/{split}.label").read_text().split()) == count
    assert "--values-mean" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [program, "pictures/cat/0-ink.png"])
    runpy.run_path(program, run_name="__main__")
    assert capsys.readouterr().out.split() == list(map(str, grey.ravel()))


@pytest.mark.parametrize("number", [np.float32, np.int32])
def test_pictures_of_32_bits_are_refused(tmp_path, monkeypatch, number):
    image = pytest.importorskip("PIL.Image", reason="the program needs Pillow")
    image.fromarray(np.arange(28 * 28, dtype=number).reshape(28, 28)).save(tmp_path / "picture.tif")
    program = str(ROOT / "examples/pictures/squares.py")
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path / "picture.tif")])
    with pytest.raises(SystemExit, match="32 bits"):
        runpy.run_path(program, run_name="__main__")


@pytest.mark.parametrize(
    ("name", "share", "words"),
    [
        ("cat/notes.txt", 0, "cat/notes.txt is no whole picture"),
        ("cat/half.png", 0.5, "cat/half.png is no whole picture"),
        ("cat/more/1.png", 1, "cat/more is no whole picture"),
        ("a cat/1.png", 1, "one word"),
    ],
)
def test_pictures_that_cannot_be_read_are_named_before_any_work(tmp_path, monkeypatch, name, share, words):
    image = pytest.importorskip("PIL.Image", reason="the program needs Pillow")
    for each in ("dog/1.png", "dog/2.png", "dog/3.png", name):
        (tmp_path / "pictures" / each).parent.mkdir(parents=True, exist_ok=True)
        image.effect_noise((28, 28), 50).save(tmp_path / "picture.png")
        picture = (tmp_path / "picture.png").read_bytes()
        (tmp_path / "pictures" / each).write_bytes(picture[: int(len(picture) * (share if each == name else 1))])
    program = str(ROOT / "examples/pictures/squares.py")
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path / "pictures"), str(tmp_path / "data")])
    with pytest.raises(SystemExit, match=words):
        runpy.run_path(program, run_name="__main__")
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
