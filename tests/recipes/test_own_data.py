"""The commands of docs/own-data.md on a small text, and the hydra configurations that the page mentions."""

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from tests.helpers.commands import ROOT, SYLLABLES, as_words, fairseq
from tests.helpers.documents import blocks

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/own-data.md"
USER_DIR = f'"{ROOT / "mega_fairseq"}"'
# Smaller numbers, so that a few hundred sentences suffice.
SMALLER = {"8000": "60", "2000": "40", "1000": "20"}
SIZES = {"layers": 1, "embed_dim": 16, "hidden_dim": 32, "z_dim": 8, "ffn_embed_dim": 32}
UPDATES = 3


def write_corpus(place):
    """Writes sentences with punctuation; in the other language each word is reversed."""
    chance = random.Random(1)
    with open(place / "corpus.en", "w") as english, open(place / "corpus.de", "w") as german:
        for _ in range(240):
            words = ["".join(chance.choices(SYLLABLES, k=2)) for _ in range(chance.randint(3, 9))]
            print(", ".join(words) + ".", file=english)
            print(", ".join(word[::-1] for word in words) + "!", file=german)
    (place / "corpus.txt").write_text((place / "corpus.en").read_text())


def run_section(place, heading, sides):
    """Runs the blocks of a section with shortened trainings; returns the output of each fairseq command, by name."""
    write_corpus(place)
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sizes = {f"{side}_{name}": size for side in sides for name, size in SIZES.items()}
    shorter = {
        "train": ["--cpu", f"--max-update={UPDATES}", "--log-interval=1", *as_words(sizes)],
        "hydra-train": [
            *["common.cpu=true", f"optimization.max_update={UPDATES}", "common.log_interval=1"],
            *(f"+model.{name}={size}" for name, size in sizes.items()),
        ],
    }
    said = {}
    for block in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        shell = re.sub(r"\b(8000|2000|1000)\b", lambda number: SMALLER[number.group()], block)
        shell = shell.replace("$REPO", str(ROOT)).replace("python ", f"{sys.executable} ")
        shell, *commands = re.split(r"^fairseq-", shell.replace("\\\n", " "), flags=re.MULTILINE)
        subprocess.run(["bash", "-euc", shell], cwd=place, check=True)
        for command in commands:
            command = command.replace('"$(mega-fairseq user-dir)"', USER_DIR).replace("$PWD", str(place))
            name, *words = shlex.split(command)
            if name == "hydra-train":
                (save_dir,) = (Path(word.split("=")[1]) for word in words if word.startswith("checkpoint.save_dir="))
                save_dir.rename(place / "checkpoints of fairseq-train")
            cpu = [] if name in ("preprocess", *shorter) else ["--cpu"]
            said[name] = fairseq(name, *words, *shorter.get(name, cpu), cwd=place)
    # hydra writes the log to a file
    said["hydra-train"] = (place / "hydra_train.log").read_text()
    return said


def losses(log):
    """The losses of all updates, epochs and validations."""
    return re.findall(r"\bloss[= ]([\d.]+)", log)


@pytest.mark.parametrize(
    ("heading", "sides"),
    [("Sentence pairs to BLEU", ["encoder", "decoder"]), ("A text to perplexity", ["decoder"])],
)
def test_the_documented_commands_go_from_raw_text_to_scores(heading, sides, tmp_path):
    said = run_section(tmp_path, heading, sides)
    # The YAML file and the command line are the same training.
    trained = losses(said["train"])
    assert len(trained) >= UPDATES
    assert losses(said["hydra-train"]) == trained
    if "generate" in said:
        references = [(tmp_path / "test.de").read_text().splitlines()]
        words = sacrebleu.corpus_bleu(references[0], references).ref_len
        assert re.search(rf"BLEU = [\d.]+ .* ref_len = {words}\)\s*$", said["generate"])
        assert len(re.findall("^H-", said["generate"], re.MULTILINE)) == 20
    else:
        tokens = sum(len(line.split()) + 1 for line in (tmp_path / "pieces.test").read_text().splitlines())
        assert f"Evaluated {tokens} tokens" in said["eval-lm"]
        assert re.search(r"Loss \(base 2\): [\d.]+, Perplexity: [\d.]+$", said["eval-lm"], re.MULTILINE)


def test_the_documented_commands_go_from_pictures_to_accuracy(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(40):
        folder = tmp_path / "pictures" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (28, 28), 5 * number).save(folder / f"{number}.png")
    (section,) = re.findall(r"^## Pictures to accuracy\n(.*)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shorter = {
        "train": ["--cpu", f"--max-update={UPDATES}", "--log-interval=1"],
        "hydra-train": ["common.cpu=true", f"optimization.max_update={UPDATES}", "common.log_interval=1"],
        "classify": ["--cpu"],
        "prepare": ["--workers=1"],
    }
    said = []
    for block in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        block = block.replace("\\\n", " ").replace('"$(mega-fairseq user-dir)"', USER_DIR).replace("$REPO", str(ROOT))
        command, *words = shlex.split(block.replace("$PWD", str(tmp_path)))
        name = words[0] if command == "mega-fairseq" else command.split("-", 1)[1]
        if name == "hydra-train":
            (tmp_path / "checkpoints-pictures").rename(tmp_path / "checkpoints of fairseq-train")
        command = command if command == "mega-fairseq" else name
        said.append(fairseq(command, *words, *shorter[name], cwd=tmp_path))
    prepared, trained, _, classified = said
    assert len(losses(trained)) >= UPDATES
    assert losses((tmp_path / "hydra_train.log").read_text()) == losses(trained)
    assert "wrote train (32), valid (4), test (4) to data-pictures" in prepared
    assert "train with --values-mean" in prepared
    assert f"num_updates: {UPDATES} >= max_update: {UPDATES}" in trained
    assert re.search(r"^accuracy [\d.]+% of 4 examples", classified, re.MULTILINE)
    assert classified.splitlines()[-1] == "wrote classified.json, classified.png"


def test_the_page_mentions_all_hydra_configurations():
    names = set(re.findall(r"--config-name (\w+)", "".join(blocks(PAGE, "bash"))))
    assert names == {path.stem for path in (ROOT / "examples/hydra").iterdir()}
    for path in (ROOT / "examples/hydra").iterdir():
        # The command in the head of the file is the one of the page.
        command = re.search(r"fairseq-hydra-train (?:.*\\\n)*.*", path.read_text()).group()
        assert " ".join(command.split()).replace(" # ", " ") in PAGE.read_text().replace("\n    ", " ")
