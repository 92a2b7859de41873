"""Training that is killed, or stopped by a full disk, gives the same model after running the command again.

Broken checkpoints and those of other models are refused.
"""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.models import MegaLanguageModel
from tests.helpers import faults
from tests.helpers.commands import (
    LANGUAGE_MODELS,
    LM,
    STOCK,
    TRAINING,
    Running,
    checkpoint,
    failure,
    fairseq,
    once,
    preprocess_text,
    records,
    start_processes,
    trained,
)

pytestmark = pytest.mark.slow

# Checkpoints are saved after 6, 12 and 18 updates, within the first epoch; each is better than the one before.
SAVING = ["--save-interval-updates=6", "--max-update=18"]
SECOND, LAST, BEST = "checkpoint_1_12.pt", "checkpoint_last.pt", "checkpoint_best.pt"
KILLED = -9


@pytest.fixture(scope="module")
def training():
    """An uninterrupted training of a language model; how fairseq saves and loads does not depend on the model."""

    def make(place):
        words = [preprocess_text(place), *LANGUAGE_MODELS["softmax"], *SAVING]
        said = fairseq("train", *words, "--save-dir", place / "checkpoints")
        return SimpleNamespace(words=words, data=words[0], folder=place / "checkpoints", said=said)

    return once("training", make)


def train(training, folder, *options, fault=None, code=0):
    """Runs the same training, with or without a fault; returns its output."""
    ended, said = Running("train", *training.words, "--save-dir", folder, *options, fault=fault).wait()
    assert ended == code, said
    return said


def losses(said):
    return {record["num_updates"]: record["loss"] for record in records(said, "train_inner")}


def broken(folder):
    """The names of the checkpoints that torch cannot load."""
    names = []
    for path in folder.glob("checkpoint*.pt"):
        try:
            checkpoint(path)
        except RuntimeError:
            names.append(path.name)
    return names


def assert_refused(training, folder, *options, path=LAST, remedy="--restore-file"):
    """Checks that the training does not start from a broken checkpoint and names an option."""
    line = failure("train", *training.words, "--save-dir", folder, *options)
    assert line.startswith("ValueError: ")
    assert str(folder / path) in line
    assert str(remedy) in line


def assert_ends_like(training, folder, after, *options):
    """Runs the command again and checks that it resumes after this update, to the same losses and checkpoints."""
    said = train(training, folder, *options)
    assert ("it replaces those of the same names" in said) == bool(options)  # with --restore-file
    assert losses(said) == {update: loss for update, loss in losses(training.said).items() if update > after}
    assert {path.name for path in folder.iterdir()} == {path.name for path in training.folder.iterdir()}
    for name in (LAST, BEST):
        ours, theirs = checkpoint(folder / name), checkpoint(training.folder / name)
        for part in ("model", "last_optimizer_state"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ killed, full disk


def test_a_half_copied_best_checkpoint_is_copied_again(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_copy, SECOND, BEST), code=KILLED)
    assert broken(tmp_path) == [BEST]
    assert_ends_like(training, tmp_path, after=6)


def test_a_half_copied_last_checkpoint_is_refused(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_copy, SECOND, LAST), code=KILLED)
    assert broken(tmp_path) == [LAST]
    assert_refused(training, tmp_path)
    assert_refused(training, tmp_path, "--restore-file", SECOND, path=SECOND)  # a path is asked for, not a name
    assert_refused(training, tmp_path, "--restore-file", tmp_path, path="")
    assert_ends_like(training, tmp_path, 12, "--restore-file", tmp_path / SECOND)


def test_a_start_with_new_weights_beside_other_checkpoints_is_reported(training, tmp_path):
    (tmp_path / "checkpoint9.pt").touch()
    said = train(training, tmp_path, "--restore-file", tmp_path / LAST, "--max-update=1")
    assert "this training starts with new weights: it replaces" in said


def test_a_start_that_is_not_that_of_finetuning_is_reported(training, tmp_path):
    shutil.copytree(training.folder, tmp_path / "own")
    for given, told in (("own/checkpoint_last.pt", True), ("other.pt", True), ("missing.pt", False)):
        shutil.copy(training.folder / LAST, tmp_path / "other.pt")  # newer
        options = ["--finetune-from-model", tmp_path / given, "--max-update=1"]
        said = train(training, tmp_path / "own", *options)
        assert (f"goes on from {tmp_path / 'own' / LAST} and not from {tmp_path / given};" in said) == told


@pytest.mark.parametrize("option", ["--reset-optimizer", "--reset-meters"])
def test_a_start_that_forgets_the_best_score_is_reported(training, tmp_path, option):
    shutil.copytree(training.folder, tmp_path, dirs_exist_ok=True)
    said = train(training, tmp_path, option, "--max-update=1")
    assert f"this training starts from {tmp_path / LAST}: it replaces" in said


def test_a_training_that_was_killed_and_stopped_by_a_full_disk_resumes_to_the_same_model(training, tmp_path):
    said = train(training, tmp_path, fault=partial(faults.killed_in_update, 8), code=KILLED)
    assert max(losses(said)) == 7
    assert broken(tmp_path) == []
    said = train(training, tmp_path, fault=partial(faults.no_space, 100_000), code=1)
    assert f"Saving checkpoint to {tmp_path / SECOND}" in said
    assert said.splitlines()[-1].startswith("OSError: ")
    assert broken(tmp_path) == []
    assert_ends_like(training, tmp_path, after=6)


# ------------------------------------------------------------------------------------------------ broken checkpoints


def half(path):
    content = path.read_bytes()
    return content[: len(content) // 2]


@pytest.mark.parametrize("harm", ["empty", "a failed save before", "truncated"])
def test_a_broken_checkpoint_is_refused(training, harm, tmp_path):
    """fairseq tries to save three times to one file; a successful attempt is appended to the failed ones."""
    last, option = training.folder / LAST, "--finetune-from-model"
    if harm == "truncated":
        (tmp_path / "half.pt").write_bytes(half(last))
        assert_refused(training, tmp_path, option, tmp_path / "half.pt", path="half.pt", remedy=option)
    else:
        (tmp_path / LAST).write_bytes(b"" if harm == "empty" else half(last) + last.read_bytes())
        assert_refused(training, tmp_path, option, last)


def test_all_processes_refuse_the_broken_checkpoint_of_the_first(training, tmp_path):
    """The second one has a folder without checkpoints."""
    folders = [tmp_path / "broken", tmp_path / "empty"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / LAST).write_bytes(half(training.folder / LAST))
    own = [["--save-dir", each] for each in folders]
    (code, said), (other, _) = (each.wait() for each in start_processes(*training.words, own=own))
    assert code
    assert other
    assert str(folders[0] / LAST) in said


def test_evaluation_does_not_search_for_other_checkpoints(training, tmp_path):
    """The options of the checkpoint contain the folder of its training, which now has a broken last checkpoint."""
    state = checkpoint(training.folder / LAST)
    state["cfg"]["checkpoint"]["save_dir"] = str(tmp_path)
    torch.save(state, tmp_path / "kept.pt")
    (tmp_path / LAST).write_bytes(b"")
    fairseq("eval-lm", training.data, *LM, "--gen-subset=valid", "--path", tmp_path / "kept.pt")
    MegaLanguageModel.from_pretrained(str(tmp_path), "kept.pt", str(training.data))


def test_checkpoints_of_another_architecture_are_refused(training, tmp_path):
    fairseq("train", trained("translation").data, *STOCK, *TRAINING, "--max-update=1", "--save-dir", tmp_path)
    words = [*training.words, "--save-dir", tmp_path / "new", "--restore-file", tmp_path / LAST]
    assert str(tmp_path / LAST) in failure("train", *words)
    assert "TransformerModel" in failure("eval-lm", training.data, *LM, "--path", tmp_path / LAST)
