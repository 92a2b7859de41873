"""Training that is killed, or stopped by a full disk, gives the same model after running the command again.

fairseq's commands refuse broken checkpoints and those of other models.
"""

import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from tests.helpers import faults
from tests.helpers.commands import (
    CPU,
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    PLUGIN,
    STOCK,
    TRAINING,
    Running,
    checkpoint,
    failure,
    fairseq,
    preprocess_pairs,
    preprocess_text,
    records,
    start_processes,
)

pytestmark = pytest.mark.slow

# Checkpoints are saved after 6, 12 and 18 updates, within the first epoch; each is better than the one before.
SAVING = ["--save-interval-updates=6", "--max-update=18"]
FIRST, SECOND, LAST, BEST = "checkpoint_1_6.pt", "checkpoint_1_12.pt", "checkpoint_last.pt", "checkpoint_best.pt"
KILLED = -9


# ------------------------------------------------------------------------------------------------ shared fixtures


@pytest.fixture(scope="session")
def translation(tmp_path_factory):
    """An uninterrupted training of a translation model."""
    place = tmp_path_factory.mktemp("translation")
    words = [*PLUGIN, *MEGA, *TRAINING, "--lr=0.005", "--grouped-shuffling"]  # same batches after resuming
    evaluate = ["generate", preprocess_pairs(place), *PLUGIN, *CPU, "--max-len-b=5"]
    return trained(MegaTransformerModel, place, words, evaluate)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory):
    """An uninterrupted training of a language model."""
    place = tmp_path_factory.mktemp("language_model")
    words = [*LM, *MEGA_LM, *LM_HEADS["softmax"], *LM_TRAINING]
    evaluate = ["eval-lm", preprocess_text(place), *LM, "--gen-subset=valid"]
    return trained(MegaLanguageModel, place, words, evaluate)


@pytest.fixture(params=["translation", "language_model"])
def training(request):
    """Each of the two."""
    return request.getfixturevalue(request.param)


# How fairseq saves and loads does not depend on the model, so most tests use one of the two.
language_models = pytest.mark.parametrize("training", ["language_model"], indirect=True)
translations = pytest.mark.parametrize("training", ["translation"], indirect=True)


def trained(model, place, words, evaluate):
    words, folder = [place / "bin", *words, *SAVING], place / "checkpoints"
    said = fairseq("train", *words, "--save-dir", folder)
    return SimpleNamespace(model=model, data=words[0], words=words, evaluate=evaluate, folder=folder, said=said)


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


def assert_refused_for(training, folder, complete, *options):
    """Checks that the training does not start from a broken last checkpoint and names a complete one."""
    line = failure("train", *training.words, "--save-dir", folder, *options)
    assert line.startswith(f"ValueError: --restore-file is {folder / LAST}, which is not a complete checkpoint;")
    assert f"give --restore-file {complete}," in line


def assert_ends_like(training, folder, after, *options):
    """Runs the command again and checks that it resumes after this update, to the same losses and checkpoints."""
    said = train(training, folder, *options)
    assert losses(said) == {update: loss for update, loss in losses(training.said).items() if update > after}
    assert {path.name for path in folder.iterdir()} == {path.name for path in training.folder.iterdir()}
    for name in (LAST, BEST):
        ours, theirs = checkpoint(folder / name), checkpoint(training.folder / name)
        for part in ("model", "last_optimizer_state"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)
    return said


# ------------------------------------------------------------------------------------------------ killed


def test_a_killed_training_resumes_to_the_same_model(training, tmp_path):
    said = train(training, tmp_path, fault=partial(faults.killed_in_update, 16), code=KILLED)
    assert max(losses(said)) == 15
    assert broken(tmp_path) == []
    assert_ends_like(training, tmp_path, after=12)


@language_models
def test_a_half_written_checkpoint_is_not_used(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_write, f"{SECOND}.tmp"), code=KILLED)
    assert (tmp_path / f"{SECOND}.tmp").stat().st_size > 0
    assert broken(tmp_path) == []
    assert "resuming" not in assert_ends_like(training, tmp_path, after=6)


@translations
def test_a_half_copied_best_checkpoint_is_copied_again(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_copy, SECOND, BEST), code=KILLED)
    assert broken(tmp_path) == [BEST]
    assert "resuming" not in assert_ends_like(training, tmp_path, after=6)


@translations
def test_a_half_copied_last_checkpoint_is_refused_naming_a_complete_one(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_copy, SECOND, LAST), code=KILLED)
    assert broken(tmp_path) == [LAST]
    assert_refused_for(training, tmp_path, tmp_path / SECOND)
    assert_ends_like(training, tmp_path, 12, "--restore-file", tmp_path / SECOND)


# ------------------------------------------------------------------------------------------------ full disk


@language_models
def test_a_training_stopped_by_a_full_disk_resumes_when_there_is_space(training, tmp_path):
    train(training, tmp_path, fault=partial(faults.killed_in_update, 8), code=KILLED)
    said = train(training, tmp_path, fault=partial(faults.no_space, 100_000), code=1)
    assert f"Saving checkpoint to {tmp_path / SECOND}" in said
    assert said.splitlines()[-1] == "OSError: [Errno 27] File too large"  # on a full disk, 28: No space left on device
    assert broken(tmp_path) == []
    assert_ends_like(training, tmp_path, after=6)


# ------------------------------------------------------------------------------------------------ other starts


def harmed(path, harm="half"):
    """The content of a damaged checkpoint."""
    content = path.read_bytes()
    half = content[: len(content) // 2]
    return {"half": half, "empty": b"", "failed save before": half + content}[harm]


@pytest.fixture
def interrupted(training, tmp_path):
    """A training, and a copy of its folder with a broken last checkpoint and two complete ones; the later of these has
    the earlier file time."""
    for name in (FIRST, SECOND):
        shutil.copy(training.folder / name, tmp_path)
    os.utime(tmp_path / SECOND, (0, 0))
    (tmp_path / LAST).write_bytes(harmed(training.folder / LAST))
    return training, tmp_path


@language_models
@pytest.mark.parametrize("harm", ["empty", "failed save before"])
@pytest.mark.parametrize("finetune", [False, True])
def test_any_broken_last_checkpoint_is_refused_naming_the_newest_complete_one(interrupted, harm, finetune):
    """fairseq tries to save three times to one file; a successful attempt is appended to the failed ones."""
    training, folder = interrupted
    (folder / LAST).write_bytes(harmed(training.folder / LAST, harm))
    (folder / "checkpoint_averaged.pt").write_bytes((training.folder / LAST).read_bytes())
    options = ["--finetune-from-model", training.folder / LAST] if finetune else []
    assert_refused_for(training, folder, folder / SECOND, *options)


@language_models
def test_without_a_last_checkpoint_a_new_training_starts_with_a_warning_about_the_others(interrupted):
    training, folder = interrupted
    (folder / LAST).unlink()
    said = train(training, folder, "--max-update=1")
    assert losses(said) == {1: losses(training.said)[1]}
    warning = (
        f"starting a new training, since there is no {folder / LAST}: --restore-file {folder / SECOND} would resume"
    )
    assert warning in said


@language_models
def test_checkpoints_with_a_suffix_are_left_to_fairseq(interrupted):
    training, folder = interrupted
    said = train(training, folder, "--checkpoint-suffix=-a", "--max-update=1")
    assert losses(said) == {1: losses(training.said)[1]}
    assert "resuming" not in said


@language_models
def test_all_processes_refuse_the_broken_checkpoint_of_the_first(interrupted, tmp_path_factory):
    """The second one has a folder without checkpoints."""
    training, folder = interrupted
    own = [["--save-dir", each] for each in (folder, tmp_path_factory.mktemp("empty"))]
    for code, said in (each.wait() for each in start_processes(*training.words, own=own)):
        assert code, said
        assert f"give --restore-file {folder / SECOND}" in said.splitlines()[-1]


def test_only_training_searches_for_other_checkpoints(training, tmp_path):
    """The options of the checkpoint contain the folder of its training, which now has a broken last checkpoint."""
    state = checkpoint(training.folder / LAST)
    state["cfg"]["checkpoint"]["save_dir"] = str(tmp_path)
    torch.save(state, tmp_path / "kept.pt")
    (tmp_path / LAST).write_bytes(b"")
    fairseq(*training.evaluate, "--path", tmp_path / "kept.pt")
    training.model.from_pretrained(str(tmp_path), "kept.pt", str(training.data))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("training", "option"),
    [("translation", "--restore-file"), ("language_model", "--finetune-from-model")],
    indirect=["training"],
)
def test_a_training_does_not_start_from_a_truncated_checkpoint(training, option, tmp_path):
    (tmp_path / "half.pt").write_bytes(harmed(training.folder / LAST))
    line = failure("train", *training.words, "--save-dir", tmp_path, option, tmp_path / "half.pt")
    assert line.startswith(f"ValueError: {option} is {tmp_path}/half.pt, which is not a complete checkpoint")


@language_models
def test_a_training_does_not_resume_without_a_complete_checkpoint(training, tmp_path):
    for name in (FIRST, LAST):
        (tmp_path / name).write_bytes(harmed(training.folder / LAST))
    line = failure("train", *training.words, "--save-dir", tmp_path)
    assert f"--restore-file is {tmp_path / LAST}, which is not a complete checkpoint; remove it" in line


def test_a_truncated_checkpoint_is_not_evaluated(training, tmp_path):
    """fairseq logs which file it reads, and torch raises the error."""
    path = tmp_path / LAST
    path.write_bytes(harmed(training.folder / LAST))
    code, said = Running(*training.evaluate, "--path", path).wait()
    assert code == 1
    assert f"loading model(s) from {path}" in said
    assert "failed reading zip archive: failed finding central directory" in said.splitlines()[-1]


@pytest.fixture(scope="session")
def foreign(translation, tmp_path_factory):
    """A checkpoint of fairseq's Transformer."""
    folder = tmp_path_factory.mktemp("foreign")
    fairseq("train", translation.data, *STOCK, *TRAINING, "--max-update=1", "--save-dir", folder)
    return folder / LAST


@pytest.mark.parametrize(
    ("training", "option"),
    [("language_model", "--restore-file"), ("translation", "--finetune-from-model")],
    indirect=["training"],
)
def test_a_training_does_not_start_from_another_architecture(training, foreign, option, tmp_path):
    line = failure("train", *training.words, "--save-dir", tmp_path, option, foreign)
    assert line == (
        f"Exception: Cannot load model parameters from checkpoint {foreign}; "
        "please ensure that the architectures match."
    )


def test_a_translation_model_is_not_evaluated_as_a_language_model(language_model, foreign):
    line = failure("eval-lm", language_model.data, *LM, "--path", foreign)
    assert "--task mega_language_modeling carries state through streams, which TransformerModel cannot do" in line
