"""A language model that the released command line trained and saved: converted, it evaluates as the release did.

tests/golden/fork_lm holds that checkpoint, its binarised text and what the release's evaluation printed for the test
split; README.md there says how. The commands here are the real ones: `mega-fairseq convert` and stock fairseq-eval-lm.
"""

import re
from argparse import Namespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

from tests import golden_cases as golden
from tests.commands import CPU, PLUGIN, fairseq
from tests.released import NEEDS_TORCH, READS_SAFELY, assert_refused, run, save

pytestmark = pytest.mark.skipif(not READS_SAFELY, reason=NEEDS_TORCH)
FORK = golden.FOLDER / "fork_lm"
DATA, CHECKPOINT = FORK / "data-bin", FORK / "checkpoint_last.pt"
TOKENS = 371  # of the test split
# Streams of the release's evaluation at chunk 16: a quarter of the split each, cut back to the end of a line.
STREAMS = [85, 82, 81, 87, 36]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("fork") / "ours.pt"
    result = run("convert", CHECKPOINT, target)
    assert result.returncode == 0, result.stderr
    assert "mega_lm_enwik8_base, language model, 24,016 parameters" in result.stdout
    assert "cut them to 8192, but trained on segments of up to 64" in result.stdout
    return target


def evaluated(converted, chunk, data=DATA, *options):
    """Base-2 loss, and the words of each stream with their log-probabilities, that fairseq-eval-lm prints."""
    said = fairseq(
        "eval-lm", data, "--task", "mega_language_modeling", *PLUGIN, *CPU, "--path", converted, "--gen-subset", "test",
        "--output-word-probs", "--model-overrides", f"{{'decoder_chunk_size': {chunk}}}", *options,
    )  # fmt: skip
    lines = re.findall(r"\b(\d+) (\S+ \[-[\d.]+\]\t.*)$", said, re.MULTILINE)
    words = {int(stream): _words(text) for stream, text in lines}
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1)), words


def printed(chunk):
    """The same of the release, which prints a stream chunk by chunk."""
    words = {}
    for stream, text in re.findall(r"^S-(\d+) (.*)$", (FORK / f"word_probs_chunk{chunk}.txt").read_text(), re.M):
        words.setdefault(int(stream), []).extend(_words(text))
    return words


def _words(text):
    return [(word, float(number)) for word, number in re.findall(r"(\S+) \[(-[\d.]+)\]", text)]


def assert_same(ours, released):
    assert sorted(ours) == sorted(released)
    for stream, words in released.items():
        assert [word for word, _ in ours[stream]] == [word for word, _ in words]
        np.testing.assert_allclose([n for _, n in ours[stream]], [n for _, n in words], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("chunk", "loss"), [(16, 3.2051), (32, 3.2075)])
def test_the_whole_split_as_one_stream_has_the_released_loss_at_every_chunk_size(converted, chunk, loss):
    ours, words = evaluated(converted, chunk)
    assert [len(stream) for stream in words.values()] == [TOKENS]
    assert round(ours, 4) == loss


def test_every_word_of_the_split_as_one_stream_gets_the_released_log_probability(converted):
    _, words = evaluated(converted, 32)
    assert_same(words, printed(32))


@pytest.fixture
def streams(tmp_path):
    """The test split, with a line for each stream of the release's evaluation at chunk 16."""
    dictionary = Dictionary.load(str(DATA / "dict.txt"))
    dictionary.save(str(tmp_path / "dict.txt"))
    split = MMapIndexedDataset(str(DATA / "test"))
    tokens = torch.cat([split[i] for i in range(len(split))])
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "test.bin"), dtype=np.uint16)
    for stream in tokens.split(STREAMS):
        builder.add_item(stream)
    builder.finalize(str(tmp_path / "test.idx"))
    return tmp_path


def test_every_word_of_several_streams_gets_the_released_log_probability(converted, streams):
    loss, words = evaluated(converted, 16, streams, "--documents", "line", "--valid-block", "documents")
    assert_same(words, printed(16))
    assert round(loss, 4) == 3.2077


def test_nothing_of_the_pickled_options_is_executed(tmp_path):
    content = torch.load(CHECKPOINT, weights_only=False)
    assert isinstance(content["args"], Namespace)
    content["args"].user_dir = Trap(tmp_path / "trap")
    source = save(content, tmp_path / "hostile.pt")
    assert_refused(run("convert", source, tmp_path / "ours.pt"), source, "not executed")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


class Trap:
    """Creates a file when it is unpickled in the ordinary way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")
