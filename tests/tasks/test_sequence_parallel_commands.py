"""Language models whose segments and streams are shared by several processes, through fairseq's commands."""

import functools
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig

from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from mega_fairseq.tasks.mega_language_modeling import sequence_group
from tests.helpers import faults
from tests.helpers.commands import (
    LIMIT,
    LM,
    LM_CHUNK,
    LM_HEADS,
    MEGA_LM,
    ON_CPUS,
    as_words,
    fairseq,
    free_port,
    once,
    perplexity,
    start_processes,
    succeed,
    train_in_processes,
)
from tests.helpers.forking import python
from tests.helpers.processes import assert_same_course, course
from tests.helpers.small_models import language_model

pytestmark = pytest.mark.slow

# An epoch has 13 batches. Two groups of processes take seven updates for them; in the last one, a group has no batch.
EPOCH, UPDATES = 7, 9
# Gradients are compared by the models after a plain gradient step, which Adam would turn into another.
WORDS = [
    *LM, *MEGA_LM, "--dropout=0", "--optimizer=nag", "--momentum=0", "--lr=1", "--clip-norm=0",
    "--criterion=mega_lm_cross_entropy",
    "--log-format=json", "--log-interval=1", "--num-workers=0", "--save-interval-updates=1", f"--max-update={UPDATES}",
    *as_words({"variant_block_multiple_min": 3, "variant_block_multiple_max": 8}), *LM_HEADS["softmax"],
    "--valid-block=splits:3", "--piece-tokens=100", "--documents=blank",
]  # fmt: skip
CLOSE = {"tolerance": 1e-5, "of_models": 1e-5}
TOKENS = 28 * LM_CHUNK  # of a batch, in all processes that share its segments


def shared(size):
    return [f"--sequence-parallel-size={size}", f"--max-tokens={TOKENS // size}"]


@pytest.fixture
def run(text):
    """Trains once with so many processes, of which `size` share each segment, and returns the folder."""

    def train(processes, size, batches, folder):
        words = [text, *WORDS, *shared(size), f"--update-freq={batches}", "--save-dir", folder]
        if processes == 1:
            fairseq("train", *words)
        else:
            train_in_processes(*words, count=processes)
        return folder

    def trained(processes, size, batches=1):
        return once(f"sharing-{processes}-{size}-{batches}", functools.partial(train, processes, size, batches))

    return trained


# ------------------------------------------------------------------------------------------------ training


def test_shared_segments_train_like_one_process_with_whole_segments(run):
    """In two groups of two processes."""
    folder, expected = run(4, 2), run(1, 1, batches=2)
    assert_same_course(folder, expected, range(1, UPDATES + 1), **CLOSE)
    ours, theirs = (course(at)[UPDATES].valid for at in (folder, expected))
    for name in ("loss", "bits_per_token"):
        assert ours[name][1] == theirs[name][1]  # tokens
        assert ours[name][0] / ours[name][1] == pytest.approx(theirs[name][0] / theirs[name][1], abs=1e-5)
    tokens = [course(folder)[number].train["wpb"] for number in range(1, EPOCH + 1)]
    assert tokens[-1] <= TOKENS < min(tokens[:-1])  # a group had no batch


@pytest.fixture
def torchrun():
    """Starts processes as documented, but forked from one that has imported fairseq; their output is in `output`."""
    scripts, started = Path(sysconfig.get_path("scripts")), []
    environment = ["--distributed-world-size=2", "--distributed-init-method=env://", "--distributed-rank=-1"]

    def begin(output, launch, *words):
        command = [scripts / "torchrun", *launch, "--no-python", python(), "-m", "fairseq_cli.train", *words, *ON_CPUS]
        with open(output, "w") as said:
            started.append(subprocess.Popen([*map(str, command), *environment], stdout=said, stderr=said))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait(60)


def test_torchrun_shares_segments_between_two_nodes(text, run, torchrun, tmp_path):
    where = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    words = [text, *WORDS, *shared(2), "--max-update=3", "--save-dir", tmp_path / "run"]
    nodes = [torchrun(tmp_path / f"node{rank}", [*where, f"--node_rank={rank}"], *words) for rank in (0, 1)]
    assert [node.wait(LIMIT) for node in nodes] == [0, 0], (tmp_path / "node0").read_text()
    assert_same_course(tmp_path / "run", run(1, 1), [1, 2, 3], **CLOSE)


def test_training_resumes_between_epochs_with_another_number_of_processes_for_each_segment(text, run, tmp_path):
    words = [text, *WORDS, *shared(4), "--update-freq=2", "--restore-file", run(4, 2) / "checkpoint1.pt"]
    train_in_processes(*words, "--save-dir", tmp_path, count=4)
    assert_same_course(tmp_path, run(4, 2), range(EPOCH + 1, UPDATES + 1), **CLOSE)


def test_if_one_process_is_killed_the_other_ends(text, tmp_path):
    kill = [None, functools.partial(faults.killed_in_update, 3)]
    both = start_processes(text, *WORDS, *shared(2), "--save-dir", tmp_path, faults=kill)
    started = time.monotonic()
    (code, said), (killed, _) = (process.wait() for process in both)
    assert time.monotonic() - started < LIMIT / 2
    assert (code, killed) == (1, -signal.SIGKILL)
    assert said.splitlines()[-1].startswith("RuntimeError: ")


def test_a_process_without_memory_ends_with_one_sentence(text):
    """fairseq would skip the batch in this process alone, and look for these words."""

    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    with pytest.raises(RuntimeError, match="a slice does not fit into the memory of this process; give") as refusal:
        task(text).valid_step({}, torch.nn.Identity(), full)
    assert "out of memory" not in str(refusal.value)


# ------------------------------------------------------------------------------------------------ evaluation


def test_a_stream_in_two_processes_has_the_loss_of_one_process(text, run):
    words = [text, *LM, "--path", run(4, 2) / "checkpoint_last.pt", "--gen-subset=valid"]
    two = perplexity(succeed(start_processes(*words, "--sequence-parallel-size=2", command="eval-lm")))
    one = perplexity(fairseq("eval-lm", *words))
    assert two[0] == one[0] == (text / "valid.bin").stat().st_size // 2
    assert two[1] == pytest.approx(one[1], abs=1.01e-4)  # four digits are printed


# ------------------------------------------------------------------------------------------------ refusals


def task(text, **options):
    cfg = MegaLanguageModelingConfig(data=str(text), tokens_per_sample=LM_CHUNK, seed=1, **options)
    found = MegaLanguageModelingTask.setup_task(cfg)
    found.group, found.unit = SimpleNamespace(rank=0, size=4), LM_CHUNK
    return found


def test_segments_that_are_too_short_for_all_processes_are_refused(text):
    with pytest.raises(ValueError, match="--sequence-parallel-size is 4 .* 48 tokens"):
        task(text, variant_block_multiple_max=3).load_dataset("train", data_selector=None)
    task(text, variant_block_multiple_max=4).load_dataset("train", data_selector=None)


def test_other_criteria_are_refused(text):
    with pytest.raises(ValueError, match="--criterion cross_entropy"):
        task(text).build_criterion(CrossEntropyCriterionConfig(_name="cross_entropy"))


def test_a_number_that_does_not_divide_the_processes_is_refused_in_training_only():
    with pytest.raises(ValueError, match="--sequence-parallel-size is 4"):
        sequence_group(4, for_training=True)
    assert sequence_group(4, for_training=False) is None  # a trained model can be used in one process


@pytest.mark.parametrize(
    ("options", "said"),
    [({"decoder_chunk_size": -1}, "--decoder-chunk-size is -1"), ({"decoder_layerdrop": 0.1}, "--decoder-layerdrop")],
)
def test_models_that_cannot_share_sequences_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        language_model(**options).decoder.share_sequences(SimpleNamespace(rank=0, size=2))


def test_a_decoder_that_shares_sequences_keeps_its_chunks():
    decoder = language_model().decoder
    decoder.share_sequences(SimpleNamespace(rank=0, size=2))
    with pytest.raises(ValueError, match="attention stays in chunks"):
        decoder.set_chunk_size(-1)
