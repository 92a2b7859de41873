"""The translation recipes, as a newcomer calls them: from another folder, on slices small enough for a test."""

import functools
import importlib.util
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WMT = EXAMPLES / "wmt16_en_de"
BIBLE = WMT / "bible"
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
# What a script may be told by the one who runs the tests.
FOREIGN = ("BPE", "BYTES", "CORPUS", "EXPECTED", "GPUS", "MIRROR", "SOURCES", "UNITS", "VOCABULARY")
SIZES = {"train": 200, "valid": 20, "test": 20}
# Recipe and architecture stay, but a step takes a fraction of a second.
NARROW = [
    f"--{side}-{name}={size}"
    for side in ("encoder", "decoder")
    for name, size in {"layers": 1, "embed-dim": 32, "hidden-dim": 64, "z-dim": 16, "ffn-embed-dim": 64}.items()
]
SHORT_OUTPUT = ["--max-len-a=0", "--max-len-b=20"]


class Recipe:
    """Calls the scripts of one folder from elsewhere, with everything they write under `place`."""

    def __init__(self, scripts, place, **variables):
        self.scripts, self.place = scripts, place
        self.data, self.checkpoints, self.results = place / "data", place / "checkpoints", place / "results"
        self.variables = {
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            "PYTHON": sys.executable,
            "WORKERS": "1",
            "OMP_NUM_THREADS": "1",
            "GPUS": "0",
            "DATA": self.data,
            "CHECKPOINTS": self.checkpoints,
            "RESULTS": self.results,
            **variables,
        }
        place.mkdir(exist_ok=True)

    def start(self, script, *arguments, **variables):
        return subprocess.Popen(
            [str(self.scripts / script), *map(str, arguments)],
            cwd=self.place,
            env={name: str(value) for name, value in {**self.variables, **variables}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script, *arguments, **variables):
        """What the script printed, on both streams."""
        process = self.start(script, *arguments, **variables)
        printed = "".join(process.communicate())
        assert process.returncode == 0, printed
        return printed

    def refusal(self, script, *arguments, **variables):
        """The one sentence with which the script stopped."""
        process = self.start(script, *arguments, **variables)
        _, said = process.communicate()
        assert process.returncode == 1, said
        (sentence,) = re.findall(r"^error: (.*)$", said, re.MULTILINE)
        return sentence


def text(path):
    return path.read_bytes().decode().split("\n")[:-1]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode())


def files(folder):
    """All files below, by name, with what they hold; fairseq's log has times in it."""
    return {path.name: path.read_bytes() for path in folder.rglob("*.*") if path.suffix != ".log" and path.is_file()}


def small_corpus(folder):
    """The first pairs of each split of the shipped corpus."""
    with tarfile.open(BIBLE / "bible-ende.tar.xz") as archive:
        for split, size in SIZES.items():
            for language in ("en", "de"):
                lines = archive.extractfile(f"bible-ende/{split}.{language}").read().decode().split("\n")
                write(folder / f"{split}.{language}", lines[:size])
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def bible_recipe(place, corpus):
    return Recipe(BIBLE, place, CORPUS=corpus, VOCABULARY=300)


@pytest.fixture
def bible(tmp_path, corpus):
    # A space in a path is where careless quoting shows.
    return bible_recipe(tmp_path / "a place", corpus)


@pytest.fixture(scope="module")
def prepared_bible(tmp_path_factory, corpus):
    recipe = bible_recipe(tmp_path_factory.mktemp("a place"), corpus)
    recipe.run("prepare.sh")
    return recipe


# ------------------------------------------------------------------------------------------- the shipped corpus


@pytest.mark.slow
def test_the_shipped_corpus_goes_from_text_to_scores(prepared_bible):
    bible = prepared_bible
    recipe = {"UPDATES": 8, "WARMUP": 2, "MAX_TOKENS": 8000, "BATCH_TOKENS": 8000}
    bible.run("train.sh", *NARROW, "--max-update=1", **recipe)
    said = bible.run("train.sh", *NARROW, **recipe)
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt", said)
    assert "num_updates: 8 >= max_update: 8" in said

    epochs = sorted(bible.checkpoints.glob("checkpoint[0-9]*.pt"))
    assert len(epochs) >= 2
    bible.run("../average.sh", bible.checkpoints, LAST=len(epochs))
    models = [torch.load(path, weights_only=True)["model"] for path in epochs]
    averaged = torch.load(bible.checkpoints / "averaged.pt", weights_only=True)["model"]
    for name, tensor in averaged.items():
        mean = sum(model[name].double() for model in models) / len(models)
        torch.testing.assert_close(tensor, mean.to(tensor.dtype), rtol=0, atol=0)

    printed = bible.run("generate.sh", *SHORT_OUTPUT)
    assert len(text(bible.results / "hypotheses.txt")) == SIZES["test"]
    scores = (bible.results / "scores.txt").read_text()
    assert scores in printed
    assert re.search(r"BLEU\|nrefs:1\|case:mixed\|eff:no\|tok:13a\|.* = [\d.]+", scores)
    assert re.search(r"chrF2\|nrefs:1\|.* = [\d.]+", scores)

    # Had training gone on, the average would be of the past.
    os.utime(bible.checkpoints / "checkpoint_last.pt")
    assert "run average.sh first" in bible.refusal("generate.sh")


def test_an_interrupted_preparation_goes_on_where_it_stopped_and_ends_the_same(bible, prepared_bible):
    process = bible.start("prepare.sh")
    for line in process.stderr:
        if "segmenting valid.en" in line:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (bible.data / "sentencepiece/text").exists()

    said = bible.run("prepare.sh")
    assert re.findall(r"have .*/(\w+)$", said, re.MULTILINE) == ["raw", "plain", "codes"]
    assert re.findall(r"making .*/(\w+)$", said, re.MULTILINE) == ["text", "bin"]
    assert files(bible.data) == files(prepared_bible.data)
    assert "making" not in bible.run("prepare.sh")


def test_other_choices_do_not_pass_for_the_ones_that_a_folder_was_made_with(prepared_bible, corpus, tmp_path):
    sentence = prepared_bible.refusal("prepare.sh", VOCABULARY=310)
    assert "VOCABULARY=300, not with VOCABULARY=310: name another folder with DATA=" in sentence
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    write(other / "valid.en", text(corpus / "valid.en")[::-1])
    assert "name another folder with DATA=" in prepared_bible.refusal("prepare.sh", CORPUS=other)


def test_a_corpus_whose_languages_are_out_of_step_is_refused(bible, corpus):
    broken = bible.place / "broken"
    shutil.copytree(corpus, broken)
    write(broken / "train.de", text(corpus / "train.de")[1:])
    assert "train.de has 199 lines where 200 are expected" in bible.refusal("prepare.sh", CORPUS=broken)


def test_a_last_line_without_its_end_is_a_line_like_any_other(bible, prepared_bible, corpus, tmp_path):
    cut = bible.place / "cut"
    shutil.copytree(corpus, cut)
    # On one side, and on both.
    for name in ("train.de", "valid.en", "test.en", "test.de"):
        (cut / name).write_bytes((corpus / name).read_bytes()[:-1])
    bible.variables.update(CORPUS=cut, BPE="sentencepiece")
    bible.run("prepare.sh")
    assert files(bible.data / "sentencepiece") == files(prepared_bible.data / "sentencepiece")
    wrapper = answering(bible, tmp_path)
    assert " = 100.00 " in bible.run("generate.sh", PYTHON=wrapper, CHECKPOINT=wrapper)


def test_a_vocabulary_that_does_not_suit_the_text_is_refused_with_one_that_does(bible):
    sentence = bible.refusal("prepare.sh", VOCABULARY=8000)
    assert re.fullmatch(r"VOCABULARY=8000 does not suit this text: give \d+ or less\.", sentence)
    sentence = bible.refusal("prepare.sh", VOCABULARY=10)
    assert re.fullmatch(r"VOCABULARY=10 does not suit this text: give \d+ or more, for its letters\.", sentence)


@pytest.mark.parametrize("folder", [WMT, BIBLE])
def test_a_number_that_is_none_is_refused_before_any_work(folder, tmp_path):
    numbers = {
        "prepare.sh": "VOCABULARY WORKERS",
        "train.sh": "UPDATES MAX_TOKENS BATCH_TOKENS GPUS WARMUP KEEP",
        "generate.sh": "MAX_TOKENS BEAM",
    }
    for script, names in numbers.items():
        refuses_what_is_no_number(Recipe(folder, tmp_path), script, names.split())
    refuses_what_is_no_number(Recipe(WMT, tmp_path), "average.sh", ["LAST"])


def refuses_what_is_no_number(recipe, script, names):
    for name, wrong in zip(names, itertools.cycle(("many", "-1", "08", "1.5"))):
        least = 0 if name in ("GPUS", "WARMUP", "KEEP") else 1
        assert recipe.refusal(script, **{name: wrong}) == f"{name} is '{wrong}'; give a whole number from {least}."
    assert not list(recipe.place.iterdir())


def test_each_script_says_which_one_comes_before_it(bible):
    assert "run prepare.sh first" in bible.refusal("train.sh")
    assert "run average.sh first" in bible.refusal("generate.sh")
    assert "is not there" in bible.refusal("../average.sh", bible.checkpoints)
    write(bible.checkpoints / "checkpoint1.pt", [])
    assert "set LAST=1" in bible.refusal("../average.sh", bible.checkpoints, LAST=2)


def test_a_wrong_variable_is_refused_with_the_right_values(bible, prepared_bible):
    assert "use fp32 or bf16" in prepared_bible.refusal("train.sh", PRECISION="fp16")
    assert "say fp32, fp16 or bf16" in prepared_bible.refusal("train.sh", PRECISION="half")
    assert "say sentencepiece, subword-nmt or fastbpe" in bible.refusal("prepare.sh", BPE="wordpiece")
    assert "has no fairseq" in bible.refusal("prepare.sh", PYTHON="false")


@pytest.mark.skipif(importlib.util.find_spec("fastBPE") is not None, reason="fastBPE is installed")
def test_a_missing_module_is_named_with_the_command_that_installs_it(bible):
    assert "pip install --no-deps --no-build-isolation fastBPE" in bible.refusal("prepare.sh", BPE="fastbpe")


# ------------------------------------------------------------------------------------------------------ WMT'16

# archive: split, English file, German file, pairs
ARCHIVES = {
    "de-en.tgz": ("train", "europarl.en", "europarl.de", 120),
    "web.tgz": ("train", "deep/down/web.en", "deep/down/web.de", 84),
    "test.tgz": ("valid", "test/newstest-src.en.sgm", "test/newstest-src.de.sgm", 20),
    "test-full.tgz": ("test", "full/newstest-src.en.sgm", "full/newstest-ref.de.sgm", 20),
}
# What the web holds: nothing, far too much, unlike lengths, characters that some take for the end of a line.
WEB = [("", "leer"), ("many " * 90, "viele " * 90), ("no", "nein " * 10), ("end\r of line", "Zeilen\u2028ende")]
# A text without hyphens would not show what splitting compounds does.
HYPHENS = {"en": "Noah-like", "de": "Arche-Noah"}


def pack(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, lines in members.items():
            if name.endswith(".sgm"):
                lines = ["<doc>", *(f'<seg id="{i}"> {line} </seg>' for i, line in enumerate(lines, 1)), "</doc>"]
            # English text lacks the end of its last line.
            data = ("\n".join(lines) + "\n" * (not name.endswith(".en"))).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory, corpus):
    """A small world of archives, built like the real ones."""
    folder = tmp_path_factory.mktemp("mirror")
    remaining = {
        (split, language): text(corpus / f"{split}.{language}") for split in SIZES for language in ("en", "de")
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


@pytest.fixture
def wmt(tmp_path, mirror):
    return wmt_recipe(tmp_path / "a place", mirror)


def half(path):
    data = path.read_bytes()
    return data[: len(data) // 2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, mirror):
    """Has WMT prepared once for each segmentation: gives the recipe, and what prepare.sh said."""

    @functools.lru_cache(maxsize=None)
    def prepare(bpe):
        recipe = wmt_recipe(tmp_path_factory.mktemp(bpe), mirror, BPE=bpe)
        (recipe.data / "downloads").mkdir(parents=True)
        # A download broke off before.
        (recipe.data / "downloads/web.tgz.part").write_bytes(half(mirror / "web.tgz"))
        return recipe, recipe.run("prepare.sh")

    return prepare


def test_wmt_is_downloaded_cleaned_and_segmented_and_what_was_removed_is_said(prepared, mirror):
    wmt, said = prepared("subword-nmt")
    assert (wmt.data / "downloads/web.tgz").read_bytes() == (mirror / "web.tgz").read_bytes()
    assert "train: 204 pairs" in said
    assert "cleaning removed 3 of 204 pairs (1 empty, 1 lengths differ by more than 9 times, 1 longer than 80" in said
    for language in ("en", "de"):
        assert len(text(wmt.data / f"subword-nmt/text/train.{language}")) == 201
    assert text(wmt.data / "tok/train.en")[-1] == "end of line"
    dictionaries = [(wmt.data / f"subword-nmt/bin/dict.{language}.txt").read_bytes() for language in ("en", "de")]
    assert dictionaries[0] == dictionaries[1]


@pytest.mark.slow
def test_wmt_is_trained_on_as_published_and_scored_four_ways(prepared):
    wmt, _ = prepared("subword-nmt")
    wmt.run("train.sh", *NARROW, "--max-update=2", PRECISION="bf16", KEEP=2)
    cfg = torch.load(wmt.checkpoints / "checkpoint_last.pt", weights_only=True)["cfg"]
    assert cfg["model"]["_name"] == "mega_transformer_base"
    names = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "share_all_embeddings")
    assert [cfg["model"][name] for name in names] == [0.15, 0.1, 0.1, 0.1, True]
    assert (cfg["optimizer"]["adam_betas"], cfg["optimizer"]["adam_eps"]) == ("(0.9, 0.98)", 1e-8)
    assert (cfg["optimizer"]["lr"], cfg["optimizer"]["weight_decay"]) == ([1e-3], 0.05)
    assert (cfg["optimization"]["clip_norm"], cfg["criterion"]["label_smoothing"]) == (1.0, 0.1)
    names = ("_name", "power", "end_learning_rate", "warmup_updates", "total_num_update")
    assert [cfg["lr_scheduler"][name] for name in names] == ["polynomial_decay", 1.0, 0.0, 4000, 500000.0]
    # 65536 tokens an update, on one device at 8192 a batch
    assert (cfg["dataset"]["max_tokens"], cfg["optimization"]["update_freq"]) == (8192, [8])
    assert (cfg["dataset"]["required_batch_size_multiple"], cfg["common"]["bf16"]) == (1, True)

    wmt.run("average.sh")
    wmt.run("generate.sh", *SHORT_OUTPUT)
    assert len((wmt.results / "scores.txt").read_text().splitlines()) == 4


def answering(recipe, place):
    """A Python whose fairseq-generate knows the reference, and writes it in an order of its own."""
    pieces = text(recipe.data / recipe.variables["BPE"] / "text/test.de")
    answers = [f"H-{number}\t-0.5\t{line}" for number, line in enumerate(pieces)]
    write(place / "answers", ["S-0\ta source", *sorted(answers), "D-0\t-0.5\tnot this"])
    return pretending(place, "generate")


def pretending(place, tool):
    """A Python in whose fairseq this tool only prints what `answers` holds."""
    wrapper = place / "python"
    condition = f'[ "$2" = fairseq_cli.{tool} ]'
    otherwise = f"exec '{sys.executable}' \"$@\""
    wrapper.write_text(f"#!/bin/sh\nif {condition}; then cat '{place}/answers'; else {otherwise}; fi\n")
    wrapper.chmod(0o755)
    return wrapper


@pytest.mark.slow
@pytest.mark.parametrize("bpe", ["sentencepiece", "subword-nmt", "fastbpe"])
def test_any_segmentation_is_undone_and_sorted_into_the_order_of_the_reference(prepared, bpe, tmp_path):
    if bpe == "fastbpe":
        pytest.importorskip("fastBPE")
    wmt, _ = prepared(bpe)
    wrapper = answering(wmt, tmp_path)
    variables = {"PYTHON": wrapper, "CHECKPOINT": wrapper, "RESULTS": tmp_path}
    wmt.run("generate.sh", **variables)
    scores = re.sub(r"\(.*?\)", "", (tmp_path / "scores.txt").read_text())
    bleu, chrf, tokenised, split = map(float, re.findall(r"= ([\d.]+)", scores))
    assert min(tokenised, split) == 100
    # Moses' detokeniser is no exact inverse.
    assert min(bleu, chrf) > (99.9 if bpe == "sentencepiece" else 95)
    assert text(tmp_path / "reference.tok.split")[0].startswith("Arche ##AT##-##AT## Noah ")

    write(tmp_path / "answers", text(tmp_path / "answers")[2:])
    assert "not one translation for each sentence" in wmt.refusal("generate.sh", **variables)
    assert not (tmp_path / "scores.txt").exists()  # the old scores are of other translations


def test_a_dead_link_is_reported_with_the_file_to_fetch_and_the_folder_to_put_it_in(wmt, mirror):
    downloads = wmt.data / "downloads"
    for dead in (f"file://{wmt.place}/nothing", "http://127.0.0.1:9"):
        sentence = wmt.refusal("prepare.sh", MIRROR=dead)
        assert all(archive in sentence for archive in ARCHIVES)
        assert f"put it into {downloads}" in sentence
    # What was put there by hand is taken and looked into as what was downloaded is.
    for archive in ARCHIVES:
        shutil.copy(mirror / archive, downloads)
    (downloads / "web.tgz").write_bytes(half(mirror / "web.tgz"))
    assert "web.tgz is truncated or no archive: remove it" in wmt.refusal("prepare.sh", MIRROR=dead)
    assert not (wmt.data / "raw").exists()


def test_an_archive_with_other_lines_than_expected_is_refused(wmt, mirror):
    table = wmt.place / "sources.txt"
    table.write_text((mirror / "sources.txt").read_text().replace("train 84", "train 85"))
    sentence = wmt.refusal("prepare.sh", SOURCES=table)
    assert "has 84 lines where 85 are expected" in sentence
    assert "web.tgz" in sentence


def test_the_published_sources_are_the_4_5_million_pairs_of_the_paper():
    rows = [line.split() for line in text(WMT / "sources.txt") if line and not line.startswith("#")]
    assert all(len(row) == 5 for row in rows)
    pairs = {split: sum(int(row[1]) for row in rows if row[0] == split) for split in SIZES}
    assert pairs == {"train": 4_562_102, "valid": 3000, "test": 3003}


# --------------------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_script_stops_at_the_first_error_and_passes_shellcheck(script):
    if script.name != "common.sh":
        assert os.access(script, os.X_OK)
        assert "\nset -euo pipefail\n" in script.read_text()
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", str(script)], check=True, cwd=EXAMPLES.parent)
