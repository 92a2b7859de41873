"""Training in two processes on CPUs: the same steps as one process, resuming, and one process killed."""

import functools
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mega_fairseq.criterions import MegaLMCrossEntropy
from mega_fairseq.models import MegaLanguageModel, MegaLMConfig
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.helpers import faults
from tests.helpers.commands import (
    LIMIT,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_SIZES,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    PLUGIN,
    TRAINING,
    fairseq,
    once,
    preprocess_pairs,
    preprocess_text,
    records,
    start_processes,
    train_in_processes,
)
from tests.helpers.processes import assert_same_course, course

pytestmark = pytest.mark.slow

# Both epochs have eleven batches: two processes take six updates for them, and in the last update one has no batch.
EPOCH, UPDATES = 6, 8
SAVING = ["--save-interval-updates=1", f"--max-update={UPDATES}"]
TEXT = [*LM, *MEGA_LM, *LM_TRAINING, "--dropout=0", "--max-tokens=480"]
WORDS = {
    # Five validation batches, and the same training batches whether resumed or not.
    "translation": [
        *PLUGIN, *MEGA, *(word for word in TRAINING if word != "--no-epoch-checkpoints"), "--dropout=0",
        "--max-tokens=600", "--max-tokens-valid=50", "--update-epoch-batch-itr=True",
        "--criterion=mega_label_smoothed_cross_entropy",  # which uses parameters outside of the model's forward
    ],
    # Three validation streams, one at a time, so that one process has none in the second round.
    "softmax": [*TEXT, *LM_HEADS["softmax"], "--valid-block=splits:3", "--batch-size-valid=1"],
    # By default there are as many streams as processes.
    "adaptive": [*TEXT, *LM_HEADS["adaptive"], "--adaptive-softmax-dropout=0"],
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def runs():
    """Trains a task once in two processes, and once in one process with two batches per update and the same streams."""

    def run(task, folder):
        data = (preprocess_pairs if task == "translation" else preprocess_text)(folder)
        valid = data / ("valid.de-en.en.bin" if task == "translation" else "valid.bin")
        words = [data, *WORDS[task], *SAVING]
        folders = {name: folder / name for name in ("two", "one")}
        said = train_in_processes(*words, "--save-dir", folders["two"])
        streams = ["--valid-block=splits:2"] if task == "adaptive" else []
        fairseq("train", *words, *streams, "--update-freq=2", "--save-dir", folders["one"])
        tokens = valid.stat().st_size // 2  # two bytes per token
        return SimpleNamespace(words=words, valid_tokens=tokens, said=said, **folders)

    return lambda task: once(f"ddp-{task}", functools.partial(run, task))


# ------------------------------------------------------------------------------------------------ same steps as one


@pytest.mark.parametrize("task", WORDS)
def test_two_processes_train_and_validate_like_one_with_batches_twice_as_large(runs, task):
    run = runs(task)
    assert_same_course(run.two, run.one, range(1, UPDATES + 1), tolerance=1e-5)
    two, one = course(run.two), course(run.one)
    tokens = [two[number].train["wpb"] for number in range(1, EPOCH + 1)]
    assert tokens[-1] <= 600 < min(tokens[:-1])  # the last is a single batch: one process had none
    for number in range(1, UPDATES + 1):
        found, expected = two[number].valid, one[number].valid
        assert found.keys() == expected.keys()
        for name in found.keys() - {"wpb", "bsz"}:
            assert found[name][1] == expected[name][1] == number * run.valid_tokens  # each token once
            assert found[name][0] / found[name][1] == pytest.approx(expected[name][0] / expected[name][1], abs=1e-5)
        for name in ("wpb", "bsz"):
            assert found[name][0] == expected[name][0]
    assert run.said.count("valid is read as 2 streams") == (task == "adaptive")


def test_an_evaluation_of_which_only_a_part_would_be_reported_is_refused(runs):
    run = runs("softmax")
    path = ["--path", run.two / "checkpoint_last.pt", "--gen-subset=valid"]
    both = start_processes(run.words[0], *LM, *path, command="eval-lm")
    for code, said in [process.wait() for process in both]:
        assert code != 0
        assert re.search("^ValueError: .* 2 processes.* --sequence-parallel-size", said, re.MULTILINE)


def test_a_process_without_a_batch_trains_on_at_most_a_chunk(text):
    """fairseq passes it the last loaded batch, which may be the whole validation set as one stream."""
    options = MegaLanguageModelingConfig(data=str(text), tokens_per_sample=LM_CHUNK)
    task = MegaLanguageModelingTask.setup_task(options)
    task.load_dataset("valid")
    cfg = MegaLMConfig(**LM_SIZES, rel_pos_bias="rotary", share_decoder_input_output_embed=True)
    made, read = MegaLanguageModel.build_model(cfg, task), []
    made.register_forward_pre_hook(lambda _, *inputs: read.append(inputs[1]["src_tokens"].shape), with_kwargs=True)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    batch = task.get_batch_iterator(task.dataset("valid")).first_batch
    arguments = [batch, made, MegaLMCrossEntropy(task, sentence_avg=False), optimizer, 0]
    task.train_step(*arguments, ignore_grad=True)
    assert all(parameter.grad.eq(0).all() for parameter in made.parameters())
    task.train_step(*arguments)
    assert read == [(1, LM_CHUNK), (1, batch["ntokens"])]


def test_layers_are_dropped_in_two_processes(tmp_path):
    words = [preprocess_pairs(tmp_path), *WORDS["translation"], "--max-update=3", "--decoder-layerdrop=0.7"]
    said = train_in_processes(*words, "--disable-validation", "--no-save")
    assert [record["num_updates"] for record in records(said, "train_inner")] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------ resuming


def test_two_processes_resume_within_an_epoch_with_the_same_updates(runs, tmp_path):
    run = runs("adaptive")
    train_in_processes(*run.words, "--restore-file", run.two / "checkpoint_1_3.pt", "--save-dir", tmp_path)
    assert_same_course(tmp_path, run.two, range(4, UPDATES + 1))


def test_one_process_resumes_a_training_of_two_processes_between_epochs(runs, tmp_path):
    """Not within an epoch: fairseq counts batches per process and silently resumes at another batch."""
    run = runs("softmax")
    start = run.two / "checkpoint1.pt"
    fairseq("train", *run.words, "--update-freq=2", "--restore-file", start, "--save-dir", tmp_path)
    assert_same_course(tmp_path, run.two, range(EPOCH + 1, UPDATES + 1), tolerance=1e-5)


# ------------------------------------------------------------------------------------------------ kill -9


def writers(output):
    """Processes that have the output file of a command open: the command and all of its workers."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(output):
                found.add(int(link.parts[2]))
        except OSError:  # the process has ended
            continue
    return found


def wait_until(condition, seconds):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)


def test_if_the_first_of_two_processes_is_killed_the_other_ends_with_its_workers_and_training_resumes(runs, tmp_path):
    """A killed second one is in tests/tasks/test_sequence_parallel_commands.py."""
    run = runs("softmax")
    words = [*run.words, "--num-workers=1", "--save-dir", tmp_path]
    both = start_processes(*words, faults=[functools.partial(faults.killed_in_update, 4), None])
    try:
        both[0].process.join(LIMIT)
        wait_until(lambda: not both[1].process.is_alive(), 20)
        wait_until(lambda: not any(writers(process.output) for process in both), 20)
    finally:
        for process in both:
            process.process.kill()
    (killed, _), (code, said) = (process.wait() for process in both)
    assert (killed, code) == (-signal.SIGKILL, 1)
    assert "RuntimeError" in said
    train_in_processes(*words)
    assert_same_course(tmp_path, run.two, range(1, UPDATES + 1))
