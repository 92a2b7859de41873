"""`mega-fairseq convert --tokenizer`: vocabularies of Hugging Face and fairseq, and commands that use them."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder

from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.convert import command
from mega_fairseq.cli.main import main
from mega_fairseq.models import MegaEncoderModel
from tests.helpers import golden_cases as golden
from tests.helpers.commands import PLUGIN, fairseq, records

CASE = golden.FOLDER / "huggingface" / "mlm_defaults"
FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ a"]
PIECES = [*FIRST, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES), "<mask>"]
SPARE = 3  # rows of the embeddings beyond the vocabulary
ROWS = len(PIECES) + SPARE
TEXT = ["the cat sat on the mat", "a café, then the theatre", "1 2 3", "the the a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked language model with a vocabulary of byte-level BPE, in both of Hugging Face's forms."""
    folder = tmp_path_factory.mktemp("tokens") / "hf"
    shutil.copytree(CASE, folder)
    tensors = safetensors.torch.load_file(str(folder / "model.safetensors"))
    torch.manual_seed(0)
    for name in ("mega.embedding_layer.word_embeddings.weight", "mlm_head.bias"):
        tensors[name] = 0.3 * torch.randn(ROWS, *tensors[name].shape[1:])
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(tensors))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS}))
    numbers = {token: number for number, token in enumerate(PIECES)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    return folder


def tokenizer(**model):
    numbers = {token: number for number, token in enumerate(PIECES[:-1])}
    return {
        "added_tokens": [{"id": len(PIECES) - 1, "content": "<mask>", "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": numbers, "merges": MERGES, **model},
    }


def convert(folder, target, *options):
    assert main(["convert", str(folder), str(target), *map(str, options)]) == 0
    return target


@pytest.mark.parametrize("file", ["vocab.json", "tokenizer.json"])
def test_the_dictionary_gives_each_piece_the_row_of_its_embedding(file, folder, tmp_path):
    convert(folder, tmp_path / "ours.pt", "--tokenizer", folder / file)
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    of_bpe = tmp_path if file == "tokenizer.json" else folder
    bpe = get_encoder(str(of_bpe / "vocab.json"), str(of_bpe / "merges.txt"))
    assert len(dictionary) == ROWS
    assert [dictionary.index(word) for word in [*FIRST, "<mask>"]] == [0, 1, 2, 3, len(PIECES) - 1]
    assert dictionary.add_symbol("<mask>") == len(PIECES) - 1  # as fairseq's tasks do
    for line in TEXT:
        numbers = bpe.encode(line)
        assert dictionary.encode_line(" ".join(map(str, numbers)), append_eos=False).tolist() == numbers
        assert bpe.decode(numbers) == line
    assert bpe.encode(" the") == [PIECES.index("Ġthe")]


@pytest.mark.parametrize("form", ["vocab.json", "tokenizer.json", "added_tokens.json"])
def test_the_dictionary_leads_back_to_the_same_vocabulary(form, folder, tmp_path):
    tokenizer, wanted = folder / form, json.loads((folder / "vocab.json").read_text())
    if form == "added_tokens.json":  # of a tokenizer that was trained without <mask>
        (tmp_path / "given").mkdir()
        (tmp_path / "given" / form).write_text(json.dumps({"<mask>": wanted["<mask>"]}))
        tokenizer = tmp_path / "given/vocab.json"
        tokenizer.write_text(json.dumps({token: wanted[token] for token in PIECES[:-1]}))
        shutil.copy(folder / "merges.txt", tmp_path / "given")
    convert(folder, tmp_path / "ours.pt", "--tokenizer", tokenizer)
    for name in ("vocab.json", "merges.txt") if form == "vocab.json" else ():  # written for the other two
        shutil.copy(folder / name, tmp_path)
    convert(tmp_path / "ours.pt", tmp_path / "back", "--to-huggingface", "--tokenizer", tmp_path / "dict.txt")
    after = json.loads((tmp_path / "back" / "vocab.json").read_text())
    assert {token: number for token, number in after.items() if "madeup" not in token} == wanted
    assert sorted(after.values()) == list(range(ROWS))
    assert (tmp_path / "back" / "merges.txt").read_text() == (folder / "merges.txt").read_text()


def test_the_dictionary_of_robertas_recipe_becomes_its_vocabulary(folder, tmp_path):
    """Its words are numbers of GPT-2's encoder.json in order of frequency, and tasks add <mask> at the end."""
    tokens = PIECES[len(FIRST) : -1]
    (tmp_path / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    shutil.copy(folder / "merges.txt", tmp_path / "vocab.bpe")
    order = list(reversed(range(len(tokens))))
    words = [*map(str, order), *(f"madeupword{number:04d}" for number in range(SPARE))]
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    convert(folder, tmp_path / "ours.pt")
    convert(tmp_path / "ours.pt", tmp_path / "back", "--to-huggingface", "--tokenizer", tmp_path / "dict.txt")
    numbers = json.loads((tmp_path / "back" / "vocab.json").read_text())
    assert [numbers[token] for token in FIRST] == [0, 1, 2, 3]
    assert [numbers[tokens[number]] for number in order] == list(range(4, 4 + len(order)))
    assert numbers["<mask>"] == ROWS - 1


def test_whole_words_are_the_words_of_the_dictionary(folder, tmp_path, capsys):
    words = [*FIRST, *(f"w{number}" for number in range(ROWS - 5)), "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    convert(folder, tmp_path / "ours.pt", "--tokenizer", tmp_path / "vocab.json")
    assert "no merges.txt" in capsys.readouterr().out
    assert Dictionary.load(str(tmp_path / "dict.txt")).symbols == words
    convert(tmp_path / "ours.pt", tmp_path / "back", "--to-huggingface", "--tokenizer", tmp_path / "dict.txt")
    assert list(json.loads((tmp_path / "back" / "vocab.json").read_text())) == words


MOVED = {token: number for number, token in enumerate(["<pad>", "<s>", *PIECES[2:]])}
REFUSED = {
    "no JSON": ("{", "JSON"),
    "a list": ("[]", "types"),
    "other first types": (json.dumps(MOVED), "'<pad>', '<s>'"),
    "more types than the model": (json.dumps({**MOVED, "more": ROWS}), f"{ROWS} types"),
    "a number twice": (json.dumps({"a": 0, "b": 0}), "types"),
    "a number that is a word": (json.dumps({"a": "0"}), "types"),
    "pieces of a unigram model": (json.dumps(tokenizer(type="Unigram")), "'Unigram'"),
    "BPE without bytes": (json.dumps({**tokenizer(), "pre_tokenizer": None}), "without bytes"),
    "merges of numbers": (json.dumps(tokenizer(merges=[[1, 2]])), "merges"),
    "a number of added tokens": (json.dumps({**tokenizer(type="Unigram"), "added_tokens": 5}), "'Unigram'"),
    "words with spaces": (
        json.dumps({word: n for n, word in enumerate([*FIRST, "a b"])}),
        "spaces",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_vocabularies_are_refused(what, folder, tmp_path, refuses):
    content, words = REFUSED[what]
    (tmp_path / "any.json").write_text(content)
    options = ("--tokenizer", tmp_path / "any.json")
    refuses("convert", folder, tmp_path / "ours.pt", *options, words=[tmp_path / "any.json", words])


@pytest.mark.parametrize(
    ("content", "words"),
    [("a 1\n" * 2, "dictionary"), ("a 1\n", "5 types"), ("".join(f"{n} 1\n" for n in range(ROWS - 4)), "vocab.json")],
)
def test_dictionaries_that_do_not_fit_are_refused(content, words, folder, tmp_path, refuses):
    convert(folder, tmp_path / "ours.pt")
    (tmp_path / "dict.txt").write_text(content)
    options = ("--to-huggingface", "--tokenizer", tmp_path / "dict.txt")
    refuses("convert", tmp_path / "ours.pt", tmp_path / "back", *options, words=[tmp_path / "dict.txt", words])


def test_files_of_the_bpe_that_cannot_be_read_are_refused(folder, tmp_path, refuses):
    convert(folder, tmp_path / "ours.pt", "--tokenizer", folder / "vocab.json")
    back = (tmp_path / "ours.pt", tmp_path / "back", "--to-huggingface", "--tokenizer", tmp_path / "dict.txt")
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(folder / file, tmp_path)
    (tmp_path / "vocab.json").write_text("[1]")
    refuses("convert", *back, words=[tmp_path / "dict.txt", "vocab.json beside it"])
    shutil.copy(folder / "vocab.json", tmp_path)
    options = (tmp_path / "again.pt", "--tokenizer", tmp_path / "vocab.json")
    for merges in (b"#version: 0.2\n\xff a\n", b"<html>\n"):
        (tmp_path / "merges.txt").write_bytes(merges)
        refuses("convert", folder, *options, words=[tmp_path / "vocab.json", "merges.txt beside it"])


def test_an_existing_dictionary_is_only_replaced_on_request(folder, tmp_path, refuses):
    (tmp_path / "dict.txt").write_text("other\n")
    options = ("--tokenizer", folder / "vocab.json")
    refuses("convert", folder, tmp_path / "ours.pt", *options, words=[tmp_path / "dict.txt", "--force"])
    convert(folder, tmp_path / "ours.pt", *options, "--force")


def test_a_checkpoint_is_written_after_its_dictionary(folder, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(command, "write", lambda path, content: written.append(Path(path).name))
    convert(folder, tmp_path / "ours.pt", "--tokenizer", folder / "vocab.json")
    assert written == ["dict.txt", "ours.pt"]


# -------------------------------------------------------------------------------------- fairseq


def test_a_converted_model_fills_the_masks_of_a_text(folder, tmp_path):
    convert(folder, tmp_path / "ours.pt", "--tokenizer", folder / "vocab.json")
    files = {"gpt2_encoder_json": str(folder / "vocab.json"), "gpt2_vocab_bpe": str(folder / "merges.txt")}
    hub = MegaEncoderModel.from_pretrained(tmp_path, "ours.pt", tmp_path, bpe="gpt2", **files)
    the = PIECES.index("Ġthe")
    with torch.no_grad():
        hub.model.encoder.lm_head.bias[the] += 100.0
    assert hub.fill_mask("a <mask> cat", topk=1)[0][0] == "a the cat"


@pytest.mark.slow
def test_fairseq_validates_and_trains_a_converted_model(folder, tmp_path, capsys):
    path = convert(folder, tmp_path / "ours.pt", "--tokenizer", folder / "vocab.json")
    (options,) = re.findall(r"to train it further: (.*) --restore-file", capsys.readouterr().out)
    bpe = get_encoder(str(folder / "vocab.json"), str(folder / "merges.txt"))
    (tmp_path / "text").write_text("".join(" ".join(map(str, bpe.encode(line))) + "\n" for line in 4 * TEXT))
    prefixes = [f"--{split}pref={tmp_path / 'text'}" for split in ("train", "valid")]
    said = fairseq(
        "preprocess", "--only-source", "--srcdict", tmp_path / "dict.txt", *prefixes, "--destdir", tmp_path / "bin"
    )
    assert "0.0% replaced" in said
    common = [tmp_path / "bin", *PLUGIN, "--cpu", "--batch-size=4", "--required-batch-size-multiple=1"]
    task = ["--task=masked_lm", "--criterion=masked_lm"]
    validated = fairseq("validate", *common, *task, "--path", path, "--valid-subset=valid")
    loss = float(re.search(r"\| loss ([\d.]+)", validated)[1])
    trained_here = fairseq(
        "train", *common, *options.split(), "--restore-file", path,
        "--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader", "--optimizer=adam",
        "--lr=0", "--max-update=1", "--save-dir", tmp_path / "run", "--log-format=json",
        "--tokens-per-sample=24", "--batch-size-valid=4",
    )  # fmt: skip
    assert "other options" not in trained_here
    assert records(trained_here, "valid")[-1]["valid_loss"] == pytest.approx(loss, abs=0.02)
    before, after = (trained.read(str(each)).tensors for each in (path, tmp_path / "run" / "checkpoint_last.pt"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())  # the learning rate is 0
    assert loss < 3 * math.log2(ROWS)
