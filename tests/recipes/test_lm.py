"""The language modelling recipes, from raw text to scores, on texts of a few kilobytes."""

import math
import os
import re
import shutil
import tarfile
import zipfile

import pytest
import torch

from mega_fairseq.cli import doctor
from mega_fairseq.cli.output import locked
from tests.helpers.recipes import EXAMPLES, Recipe, answering, files, half, text, write

pytestmark = pytest.mark.slow

LM = EXAMPLES / "lm"
SHIPPED = LM / "addresses/lm-sotu.tar.xz"
SPLITS = ("train", "valid", "test")
# The recipe's architecture, reduced so that an update takes a fraction of a second.
SIZES = {"layers": 1, "embed-dim": 16, "hidden-dim": 32, "ffn-embed-dim": 32, "z-dim": 8, "chunk-size": 8}
NARROW = [f"--decoder-{name}={size}" for name, size in SIZES.items()]


def trained_with(recipe):
    return torch.load(recipe.checkpoints / "checkpoint_last.pt", weights_only=True)["cfg"]


def scores(recipe, name):
    """The scores that evaluate.sh saved, by name; the number of tokens and their total bits, from fairseq's log."""
    found = {key: float(value) for key, value in re.findall(r"(.+): +([\d.]+)", (recipe.results / name).read_text())}
    said = (recipe.results / name).with_suffix(".log").read_text()
    tokens = int(re.search(r"Evaluated ([\d,]+) tokens", said).group(1).replace(",", ""))
    return found, tokens, tokens * float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1))


def as_published(cfg, lr=5e-3):
    """Checks the settings that all recipes share."""
    adam = cfg["optimizer"]
    assert (adam["adam_betas"], adam["adam_eps"], adam["lr"]) == ("(0.9, 0.98)", 1e-8, [lr])
    assert (adam["weight_decay"], cfg["optimization"]["clip_norm"]) == (0.1, 0.25)
    names = ("_name", "power", "end_learning_rate")
    assert [cfg["lr_scheduler"][name] for name in names] == ["polynomial_decay", 1.0, 0.0]
    assert (cfg["task"]["_name"], cfg["criterion"]["_name"]) == ("mega_language_modeling", "mega_lm_cross_entropy")


def schedule(cfg):
    return [cfg["lr_scheduler"]["warmup_updates"], cfg["lr_scheduler"]["total_num_update"]]


def segments(cfg):
    names = ("variant_block_multiple_min", "variant_block_multiple_max", "valid_block")
    return [cfg["task"][name] for name in names]


def tokens_per_update(cfg):
    return [cfg["dataset"]["max_tokens"], *cfg["optimization"]["update_freq"]]


# ------------------------------------------------------------------------------------------- the shipped corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The first kilobytes of each split of the shipped corpus, the test text with runs of blanks."""
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(SHIPPED) as archive:
        for split, size in zip(SPLITS, (6000, 1500, 1500)):
            (folder / f"{split}.txt").write_bytes(archive.extractfile(f"lm-sotu/{split}.txt").read()[:size])
    blanks = (folder / "test.txt").read_bytes()[:1400].replace(b" ", b" " * 5, 25)
    (folder / "test.txt").write_bytes(blanks)
    return folder


def addresses_recipe(place, corpus, **variables):
    return Recipe(LM / "addresses", place, CORPUS=corpus, VOCABULARY=120, **variables)


@pytest.fixture
def addresses(tmp_path, corpus):
    # The space in the path detects missing quotes.
    return addresses_recipe(tmp_path / "a place", corpus)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, corpus):
    recipe = addresses_recipe(tmp_path_factory.mktemp("a place"), corpus, UNITS="bpe")
    recipe.run("prepare.sh")
    return recipe


@pytest.mark.parametrize("units", ["bytes", "bpe"])
def test_the_shipped_corpus_goes_from_text_to_scores_per_byte_and_per_word(addresses, units, corpus):
    addresses.variables["UNITS"] = units
    addresses.run("prepare.sh")
    recipe = {"UPDATES": 4, "WARMUP": 2, "SAVE": 1}
    addresses.run("train.sh", *NARROW, "--max-update=1", **recipe)
    if units == "bytes":
        said = addresses.run("train.sh", *NARROW, **recipe)
        assert re.search(r"Loaded checkpoint .*checkpoint_last.pt", said)
        assert "num_updates: 4 >= max_update: 4" in said
    cfg = trained_with(addresses)
    as_published(cfg, lr=1e-2)
    assert (cfg["model"]["_name"], segments(cfg)) == ("mega_lm_small", [2, 4, "splits:1"])
    faster = doctor.product_seconds("float32") / doctor.product_seconds("bfloat16")
    assert cfg["common"]["bf16"] == (faster >= doctor.WORTH_IT)
    assert tokens_per_update(cfg) == [4096, 1]

    printed = addresses.run("evaluate.sh", STREAMS=3, CHUNK=4)
    found, tokens, bits = scores(addresses, "test-chunk4-streams3.txt")
    assert (addresses.results / "test-chunk4-streams3.txt").read_text() in printed
    words = [line.split() for line in (corpus / "test.txt").read_text().splitlines()]
    held = 1500 if units == "bytes" else sum(len(" ".join(line).encode()) + 1 for line in words)
    assert found == {
        "bits per byte": pytest.approx(bits / held, rel=1e-4),
        "perplexity per word": pytest.approx(2 ** (bits / sum(len(line) + 1 for line in words)), rel=1e-3),
    }
    if units == "bytes":
        assert tokens == 1501
        assert found["bits per byte"] < 8
        last = addresses.checkpoints / "checkpoint_last.pt"
        addresses.run("evaluate.sh", "--documents", "line", CHECKPOINT=last)
        kept = scores(addresses, "test-chunk512-streams1-checkpoint_last-documents-line.txt")
        assert kept[1] == 1501
        addresses.run("sweep.sh", CHUNKS="32,64", STREAMS="2,1", SUBSET="valid")
        assert len(text(addresses.results / "sweep-valid.csv")) == 1 + 4
        assert (addresses.results / "sweep-valid.json").exists()


def test_an_interrupted_preparation_resumes_and_gives_the_same_data(addresses, prepared):
    addresses.kill_while_segmenting("valid", UNITS="bpe")
    assert not (addresses.data / "bpe/text").exists()

    said = addresses.run("prepare.sh", UNITS="bpe")
    assert re.findall(r"have .*/(\w+)$", said, re.MULTILINE) == ["raw", "codes"]
    assert re.findall(r"making .*/(\w+)$", said, re.MULTILINE) == ["text", "bin"]
    assert files(addresses.data) == files(prepared.data)
    assert "making" not in addresses.run("prepare.sh", UNITS="bpe")


def test_a_text_that_a_full_disk_cuts_is_not_taken_as_complete(addresses, corpus):
    limit = addresses.place / "limit.sh"  # bash reads it first
    limit.write_text("ulimit -f 10")  # KiB: enough for the texts, but not for the numbers of 6,000 bytes
    process = addresses.start("prepare.sh", BASH_ENV=limit, PYTHONUNBUFFERED=1)
    said = "".join(process.communicate())
    assert process.returncode != 0
    assert "File too large" in said
    assert (addresses.data / "raw").exists()
    assert not (addresses.data / "bytes/text").exists()
    addresses.run("prepare.sh")
    assert len((addresses.data / "bytes/text/train.txt").read_text().split()) == 6000


def test_data_made_with_other_settings_is_refused(prepared, corpus, tmp_path):
    assert "VOCABULARY=120, not with VOCABULARY=130" in prepared.refusal("prepare.sh", VOCABULARY=130)
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    write(other / "valid.txt", ["other"])
    assert "name another folder with DATA=" in prepared.refusal("prepare.sh", CORPUS=other)


def test_a_damaged_or_incomplete_corpus_is_refused(addresses, corpus):
    archive = addresses.place / "half.tar.xz"
    archive.write_bytes(half(SHIPPED))
    assert "half.tar.xz is truncated or not an archive" in addresses.refusal("prepare.sh", CORPUS=archive)
    folder = addresses.place / "incomplete"
    shutil.copytree(corpus, folder)
    (folder / "valid.txt").write_text("")
    assert f"valid.txt of {folder} is empty" in addresses.refusal("prepare.sh", CORPUS=folder)
    (folder / "valid.txt").unlink()
    assert f"valid.txt does not exist: {folder} is incomplete" in addresses.refusal("prepare.sh", CORPUS=folder)
    assert not (addresses.data / "raw").exists()


def test_bytes_may_be_invalid_utf8_but_pieces_may_not(addresses):
    folder = addresses.place / "no text"
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"{split}.txt").write_bytes(b"two \xff\xfewords\n")
    said = addresses.run("prepare.sh", CORPUS=folder)
    assert said.count("12 bytes, 3 words and line ends") == 3
    assert "Traceback" not in said
    sentence = addresses.refusal("prepare.sh", CORPUS=folder, UNITS="bpe", VOCABULARY=20)
    assert sentence == "the text is not UTF-8 (invalid start byte): convert it, with iconv for instance."


@pytest.mark.parametrize("recipe", ["addresses", "enwik8", "wikitext103"])
def test_each_script_reports_the_script_to_run_first(tmp_path, recipe):
    recipe = Recipe(LM / recipe, tmp_path)
    for script in ("train.sh", "evaluate.sh", "sweep.sh"):
        assert "run prepare.sh first" in recipe.refusal(script)
    for units in ("bytes", "words"):
        (recipe.data / units / "bin").mkdir(parents=True)
    for script in ("evaluate.sh", "sweep.sh"):
        assert "checkpoint_best.pt does not exist: run train.sh first" in recipe.refusal(script)


def test_unknown_units_are_refused_with_the_allowed_ones(addresses):
    assert "UNITS=words is unknown: use bytes or bpe" in addresses.refusal("prepare.sh", UNITS="words")


def test_an_impossible_vocabulary_size_is_refused_with_a_possible_one(addresses):
    sentence = addresses.refusal("prepare.sh", UNITS="bpe", VOCABULARY=8000)
    assert re.fullmatch(r"a vocabulary of 8000 is too large for this text: give \d+ or less\.", sentence)


@pytest.mark.parametrize("recipe", ["addresses", "enwik8", "wikitext103"])
def test_an_invalid_number_is_refused_before_any_work(tmp_path, recipe):
    own = {"addresses": ["VOCABULARY"], "enwik8": ["BYTES"], "wikitext103": []}[recipe]
    save = ["SAVE"] if recipe == "addresses" else []
    recipe = Recipe(LM / recipe, tmp_path)
    recipe.refuses_invalid_numbers("prepare.sh", "WORKERS", *own)
    recipe.refuses_invalid_numbers("train.sh", "UPDATES", "MAX_TOKENS", "BATCH_TOKENS", "GPUS", "WARMUP", *save)
    recipe.refuses_invalid_numbers("evaluate.sh", "CHUNK", "STREAMS")


@pytest.fixture
def pretended(tmp_path):
    """A recipe that looks prepared and trained, on ten bytes; its fairseq-eval-lm prints the file `answers`."""
    recipe = Recipe(LM / "addresses", tmp_path, PYTHON=answering(tmp_path, "eval_lm"))
    write(recipe.data / "raw/test.txt", ["ten bytes"])
    (recipe.data / "bytes/bin").mkdir(parents=True)
    for folder in ("checkpoints", "other"):
        for name in ("best", "last"):
            write(tmp_path / f"{folder}/checkpoint_{name}.pt", [])
    return recipe


def say(recipe, bits):
    write(recipe.place / "answers", ["Evaluated 10 tokens", f"Loss (base 2): {bits}, Perplexity: 1"])


def test_score_files_are_named_after_the_settings_of_the_evaluation(pretended):
    calls = {
        "": ([], {}),
        "-valid-block-size-7": (["--valid-block", "size:7"], {}),
        "-documents-line": (["--documents=line"], {}),
        "-checkpoint_last": ([], {"CHECKPOINT": "checkpoints/checkpoint_last.pt"}),
        "-checkpoint_last-documents-line": (
            ["--documents", "line"],
            {"CHECKPOINT": pretended.checkpoints / "checkpoint_last.pt"},
        ),
        f"-{pretended.place}-other-checkpoint_best".replace("/", "-"): ([], {"CHECKPOINT": "other/checkpoint_best.pt"}),
    }
    for number, (arguments, variables) in enumerate(calls.values(), 1):
        say(pretended, number)
        pretended.run("evaluate.sh", *arguments, **variables)
    for number, name in enumerate(calls, 1):
        found, _, _ = scores(pretended, f"test-chunk512-streams1{name}.txt")
        assert found["bits per byte"] == number
    assert len(files(pretended.results)) == len(calls)


def test_what_has_a_variable_is_refused_as_an_argument(pretended):
    for script in ("evaluate.sh", "sweep.sh"):
        assert "name the subset with SUBSET=" in pretended.refusal(script, "--gen-subset", "valid")
        assert "name the subset with SUBSET=" in pretended.refusal(script, "--subset=valid")
    overrides = "--model-overrides={'decoder_chunk_size': 4}"
    assert "give the chunk size with CHUNK=" in pretended.refusal("evaluate.sh", overrides)


def test_a_result_is_not_written_by_two_evaluations_at_once(pretended):
    write(pretended.results / "test-chunk512-streams1.log.tmp", [])
    say(pretended, 1)
    with locked(str(pretended.results / "test-chunk512-streams1.log.tmp")):
        assert "test-chunk512-streams1.log.tmp: wait until it has finished" in pretended.refusal("evaluate.sh")
        pretended.run("evaluate.sh", CHUNK=4)
    pretended.run("evaluate.sh")


def test_a_training_is_not_started_twice(pretended):
    with locked(str(pretended.checkpoints)):
        assert f"is writing to {pretended.checkpoints}: wait until it" in pretended.refusal("train.sh")


def test_a_failed_evaluation_leaves_only_temporary_files(pretended):
    pretended.results.mkdir()
    (pretended.place / "answers").write_text("out of memory\n")
    assert "fairseq-eval-lm gave no loss" in pretended.refusal("evaluate.sh")
    assert {path.suffix for path in pretended.results.iterdir()} == {".tmp"}
    # Counting words fails, after counting bytes.
    say(pretended, 1)
    python = pretended.variables["PYTHON"]
    python.write_text(python.read_text().replace("\n", '\ncase $2 in *"line.split()"*) exit 1 ;; esac\n', 1))
    process = pretended.start("evaluate.sh")
    process.communicate()
    assert process.returncode != 0
    assert {path.suffix for path in pretended.results.iterdir()} == {".tmp"}
    assert "tset.txt does not exist" in pretended.refusal("evaluate.sh", SUBSET="tset")


def test_scores_of_an_earlier_evaluation_are_removed_when_the_next_one_begins(pretended):
    say(pretended, 1)
    pretended.run("evaluate.sh")
    assert {path.suffix for path in pretended.results.iterdir()} == {".txt", ".log"}
    (pretended.place / "answers").write_text("out of memory\n")
    pretended.refusal("evaluate.sh")
    assert {path.suffix for path in pretended.results.iterdir()} == {".tmp"}


def test_the_licence_of_the_shipped_corpus_is_given():
    with tarfile.open(SHIPPED) as archive:
        assert b"CC0 1.0" in archive.extractfile("lm-sotu/LICENSE.txt").read()


# --------------------------------------------------------------------------------------------------- downloads


def pack(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory, corpus):
    """Archives with the layout of the real ones, and the expected numbers of WikiText-103."""
    folder = tmp_path_factory.mktemp("mirror")
    texts = {split: (corpus / f"{split}.txt").read_text().replace("\n", " <unk>\n") for split in SPLITS}
    pack(folder / "wikitext-103-v1.zip", {f"wikitext-103/wiki.{split}.tokens": texts[split] for split in SPLITS})
    rows = ["# a comment"]
    for split, content in texts.items():
        # The truncated last line counts as a line: fairseq adds a line end.
        lines = len(content.splitlines())
        tokens = sum(len(line.split()) + 1 for line in content.splitlines())
        rows.append(f"{split} wiki.{split}.tokens {lines} {tokens}")
    # bos, pad, eos, unk, rounded up to a multiple of eight
    rows.append(f"types {math.ceil((3 + len(set(texts['train'].split()))) / 8) * 8}")
    write(folder / "expected.txt", [f"{row}\r" for row in rows])  # as if it was written on Windows
    pack(folder / "enwik8.zip", {"enwik8": os.urandom(1000) * 4})
    return folder


@pytest.fixture
def wikitext(tmp_path, mirror):
    variables = {"MIRROR": f"file://{mirror}", "EXPECTED": mirror / "expected.txt"}
    return Recipe(LM / "wikitext103", tmp_path / "a place", **variables)


@pytest.fixture
def enwik8(tmp_path, mirror):
    return Recipe(LM / "enwik8", tmp_path / "a place", MIRROR=f"file://{mirror}", BYTES=4000)


def test_wikitext_is_downloaded_checked_trained_as_published_and_scored_by_words(wikitext, mirror):
    # An interrupted download.
    archive = mirror / "wikitext-103-v1.zip"
    (wikitext.data / "downloads").mkdir(parents=True)
    (wikitext.data / "downloads/wikitext-103-v1.zip.part").write_bytes(half(archive))
    wikitext.run("prepare.sh")
    assert (wikitext.data / "downloads/wikitext-103-v1.zip").read_bytes() == archive.read_bytes()
    assert "making" not in wikitext.run("prepare.sh")

    wikitext.run("train.sh", *NARROW, "--max-update=1", "--adaptive-softmax-cutoff=20,60", PRECISION="bf16")
    cfg = trained_with(wikitext)
    as_published(cfg)
    assert (cfg["model"]["_name"], segments(cfg)) == ("mega_lm_wt103", [2, 6, "splits:10"])
    assert (schedule(cfg), tokens_per_update(cfg)) == ([24000, 400000], [6144, 24])
    names = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "adaptive_softmax_dropout")
    assert [cfg["model"][name] for name in names] == [0.3, 0.1, 0.1, 0.1, 0.2]
    assert cfg["common"]["bf16"]

    printed = wikitext.run("evaluate.sh")
    found, tokens, bits = scores(wikitext, "test-chunk2048-streams10.txt")
    assert str(tokens) == [row.split()[3] for row in text(mirror / "expected.txt") if row.startswith("test")][0]
    assert found == {"perplexity per word": pytest.approx(2 ** (bits / tokens), rel=1e-3)}
    assert "perplexity per word" in printed


def test_enwik8_is_split_by_bytes_trained_as_published_and_scored_by_bytes(enwik8, mirror):
    enwik8.run("prepare.sh")
    parts = [(enwik8.data / f"raw/{split}.txt").read_bytes() for split in SPLITS]
    assert [len(part) for part in parts] == [3600, 200, 200]
    with zipfile.ZipFile(mirror / "enwik8.zip") as archive:
        assert b"".join(parts) == archive.read("enwik8")
    assert bytes(map(int, text(enwik8.data / "bytes/text/test.txt")[0].split())) == parts[2]
    assert "making" not in enwik8.run("prepare.sh")

    enwik8.run("train.sh", *NARROW, "--max-update=1")
    cfg = trained_with(enwik8)
    as_published(cfg)
    assert (cfg["model"]["_name"], segments(cfg)) == ("mega_lm_enwik8", [2, 4, "splits:50"])
    assert (schedule(cfg), tokens_per_update(cfg)) == ([24000, 400000], [8192, 8])
    assert (cfg["model"]["dropout"], cfg["model"]["attention_dropout"]) == (0.1, 0.0)

    enwik8.run("evaluate.sh")
    found, tokens, bits = scores(enwik8, "test-chunk4096-streams50.txt")
    assert tokens == 201
    assert found == {"bits per byte": pytest.approx(bits / 200, rel=1e-3)}


def test_a_dead_link_is_reported_with_the_missing_file_and_its_folder(wikitext, enwik8, mirror):
    for recipe, archive in ((wikitext, "wikitext-103-v1.zip"), (enwik8, "enwik8.zip")):
        downloads = recipe.data / "downloads"
        for dead in (f"file://{recipe.place}/nothing", "http://127.0.0.1:9"):
            sentence = recipe.refusal("prepare.sh", MIRROR=dead)
            assert f"could not download {archive}" in sentence
            assert f"put it into {downloads}" in sentence
        # Files put into the folder by hand are checked like downloaded ones.
        damaged = bytearray((mirror / archive).read_bytes())
        damaged[100] ^= 255
        for content in (half(mirror / archive), damaged, b"<html>"):
            (downloads / archive).write_bytes(content)
            assert f"{archive} is damaged, truncated or not an archive" in recipe.refusal("prepare.sh", MIRROR=dead)
        pack(downloads / archive, {"something": "else"})
        assert "replace it with the right archive" in recipe.refusal("prepare.sh", MIRROR=dead)
        assert not (recipe.data / "raw").exists()


def test_the_next_address_is_tried_after_a_dead_one(enwik8, mirror):
    tried = enwik8.place / "tried"
    curl = enwik8.place / "curl"
    curl.write_text(
        f"""#!/bin/bash
        url=${{@: -1}} output=${{@: -2:1}}
        echo "$url" >>'{tried}'
        [ "$(wc -l <'{tried}')" = 2 ] && cp '{mirror}/enwik8.zip' "$output"
        """
    )
    curl.chmod(0o755)
    enwik8.run("prepare.sh", MIRROR="", PATH=f"{enwik8.place}:{os.environ['PATH']}")
    assert len(set(text(tried))) == 2
    assert (enwik8.data / "bytes/bin/train.bin").exists()


def test_an_archive_with_unexpected_counts_is_refused(wikitext, enwik8, mirror):
    rows = [row.split() for row in text(mirror / "expected.txt")]
    for name, column in (("lines of valid", 2), ("types of the dictionary", 1)):
        wrong = [list(row) for row in rows]
        (row,) = (row for row in wrong if row[0] == ("types" if "types" in name else "valid"))
        right, row[column] = row[column], "1"
        table = wikitext.place / f"wrong{column}.txt"
        write(table, map(" ".join, wrong))
        variables = {"EXPECTED": table, "DATA": wikitext.place / f"data{column}"}
        assert f"{name}: found {right} where 1 are expected" in wikitext.refusal("prepare.sh", **variables)
    assert "has 4000 bytes where 5000 are expected" in enwik8.refusal("prepare.sh", BYTES=5000)


def test_the_expected_wikitext_counts_are_the_published_ones():
    rows = {row.split()[0]: row.split()[1:] for row in text(LM / "wikitext103/expected.txt") if row[0] != "#"}
    known = {"train": [1801350, 103227021], "valid": [3760, 217646], "test": [4358, 245569], "types": [267744]}
    assert {name: [int(number) for number in row if number.isdigit()] for name, row in rows.items()} == known
