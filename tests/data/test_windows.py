"""Windows of documents: every line once, in its document, within the limit, by (seed, epoch) only."""

import numpy as np
import pytest
import torch
from fairseq.data import LanguagePairDataset, ListDataset
from fairseq.tasks.fairseq_task import FairseqTask
from hypothesis import example, given
from hypothesis import strategies as st

from mega_fairseq.data.windows import Draw, WindowDataset, windows
from tests.helpers.corpora import assert_cuts_depend_only_on_seed_and_epoch
from tests.helpers.golden_models import dictionary

SEPARATORS, EOS = (90, 91), 2
TYPES = dictionary(96)


def sides(sizes):
    """Lines of each side, with a type for each line and side, and eos."""
    return [
        [torch.tensor([10 + (2 * line + side) % 71] * (size - 1) + [EOS]) for line, size in enumerate(column)]
        for side, column in enumerate(zip(*sizes))
    ]


def dataset(sizes, documents, limit, draw=None):
    columns = [np.array(column) for column in zip(*sizes)]
    source, target = (ListDataset(lines, column) for lines, column in zip(sides(sizes), columns))
    lines = LanguagePairDataset(source, columns[0], TYPES, target, columns[1], TYPES)
    return WindowDataset(lines, np.array(documents), limit, SEPARATORS, draw)


@st.composite
def corpora(draw):
    """Sizes of lines on both sides, borders of documents and a limit that no line exceeds."""
    sizes = draw(st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=40))
    inner = draw(st.sets(st.integers(1, len(sizes)), max_size=6)) - {len(sizes)}
    limit = draw(st.integers(max(map(max, sizes)), 200))
    return sizes, [0, *sorted(inner), len(sizes)], limit


draws = st.builds(Draw, st.integers(0), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())


UNLIKE = [(9, 20), (9, 9), (9, 9), (20, 9), (9, 20), (9, 20), (9, 9)]  # the longer side is now one, now the other


@given(corpora(), st.none() | draws, st.integers(1, 99))
@example((UNLIKE, [0, 3, 7], 40), None, 1)
def test_windows_are_a_partition_of_the_lines_within_documents_and_limit(corpus, draw, epoch):
    """Lines are in order, each once, and with their tokens."""
    (sizes, documents, limit), made = corpus, dataset(*corpus, draw)
    made.set_epoch(epoch)
    items = [made[number] for number in range(len(made))]
    bounds = made.src.bounds.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert set(documents) <= set(bounds), "a window crosses a document's border"
    for side, (name, separator) in enumerate(zip(("source", "target"), SEPARATORS)):
        tokens, rest = [item[name] for item in items], sides(sizes)[side]
        joined = torch.cat(tokens)
        ends = joined.eq(EOS) | joined.eq(separator)
        assert torch.where(ends, EOS, joined).tolist() == torch.cat(rest).tolist()
        assert [window[-1].item() for window in tokens] == [EOS] * len(tokens)
        assert joined.eq(EOS).sum() == len(tokens), "an eos within a window"
        assert [len(window) for window in tokens] == made.sizes[:, side].tolist()
        assert max(map(len, tokens)) <= min(limit, made.longest), "a window exceeds the limit"


# ------------------------------------------------------------------------------------------ seed and epoch

MANY = [(10, 10)] * 400, list(range(0, 401, 50)), 128


def test_windows_depend_only_on_seed_and_epoch():
    assert_cuts_depend_only_on_seed_and_epoch(
        lambda seed: dataset(*MANY, Draw(seed, 0.2, False)), lambda made: made.src.bounds
    )
    fixed = dataset(*MANY)
    before = fixed.src.bounds.tolist()
    fixed.set_epoch(7)
    assert fixed.src.bounds.tolist() == before
    assert np.unique(fixed.src_sizes).tolist() == [20, 120]


def bounds_of(lines, document, size, limit, draw):
    """Borders of the windows of documents with so many lines, all of one size."""
    ends = size * np.arange(lines + 1)
    return windows(np.arange(0, lines + 1, document), np.stack([ends, ends], 1), limit, draw, 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_documents_of_single_lines_is_the_option(share):
    starts = np.isin(np.arange(6000), bounds_of(6000, 6, 80, 480, Draw(1, share, True))).reshape(-1, 6)
    single = starts.all(1).mean()
    assert single == pytest.approx(share, abs=0.05 if 0 < share < 1 else 0.0)


def test_every_octave_of_lengths_has_as_many_tokens():
    sizes = 4 * np.diff(bounds_of(200_000, 1000, 4, 1024, Draw(1, 0.0, False)))
    octaves = np.clip(np.log2(sizes / 64.5).astype(int), 0, 3)
    shares = np.bincount(octaves, weights=sizes) / sizes.sum()
    assert len(shares) == 4
    assert shares == pytest.approx([0.25] * 4, abs=0.07)


# ------------------------------------------------------------------------------------------ batches


class Task(FairseqTask):
    """fairseq's batches."""


def iterator(made, epoch, shards=1, shard=0, multiple=8):
    task = Task(None)
    return task.get_batch_iterator(
        made, 256, required_batch_size_multiple=multiple, seed=1, num_shards=shards, shard_id=shard, epoch=epoch
    )


def lines_of(batches):
    """The tokens of all windows of batches."""
    return sorted(tuple(row[row.ne(TYPES.pad())].tolist()) for batch in batches for row in batch["target"])


def batches(epoch_iterator):
    return list(epoch_iterator.next_epoch_itr())


@given(corpora(), st.none() | draws, st.integers(1, 3))
def test_processes_share_all_windows_without_loss(corpus, draw, count):
    """Also with a multiple of sentences, of which fairseq would drop the remainder."""
    datasets = [dataset(*corpus, draw) for _ in range(count)]
    shared = [batch for rank, one in enumerate(datasets) for batch in batches(iterator(one, 2, count, rank)) if batch]
    assert lines_of(shared) == sorted(
        tuple(datasets[0][number]["target"].tolist()) for number in range(len(datasets[0]))
    )


def test_training_resumed_within_an_epoch_has_the_same_batches():
    draw, whole = Draw(1, 0.3, False), []
    made = dataset(*MANY, draw)
    for epoch in (1, 2):
        epoch_iterator = iterator(made, epoch)
        whole.append([batch["target"].tolist() for batch in batches(epoch_iterator)])
    first = iterator(made, 2)
    rest = first.next_epoch_itr()
    for _ in range(3):
        next(rest)
    resumed = iterator(dataset(*MANY, draw), 2)
    resumed.load_state_dict(first.state_dict())
    assert [batch["target"].tolist() for batch in resumed.next_epoch_itr()] == whole[1][3:]
    assert whole[0] != whole[1]


def test_single_lines_give_the_batches_of_translation():
    made = dataset(*MANY, Draw(1, 1.0, False))
    sizes = np.array([10] * 400)
    source, target = (ListDataset(lines, sizes) for lines in sides(MANY[0]))
    stock = LanguagePairDataset(source, sizes, TYPES, target, sizes, TYPES)
    for one, other in zip(batches(iterator(made, 1)), batches(iterator(stock, 1, multiple=1))):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
