"""Segments, streams and batches of language models: every token once, independent of global random state."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.data import ByteNumbers, SegmentDataset, StreamDataset
from mega_fairseq.data.byte_numbers import ByteNumbersConfig
from mega_fairseq.data.streams import stream_bounds
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.helpers.corpora import TYPES, assert_cuts_depend_only_on_seed_and_epoch, in_memory, tokens
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.processes import assert_workers_end_with_epoch

EOS = 2
BYTES = ByteNumbers(ByteNumbersConfig())


# ------------------------------------------------------------------------------------------------ segments


@st.composite
def corpora(draw):
    lines = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=12))
    lines.append(draw(st.integers(1, 400)))
    parts = sorted(draw(st.lists(st.integers(0, sum(lines)), max_size=3)))
    return in_memory(lines, parts)


@st.composite
def segmentations(draw):
    least = draw(st.integers(1, 4))
    multiples, corpus = (least, least + draw(st.integers(0, 3))), draw(corpora())
    how, chunk, seed = (
        draw(st.sampled_from(["stream", "line", "blank"])),
        draw(st.integers(1, 30)),
        draw(st.integers(0)),
    )
    made = SegmentDataset(corpus, corpus.documents(how), chunk, multiples, seed, PAD, EOS)
    made.set_epoch(draw(st.integers(1, 50)))
    return made


@given(segmentations())
def test_an_epoch_contains_every_token_exactly_once_in_whole_chunks(dataset):
    everything, samples = tokens(len(dataset.corpus)), [dataset[i] for i in range(len(dataset))]
    assert torch.cat([sample["target"] for sample in samples]).tolist() == everything.tolist()
    starts, ends = dataset.bounds[:-1].tolist(), dataset.bounds[1:].tolist()
    borders, (least, most) = set(dataset.documents.tolist()), dataset.multiples
    assert borders <= {0, *ends}
    assert dataset.num_tokens_vec(np.arange(len(dataset))).tolist() == dataset.sizes.tolist()
    for start, end, sample in zip(starts, ends, samples):
        size, before = sample["target"].numel(), EOS if start in borders else everything[start - 1]
        assert sample["source"].tolist() == [before, *sample["target"].tolist()[:-1]]
        assert 1 <= size == dataset.size(starts.index(start)) <= min(most * dataset.chunk, dataset.longest)
        if end not in borders:  # the last segment of a document may be shorter
            assert size % dataset.chunk == 0
            assert least <= size // dataset.chunk


def test_every_number_of_chunks_in_the_range_is_equally_likely():
    dataset = SegmentDataset(in_memory([90_000]), np.array([0, 90_000]), 10, (2, 4), 1, PAD, EOS)
    numbers, counts = np.unique(dataset.sizes[:-1] // 10, return_counts=True)
    assert numbers.tolist() == [2, 3, 4]
    assert counts / counts.sum() == pytest.approx([1 / 3] * 3, abs=0.03)


def long_dataset(seed):
    return SegmentDataset(in_memory([900]), np.array([0, 900]), 5, (2, 4), seed, PAD, EOS)


def test_segments_depend_only_on_seed_and_epoch():
    assert_cuts_depend_only_on_seed_and_epoch(long_dataset, lambda dataset: dataset.bounds)
    dataset = long_dataset(2)
    dataset.set_epoch(3)
    kept = dataset.bounds
    dataset.set_epoch(3)
    assert dataset.bounds is kept  # fairseq sets the same epoch several times


# ------------------------------------------------------------------------------------------------ tasks and batches


def task(**options):
    return MegaLanguageModelingTask(MegaLanguageModelingConfig(data="unused", seed=1, **options), dictionary(TYPES))


def epoch(dataset, **options):
    return list(task().get_batch_iterator(dataset, **options).next_epoch_itr(shuffle=True))


@given(segmentations(), st.integers(1, 9), st.sampled_from([None, 1, 3]), st.integers(1, 3))
def test_no_segment_is_dropped_for_any_multiple_limit_or_number_of_processes(dataset, multiple, rows, shards):
    at_most = dataset.multiples[1] * dataset.chunk
    limits = {"max_tokens": at_most, "max_sentences": rows, "max_positions": at_most}
    seen = []
    for shard in range(shards):
        options = {"num_shards": shards, "shard_id": shard, "required_batch_size_multiple": multiple}
        for batch in epoch(dataset, ignore_invalid_inputs=True, epoch=3, **options, **limits):
            if not batch:
                continue
            seen += batch["id"].tolist()
            assert batch["target"].numel() <= limits["max_tokens"]
            assert batch["target"].size(0) == batch["nsentences"] <= (rows or 10**9)
            assert batch["target"].ne(PAD).sum() == batch["ntokens"] == batch["net_input"]["src_lengths"].sum()
            assert batch["net_input"]["src_tokens"].eq(PAD).equal(batch["target"].eq(PAD))
    assert sorted(seen) == list(range(len(dataset)))


def test_batches_depend_on_the_epoch_but_not_on_global_random_state():
    """Also those of segments of equal length."""
    dataset, batches = SegmentDataset(in_memory([900]), np.array([0, 900]), 5, (2, 2), 1, PAD, EOS), []
    for number in (1, 2, 1):
        np.random.rand(number)
        batches.append([tuple(batch["id"].tolist()) for batch in epoch(dataset, max_tokens=40, epoch=number)])
    assert batches[0] == batches[2]
    assert not set(batches[0]) & set(batches[1])


def test_processes_that_load_batches_end_with_their_epoch():
    dataset = SegmentDataset(in_memory([900]), np.array([0, 900]), 5, (2, 2), 1, PAD, EOS)
    options = {"max_tokens": 40, "num_workers": 1, "data_buffer_size": 1}
    assert_workers_end_with_epoch(task().get_batch_iterator(dataset, **options))


@pytest.mark.parametrize("number", [1, 5])
def test_a_limit_shorter_than_some_segment_is_refused_in_every_epoch(number):
    """Also if no segment of the first epoch exceeds it: training must not stop in its fifth epoch."""
    dataset = SegmentDataset(in_memory([60]), np.array([0, 60]), 10, (1, 5), 1, PAD, EOS)
    with pytest.raises(ValueError, match="50 tokens, --max-tokens .* 49"):
        epoch(dataset, max_tokens=49, max_positions=49, ignore_invalid_inputs=True, epoch=number)
    with pytest.raises(ValueError, match="50 tokens, --max-tokens .* 49"):
        epoch(dataset, max_tokens=49, epoch=number)  # as in validation
    assert epoch(dataset, max_tokens=50, max_positions=50, ignore_invalid_inputs=True, epoch=number)


def test_a_refused_limit_is_the_one_given_if_processes_share_segments():
    dataset, sharing = SegmentDataset(in_memory([60]), np.array([0, 60]), 10, (1, 5), 1, PAD, EOS), task()
    sharing.group = SimpleNamespace(rank=0, size=4)
    with pytest.raises(ValueError, match="50 tokens, --max-tokens .* allow 12 in each of 4 processes"):
        sharing.get_batch_iterator(dataset, max_tokens=12, num_shards=4)
    assert sharing.get_batch_iterator(dataset, max_tokens=13, num_shards=4)


def test_a_limit_must_fit_only_the_longest_document_if_documents_are_shorter_than_segments():
    dataset = SegmentDataset(in_memory([8, 9]), np.array([0, 8, 17]), 10, (2, 4), 1, PAD, EOS)
    assert epoch(dataset, max_tokens=9, max_positions=9)


# ------------------------------------------------------------------------------------------------ streams


@st.composite
def streams(draw):
    corpus = draw(corpora())
    block = draw(
        st.one_of(
            st.integers(1, len(corpus)).map("splits:{}".format),
            st.integers(1, 2 * len(corpus)).map("size:{}".format),
            st.just("documents"),
        )
    )
    how = draw(st.sampled_from(["stream", "line", "blank"]))
    return StreamDataset(corpus, stream_bounds(block, corpus.documents(how)), PAD, EOS), block, corpus.documents(how)


@given(streams())
def test_streams_cover_the_split_exactly_once_and_start_from_eos(made):
    dataset, block, documents = made
    found = [dataset[i] for i in range(len(dataset))]
    assert torch.cat([sample["target"] for sample in found]).tolist() == tokens(len(dataset.corpus)).tolist()
    for sample in found:
        assert sample["source"].tolist() == [EOS, *sample["target"].tolist()[:-1]]
    kind, _, number = block.partition(":")
    if kind == "splits":
        assert len(dataset) == int(number)
        assert dataset.sizes.max() - dataset.sizes.min() <= 1
    elif kind == "size":
        assert set(dataset.sizes[:-1].tolist()) <= {int(number)}
        assert 1 <= dataset.sizes[-1] <= int(number)
    else:
        assert dataset.bounds.tolist() == documents.tolist()


@given(streams(), st.one_of(st.none(), st.integers(1, 300)), st.one_of(st.none(), st.integers(1, 9)))
def test_batches_contain_each_stream_once_within_the_limits(made, max_tokens, rows):
    dataset, *_ = made
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max_tokens, max_sentences=rows)
    assert sorted(np.concatenate(batches)) == list(range(len(dataset)))
    for batch in batches:
        assert len(batch) <= (rows or len(dataset))
        if len(batch) > 1 and max_tokens:
            assert len(batch) * dataset.sizes[batch].max() <= max_tokens


@pytest.mark.parametrize(
    ("shards", "limits", "expected"),
    [
        (1, {}, [[[0, 1, 2, 3, 4]]]),
        (2, {}, [[[0, 1, 2]], [[3, 4]]]),
        (2, {"max_sentences": 2}, [[[0, 1], [4]], [[2, 3], []]]),
        (2, {"max_tokens": 4}, [[[0], [2], [4]], [[1], [3], []]]),
        (5, {}, [[[0]], [[1]], [[2]], [[3]], [[4]]]),
        (6, {}, [[[0]], [[1]], [[2]], [[3]], [[4]], [[]]]),
    ],
)
def test_streams_are_spread_over_all_processes(shards, limits, expected):
    dataset = StreamDataset(in_memory([20]), np.arange(0, 21, 4), PAD, EOS)
    for shard, batches in enumerate(expected):
        found = task().get_batch_iterator(dataset, num_shards=shards, shard_id=shard, **limits)
        numbers = [batch["id"].tolist() if batch else [] for batch in found.next_epoch_itr(shuffle=False)]
        assert numbers == batches
    assert dataset.collater([]) == dataset.for_scoring().collater([]) == {}


def test_targets_are_passed_to_the_model_only_for_scoring():
    dataset = StreamDataset(in_memory([20]), np.array([0, 13, 20]), PAD, EOS)
    (validation,), (scoring,) = epoch(dataset), task().eval_lm_dataloader(dataset)
    assert "target" not in validation["net_input"]
    assert scoring["net_input"].pop("target").equal(validation["target"])
    assert scoring["net_input"]["src_tokens"].equal(validation["net_input"]["src_tokens"])


def test_more_shards_than_streams_are_refused():
    with pytest.raises(ValueError, match="--num-shards is 3 .* fewer streams, 2; give --valid-block splits:3"):
        task().eval_lm_dataloader(StreamDataset(in_memory([20]), np.array([0, 13, 20]), PAD, EOS), num_shards=3)


def test_more_streams_than_tokens_are_refused():
    with pytest.raises(ValueError, match="'splits:8' .* 7 tokens"):
        stream_bounds("splits:8", np.array([0, 7]))


def test_a_stream_longer_than_the_model_allows_is_refused():
    dataset = StreamDataset(in_memory([20]), np.array([0, 13, 20]), PAD, EOS)
    with pytest.raises(ValueError, match="13 tokens, .* 12"):
        epoch(dataset, max_positions=12)


# ------------------------------------------------------------------------------------------------ bytes


@given(st.text())
def test_numbers_of_bytes_become_the_same_text_again(text):
    numbers = BYTES.encode(text)
    assert [int(number) for number in numbers.split()] == list(text.encode())
    assert BYTES.decode(numbers) == text


def test_tokens_that_are_no_text_become_replacement_characters():
    assert BYTES.decode("72 <unk> 195 105") == "H\ufffd\ufffdi"


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant_block_multiple_min": 0}, "--variant-block-multiple-min is 0"),
        ({"variant_block_multiple_min": 3, "variant_block_multiple_max": 2}, "--variant-block-multiple-max 2"),
        ({"tokens_per_sample": -1}, "--tokens-per-sample minus --context-window is -1"),
        *(
            ({"valid_block": text}, f"--valid-block is '{text}'")
            for text in ("", "splits", "splits:0", "size:-3", "documents:2", "size:3.5")
        ),
    ],
)
def test_options_out_of_range_are_refused_in_one_sentence(options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        task(**options)
    assert "\n" not in str(caught.value)
