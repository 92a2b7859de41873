"""A language model trained by the released command line gives the released evaluation after conversion.

tests/golden/fork_lm contains its checkpoint, its binarised text and the output of the released evaluation on the test
split (tests/golden/README.md). The tests run `mega-fairseq convert` and stock fairseq-eval-lm.
"""

import re

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset

from tests.helpers import golden_cases as golden
from tests.helpers.binarised import write_indexed
from tests.helpers.commands import CPU, PLUGIN, Running, fairseq
from tests.helpers.released import NEEDS_TORCH, READS_SAFELY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not READS_SAFELY, reason=NEEDS_TORCH)]
FORK = golden.FOLDER / "fork_lm"
DATA, CHECKPOINT = FORK / "data-bin", FORK / "checkpoint_last.pt"
TOKENS = 371  # of the test split
# Streams of the released evaluation with chunks of 16: a quarter of the split each, cut at the end of a line.
STREAMS = [85, 82, 81, 87, 36]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("fork") / "ours.pt"
    code, output = Running("mega-fairseq", "convert", CHECKPOINT, target).wait()
    assert code == 0, output
    assert "24,016 parameters" in output
    assert "8192" in output
    return target


def evaluate(converted, chunk, data=DATA, *options):
    """Base-2 loss, and the words of each stream with their log-probabilities, from fairseq-eval-lm."""
    output = fairseq(
        "eval-lm", data, "--task", "mega_language_modeling", *PLUGIN, *CPU, "--path", converted, "--gen-subset", "test",
        "--output-word-probs", "--model-overrides", f"{{'decoder_chunk_size': {chunk}}}", *options,
    )  # fmt: skip
    lines = re.findall(r"\b(\d+) (\S+ \[-[\d.]+\]\t.*)$", output, re.MULTILINE)
    words = {int(stream): _words(text) for stream, text in lines}
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", output).group(1)), words


def printed(chunk):
    """The words of each stream that the release printed, chunk by chunk."""
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


def test_one_stream_has_the_released_losses_at_two_chunk_sizes(converted):
    for chunk, released in ((16, 3.2051), (32, 3.2075)):
        loss, words = evaluate(converted, chunk)
        assert [len(stream) for stream in words.values()] == [TOKENS]
        assert round(loss, 4) == released
    assert_same(words, printed(32))  # for chunks of 16 only the loss was recorded


@pytest.fixture
def streams(tmp_path):
    """The test split, with one line per stream of the released evaluation at chunk 16."""
    dictionary = Dictionary.load(str(DATA / "dict.txt"))
    dictionary.save(str(tmp_path / "dict.txt"))
    split = MMapIndexedDataset(str(DATA / "test"))
    tokens = torch.cat([split[i] for i in range(len(split))])
    write_indexed(tmp_path / "test", tokens.split(STREAMS))
    return tmp_path


def test_several_streams_have_the_released_loss_and_log_probabilities(converted, streams):
    loss, words = evaluate(converted, 16, streams, "--documents", "line", "--valid-block", "documents")
    assert_same(words, printed(16))
    assert round(loss, 4) == 3.2077
