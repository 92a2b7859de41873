"""The language modelling recipes, from raw text to scores, on texts of a few kilobytes."""

import math
import os
import re
import shutil
import tarfile
import zipfile

import pytest
import torch

from tests.helpers.forking import write_script
from tests.helpers.recipes import EXAMPLES, Recipe, answering, configuration, files, half, text, write

pytestmark = pytest.mark.slow

LM = EXAMPLES / "lm"
SHIPPED = LM / "addresses/lm-sotu.tar.xz"
SPLITS = ("train", "valid", "test")
# The recipe's architecture, reduced so that an update takes a fraction of a second.
SIZES = {"layers": 1, "embed-dim": 16, "hidden-dim": 32, "ffn-embed-dim": 32, "z-dim": 8, "chunk-size": 8}
NARROW = [f"--decoder-{name}={size}" for name, size in SIZES.items()]


def scores(recipe, name):
    """The scores that evaluate.sh saved, by name; the number of tokens and their total bits, from fairseq's log."""
    values = {key: float(value) for key, value in re.findall(r"(.+): +([\d.]+)", (recipe.results / name).read_text())}
    said = (recipe.results / name).with_suffix(".log").read_text()
    tokens = int(re.search(r"Evaluated ([\d,]+) tokens", said).group(1).replace(",", ""))
    return values, tokens, tokens * float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1))


def assert_as_published(cfg, arch, segments, batch, updates, lr=5e-3):
    """Checks the model's preset, segments, tokens per batch and batches per update, and the settings of all recipes."""
    task, adam, schedule = cfg["task"], cfg["optimizer"], cfg["lr_scheduler"]
    assert (task["_name"], cfg["criterion"]["_name"]) == ("mega_language_modeling", "mega_lm_cross_entropy")
    assert (adam["adam_betas"], adam["adam_eps"], adam["lr"]) == ("(0.9, 0.98)", 1e-8, [lr])
    assert (adam["weight_decay"], cfg["optimization"]["clip_norm"]) == (0.1, 0.25)
    assert (schedule["_name"], schedule["power"], schedule["end_learning_rate"]) == ("polynomial_decay", 1.0, 0.0)
    assert [schedule["warmup_updates"], schedule["total_num_update"]] == updates
    assert cfg["model"]["_name"] == arch
    names = ("variant_block_multiple_min", "variant_block_multiple_max", "valid_block")
    assert [task[name] for name in names] == segments
    assert [cfg["dataset"]["max_tokens"], *cfg["optimization"]["update_freq"]] == batch


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


@pytest.fixture
def addresses(tmp_path, corpus):
    # The space in the path detects missing quotes.
    return Recipe(LM / "addresses", tmp_path / "a place", CORPUS=corpus, VOCABULARY=120)


def test_the_shipped_corpus_goes_from_text_to_scores_and_a_text_that_a_full_disk_cuts_is_not_taken_as_complete(
    addresses, corpus
):
    limit = addresses.place / "limit.sh"  # bash reads it first
    limit.write_text("ulimit -f 10")  # KiB: enough for the texts, but not for the numbers of 6,000 bytes
    said = addresses.refusal("prepare.sh", BASH_ENV=limit, PYTHONUNBUFFERED=1)
    assert f"the disk of {addresses.data} is full" in said
    assert (addresses.data / "raw").exists()
    assert not (addresses.data / "bytes/text").exists()
    addresses.run("prepare.sh")
    assert len((addresses.data / "bytes/text/train.txt").read_text().split()) == 6000

    addresses.run("train.sh", *NARROW, UPDATES=2, WARMUP=1, SAVE=1, PRECISION="fp32")
    cfg = torch.load(addresses.checkpoints / "checkpoint_last.pt", weights_only=True)["cfg"]
    assert_as_published(cfg, "mega_lm_small", [2, 4, "splits:1"], [4096, 1], [1, 2], lr=1e-2)

    printed = addresses.run("evaluate.sh", STREAMS=3, CHUNK=4)
    values, tokens, bits = scores(addresses, "test-chunk4-streams3.txt")
    assert (addresses.results / "test-chunk4-streams3.txt").read_text() in printed
    assert tokens == 1501
    assert values == scores_of(bits, 1500, corpus)
    assert values["bits per byte"] < 8
    addresses.run("sweep.sh", CHUNKS="32,64", STREAMS="1", SUBSET="valid")
    assert len(text(addresses.results / "sweep-valid.csv")) == 1 + 2
    assert (addresses.results / "sweep-valid.json").exists()


def scores_of(bits, size, corpus):
    """The scores of a test text of so many bytes with these bits in all."""
    words = sum(len(line.split()) + 1 for line in (corpus / "test.txt").read_text().splitlines())
    return {
        "bits per byte": pytest.approx(bits / size, rel=1e-3),
        "perplexity per word": pytest.approx(2 ** (bits / words), rel=1e-3),
    }


def test_pieces_are_scored_by_the_text_that_they_hold(addresses, corpus):
    """With one blank for each run of white space."""
    addresses.run("prepare.sh", UNITS="bpe")
    addresses.variables["UNITS"] = "bpe"
    trained(addresses)
    say(addresses, 500)
    addresses.run("evaluate.sh")
    values, _, bits = scores(addresses, "test-chunk512-streams1.txt")
    size = sum(len(" ".join(line.split()).encode()) + 1 for line in (corpus / "test.txt").read_text().splitlines())
    assert values == scores_of(bits, size, corpus)


def test_a_damaged_or_incomplete_corpus_is_refused(addresses, corpus):
    archive = addresses.place / "half.tar.xz"
    archive.write_bytes(half(SHIPPED))
    assert archive.name in addresses.refusal("prepare.sh", CORPUS=archive)
    folder = addresses.place / "incomplete"
    shutil.copytree(corpus, folder)
    (folder / "valid.txt").write_text("")
    assert "valid.txt" in addresses.refusal("prepare.sh", CORPUS=folder)
    assert not (addresses.data / "raw").exists()


def test_bytes_may_be_invalid_utf8_but_pieces_may_not(addresses):
    folder = addresses.place / "no text"
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"{split}.txt").write_bytes(b"two \xff\xfewords\n")
    assert addresses.run("prepare.sh", CORPUS=folder).count("12 bytes, 3 words and line ends") == 3
    assert "UTF-8" in addresses.refusal("prepare.sh", CORPUS=folder, UNITS="bpe", VOCABULARY=20)


# ------------------------------------------------------------------------------------------------ files of scores


def trained(recipe):
    """Makes a recipe look trained; its fairseq-eval-lm prints the file `answers`."""
    recipe.variables["PYTHON"] = answering(recipe.place, "eval_lm")
    for name in ("checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt", "other/checkpoint_best.pt"):
        write(recipe.place / name, [])


def say(recipe, bits, tokens=10):
    write(recipe.place / "answers", [f"Evaluated {tokens} tokens", f"Loss (base 2): {bits}, Perplexity: 1"])


@pytest.fixture
def evaluated(tmp_path):
    """A recipe that looks prepared and trained, on ten bytes."""
    recipe = Recipe(LM / "addresses", tmp_path)
    write(recipe.data / "raw/test.txt", ["ten bytes"])
    (recipe.data / "bytes/bin").mkdir(parents=True)
    trained(recipe)
    say(recipe, 1)
    return recipe


def test_score_files_are_named_after_the_settings(evaluated):
    calls = {
        "-valid-block-size-7": (["--valid-block", "size:7"], {}),
        "-checkpoint_last": ([], {"CHECKPOINT": "checkpoints/checkpoint_last.pt"}),
        f"-{evaluated.place}-other-checkpoint_best".replace("/", "-"): ([], {"CHECKPOINT": "other/checkpoint_best.pt"}),
    }
    for number, (arguments, variables) in enumerate(calls.values(), 1):
        say(evaluated, number)
        evaluated.run("evaluate.sh", *arguments, **variables)
    for number, name in enumerate(calls, 1):
        values, _, _ = scores(evaluated, f"test-chunk512-streams1{name}.txt")
        assert values["bits per byte"] == number
    assert len(files(evaluated.results)) == len(calls)


def test_a_failed_evaluation_leaves_no_scores(evaluated):
    evaluated.run("evaluate.sh")
    assert {path.suffix for path in evaluated.results.iterdir()} == {".txt", ".log"}
    write(evaluated.place / "answers", ["out of memory"])
    assert "fairseq-eval-lm" in evaluated.refusal("evaluate.sh")
    assert {path.suffix for path in evaluated.results.iterdir()} == {".tmp"}
    # Counting words fails, after counting bytes.
    say(evaluated, 1)
    python = evaluated.variables["PYTHON"]
    python.write_text(python.read_text().replace("\n", '\ncase $2 in *"line.split()"*) exit 1 ;; esac\n', 1))
    process = evaluated.start("evaluate.sh")
    process.communicate()
    assert process.returncode != 0
    assert {path.suffix for path in evaluated.results.iterdir()} == {".tmp"}


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


def test_wikitext_is_downloaded_trained_as_published_and_scored_by_words(wikitext, mirror):
    # An interrupted download.
    archive = mirror / "wikitext-103-v1.zip"
    (wikitext.data / "downloads").mkdir(parents=True)
    (wikitext.data / "downloads/wikitext-103-v1.zip.part").write_bytes(half(archive))
    wikitext.run("prepare.sh")
    assert (wikitext.data / "downloads/wikitext-103-v1.zip").read_bytes() == archive.read_bytes()
    assert "making" not in wikitext.run("prepare.sh")

    cfg = configuration(wikitext, wikitext.place, PRECISION="bf16")
    assert_as_published(cfg, "mega_lm_wt103", [2, 6, "splits:10"], [6144, 24], [24000, 400000])
    names = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "adaptive_softmax_dropout")
    assert [cfg["model"][name] for name in names] == [0.3, 0.1, 0.1, 0.1, 0.2]
    assert cfg["common"]["bf16"]

    trained(wikitext)
    say(wikitext, 2.5, *(row.split()[3] for row in text(mirror / "expected.txt") if row.startswith("test")))
    wikitext.run("evaluate.sh")
    values, _, _ = scores(wikitext, "test-chunk2048-streams10.txt")
    assert values == {"perplexity per word": pytest.approx(2**2.5, rel=1e-3)}


def test_enwik8_is_split_trained_as_published_and_scored_by_bytes(enwik8, mirror):
    """With a curl that finds the archive at the second address only."""
    tried = enwik8.place / "tried"
    write_script(
        enwik8.place / "curl",
        f"""
        while [ $# -gt 2 ]; do shift; done  # the file and the address are left
        echo "$2" >>'{tried}'
        [ "$(wc -l <'{tried}')" = 2 ] && cp '{mirror}/enwik8.zip' "$1"
        """,
    )
    enwik8.run("prepare.sh", MIRROR="", PATH=f"{enwik8.place}:{os.environ['PATH']}")
    assert len(set(text(tried))) == 2
    parts = [(enwik8.data / f"raw/{split}.txt").read_bytes() for split in SPLITS]
    assert [len(part) for part in parts] == [3600, 200, 200]
    with zipfile.ZipFile(mirror / "enwik8.zip") as archive:
        assert b"".join(parts) == archive.read("enwik8")
    assert bytes(map(int, text(enwik8.data / "bytes/text/test.txt")[0].split())) == parts[2]

    cfg = configuration(enwik8, enwik8.place, PRECISION="fp32")
    assert_as_published(cfg, "mega_lm_enwik8", [2, 4, "splits:50"], [8192, 8], [24000, 400000])
    assert (cfg["model"]["dropout"], cfg["model"]["attention_dropout"]) == (0.1, 0.0)

    trained(enwik8)
    say(enwik8, 2.5, 201)
    enwik8.run("evaluate.sh")
    values, _, _ = scores(enwik8, "test-chunk4096-streams50.txt")
    assert values == {"bits per byte": pytest.approx(2.5 * 201 / 200, rel=1e-3)}


def test_a_missing_or_damaged_download_is_reported(enwik8, mirror):
    downloads, dead = enwik8.data / "downloads", f"file://{enwik8.place}/nothing"
    sentence = enwik8.refusal("prepare.sh", MIRROR=dead)
    assert "could not download enwik8.zip" in sentence
    assert str(downloads) in sentence
    # Files put into the folder by hand are checked like downloaded ones.
    damaged = bytearray((mirror / "enwik8.zip").read_bytes())
    damaged[100] ^= 255
    for content in (half(mirror / "enwik8.zip"), damaged):
        (downloads / "enwik8.zip").write_bytes(content)
        assert "enwik8.zip is damaged" in enwik8.refusal("prepare.sh", MIRROR=dead)
    assert not (enwik8.data / "raw").exists()


def test_an_archive_with_unexpected_counts_is_refused(wikitext, enwik8, mirror):
    for name, row in (("lines of valid", r"(valid \S+) \d+"), ("types of the dictionary", r"(types) \d+")):
        table = wikitext.place / f"{name}.txt"
        table.write_text(re.sub(row, r"\1 1", (mirror / "expected.txt").read_text()))
        variables = {"EXPECTED": table, "DATA": wikitext.place / name}
        assert re.search(f"{name}: .* 1 ", wikitext.refusal("prepare.sh", **variables))
    assert "4000 bytes" in enwik8.refusal("prepare.sh", BYTES=5000)
