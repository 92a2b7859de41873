"""Encoders through fairseq's command lines: pre-trained as masked language models, then fine-tuned.

The data are sentences in GPT-2's BPE, in which two words alternate, and their classes.
"""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig
from fairseq.tasks import setup_task

from mega_fairseq.models import MegaEncoderModel
from tests.helpers.commands import (
    CPU,
    PLUGIN,
    SMALL,
    SYLLABLES,
    as_words,
    checkpoint,
    fairseq,
    losses,
    records,
)
from tests.helpers.configurations import training
from tests.helpers.processes import assert_workers_end_with_epoch

pytestmark = pytest.mark.slow

SPACE = "\u0120"  # as GPT-2 writes it
SENTENCES = {"train": 211, "valid": 31}  # primes, so that no batch size divides them
UPDATES, WITHIN_EPOCH = 100, 93
SIZES = {f"encoder_{name}": size for name, size in {**SMALL, "hidden_dim": 48, "z_dim": 16, "n_dim": 4}.items()}
TRAINING = {
    "arch": "mega_encoder_small", **SIZES, "encoder_chunk_size": 5, "dropout": 0, "optimizer": "adam", "lr": 0.02,
    "clip_norm": 1, "batch_size": 8, "log_format": "json", "log_interval": 1, "num_workers": 0,
}  # fmt: skip
MASKED_LM = {
    "task": "masked_lm", "criterion": "mega_masked_lm", "tokens_per_sample": 40, "sample_break_mode": "complete",
    "mask_prob": 0.3,
}  # fmt: skip
NAME = "sentence_prediction"
FINE_TUNING = {"task": NAME, "criterion": NAME, "num_classes": 2, "max_positions": 40, "init_token": 0}
FINE_UPDATES = 50
HEAD = "classification_heads.sentence_classification_head"
RESET = {f"reset_{name}": True for name in ("optimizer", "dataloader", "meters", "lr_scheduler")}


def words_of(*groups, **more):
    """The options of a training."""
    given = dict(TRAINING)
    for group in (*groups, more):
        given.update(group)
    return [*PLUGIN, *CPU, *as_words(given)]


LETTERS = sorted(set("".join(SYLLABLES)))
PIECES = [SPACE, *LETTERS, *SYLLABLES, *(SPACE + syllable for syllable in SYLLABLES)]
WORDS = [a + b for a, b in zip(SYLLABLES[::3], SYLLABLES[1::3])]


def write_bpe(folder):
    """The files of a BPE whose pieces are syllables, those that start a word with the space before them."""
    (folder / "encoder.json").write_text(json.dumps({piece: number for number, piece in enumerate(PIECES)}))
    merges = [*map(" ".join, SYLLABLES), *(f"{SPACE} {syllable}" for syllable in SYLLABLES)]
    (folder / "vocab.bpe").write_text("\n".join(["#version", *merges, ""]))
    files = bpe_options(folder)
    return GPT2BPE(GPT2BPEConfig(**{name: str(files[name]) for name in ("gpt2_encoder_json", "gpt2_vocab_bpe")}))


def bpe_options(folder):
    return {"bpe": "gpt2", "gpt2_encoder_json": folder / "encoder.json", "gpt2_vocab_bpe": folder / "vocab.bpe"}


def write_data(folder):
    """Two words in turn; the class is that of the first one's vowel."""
    bpe = write_bpe(folder)
    for split, size in SENTENCES.items():
        chance, sentences, labels = random.Random(split), [], []
        for _ in range(size):
            first, second = chance.choices(WORDS, k=2)
            sentences.append(" ".join([first, second] * chance.randint(2, 5)))
            labels.append("dark" if first[1] in "ou" else "light")
        (folder / f"{split}.text").write_text("\n".join(sentences) + "\n")
        (folder / f"{split}.input").write_text("\n".join(map(bpe.encode, sentences)) + "\n")
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")

    def binarise(name, destination, *words):
        files = [f"--{split}pref={folder}/{split}.{name}" for split in SENTENCES]
        fairseq("preprocess", "--only-source", *files, f"--destdir={destination}", *words)

    binarise("input", folder / "text")
    binarise("input", folder / "classes/input0", "--srcdict", folder / "text/dict.txt")
    binarise("label", folder / "classes/label")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A masked language model."""
    folder = tmp_path_factory.mktemp("encoder")
    write_data(folder)
    saving = {"save_dir": folder / "model", "save_interval_updates": WITHIN_EPOCH, "max_update": UPDATES}
    said = fairseq("train", folder / "text", *words_of(MASKED_LM, bpe_options(folder), saving))
    last = folder / "model/checkpoint_last.pt"
    return SimpleNamespace(folder=folder, text=folder / "text", classes=folder / "classes", last=last, said=said)


def validated(data, path, *options):
    given = {"path": path, "batch_size": 7, "log_format": "json", "required_batch_size_multiple": 1, "cpu": True}
    for group in options:
        given.update(group)
    return records(fairseq("validate", data, *PLUGIN, *as_words(given)), "valid")[-1]


def test_pre_training_learns_and_fairseq_validate_repeats_its_validation(model):
    curve = losses(model.said)
    assert sum(curve[-5:]) / 5 < 3.7 < curve[0]  # bits; unigrams have 4.6
    expected = records(model.said, "valid")[-1]["valid_loss"]
    assert validated(model.text, model.last, MASKED_LM)["valid_loss"] == pytest.approx(expected, abs=1e-3)


def test_pre_training_resumed_within_an_epoch_ends_with_the_same_model(model, tmp_path):
    (start,) = model.last.parent.glob(f"checkpoint_*_{WITHIN_EPOCH}.pt")
    start = {"restore_file": start, "save_dir": tmp_path}
    said = fairseq("train", model.text, *words_of(MASKED_LM, start, max_update=UPDATES))
    assert losses(said) == losses(model.said)[WITHIN_EPOCH:]
    first, resumed = (checkpoint(path)["model"] for path in (model.last, tmp_path / "checkpoint_last.pt"))
    torch.testing.assert_close(resumed, first, rtol=0, atol=0)


def test_each_epoch_has_new_masks_also_with_workers(model, tmp_path):
    options = {"num_workers": 1, "max_update": 25, "save_dir": tmp_path, "disable_validation": True}
    said = fairseq("train", model.text, *words_of(MASKED_LM, bpe_options(model.folder), options))
    assert records(said, "train_inner")[-1]["epoch"] > 1
    assert losses(said) == losses(model.said)[:25]


def task_of(model, *options):
    """The task that a training of a masked language model sets up, after it has built its model."""
    cfg = training(str(model.text), *map(str, words_of(MASKED_LM, *options)))
    task = setup_task(cfg.task)
    task.build_model(cfg.model)
    return task


def test_processes_that_load_batches_end_with_their_epoch(model, monkeypatch):
    monkeypatch.setattr("mega_fairseq.models.mega_encoder.is_training", lambda cfg: True)
    task = task_of(model, bpe_options(model.folder))
    task.load_dataset("train")
    options = {"max_tokens": 400, "num_workers": 1, "data_buffer_size": 1}
    first, second = (task.get_batch_iterator(task.dataset("train"), **options) for _ in range(2))
    assert first is not second
    assert_workers_end_with_epoch(first)


def test_whole_words_are_masked(model):
    task = task_of(model, bpe_options(model.folder), {"mask_whole_words": True, "leave_unmasked_prob": 0})
    task.load_dataset("train")
    starts = [not s.isdecimal() or PIECES[int(s)].startswith(SPACE) for s in task.dictionary.symbols]
    count = 0
    for example in map(task.dataset("train").__getitem__, range(20)):
        masked = example["target"].ne(task.dictionary.pad())
        tokens = torch.where(masked, example["target"], example["net_input.src_tokens"])
        for i in range(1, len(tokens)):
            if not starts[tokens[i]]:  # a piece within a word
                assert masked[i] == masked[i - 1]
                count += bool(masked[i])
    assert count > 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_whole_words": True}, "--mask-whole-words needs"),
        ({"rel_pos_bias": "simple", "encoder_chunk_size": -1, "tokens_per_sample": 600}, "--tokens-per-sample 600"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_model_are_refused(model, options, said):
    with pytest.raises(ValueError, match=said):
        task_of(model, options)


@pytest.fixture(scope="module")
def finetuned(model, tmp_path_factory):
    """A classifier of sentences, from the weights of the masked language model."""
    start = {"restore_file": model.last, **RESET, "save_dir": tmp_path_factory.mktemp("fine")}
    said = fairseq("train", model.classes, *words_of(FINE_TUNING, start, max_update=FINE_UPDATES))
    return start["save_dir"] / "checkpoint_last.pt", said


def test_fine_tuning_learns_the_classes(model, finetuned):
    path, said = finetuned
    assert f"{HEAD} starts anew" in said
    expected = records(said, "valid")[-1]
    assert expected["valid_accuracy"] > 80
    found = validated(model.classes, path, FINE_TUNING)
    assert found["valid_accuracy"] == pytest.approx(expected["valid_accuracy"], abs=0.1)


def test_the_command_classify_takes_fine_tuned_encoders(model, finetuned):
    expected = records(finetuned[1], "valid")[-1]["valid_accuracy"]
    said = fairseq("mega-fairseq", "classify", finetuned[0], model.classes, "--subset=valid", "--cpu")
    assert f"accuracy {expected}% of {SENTENCES['valid']} examples" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_classes": 5}, [f"{HEAD} starts anew: it has other sizes"]),
        ({"classification_head_name": "other"}, [f"leaving out {HEAD}", "heads.other starts anew"]),
        ({"lm_head": "none"}, ["leaving out encoder.lm_head"]),
    ],
    ids=str,
)
def test_another_training_starts_from_the_weights_of_a_checkpoint_with_other_heads(
    model, finetuned, options, said, tmp_path
):
    start = {"finetune_from_model": finetuned[0], "save_dir": tmp_path, "lr": 0, "max_update": 1}
    output = fairseq("train", model.classes, *words_of(FINE_TUNING, start, options))
    assert all(words in output for words in said)
    first, started = (checkpoint(path)["model"] for path in (finetuned[0], tmp_path / "checkpoint_last.pt"))
    equal = {name for name in first if name in started and torch.equal(first[name], started[name])}
    assert equal >= {name for name in first if name.startswith(("encoder.embed", "encoder.layers"))}
    assert (f"{HEAD}.out_proj.weight" in equal) == ("lm_head" in options)


def test_values_are_predicted_and_options_ranked(model, tmp_path):
    """fairseq's regression, and its task `sentence_ranking`."""
    for name in ("input0", "input1", "input2"):
        shutil.copytree(model.classes / "input0", tmp_path / name)
    for split in ("train", "valid"):
        labels = (model.folder / f"{split}.label").read_text().split()
        (tmp_path / "label").mkdir(exist_ok=True)
        (tmp_path / f"label/{split}.label").write_text("\n".join(str(len(label) - 4) for label in labels) + "\n")
    start = {"finetune_from_model": model.last, "max_update": 1}
    ranking = {"task": "sentence_ranking", "criterion": "sentence_ranking", "num_classes": 2, "max_positions": 80}
    said = fairseq("train", tmp_path, *words_of(ranking, start, save_dir=tmp_path / "ranking"))
    assert records(said, "valid")[-1]["valid_loss"] > 0
    for name in ("input1", "input2"):
        shutil.rmtree(tmp_path / name)
    values = {"num_classes": 1, "regression_target": True, "save_dir": tmp_path / "values"}
    said = fairseq("train", tmp_path, *words_of(FINE_TUNING, start, values))
    assert records(said, "valid")[-1]["valid_loss"] > 0


# ------------------------------------------------------------------------------------------------ from Python


def loaded(path, data):
    return MegaEncoderModel.from_pretrained(path.parent, path.name, data)


def test_masks_are_filled_as_the_model_says(model):
    roberta = loaded(model.last, model.text)
    first, second = WORDS[:2]
    text = " ".join([first, second, first, second, first])
    tokens = roberta.encode(text)
    assert roberta.decode(tokens) == text
    filled = roberta.fill_mask(f"{text} <mask>{second[2:]} {first} {second}", topk=3)
    whole, probability, piece = filled[0]
    assert (whole, piece) == (f"{text} {second} {first} {second}", f" {second[:2]}")
    assert probability > 0.5 > filled[1][1] >= filled[2][1]
    features = roberta.extract_features(tokens)
    assert features.shape == (1, len(tokens), SIZES["encoder_embed_dim"])
    assert roberta.extract_features(tokens, return_all_hiddens=True)[0].shape == features.shape
    roberta.register_classification_head("new", num_classes=3)
    roberta.train().predict("new", tokens).sum().backward()  # fine-tuned in a program of its own


def test_masks_are_filled_without_a_bpe(model, tmp_path):
    content = checkpoint(model.last)
    content["cfg"]["bpe"] = None
    torch.save(content, tmp_path / "model.pt")
    roberta = loaded(tmp_path / "model.pt", model.text)
    symbols = (model.folder / "valid.input").read_text().splitlines()[0]
    assert roberta.decode(roberta.encode(symbols)) == symbols
    start, _, last = symbols.rpartition(" ")
    fillings = {whole: piece for whole, _, piece in roberta.fill_mask(f"{start} <mask>", topk=40)}
    assert fillings[symbols] == f" {last}"
