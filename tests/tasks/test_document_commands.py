"""Training on windows of documents with real command lines: with hydra, any model, blank lines."""

import shutil
import sys
from argparse import Namespace

import pytest

from mega_fairseq.models import MegaTransformerModel
from mega_fairseq.tasks import MegaDocumentTranslationConfig, MegaDocumentTranslationTask
from tests.helpers.commands import (
    CPU,
    MEGA_SIZES,
    PLUGIN,
    ROOT,
    SMALL,
    STOCK,
    TRAINING,
    checkpoint,
    failure,
    fairseq,
    fresh,
    interactive,
    lines,
    on_each_side,
)
from tests.helpers.processes import assert_workers_end_with_epoch
from tests.helpers.recipes import EXAMPLES, small_bible, text, write

pytestmark = pytest.mark.slow

TASK = [*PLUGIN, "--task=mega_document_translation", "--source-lang=en", "--target-lang=de"]
DOCUMENTS = [*TASK, *TRAINING, "--window-tokens=280"]


@pytest.fixture
def data(bible):
    return bible


def test_commands_translate_every_line_of_the_test_documents(data, trained_on_documents, tmp_path):
    """fairseq-generate with fairseq's Transformer, fairseq-interactive with ours; the next test has the other pair."""
    fairseq("train", data, *DOCUMENTS, *STOCK, "--save-dir", tmp_path, "--max-update=2")
    options = [*TASK, *CPU, "--beam=2", "--window-tokens=200", "--nbest=2"]
    words = [*options, "--path", tmp_path / "checkpoint_last.pt"]
    text = [line.split() for line in (data.parent / "test.en").read_text().splitlines()]
    said = fairseq("generate", data, *words, "--max-len-b=3", "--max-tokens=500")
    sources = dict(lines(said, "S"))
    found = [line for number in sorted(sources) for line in sources[number].split(" <sep> ")]
    assert len(sources) > 1
    assert [len(line.split()) for line in found] == list(map(len, text))
    assert_counts(sources, said)
    assert "after 3 tokens" not in said
    assert "documents split" in said
    typed = [sources[number] for number in sorted(sources)]
    ours = ["--path", trained_on_documents / "checkpoint_last.pt", "--buffer-size=3", "--batch-size=3"]
    assert_counts(sources, interactive(data, typed, *options, *ours))
    said = fairseq("generate", data, *words, "--sentence-counts=free", "--max-len-b=3")
    assert "after 3 tokens" in said
    assert "--separator is @" in failure("generate", data, *words, "--separator=@")


def test_from_pretrained_translates_documents_like_fairseq_generate(data, trained_on_documents, tmp_path):
    text = (data.parent / "test.en").read_text().splitlines()
    data = shutil.copytree(data, tmp_path / "bin")
    (data / "test.docs").write_text("a\n" * 3 + "b\n" * (len(text) - 3))
    model = ["--path", trained_on_documents / "checkpoint_last.pt"]
    said = fairseq("generate", data, *TASK, *CPU, *model, "--window-tokens=200")
    windows = dict(lines(said, "D"))
    expected = [line for number in sorted(windows) for line in windows[number].split("\t")[1].split(" <sep> ")]
    documents, translated = ([part[:3], part[3:]] for part in (text, expected))
    where = (str(trained_on_documents), "checkpoint_last.pt", str(data))
    hub = MegaTransformerModel.from_pretrained(*where)
    assert hub.translate_documents(iter(document) for document in documents) == translated
    documents[0].insert(1, " ")
    translated[0].insert(1, "")
    assert hub.translate_documents([*documents[:1], [], ["", ""]]) == [*translated[:1], [], ["", ""]]
    assert hub.translate_documents([]) == []
    symbols = hub.tgt_dict.symbols
    symbols[:] = [symbol if symbol == "<sep>" else f"x<sep>{symbol}" for symbol in symbols]
    renamed = hub.translate_documents(documents)
    assert [[line.replace("x<sep>", "") for line in document] for document in renamed] == translated
    with pytest.raises(ValueError, match="contains <sep>"):
        hub.translate_documents([["a <sep> b"]])
    with pytest.raises(ValueError, match="1,101 tokens and --max-tokens is 300"):
        hub.translate_documents([["a " * 1100]])
    for text in ("a b", ["a b", "b a"]):
        with pytest.raises(TypeError, match="a list of lines"):
            hub.translate_documents(text)
    free = MegaTransformerModel.from_pretrained(*where, sentence_counts="free")
    with pytest.raises(ValueError, match="--sentence-counts exact"):
        free.translate_documents(documents)


def assert_counts(sources, said):
    """Checks that both hypotheses of each source have as many lines, none of them blank."""
    hypotheses = [(number, rest.split("\t")[1]) for number, rest in lines(said, "H")]
    assert sorted(number for number, _ in hypotheses) == sorted([*sources, *sources])
    for number, hypothesis in hypotheses:
        found = hypothesis.split("<sep>")
        assert len(found) == len(sources[number].split("<sep>"))
        assert all(map(str.strip, found))


def test_texts_with_blank_lines_are_translated_split_and_scored_without_losing_a_line(tmp_path):
    folder, texts = small_bible(tmp_path), tmp_path / "texts"
    for path in (*folder.glob("*.en"), *folder.glob("*.de")):
        ids, ended = text(path.with_suffix(".docs")), []
        for number, line in enumerate(text(path)):
            new = number and ids[number] != ids[number - 1]
            ended.append("\r\n" * bool(new) + line.replace(" ", "\u2028", 1) + "\r")
        write(texts / path.name, ended)
    out, segment = tmp_path / "out", [sys.executable, EXAMPLES / "wmt16_en_de/segment.py"]
    fairseq("mega-fairseq", "prepare", "documents", out, texts, "--boundaries=blank")
    fresh(*segment, "learn", "sentencepiece", "pieces", 300, 1.0, "train.en", "train.de", cwd=out)
    shell = 'for f in *.en *.de; do "$0" "$@" apply sentencepiece pieces < $f > pieces.$f; done'
    fresh("sh", "-c", shell, *segment, cwd=out)
    prefixes = [f"--{split}pref={out}/pieces.{split}" for split in ("train", "valid", "test")]
    fairseq(
        "preprocess", "--source-lang=en", "--target-lang=de", "--joined-dictionary", f"--destdir={out}/bin", *prefixes
    )
    for path in out.glob("*.docs"):
        shutil.copy(path, out / "bin")
    fairseq("train", out / "bin", *TASK, *TRAINING, *STOCK, "--window-tokens=280", "--save-dir", out, "--max-update=2")
    words = [out / "bin", *TASK, *CPU, "--path", out / "checkpoint_last.pt", "--beam=2", "--window-tokens=280"]
    (out / "said").write_text(fairseq("generate", *words, "--sentence-counts=free", "--max-len-b=30"))
    said = fairseq("mega-fairseq", "documents", "split", out / "said", out / "test.docs", "--out", out / "system")
    assert "had another number of lines" in said
    assert len(text(out / "system.pieces")) == len(text(out / "test.de")) == 10
    fresh("sh", "-c", '"$0" "$@" undo sentencepiece < system.pieces > system.de', *segment, cwd=out)
    files = [out / "system.de", *(out / f"test.{kind}" for kind in ("de", "docs"))]
    said = fairseq("mega-fairseq", "documents", "score", *files, "--counts", out / "system.json")
    assert "10 lines" in said
    assert "d-BLEU" in said


def test_hydra_trains_on_windows(data, tmp_path):
    sizes = [f"++model.{name}={size}" for name, size in {**MEGA_SIZES, "rel_pos_bias": "rotary"}.items()]
    fairseq(
        "hydra-train", "--config-dir", ROOT / "examples/hydra", "--config-name", "translation",
        f"common.user_dir={ROOT / 'mega_fairseq'}", "common.cpu=true", "task._name=mega_document_translation",
        f"task.data={data}", "+task.window_tokens=1200", f"checkpoint.save_dir={tmp_path}", *sizes,
        "optimization.max_update=2", cwd=tmp_path,
    )  # fmt: skip
    config = checkpoint(tmp_path / "checkpoint_last.pt")["cfg"]
    assert (config["task"]["window_tokens"], config["task"]["single_lines"]) == (1200, 0.25)
    assert config["model"]["max_source_positions"] == config["model"]["max_target_positions"] == 1200


# ------------------------------------------------------------------------------------------ refusals


def loaded(data, split="valid", **options):
    config = MegaDocumentTranslationConfig(data=str(data), source_lang="en", target_lang="de", **options)
    config.seed, config.train_subset, config.dataset_impl, config.required_seq_len_multiple = 1, "train", None, 1
    task = MegaDocumentTranslationTask.setup_task(config)
    task.load_dataset(split)
    return task


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_tokens": 20}, r"line \d+ of valid.en .*--window-tokens is 20"),
        ({"valid_window_tokens": 20}, "--valid-window-tokens is 20"),
        ({"single_lines": 1.5}, "--single-lines is 1.5"),
        ({"separator": ""}, "--separator is ''"),
        ({"separator": "and"}, "dict.en.txt contains and.* --separator"),
        ({"truncate_source": True}, "--truncate-source"),
        ({"eval_bleu": True}, "--eval-bleu is for single lines"),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(data, options, words):
    with pytest.raises(ValueError, match=words):
        loaded(data, **options)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "there is no .*valid.docs"),
        ("a\n" * 9, "9 lines and valid has 10"),
        ("a\n" * 4 + "b\n" + "a\n" * 5, "line 6 of .*'a'"),
    ],
)
def test_ids_that_do_not_fit_the_data_are_refused(data, tmp_path, ids, words):
    shutil.copytree(data, tmp_path / "bin")
    (tmp_path / "bin/valid.docs").unlink()
    if ids is not None:
        (tmp_path / "bin/valid.docs").write_text(ids)
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        loaded(tmp_path / "bin")


def test_parts_of_a_split_need_ids_of_their_own(data, tmp_path):
    shutil.copytree(data, tmp_path / "bin")
    for path in tmp_path.glob("bin/valid.en-de.*"):
        shutil.copy(path, path.with_name(path.name.replace("valid", "valid1")))
    task = loaded(tmp_path / "bin", upsample_primary=1)
    with pytest.raises(ValueError, match="10 lines and valid has 20; .* those of valid1 in valid1.docs"):
        task.load_dataset("valid", combine=True)
    (tmp_path / "bin/valid1.docs").write_text("c\n" * 10)
    task.load_dataset("valid", combine=True)


def test_a_transformer_has_positions_for_the_windows(data):
    options = Namespace(arch="transformer", max_target_positions=None, **on_each_side(**SMALL))
    model = loaded(data, window_tokens=2000).build_model(options)
    assert model.max_positions() == (2000, 2000)


def test_windows_longer_than_a_batch_or_the_model_are_refused(data):
    task = loaded(data, window_tokens=200)
    longest = task.dataset("valid").longest
    with pytest.raises(ValueError, match=f"{longest} tokens and --max-tokens is {longest - 1}"):
        task.get_batch_iterator(task.dataset("valid"), max_tokens=longest - 1)
    with pytest.raises(ValueError, match=f"the model reads {longest - 1}"):
        task.get_batch_iterator(task.dataset("valid"), max_positions=(longest, longest - 1))
    task.get_batch_iterator(task.dataset("valid"), max_tokens=longest, max_positions=(longest, longest))


def test_processes_that_load_windows_end_with_their_epoch(data):
    task = loaded(data, window_tokens=200)
    options = {"max_tokens": 400, "num_workers": 1, "data_buffer_size": 1}
    assert_workers_end_with_epoch(task.get_batch_iterator(task.dataset("valid"), **options))
