"""The translation recipes, from raw text to scores, on slices of the corpus."""

import fcntl
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.data.encoders import build_bpe

from tests.helpers.recipes import (
    BIBLE_PAIRS,
    EXAMPLES,
    Recipe,
    answering,
    bible_recipe,
    configuration,
    files,
    half,
    small_bible,
    text,
    write,
)

pytestmark = pytest.mark.slow

WMT = EXAMPLES / "wmt16_en_de"
# The recipe's architecture, reduced so that an update takes a fraction of a second.
NARROW = [
    f"--{side}-{name}={size}"
    for side in ("encoder", "decoder")
    for name, size in {"layers": 1, "embed-dim": 32, "hidden-dim": 64, "z-dim": 16, "ffn-embed-dim": 64}.items()
]
SHORT_OUTPUT = ["--max-len-a=0", "--max-len-b=20"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_bible(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def bible(tmp_path, corpus):
    # The space in the path detects missing quotes.
    return bible_recipe(tmp_path / "a place", corpus)


# ------------------------------------------------------------------------------------------- the shipped corpus


def test_the_shipped_corpus_goes_from_text_to_scores(prepared_bible):
    bible = prepared_bible
    recipe = {"UPDATES": 4, "WARMUP": 2, "MAX_TOKENS": 8000, "BATCH_TOKENS": 8000, "PRECISION": "fp32"}
    bible.variables.pop("OMP_NUM_THREADS", None)
    said = bible.run("train.sh", *NARROW, "--max-update=1", **recipe)
    assert "on the CPU in fp32 with OMP_NUM_THREADS=1\n" in said
    said = bible.run("train.sh", *NARROW, **recipe)
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt", said)
    assert "num_updates: 4 >= max_update: 4" in said

    epochs = sorted(bible.checkpoints.glob("checkpoint[0-9]*.pt"))
    assert len(epochs) >= 2
    bible.run("../average.sh", bible.checkpoints, LAST=len(epochs))
    models = [torch.load(path, weights_only=True)["model"] for path in epochs]
    averaged = torch.load(bible.checkpoints / "averaged.pt", weights_only=True)["model"]
    for name, tensor in averaged.items():
        mean = sum(model[name].double() for model in models) / len(models)
        torch.testing.assert_close(tensor, mean.to(tensor.dtype), rtol=0, atol=0)

    printed = bible.run("generate.sh", *SHORT_OUTPUT)
    assert len(text(bible.results / "hypotheses.txt")) == BIBLE_PAIRS["test"]
    scores = (bible.results / "scores.txt").read_text()
    assert scores in printed
    assert re.search(r"BLEU\|nrefs:1\|case:mixed\|eff:no\|tok:13a\|.* = [\d.]+", scores)
    assert re.search(r"chrF2\|nrefs:1\|.* = [\d.]+", scores)

    # As if training had been resumed after averaging.
    os.utime(bible.checkpoints / "checkpoint_last.pt")
    assert "run average.sh first" in bible.refusal("generate.sh")


def test_a_last_line_without_a_newline_is_kept(bible, prepared_bible, corpus, tmp_path):
    cut = bible.place / "cut"
    shutil.copytree(corpus, cut)
    # In one language and in both.
    for name in ("train.de", "valid.en", "test.en", "test.de"):
        (cut / name).write_bytes((corpus / name).read_bytes()[:-1])
    bible.variables.update(CORPUS=cut, BPE="sentencepiece")
    bible.run("prepare.sh")
    assert files(bible.data / "sentencepiece") == files(prepared_bible.data / "sentencepiece")
    wrapper = knowing_the_reference(bible, tmp_path)
    assert " = 100.00 " in bible.run("generate.sh", PYTHON=wrapper, CHECKPOINT=wrapper)


def test_data_or_settings_that_do_not_fit_are_refused(bible, prepared_bible, corpus):
    assert "VOCABULARY=310" in prepared_bible.refusal("prepare.sh", VOCABULARY=310)
    other = bible.place / "other"
    shutil.copytree(corpus, other)
    write(other / "valid.en", text(corpus / "valid.en")[::-1])
    assert "DATA=" in prepared_bible.refusal("prepare.sh", CORPUS=other)
    write(other / "train.de", text(corpus / "train.de")[1:])
    assert "train.de has 99 lines" in bible.refusal("prepare.sh", CORPUS=other)
    assert "8000" in bible.refusal("prepare.sh", VOCABULARY=8000)
    assert "PRECISION=fp16" in prepared_bible.refusal("train.sh", PRECISION="fp16")


# ------------------------------------------------------------------------------------------------------ WMT'16

# archive: split, English file, German file, pairs
ARCHIVES = {
    "de-en.tgz": ("train", "europarl.en", "europarl.de", 60),
    "web.tgz": ("train", "deep/down/web.en", "deep/down/web.de", 44),
    "test.tgz": ("valid", "test/newstest-src.en.sgm", "test/newstest-src.de.sgm", 10),
    "test-full.tgz": ("test", "full/newstest-src.en.sgm", "full/newstest-ref.de.sgm", 10),
}
# Typical web text: an empty side, long sides, different lengths, characters that some tools take for line ends.
WEB = [("", "leer"), ("many " * 90, "viele " * 90), ("no", "nein " * 10), ("end\r of line", "Zeilen\u2028ende")]
# The corpus has no hyphens, but splitting compounds needs some.
HYPHENS = {"en": "Noah-like", "de": "Arche-Noah"}


def test_a_byte_order_mark_is_not_part_of_the_text():
    program = [sys.executable, "-c", "import lines; lines.write(lines.stdin())"]
    done = subprocess.run(program, cwd=EXAMPLES / "wmt16_en_de", input=b"\xef\xbb\xbfa\n", capture_output=True)
    assert done.stdout == b"a\n"


def pack(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, lines in members.items():
            if name.endswith(".sgm"):
                lines = ["<doc>", *(f'<seg id="{i}"> {line} </seg>' for i, line in enumerate(lines, 1)), "</doc>"]
            # The English files have no newline at the end.
            data = ("\n".join(lines) + "\n" * (not name.endswith(".en"))).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory, corpus):
    """Small archives with the layout of the real ones."""
    folder = tmp_path_factory.mktemp("mirror")
    remaining = {
        (split, language): text(corpus / f"{split}.{language}") for split in BIBLE_PAIRS for language in ("en", "de")
    }
    rows = ["# a comment", ""]
    for archive, (split, *names, size) in ARCHIVES.items():
        members = {}
        for side, (language, name) in enumerate(zip(("en", "de"), names)):
            junk = [pair[side] for pair in WEB] if archive == "web.tgz" else []
            lines = remaining[split, language][: size - len(junk)]
            del remaining[split, language][: len(lines)]
            members[name] = [f"{HYPHENS[language]} {line}" if split == "test" else line for line in lines] + junk
        pack(folder / archive, members)
        short_names = " ".join(Path(name).name for name in names)
        rows.append(f"{split} {size} http://nowhere.invalid/old/{archive} {short_names}")
    write(folder / "sources.txt", rows)
    return folder


def wmt_recipe(place, mirror, **variables):
    return Recipe(WMT, place, MIRROR=f"file://{mirror}", SOURCES=mirror / "sources.txt", VOCABULARY=300, **variables)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, mirror):
    """Prepares WMT once per segmentation; returns the recipe and the output of prepare.sh."""

    @functools.lru_cache(maxsize=None)
    def prepare(bpe):
        recipe = wmt_recipe(tmp_path_factory.mktemp(bpe), mirror, BPE=bpe)
        return recipe, recipe.run("prepare.sh")

    return prepare


def test_wmt_is_downloaded_cleaned_and_segmented(prepared):
    wmt, said = prepared("subword-nmt")
    assert "train: 104 pairs" in said
    assert "cleaning removed 3 of 104 pairs (1 empty, 1 lengths differ by more than 9 times, 1 longer than 80" in said
    for language in ("en", "de"):
        assert len(text(wmt.data / f"subword-nmt/text/train.{language}")) == 101
    assert text(wmt.data / "tok/train.en")[-1] == "end of line"
    dictionaries = [(wmt.data / f"subword-nmt/bin/dict.{language}.txt").read_bytes() for language in ("en", "de")]
    assert dictionaries[0] == dictionaries[1]


def test_wmt_is_trained_as_published(prepared, tmp_path):
    cfg = configuration(prepared("subword-nmt")[0], tmp_path, PRECISION="bf16")
    assert cfg["model"]["_name"] == "mega_transformer_base"
    names = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "share_all_embeddings")
    assert [cfg["model"][name] for name in names] == [0.15, 0.1, 0.1, 0.1, True]
    assert (cfg["optimizer"]["adam_betas"], cfg["optimizer"]["adam_eps"]) == ("(0.9, 0.98)", 1e-8)
    assert (cfg["optimizer"]["lr"], cfg["optimizer"]["weight_decay"]) == ([1e-3], 0.05)
    assert (cfg["optimization"]["clip_norm"], cfg["criterion"]["label_smoothing"]) == (1.0, 0.1)
    names = ("_name", "power", "end_learning_rate", "warmup_updates", "total_num_update")
    assert [cfg["lr_scheduler"][name] for name in names] == ["polynomial_decay", 1.0, 0.0, 4000, 500000.0]
    # 65,536 tokens per update in batches of 8,192 on one device
    assert (cfg["dataset"]["max_tokens"], cfg["optimization"]["update_freq"]) == (8192, [8])
    assert (cfg["dataset"]["required_batch_size_multiple"], cfg["common"]["bf16"]) == (1, True)


def knowing_the_reference(recipe, place):
    """A Python whose fairseq-generate prints the reference in another order."""
    pieces = text(recipe.data / recipe.variables["BPE"] / "text/test.de")
    answers = [f"H-{number}\t-0.5\t{line}" for number, line in enumerate(pieces)]
    write(place / "answers", ["S-0\ta source", *sorted(answers), "D-0\t-0.5\tnot this"])
    return answering(place, "generate")


@pytest.mark.parametrize("bpe", ["sentencepiece", "subword-nmt"])
def test_translations_are_joined_and_sorted_like_the_reference(prepared, bpe, tmp_path):
    wmt, _ = prepared(bpe)
    wrapper = knowing_the_reference(wmt, tmp_path)
    variables = {"PYTHON": wrapper, "CHECKPOINT": wrapper, "RESULTS": tmp_path}
    wmt.run("generate.sh", **variables)
    scores = re.sub(r"\(.*?\)", "", (tmp_path / "scores.txt").read_text())
    bleu, chrf, tokenised, split = map(float, re.findall(r"= ([\d.]+)", scores))
    assert min(tokenised, split) == 100
    # Moses' detokeniser is not an exact inverse.
    assert min(bleu, chrf) > (99.9 if bpe == "sentencepiece" else 95)
    assert text(tmp_path / "reference.tok.split")[0].startswith("Arche ##AT##-##AT## Noah ")

    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert str(tmp_path) in wmt.refusal("generate.sh", **variables)
    os.close(folder)

    write(tmp_path / "answers", text(tmp_path / "answers")[2:])
    assert "the number of translations differs" in wmt.refusal("generate.sh", **variables)
    assert not (tmp_path / "scores.txt").exists()  # scores of the earlier translation


def test_fairseqs_fastbpe_can_read_the_codes_of_the_recipe(prepared, tmp_path):
    """As with --bpe fastbpe --bpe-codes."""
    pytest.importorskip("fastBPE")
    words = prepared("subword-nmt")[0].data / "tok"
    segment, codes = [sys.executable, WMT / "segment.py"], tmp_path / "codes"
    subprocess.run(
        [*segment, "learn", "fastbpe", codes, "300", "1", words / "train.en", words / "train.de"], check=True
    )
    apply = [*segment, "apply", "fastbpe", codes]
    with open(words / "test.de") as lines, open(tmp_path / "pieces", "w") as pieces:
        subprocess.run(apply, stdin=lines, stdout=pieces, check=True)
    words, pieces = map(text, (words / "test.de", tmp_path / "pieces"))
    bpe = build_bpe(Namespace(bpe="fastbpe", bpe_codes=str(codes)))
    assert [bpe.encode(line) for line in words] == pieces
    assert [bpe.decode(line) for line in pieces] == words


def test_a_missing_or_damaged_download_is_reported(tmp_path, mirror):
    wmt = wmt_recipe(tmp_path / "a place", mirror)
    downloads = wmt.data / "downloads"
    dead = f"file://{wmt.place}/nothing"
    sentence = wmt.refusal("prepare.sh", MIRROR=dead)
    assert all(name in sentence for name in (*ARCHIVES, str(downloads)))
    # Files put into the folder by hand are checked like downloaded ones.
    for archive in ARCHIVES:
        shutil.copy(mirror / archive, downloads)
    (downloads / "web.tgz").write_bytes(half(mirror / "web.tgz"))
    assert "web.tgz is truncated" in wmt.refusal("prepare.sh", MIRROR=dead)
    shutil.copy(mirror / "web.tgz", downloads)
    table = wmt.place / "sources.txt"
    table.write_text((mirror / "sources.txt").read_text().replace("train 44", "train 45"))
    assert "44 lines" in wmt.refusal("prepare.sh", SOURCES=table)
    assert not (wmt.data / "raw").exists()
