"""Training in two processes on CPUs: the steps of one, the same when resumed, and an end when one is killed."""

import os
import re
import signal
import subprocess
import sysconfig
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.criterions import MegaLMCrossEntropy
from mega_fairseq.models import MegaLanguageModel, MegaLMConfig
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests import faults
from tests.commands import (
    LIMIT,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_SIZES,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    ON_CPUS,
    PLUGIN,
    TRAINING,
    fairseq,
    free_port,
    preprocess_pairs,
    preprocess_text,
    start_two_processes,
    train_in_two_processes,
)
from tests.small_models import sources, targets, translation_model

pytestmark = pytest.mark.slow

# Both epochs have eleven batches: two processes take six updates for them, and in the last one of them has no batch.
EPOCH, UPDATES = 6, 8
SAVING = ["--save-interval-updates=1", f"--max-update={UPDATES}"]
TEXT = [*LM, *MEGA_LM, *LM_TRAINING, "--dropout=0", "--max-tokens=480"]
WORDS = {
    # Five batches to validate on, and the same to train on whether resumed or not.
    "translation": [
        *PLUGIN, *MEGA, *(word for word in TRAINING if word != "--no-epoch-checkpoints"), "--dropout=0",
        "--max-tokens=600", "--max-tokens-valid=50", "--update-epoch-batch-itr=True",
    ],
    # Three streams to validate on, one at a time, so that one of the processes has none in the second round.
    "softmax": [*TEXT, *LM_HEADS["softmax"], "--valid-block=splits:3", "--batch-size-valid=1"],
    # By default as many streams as processes.
    "adaptive": [*TEXT, *LM_HEADS["adaptive"], "--adaptive-softmax-dropout=0"],
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ what all share


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return preprocess_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def folders(text, tmp_path_factory):
    return {"translation": preprocess_pairs(tmp_path_factory.mktemp("pairs")), "softmax": text, "adaptive": text}


@pytest.fixture(scope="session", params=WORDS)
def task(request, folders):
    """Words of a command line, and the file with what its validation set has to be predicted."""
    data = folders[request.param]
    valid = data / ("valid.de-en.en.bin" if request.param == "translation" else "valid.bin")
    return SimpleNamespace(name=request.param, words=[data, *WORDS[request.param], *SAVING], valid=valid)


@pytest.fixture(scope="session")
def two(task, tmp_path_factory):
    """A training in two processes, with its folder and what it left there."""
    folder = tmp_path_factory.mktemp("two")
    said = train_in_two_processes(*task.words, "--save-dir", folder)
    return SimpleNamespace(folder=folder, course=course(folder), said=said)


@pytest.fixture(scope="session")
def one(task, tmp_path_factory):
    """What a training in one process leaves, with two batches in each update and the same streams to validate on."""
    folder = tmp_path_factory.mktemp("one")
    streams = ["--valid-block=splits:2"] if task.name == "adaptive" else []
    fairseq("train", *task.words, *streams, "--update-freq=2", "--save-dir", folder)
    return course(folder)


def course(folder):
    """What the checkpoint of each update holds: its numbers, which fairseq rounds where it prints them, and the model.

    Those of validations are sums over all of them so far.
    """
    found = {}
    for path in folder.glob("checkpoint*[0-9].pt"):
        state = torch.load(path, weights_only=True)
        meters = {
            source: {name: meter for _, name, _, meter in listed if "val" in meter}
            for source, listed in state["extra_state"]["metrics"].items()
        }
        found[state["optimizer_history"][-1]["num_updates"]] = SimpleNamespace(
            train={name: float(meter["val"]) for name, meter in meters["train"].items()},
            valid={name: (float(meter["sum"]), float(meter["count"])) for name, meter in meters["valid"].items()},
            model=state["model"],
        )
    return found


def assert_same_course(ours, theirs, updates, tolerance=0.0):
    """The same losses, gradients and batches, to so much, and exactly the same models."""
    assert sorted(ours) == list(updates)
    for number in updates:
        found, expected = ours[number], theirs[number]
        assert found.train.keys() >= {"loss", "gnorm", "clip", "bsz", "wpb", "lr"}
        for name in found.train:
            assert found.train[name] == pytest.approx(expected.train[name], abs=tolerance, rel=0), (number, name)
        for name in found.model:
            torch.testing.assert_close(found.model[name], expected.model[name], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ two are one


def test_two_processes_take_the_steps_of_one_with_batches_twice_as_large(two, one):
    assert_same_course(two.course, one, range(1, UPDATES + 1), tolerance=1e-5)
    tokens = [two.course[number].train["wpb"] for number in range(1, EPOCH + 1)]
    assert tokens[-1] <= 600 < min(tokens[:-1])  # the last is of a single batch: one of the processes had none


def test_two_processes_validate_on_each_token_once(task, two, one):
    tokens = task.valid.stat().st_size // 2  # two bytes a token
    for number in range(1, UPDATES + 1):
        found, expected = two.course[number].valid, one[number].valid
        assert found.keys() == expected.keys()
        for name in found.keys() - {"wpb", "bsz"}:
            assert found[name][1] == expected[name][1] == number * tokens
            assert found[name][0] / found[name][1] == pytest.approx(expected[name][0] / expected[name][1], abs=1e-5)
        for name in ("wpb", "bsz"):
            assert found[name][0] == expected[name][0]
    default = "valid is read as 2 streams, one per process, each without context from the one before"
    assert two.said.count(default) == (task.name == "adaptive")


@pytest.mark.parametrize("task", ["softmax"], indirect=True)
def test_each_process_evaluates_a_stream_of_its_own_and_says_that_nothing_combines_them(task, two):
    path = ["--path", two.folder / "checkpoint_last.pt", "--gen-subset=valid"]
    both = start_two_processes(task.words[0], *LM, *path, command="eval-lm")
    ends = [process.wait() for process in both]
    assert [code for code, _ in ends] == [0, 0], ends
    half = task.valid.stat().st_size // 2 // 2
    (tokens,) = re.findall(r"Evaluated ([\d,]+) tokens", ends[0][1])  # fairseq logs results of the first only
    assert abs(int(tokens.replace(",", "")) - half) <= 1
    for _, said in ends:
        assert "fairseq-eval-lm does not combine processes or shards: each of the 2 reports" in said


def test_several_batches_in_each_of_two_processes_are_one_update(text, tmp_path):
    """Not in the last update of an epoch: there fairseq takes a process for idle that ends with an empty batch.

    The batches before the empty one are in the gradient, but in neither its denominator nor the loss.
    """
    words = [text, *WORDS["softmax"], *SAVING, "--max-update=2"]
    train_in_two_processes(*words, "--update-freq=2", "--save-dir", tmp_path / "two")
    fairseq("train", *words, "--update-freq=4", "--save-dir", tmp_path / "one")
    ours, theirs = course(tmp_path / "two"), course(tmp_path / "one")
    for number in (1, 2):
        for name in ("loss", "gnorm", "wpb", "bsz"):
            assert ours[number].train[name] == pytest.approx(theirs[number].train[name], abs=1e-5)


def test_a_process_that_has_no_batch_trains_on_no_more_than_a_chunk(text):
    """fairseq gives it what it has loaded last, which is all of the validation set where that is one stream."""
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


@pytest.mark.parametrize(
    "options",
    [
        {}, {"share_all_embeddings": True}, {"normalize_before": True, "normalize_embedding": True},
        {"rel_pos_bias": "rotary", "encoder_chunk_size": 3, "decoder_chunk_size": 3}, {"rel_pos_bias": "t5"},
        {"encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0}, {"encoder_embed_dim": 24},
    ],
    ids=str,
)  # fmt: skip
def test_every_parameter_of_a_translation_model_has_a_gradient(options):
    """pytorch_ddp, fairseq's default on GPUs, stops where one has none."""
    made = translation_model(**options).train()
    made(sources(), None, targets())[0].sum().backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []


# ------------------------------------------------------------------------------------------------ going on


def test_two_processes_resume_within_an_epoch_as_if_they_had_never_stopped(task, two, tmp_path):
    train_in_two_processes(*task.words, "--restore-file", two.folder / "checkpoint_1_3.pt", "--save-dir", tmp_path)
    assert_same_course(course(tmp_path), two.course, range(4, UPDATES + 1))


def test_one_process_goes_on_between_epochs_where_two_stopped(task, two, tmp_path):
    """Not within an epoch: fairseq counts in batches of each process, and goes on at another place without a word."""
    start = two.folder / "checkpoint1.pt"
    fairseq("train", *task.words, "--update-freq=2", "--restore-file", start, "--save-dir", tmp_path)
    assert_same_course(course(tmp_path), two.course, range(EPOCH + 1, UPDATES + 1), tolerance=1e-5)


# ------------------------------------------------------------------------------------------------ kill -9


def writers(output):
    """Processes that have the file open to which a command says what it has to say: itself and all of its workers."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(output):
                found.add(int(link.parts[2]))
        except OSError:  # another process that has ended
            continue
    return found


def wait_until(condition, seconds):
    """How long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)
    return time.monotonic() - start


@pytest.mark.parametrize("task", ["translation", "softmax"], indirect=True)
def test_when_one_of_two_processes_is_killed_the_other_ends_and_both_can_go_on(task, two, tmp_path):
    """At once without workers that load: the connection breaks. They keep it, and look for their parent every 5 s."""
    victim, workers = {"translation": (1, 1), "softmax": (0, 0)}[task.name]
    words = [*task.words, "--num-workers", workers, "--save-dir", tmp_path]
    kill = [None, None]
    kill[victim] = partial(faults.killed_in_update, 4)
    both = start_two_processes(*words, faults=kill)
    try:
        both[victim].process.join(LIMIT)
        took = wait_until(lambda: not both[1 - victim].process.is_alive(), 20)
        assert workers or took < 4
        wait_until(lambda: not any(writers(process.output) for process in both), 20)
    finally:
        for process in both:
            process.process.kill()
    ends = [process.wait() for process in both]
    assert ends[victim][0] == -signal.SIGKILL
    assert ends[1 - victim][0] == 1
    assert "RuntimeError" in ends[1 - victim][1]
    train_in_two_processes(*words)
    assert_same_course(course(tmp_path), two.course, range(1, UPDATES + 1))


# ------------------------------------------------------------------------------------------------ torchrun


SCRIPTS = Path(sysconfig.get_path("scripts"))
FROM_TORCHRUN = ["--distributed-init-method=env://", "--distributed-rank=-1"]


@pytest.fixture
def torchrun():
    """Begins the command of the README; what it says is in the file `output`."""
    started = []

    def begin(output, launch, *words):
        command = [SCRIPTS / "torchrun", *launch, "--no-python", SCRIPTS / "fairseq-train", *words, *ON_CPUS]
        with open(output, "w") as said:
            started.append(subprocess.Popen([*map(str, command), *FROM_TORCHRUN], stdout=said, stderr=said))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("task", ["softmax"], indirect=True)
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_two_processes_on_one_node_or_on_two(task, two, nodes, torchrun, tmp_path):
    launches = [["--standalone", "--nproc_per_node=2"]]
    if nodes == 2:
        where = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
        launches = [[*where, f"--node_rank={rank}"] for rank in (0, 1)]
    words = [*task.words, "--max-update=3", "--save-dir", tmp_path / "run"]
    outputs = [tmp_path / f"node{number}" for number in range(nodes)]
    started = [torchrun(output, launch, *words) for output, launch in zip(outputs, launches)]
    codes = [process.wait(LIMIT) for process in started]
    assert codes == [0] * nodes, outputs[0].read_text()
    found = course(tmp_path / "run")
    assert sorted(found) == [1, 2, 3]
    for number in found:
        for name in ("loss", "gnorm", "bsz", "wpb"):
            assert found[number].train[name] == pytest.approx(two.course[number].train[name], abs=1e-5)


def test_torchrun_ends_the_other_process_when_one_is_killed(text, torchrun, tmp_path):
    words = [text, *WORDS["softmax"], "--no-save", "--max-update=100000", "--disable-validation"]
    output = tmp_path / "said"
    started = torchrun(output, ["--standalone", "--nproc_per_node=2"], *words)
    wait_until(lambda: "train_inner" in output.read_text(), LIMIT)
    os.kill(max(writers(output) - {started.pid}), signal.SIGKILL)
    assert started.wait(30) == 1
    assert "exitcode  : -9" in output.read_text()
    wait_until(lambda: not writers(output), 20)
