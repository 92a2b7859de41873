"""Inputs, labels and batches of the task `mega_classification`, from files in each layout."""

import math
import pickle
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import SortDataset, data_utils
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.data.classification.examples import ExampleDataset, Shortened
from mega_fairseq.data.classification.inputs import ByteLines, Inputs, byte_dictionary
from mega_fairseq.data.classification.labels import classes_in
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask
from tests.helpers.commands import fairseq

EOS, PAD = 2, 1
TEXTS = ["b a", "c", "a a a b"]
LABELS = ["10", "9", "10"]
IMAGES = np.array([[0, 51, 255], [102, 0, 0]], dtype=np.uint8)
CLIPS = np.array([[0.5, -1.0], [0.0, 0.25]], dtype=np.float32)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(path, content)
        elif isinstance(content, torch.Tensor):
            torch.save(content, path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text("".join(f"{line}\n" for line in content))
    return folder


def task_of(folder, kind, **options):
    options = {"data": str(folder), "input_kind": kind, "max_positions": 99, **options}
    return MegaClassificationTask.setup_task(MegaClassificationConfig(**options, seed=1))


def examples(folder, kind, split="train", **options):
    task = task_of(folder, kind, **options)
    task.load_dataset(split)
    return task.datasets[split]


# ------------------------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def binarised(tmp_path_factory):
    """Writes the texts, each with itself reversed as second input, as fairseq-preprocess does."""
    made = write(tmp_path_factory.mktemp("binarised"), {"text": TEXTS, "labels": LABELS})
    write(made, {"second": [text[::-1] for text in TEXTS]})
    for name, file in (("input0", "text"), ("label", "labels")):
        fairseq("preprocess", "--only-source", f"--trainpref={made}/{file}", f"--destdir={made}/{name}")
    known = ["--srcdict", made / "input0/dict.txt"]
    fairseq("preprocess", "--only-source", *known, f"--trainpref={made}/second", f"--destdir={made}/input1")

    def copy(folder, *names):
        for name, ours in zip(("input0", "input1", "label"), names or ("input0", "input1", "label")):
            shutil.copytree(made / name, folder / ours)

    return copy


@pytest.mark.parametrize(
    "names", [("input0", "input1", "label"), ("src-bin", "src1-bin", "label-bin")], ids=["fairseq", "released"]
)
def test_binarised_pairs_have_the_classes_and_types_of_fairseqs_task(binarised, tmp_path, names):
    binarised(tmp_path, *names)
    task = task_of(tmp_path, "tokens")
    task.load_dataset("train")
    assert task.classes == ["10", "9"]  # the more frequent one first, as the label dictionary has them
    assert task.dictionary.symbols[4:7] == ["a", "b", "c"]
    assert task.dictionary[len(task.dictionary) - 1] == "<mask>"
    found = [task.datasets["train"][i] for i in range(3)]
    assert [of["class"] for of in found] == [0, 1, 0]
    assert [[row.tolist() for row in of["inputs"]] for of in found] == [
        [[5, 4, EOS], [4, 5, EOS]],
        [[6, EOS], [6, EOS]],
        [[4, 4, 4, 5, EOS], [5, 4, 4, 4, EOS]],
    ]
    write(tmp_path, {"labels.txt": ["9", "10"]})
    task = task_of(tmp_path, "tokens")
    assert task.classes == ["9", "10"]
    task.load_state_dict({})  # of fairseq's task, which does not read labels.txt
    assert task.classes == ["10", "9"]


def test_pairs_with_two_dictionaries_are_refused(binarised, tmp_path):
    binarised(tmp_path)
    dictionary = tmp_path / "input1/dict.txt"
    dictionary.write_text("".join(reversed(dictionary.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match="input0/dict.txt and .*input1/dict.txt differ"):
        examples(tmp_path, "tokens")


@given(
    lines=st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line and line[-1:] != b"\r"), min_size=1),
    end=st.sampled_from((b"\n", b"\r\n")),
    last=st.booleans(),
)
def test_lines_of_any_bytes_are_read_back(tmp_path_factory, lines, end, last):
    path = tmp_path_factory.getbasetemp() / "any.input"
    path.write_bytes(end.join(lines) + end * last)
    read = ByteLines(path, byte_dictionary())
    assert [bytes((row[:-1] - 4).tolist()) for row in read] == lines
    assert read.sizes.tolist() == [len(line) + 1 for line in lines]


IMAGE_LINES = [" ".join(map(str, row)) for row in IMAGES]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.npy": IMAGES, "train.label": ["b", "a"]}, IMAGES / 255),
        ({"train.npy": (CLIPS * 2**15).clip(max=2**15 - 1).astype(np.int16), "train.label": ["b", "a"]}, CLIPS),
        ({"train.npy": CLIPS, "train.label": ["b", "a"]}, CLIPS),
        ({"input/train.src": IMAGE_LINES, "label/train.label": ["1", "0"]}, IMAGES / 255),
        (
            {
                "processed_data/raw/train_X.pt": torch.from_numpy(CLIPS)[:, None],
                "processed_data/raw/train_y.pt": torch.tensor([1, 0]),
            },
            CLIPS,
        ),
    ],
    ids=["bytes", "16 bits", "floats", "released images", "released speech"],
)
def test_values_are_scaled_by_their_type_and_normalised(tmp_path, files, expected):
    found = examples(write(tmp_path, files), "values", values_mean=0.25, values_deviation=0.5)
    assert [found[i]["class"] for i in range(2)] == [1, 0]
    for i in range(2):
        (row,) = found[i]["inputs"]
        torch.testing.assert_close(row, torch.tensor((expected[i] - 0.25) / 0.5, dtype=torch.float32))


def test_the_released_speech_calls_its_validation_split_val(tmp_path):
    raw = {"X": torch.zeros(1, 1, 4), "y": torch.tensor([7])}
    names = {f"processed_data/raw/{split}_{part}.pt": raw[part] for split in ("train", "val") for part in raw}
    assert len(examples(write(tmp_path, names), "values", split="valid")) == 1


# -------------------------------------------------------------------------------------------- labels


def test_classes_are_ordered_by_value_or_by_the_alphabet():
    assert classes_in(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert classes_in(["10", "9", "b"]) == ["10", "9", "b"]


def test_a_file_of_labels_sets_the_order_and_names_classes_without_examples(tmp_path):
    files = {"train.input": TEXTS, "train.label": ["b", "a", "b"], "labels.txt": ["c", "b", "a"]}
    task = task_of(write(tmp_path, files), "bytes")
    task.load_dataset("train")
    assert task.classes == ["c", "b", "a"]
    assert [task.datasets["train"][i]["class"] for i in range(3)] == [1, 2, 1]


def test_label_files_of_windows_have_the_same_classes(tmp_path):
    task = task_of(write(tmp_path, {"train.input": TEXTS, "train.label": b"\xef\xbb\xbfa\r\nb\r\na\r\n"}), "bytes")
    task.load_dataset("train")
    assert task.classes == ["a", "b"]


@pytest.mark.parametrize("other", [IMAGES.astype(np.float32), IMAGES.astype(np.int16)])
def test_values_with_another_scale_than_those_of_the_training_are_refused(tmp_path, other):
    test = {"test.npy": other, "test.label": ["0", "1"]}
    training = task_of(write(tmp_path / "train", {"train.npy": IMAGES, "train.label": ["0", "1"], **test}), "values")
    later = task_of(write(tmp_path / "test", test), "values")
    later.load_state_dict(training.state_dict())
    for task in (training, later):
        with pytest.raises(ValueError, match="test.npy .* the training uint8"):
            task.load_dataset("test")


def test_labels_are_matched_by_name_with_the_classes_of_a_checkpoint(tmp_path):
    files = {"train.input": TEXTS, "train.label": ["a", "b", "b"], "test.input": TEXTS, "test.label": ["b", "a", "b"]}
    trained = task_of(write(tmp_path / "train", files), "bytes")
    del files["train.input"], files["train.label"]
    other = task_of(write(tmp_path / "test", {**files, "labels.txt": ["b", "a"]}), "bytes")
    other.load_state_dict(trained.state_dict())
    other.load_dataset("test")
    assert [other.datasets["test"][i]["class"] for i in range(3)] == [1, 0, 1]


# ------------------------------------------------------------------------------------------- batches


def rows(*lengths):
    """Inputs of these lengths."""

    class Rows(Inputs):
        def __getitem__(self, index):
            return torch.arange(10, 10 + self.sizes[index])

    return Rows("rows", np.array(lengths))


def test_a_batch_is_padded_on_the_right_and_has_the_length_of_each_input():
    dataset = ExampleDataset([rows(2, 3, 1), rows(1, 1, 4)], np.array([5, 6, 7]), PAD, seed=1)
    batch = dataset.collater([dataset[2], dataset[0]])
    assert batch["id"].tolist() == [2, 0]
    assert batch["net_input"]["src_tokens"].tolist() == [[10, PAD], [10, 11]]
    assert batch["net_input"]["src_lengths"].tolist() == [1, 2]
    assert batch["net_input"]["src_tokens1"].tolist() == [[10, 11, 12, 13], [10, PAD, PAD, PAD]]
    assert batch["net_input"]["src_lengths1"].tolist() == [4, 1]
    assert batch["target"].tolist() == [7, 5]
    assert (batch["nsentences"], batch["ntokens"]) == (2, 8)


def test_both_inputs_count_in_the_size_of_a_pair():
    dataset = ExampleDataset([rows(2, 3), rows(1, 9)], None, PAD, seed=1)
    assert dataset.num_tokens_vec(np.array([1, 0])).tolist() == [18, 4]


def test_a_token_stands_in_front_and_inputs_are_cut_behind_it():
    cut = Shortened(rows(2, 3, 9), longest=4, first=77)
    assert [row.tolist() for row in cut] == [[77, 10, 11], [77, 10, 11, 12], [77, 10, 11, 12]]
    assert (cut.sizes.tolist(), cut.cut) == ([3, 4, 4], 1)


def test_examples_are_in_the_order_of_fairseqs_task():
    dataset = ExampleDataset([rows(*range(1, 30))], None, PAD, seed=3)
    with data_utils.numpy_seed(3):
        shuffle = np.random.permutation(29)
    assert dataset.ordered_indices().tolist() == SortDataset(dataset, [shuffle]).ordered_indices().tolist()


@pytest.mark.parametrize("limits", [{"max_tokens": 29}, {"max_sentences": 3}, {"max_tokens": 64, "max_sentences": 8}])
def test_every_example_is_in_a_batch_within_the_limits(limits):
    lengths = random.Random(1).choices(range(1, 30), k=101)
    dataset = ExampleDataset([rows(*lengths)], None, PAD, seed=1)
    order, _ = dataset.filter_indices_by_size(dataset.ordered_indices(), 10)
    batches = dataset.batch_by_size(order, **limits, required_batch_size_multiple=8)
    assert sorted(i for batch in batches for i in batch) == list(range(101))
    for batch in batches:
        assert len(batch) <= limits.get("max_sentences", 101)
        assert len(batch) * max(lengths[i] for i in batch) <= limits.get("max_tokens", 10**9)


@pytest.mark.parametrize("kind", ["bytes", "values"])
def test_datasets_can_be_sent_to_workers_that_are_not_forked(tmp_path, kind):
    dataset = examples(write(tmp_path, {**GOOD, "train.npy": IMAGES[[0, 1, 0]]}), kind)
    copy = pickle.loads(pickle.dumps(dataset))
    for i in range(3):
        torch.testing.assert_close(copy[i]["inputs"], dataset[i]["inputs"])


# -------------------------------------------------------------------------------------------- errors

GOOD = {"train.input": TEXTS, "train.label": LABELS}
VALUES = {"train.npy": IMAGES, "train.label": ["0", "1"]}
PICTURES = "input/train.src"  # of the released code, like the clips
CLIPS_FILE = "processed_data/raw/train_X.pt"


@pytest.mark.parametrize(
    ("kind", "files", "said"),
    [
        ("bytes", {**GOOD, "train.input": ["a", "", "b"]}, "train.input .* line 2"),
        ("bytes", {**GOOD, "train.input": b""}, "train.input is empty"),
        ("bytes", {**GOOD, "train.label": LABELS[:2]}, "3 inputs .* 2 labels"),
        ("bytes", {**GOOD, "train.input1": TEXTS[:2]}, "train.input1 has 2 inputs .* 3 labels"),
        ("bytes", {**GOOD, "train.label": ["1", "a b", "2"]}, "train.label .* line 2"),
        ("bytes", {**GOOD, "train.label": ["1", "a\0", "2"]}, "train.label .* line 2"),
        ("bytes", {**GOOD, "valid.input1": TEXTS}, "no .*train.input1"),
        ("bytes", {**GOOD, "labels.txt": ["10"]}, "label '9' in line 2"),
        ("bytes", {**GOOD, "labels.txt": ["10", "9", "10"]}, "labels.txt has the label 10 twice"),
        ("bytes", {"valid.input": TEXTS, "train.label": LABELS}, "no .*train.input"),
        ("tokens", GOOD, "contains bytes .* give --input-kind bytes"),
        ("values", {"x": ["1"]}, "contains no inputs"),
        ("values", {**VALUES, "train.npy": IMAGES[0]}, r"train.npy .* shape \(3,\)"),
        ("values", {**VALUES, "train.npy": IMAGES.astype(np.int64)}, "type int64"),
        ("values", {**VALUES, "train.npy": b"\x93NUMPY"}, "train.npy"),
        ("values", {**VALUES, "train.npy": b""}, "train.npy"),
        ("values", {**VALUES, "train.npy": np.array([[0], [1, 2]], object)}, "train.npy"),
        ("values", {**VALUES, "train.npy": np.array([[0, 1], [2, np.nan]])}, "example 2"),
        ("values", {**VALUES, "train.npy": np.array([[0, 1], [2, 1e39]])}, "example 2"),
        ("values", {PICTURES: ["1 2", "3"]}, "train.src .* row 2"),
        ("values", {PICTURES: ["1 256"]}, "train.src .* row 0"),
        ("values", {CLIPS_FILE: torch.zeros(2, 3)}, r"train_X.pt .* shape \(2, 3\)"),
        ("values", {CLIPS_FILE: b""}, "train_X.pt"),
        ("values", {CLIPS_FILE: b"PK\x03\x04"}, "train_X.pt"),
        ("values", {CLIPS_FILE: torch.ones(2, 1, 3), "processed_data/raw/train_y.pt": torch.ones(2) > 0}, "torch.bool"),
    ],
)
def test_bad_data_are_refused_in_one_sentence(tmp_path, kind, files, said):
    if PICTURES in files:
        files = {"label/train.label": ["0", "1"], **files}
    if CLIPS_FILE in files:
        files = {"processed_data/raw/train_y.pt": torch.tensor([0, 1]), **files}
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        examples(write(tmp_path, files), kind)


def test_truncated_arrays_and_archives_of_arrays_are_refused(tmp_path):
    write(tmp_path, VALUES)
    path = tmp_path / "train.npy"
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(ValueError, match="train.npy"):
            examples(tmp_path, "values")
        with open(path, "wb") as file:
            np.savez(file, IMAGES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_positions": 3}, "2 of 3 inputs in .*train.input .*--max-positions"),
        ({"values_deviation": 0.0}, "--values-deviation is 0.0"),
        ({"values_deviation": math.inf}, "--values-deviation is inf"),
        ({"values_mean": math.nan}, "--values-mean is nan"),
        ({"data": "nowhere"}, "no folder nowhere"),
        ({"data": None}, "no data"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        examples(write(tmp_path, GOOD), "bytes", **options)


@pytest.mark.parametrize(
    ("files", "kind", "token", "said"),
    [
        (VALUES, "values", 0, "--init-token is 0"),
        (GOOD, "bytes", 260, "--init-token is 260"),
        ({**GOOD, "train.label": ["1"] * 3}, "bytes", None, "have 1 different values"),
    ],
)
def test_models_are_not_built_for_unusable_options(tmp_path, files, kind, token, said):
    task = task_of(write(tmp_path, files), kind, init_token=token)
    with pytest.raises(ValueError, match=said):
        task.build_model(SimpleNamespace(max_positions=9))


def test_checkpoints_without_classes_need_the_data(tmp_path):
    cfg = MegaClassificationConfig(data=str(tmp_path / "elsewhere"), input_kind="tokens", seed=1)
    task = MegaClassificationTask.setup_task(cfg, from_checkpoint=True)
    with pytest.raises(ValueError, match="no names of classes and no dictionary, and .*elsewhere"):
        task.build_model(SimpleNamespace(max_positions=9), from_checkpoint=True)


def test_longer_inputs_are_cut_only_on_request_and_counted(tmp_path, caplog):
    cut = examples(write(tmp_path, GOOD), "bytes", max_positions=3, shorten_method="truncate")
    assert max(len(cut[i]["inputs"][0]) for i in range(3)) == 3
    assert "2 of 3 inputs in" in caplog.text


def test_an_example_longer_than_a_batch_is_refused():
    dataset = ExampleDataset([rows(2, 30)], None, PAD, seed=1)
    with pytest.raises(ValueError, match="30 tokens and --max-tokens is 29"):
        dataset.batch_by_size(dataset.ordered_indices(), max_tokens=29)


def test_another_dictionary_than_that_of_the_training_is_refused(binarised, tmp_path):
    binarised(tmp_path)
    task = task_of(tmp_path, "tokens")
    with pytest.raises(ValueError, match="another dictionary .*--srcdict"):
        task.load_state_dict({"classes": ["9", "10"], "symbols": ["a", "c", "b"]})


@pytest.mark.parametrize(
    "criterion",
    [SimpleNamespace(_name="cross_entropy"), SimpleNamespace(_name="sentence_prediction", regression_target=True)],
)
def test_criteria_that_predict_no_classes_are_refused(tmp_path, criterion):
    with pytest.raises(ValueError, match="--criterion sentence_prediction"):
        task_of(write(tmp_path, GOOD), "bytes").build_criterion(criterion)
