"""The models of `pretrained/`: small, without traces of a machine, what their cards say, and ready to be trained on."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from mega_runtime import Classifier, Translator
from tests.helpers.commands import CPU, ROOT, fairseq, fresh, records

PRETRAINED = ROOT / "pretrained"
FOLDERS = sorted(config.parent for config in PRETRAINED.glob("*/config.json"))
each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
SHIPPED = [folder for folder in FOLDERS if folder.name in ("bible-en-de", "digits")]  # with checkpoints
OF_A_MACHINE = re.compile(rb"/(root|home|work|Users)/")
TEXTS = ROOT / "examples/page/texts"


def test_there_are_models_and_they_are_small():
    assert {"bible-en-de", "bible-de-en", "addresses", "digits"} <= {folder.name for folder in FOLDERS}
    shipped = [path for folder in FOLDERS for path in folder.iterdir() if folder in SHIPPED or path.suffix != ".pt"]
    assert sum(path.stat().st_size for path in shipped) < 14e6


@each
def test_each_has_a_card_and_no_paths_of_a_machine(folder):
    assert (folder / "README.md").exists()
    assert folder not in SHIPPED or (folder / "checkpoint.pt").exists()
    files = [path for path in folder.iterdir() if path.suffix != ".md"]
    assert not [path.name for path in files if OF_A_MACHINE.search(path.read_bytes())]
    assert f"[{folder.name}]({folder.name}/README.md)" in (PRETRAINED / "README.md").read_text()


def exported(folder, out):
    """The checkpoint's own export, in the format of the folder."""
    options = []
    if (folder / "dict.txt").exists():
        options = ["--data", out, "--sentencepiece-model", folder / "pieces.model"]
        for name in ("dict.txt", "dict.en.txt", "dict.de.txt"):
            shutil.copy(folder / "dict.txt", out / name)
    fairseq("mega-fairseq", "export", folder / "checkpoint.pt", out / "model", *options)
    return out / "model"


def lines(name):
    return (TEXTS / name).read_text().splitlines()


def log_probabilities(folder, name):
    """Of the beginning of a chapter, or of labels."""
    if name == "digits":
        pictures = np.loadtxt(ROOT / "examples/try/digits.txt", dtype=np.uint8)
        return np.log([found.probability for found in Classifier(folder).predict(pictures)])
    _, source, target = name.split("-")
    model, verses = Translator(folder), [lines(f"genesis-6.{language}.txt")[:3] for language in (source, target)]
    return np.concatenate([model.score_tokens(*map(model.encode, pair)) for pair in zip(*verses)])


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_each_folder_is_the_export_of_its_checkpoint(folder, tmp_path):
    """The checkpoint is in half precision and the folder was made before, so some numbers are rounded otherwise."""
    shipped, anew = (log_probabilities(path, folder.name) for path in (folder, exported(folder, tmp_path)))
    assert np.abs(shipped - anew).max() < 0.2


def scored(folder, place):
    """The card, and what its first commands print, with `place` instead of /tmp."""
    card = (folder / "README.md").read_text()
    block = re.search(r"^```bash\n(.*?)^```", card, re.MULTILINE | re.DOTALL).group(1)
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    return card, fresh("env", path, "bash", "-euc", block.replace("/tmp/", f"{place}/"), cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name.startswith("bible")])
def test_cards_of_translation_models_have_their_scores(folder, tmp_path):
    card, said = scored(folder, tmp_path)
    found = [float(score) for score in re.findall(r'"BLEU": "([\d.]+)"', said)]
    stated = [float(score) for score in re.findall(r"^  \| (?:line|chapters).*?\| ([\d.]+) \|", card, re.MULTILINE)]
    assert found == pytest.approx(stated, abs=0.3)  # numbers of 8 bits are rounded otherwise on another CPU


@pytest.mark.slow
def test_the_card_of_the_language_model_has_its_score(tmp_path):
    card, said = scored(PRETRAINED / "addresses", tmp_path)
    bits, count = np.array([line.split("\t") for line in said.splitlines() if re.match(r"[\d.]+\t\d+$", line)], float).T
    stated = float(re.search(r"([\d.]+) bits per piece", card).group(1))
    assert (bits * count).sum() / count.sum() == pytest.approx(stated, abs=0.01)


@pytest.mark.slow
def test_the_card_of_the_classifier_has_its_score(tmp_path):
    card, said = scored(PRETRAINED / "digits", tmp_path)
    assert 100 * float(said.splitlines()[-1]) == pytest.approx(float(re.search(r"([\d.]+)% of the", card).group(1)))


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(tmp_path):
    folder = PRETRAINED / "bible-en-de"
    pieces = SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    for split, verses in (("train", slice(0, 12)), ("valid", slice(12, 22))):
        for language in ("en", "de"):
            segmented = pieces.encode(lines(f"genesis-6.{language}.txt")[verses], out_type=str)
            (tmp_path / f"{split}.{language}").write_text("".join(f"{' '.join(line)}\n" for line in segmented))
        numbers = "".join(f"{split}-{number}\n" for number in range(len(segmented)))
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/{split}.docs").write_text(numbers)
    fairseq(
        "preprocess", "--source-lang=en", "--target-lang=de", "--joined-dictionary", "--srcdict", folder / "dict.txt",
        "--destdir", tmp_path / "data", "--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid",
    )  # fmt: skip
    said = fairseq("train", tmp_path / "data", *options_of_the_card(), "--max-update=1", "--save-dir", tmp_path / "out")
    assert records(said, "valid")[0]["valid_nll_loss"] < 6  # 12 without training


def options_of_the_card():
    """How the card continues the training."""
    text = (PRETRAINED / "bible-en-de/README.md").read_text()
    (words,) = re.findall(r"fairseq-train data (.*?)\n```", text, re.DOTALL)
    words = shlex.split(words.replace("\\\n", ""))
    for old, new in (("$(mega-fairseq user-dir)", ROOT / "mega_fairseq"), ("pretrained/", f"{PRETRAINED}/")):
        words = [word.replace(old, str(new)) for word in words]
    return [*words, *CPU, "--log-format=json", "--num-workers=0"]
