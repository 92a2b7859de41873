"""Data of language models: nothing lost, nothing twice, nothing that depends on what it must not depend on."""

import gc
import re

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_fairseq.data import Corpus, SegmentDataset, StreamDataset
from mega_fairseq.data.streams import stream_bounds
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.commands import fairseq
from tests.golden_models import PAD, dictionary

EOS, TYPES, FIRST = 2, 200, 4  # the first type that is a word

quick = settings(max_examples=60, deadline=None)


# ------------------------------------------------------------------------------------------------ files


def write(path, content):
    path.write_text("".join(line + "\n" for line in content))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same text in each format: lines of 3, 0, 0, 1 and 2 words as train, one long line as train1."""
    root, made = tmp_path_factory.mktemp("formats"), {}
    first = write(root / "train", ["a b c", "", "", "d", "e f"])
    second = write(root / "train1", [" ".join("abcdef"[i * i % 6] for i in range(5000))])
    empty = write(root / "empty", [])
    for impl in ("mmap", "cached", "lazy"):
        made[impl] = root / impl
        words = ["--only-source", "--dataset-impl", impl, "--destdir", root / impl]
        fairseq("preprocess", *words, "--trainpref", first, "--validpref", empty, "--testpref", second)
        for kind in ("bin", "idx"):
            (root / impl / f"test.{kind}").rename(root / impl / f"train1.{kind}")
    return made


@pytest.fixture(params=["mmap", "cached", "lazy"])
def folder(folders, request):
    return folders[request.param]


def load(folder, split="train", combine=False):
    return Corpus.load(str(folder / split), Dictionary.load(str(folder / "dict.txt")), combine)


def copied(folder, where, split="train"):
    for name in ("dict.txt", f"{split}.bin", f"{split}.idx"):
        (where / name).write_bytes((folder / name).read_bytes())
    return where


def test_a_corpus_is_its_lines_in_a_row_in_any_format_of_fairseq_preprocess(folder):
    words, corpus = Dictionary.load(str(folder / "dict.txt")), load(folder)
    assert words.string(corpus.read(0, len(corpus)), include_eos=True) == "a b c </s> </s> </s> d </s> e f </s>"
    assert corpus.lines.tolist() == [4, 1, 1, 2, 3]


def test_parts_follow_each_other_where_they_are_asked_for(folder):
    first, both = load(folder), load(folder, combine=True)
    assert len(first) == 11
    assert len(both) == 11 + 5001
    torch.testing.assert_close(both.read(0, 11), first.read(0, 11))
    torch.testing.assert_close(both.read(11, 5012), load(folder, "train1").read(0, 5001))
    assert both.lines.tolist() == [*first.lines.tolist(), 5001]


def test_an_empty_part_in_the_middle_changes_nothing(folder, tmp_path):
    copied(folder, tmp_path)
    for number, split in ((1, "valid"), (2, "train1")):
        for kind in ("bin", "idx"):
            (tmp_path / f"train{number}.{kind}").write_bytes((folder / f"{split}.{kind}").read_bytes())
    corpus, expected = load(tmp_path, combine=True), load(folder, combine=True)
    torch.testing.assert_close(corpus.read(0, len(corpus)), expected.read(0, len(expected)))


def refusal(*arguments, **options):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_split_without_a_token_is_refused(folder):
    assert "valid.bin holds no tokens; check the text" in refusal(folder, "valid")


def test_a_split_that_is_missing_is_refused_with_its_name(folder):
    assert "tset.bin and " in refusal(folder, "tset")


def test_a_dictionary_of_other_data_is_refused(folder, tmp_path):
    lines = (copied(folder, tmp_path) / "dict.txt").read_text().splitlines()
    write(tmp_path / "dict.txt", lines[:3])
    assert "has type 9 and dict.txt only 7 types" in refusal(tmp_path)


def test_a_word_that_stands_for_no_token_is_refused(tmp_path):
    text = write(tmp_path / "text", ["a b", "c <pad> d"])
    fairseq("preprocess", "--only-source", "--trainpref", text, "--destdir", tmp_path / "bin")
    assert "holds <pad>, which fairseq uses for padding; remove that word" in refusal(tmp_path / "bin")


@pytest.mark.parametrize("kept", [0, 1, 11, -1, -2])
def test_a_file_of_tokens_that_was_cut_off_is_refused(folder, tmp_path, kept):
    file = copied(folder, tmp_path) / "train.bin"
    file.write_bytes(file.read_bytes()[:kept])
    assert "one of them is damaged; run fairseq-preprocess again" in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fairseq's half-read index
@pytest.mark.parametrize("kept", [0, 5, 8, 20, 40])
def test_an_index_that_was_cut_off_is_refused(folder, tmp_path, kept):
    file = copied(folder, tmp_path) / "train.idx"
    file.write_bytes(file.read_bytes()[:kept])
    assert re.search(r"train\.idx .*damaged.*; run fairseq-preprocess again", refusal(tmp_path))
    gc.collect()  # here, where its complaint is expected


def tokens(count):
    """Neighbours differ, so a token in the wrong place is seen."""
    return FIRST + np.arange(count) * 7 % (TYPES - FIRST)


def in_memory(lines, parts=()):
    """A corpus of lines of these lengths, its tokens in parts that end at these places."""
    return Corpus(np.split(tokens(sum(lines)), parts), np.array(lines))


def test_any_piece_is_read_across_all_borders_of_parts():
    corpus = in_memory([12], parts=(1, 4, 4, 11))
    for start in range(12):
        for stop in range(start + 1, 13):
            assert corpus.read(start, stop).tolist() == tokens(12)[start:stop].tolist()


def test_what_is_read_may_be_written_to():
    corpus = in_memory([5])
    corpus.read(1, 3).zero_()
    assert corpus.read(0, 5).tolist() == tokens(5).tolist()


@pytest.mark.parametrize(
    ("how", "lines", "borders"),
    [
        ("stream", [3, 1, 5], [0, 9]),
        ("line", [3, 1, 5], [0, 3, 4, 9]),
        ("line", [0, 3, 0, 5, 0], [0, 3, 8]),
        ("line", [1, 1, 1], [0, 1, 2, 3]),
        ("blank", [3, 4, 1, 5, 2], [0, 8, 15]),
        ("blank", [3, 1, 1, 1, 5], [0, 6, 11]),  # several blank lines are one border
        ("blank", [1, 3, 1], [0, 1, 5]),
        ("blank", [3, 4], [0, 7]),
        ("blank", [1, 1], [0, 2]),
    ],
)
def test_documents_end_where_they_are_said_to(how, lines, borders):
    assert in_memory(lines).documents(how).tolist() == borders


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


def samples(dataset):
    return [dataset[index] for index in range(len(dataset))]


@quick
@given(segmentations())
def test_an_epoch_holds_every_token_exactly_once(dataset):
    targets = torch.cat([sample["target"] for sample in samples(dataset)])
    assert targets.tolist() == tokens(len(dataset.corpus)).tolist()
    assert [dataset.size(i) for i in range(len(dataset))] == [s["target"].numel() for s in samples(dataset)]
    assert dataset.num_tokens_vec(np.arange(len(dataset))).tolist() == dataset.sizes.tolist()


@quick
@given(segmentations())
def test_sources_are_the_targets_one_earlier_and_eos_where_a_document_begins(dataset):
    everything, starts = tokens(len(dataset.corpus)), set(dataset.documents.tolist())
    for place, sample in zip(dataset.bounds.tolist(), samples(dataset)):
        before = EOS if place in starts else everything[place - 1]
        assert sample["source"].tolist() == [before, *sample["target"].tolist()[:-1]]


@quick
@given(segmentations())
def test_segments_are_whole_chunks_in_their_range_but_for_the_last_of_a_document(dataset):
    ends, (least, most) = set(dataset.documents.tolist()), dataset.multiples
    assert ends <= set(dataset.bounds.tolist())
    assert dataset.sizes.max() <= dataset.longest
    for end, size in zip(dataset.bounds[1:].tolist(), dataset.sizes.tolist()):
        assert 1 <= size <= most * dataset.chunk
        if end not in ends:
            assert size % dataset.chunk == 0
            assert least <= size // dataset.chunk <= most


def test_every_number_of_chunks_in_the_range_is_as_likely():
    dataset = SegmentDataset(in_memory([90_000]), np.array([0, 90_000]), 10, (2, 4), 1, PAD, EOS)
    numbers, counts = np.unique(dataset.sizes[:-1] // 10, return_counts=True)
    assert numbers.tolist() == [2, 3, 4]
    assert counts / counts.sum() == pytest.approx([1 / 3] * 3, abs=0.03)


def long_dataset(seed):
    return SegmentDataset(in_memory([900]), np.array([0, 900]), 5, (2, 4), seed, PAD, EOS)


def test_seed_and_epoch_alone_decide_the_cut():
    first = long_dataset(7)
    for epoch in (5, 2, 9):
        first.set_epoch(epoch)
        np.random.rand(3)
        torch.rand(3)
    second = long_dataset(7)
    second.set_epoch(9)
    assert first.bounds.tolist() == second.bounds.tolist()
    kept = second.bounds
    second.set_epoch(9)
    assert second.bounds is kept  # fairseq says the same epoch several times


def test_epochs_and_seeds_cut_differently():
    cuts = set()
    for seed in (1, 2):
        dataset = long_dataset(seed)
        for epoch in (1, 2, 3):
            dataset.set_epoch(epoch)
            cuts.add(tuple(dataset.bounds.tolist()))
    assert len(cuts) == 6


# ------------------------------------------------------------------------------------------------ tasks and batches


def task(**options):
    return MegaLanguageModelingTask(MegaLanguageModelingConfig(data="unused", seed=1, **options), dictionary(TYPES))


def epoch(dataset, **options):
    return list(task().get_batch_iterator(dataset, **options).next_epoch_itr(shuffle=True))


@settings(max_examples=25, deadline=None)
@given(segmentations(), st.integers(1, 9), st.sampled_from([None, 1, 3]), st.integers(1, 3))
def test_no_multiple_and_no_limit_and_no_number_of_processes_drops_a_segment(dataset, multiple, rows, shards):
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


def test_batches_change_from_epoch_to_epoch_and_not_with_the_global_random_state():
    dataset, batches = long_dataset(1), []
    for number in (1, 2, 1):
        np.random.rand(number)
        found = epoch(dataset, max_tokens=40, epoch=number)
        batches.append([batch["target"].tolist() for batch in found])
    assert batches[0] == batches[2] != batches[1]


def test_segments_of_one_length_are_not_always_in_the_same_company():
    dataset, batches = SegmentDataset(in_memory([900]), np.array([0, 900]), 5, (2, 2), 1, PAD, EOS), []
    for number in (1, 2):
        batches.append({tuple(batch["id"].tolist()) for batch in epoch(dataset, max_tokens=40, epoch=number)})
    assert not batches[0] & batches[1]


@pytest.mark.parametrize("number", range(1, 6))
def test_a_limit_that_a_segment_may_exceed_is_an_error_in_every_epoch(number):
    """Whatever the lengths of the first epoch: a training does not stop in its fifth."""
    dataset = SegmentDataset(in_memory([60]), np.array([0, 60]), 10, (1, 5), 1, PAD, EOS)
    with pytest.raises(ValueError, match="samples have up to 50 tokens, --max-tokens and the model allow 49: raise"):
        epoch(dataset, max_tokens=49, max_positions=49, ignore_invalid_inputs=True, epoch=number)
    assert epoch(dataset, max_tokens=50, max_positions=50, ignore_invalid_inputs=True, epoch=number)


def test_documents_shorter_than_a_segment_need_no_more_room_than_they_have():
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


@quick
@given(streams())
def test_streams_cover_the_split_exactly_once_and_start_from_eos(made):
    dataset, block, documents = made
    found = samples(dataset)
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


@quick
@given(streams(), st.one_of(st.none(), st.integers(1, 300)), st.one_of(st.none(), st.integers(1, 9)))
def test_batches_hold_each_stream_once_within_the_limits(made, max_tokens, rows):
    dataset, *_ = made
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max_tokens, max_sentences=rows)
    assert sorted(sum(batches, [])) == list(range(len(dataset)))
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


def test_an_evaluation_of_fewer_streams_than_processes_is_refused():
    dataset = StreamDataset(in_memory([20]), np.array([0, 10, 20]), PAD, EOS)
    with pytest.raises(ValueError, match="there are 2 streams for 3 processes or shards; give --valid-block splits:K"):
        task().eval_lm_dataloader(dataset, num_shards=3, shard_id=0)


def test_only_a_scorer_hands_targets_to_the_model():
    dataset = StreamDataset(in_memory([20]), np.array([0, 13, 20]), PAD, EOS)
    (validation,), (scoring,) = epoch(dataset), task().eval_lm_dataloader(dataset)
    assert "target" not in validation["net_input"]
    assert scoring["net_input"].pop("target").equal(validation["target"])
    assert scoring["net_input"]["src_tokens"].equal(validation["net_input"]["src_tokens"])


def test_more_streams_than_tokens_are_refused():
    with pytest.raises(ValueError, match="'splits:8' and the split has only 7 tokens; give fewer splits"):
        stream_bounds("splits:8", np.array([0, 7]))


def test_a_stream_beyond_what_the_model_can_take_is_refused():
    dataset = StreamDataset(in_memory([20]), np.array([0, 13, 20]), PAD, EOS)
    with pytest.raises(ValueError, match="13 tokens, .* allow 12: --valid-block size:N gives shorter streams"):
        epoch(dataset, max_positions=12)


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant_block_multiple_min": 0}, "--variant-block-multiple-min is 0"),
        ({"variant_block_multiple_min": 3, "variant_block_multiple_max": 2}, "--variant-block-multiple-max 2"),
        ({"tokens_per_sample": -1}, "--tokens-per-sample minus --context-window is -1"),
        *(
            ({"valid_block": text}, f"--valid-block is '{text}'; give splits:K")
            for text in ("", "splits", "splits:", "splits:0", "size:0", "size:-3", "documents:2", "lines", "size:3.5")
        ),
    ],
)
def test_options_out_of_range_are_refused_in_one_sentence(options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        task(**options)
    assert "\n" not in str(caught.value)


def test_a_model_without_chunks_needs_to_be_told_how_long_segments_are(folders):
    made = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=str(folders["mmap"])))
    with pytest.raises(ValueError, match="give --tokens-per-sample"):
        made.load_dataset("train")


def test_a_folder_without_a_dictionary_or_no_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="dict.txt; give the folder that fairseq-preprocess"):
        MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=str(tmp_path)))
    with pytest.raises(ValueError, match="there is no data; give the folder"):
        MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig())


@pytest.mark.parametrize(
    ("from_checkpoint", "remedy"),
    [
        (False, "run fairseq-preprocess --only-source on the text"),
        (True, "for --lm-path, copy the target's dictionary"),
    ],
)
def test_translation_data_is_refused_as_what_it_is(tmp_path, from_checkpoint, remedy):
    """A language model of --lm-path is set up from its checkpoint, with the folder of the translation data."""
    for language in ("de", "en"):
        dictionary(TYPES).save(str(tmp_path / f"dict.{language}.txt"))
    said = rf"{tmp_path} holds translation data \(dict.de.txt, dict.en.txt\) and no dict.txt; {remedy}"
    with pytest.raises(FileNotFoundError, match=said):
        MegaLanguageModelingTask.setup_task(
            MegaLanguageModelingConfig(data=str(tmp_path)), from_checkpoint=from_checkpoint
        )


def test_several_folders_take_turns_epoch_by_epoch_and_all_parts_are_trained_on(folders, tmp_path):
    copied(folders["mmap"], tmp_path, "train1")
    for kind in ("bin", "idx"):
        (tmp_path / f"train1.{kind}").rename(tmp_path / f"train.{kind}")
    data = f"{folders['mmap']}:{tmp_path}"
    made = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=data, tokens_per_sample=8, seed=1))
    sizes = []
    for number in (1, 2, 3):
        made.load_dataset("train", epoch=number, combine=True)
        sizes.append(len(made.dataset("train").corpus))
    assert sizes == [5012, 5001, 5012]
