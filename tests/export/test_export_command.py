"""`mega-fairseq export`: trained models become folders that translate, score and classify as fairseq does."""

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary

from mega_fairseq.cli import UserError
from mega_fairseq.cli.classify import load as load_classifier
from mega_fairseq.cli.export import alone_in, check_bytes, check_pieces
from mega_fairseq.export import folder as folders
from mega_fairseq.models import MegaTransformerModel
from mega_runtime import Classifier, FolderError, LanguageModel, Translator
from mega_runtime.text import Pieces
from tests.helpers import commands, faults
from tests.helpers.classifiers import assert_same_predictions
from tests.helpers.commands import (
    GENERATION,
    LM,
    Running,
    fairseq,
    perplexity,
    translations,
)
from tests.helpers.hypotheses import assert_same
from tests.helpers.pieces import few_pieces
from tests.helpers.pieces import pieces_model as pieces_of_chapters

pytestmark = pytest.mark.slow


def export(checkpoint, folder, *options):
    """Exports, and returns the folder and what the command says."""
    return folder, fairseq("mega-fairseq", "export", checkpoint, folder, *options)


@pytest.fixture(scope="module")
def exported(translation, tmp_path_factory):
    """The translation model in float32, and what the command says."""
    return export(translation.last, tmp_path_factory.mktemp("exported") / "model", "--format=float32")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# ------------------------------------------------------------------------------------------- models


def test_a_translation_model_translates_as_fairseq_generate(translation, exported):
    folder, said = exported
    assert f"wrote {folder}" in said
    assert "same hypotheses 4 of 4" in said
    config = config_of(folder)
    assert config["differences"]["rms"] < 1e-5
    assert config["languages"] == ["de", "en"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]
    said = fairseq("generate", translation.data, *GENERATION, "--path", translation.last, "--nbest=4")
    expected = {}
    for number, text, score in translations(said):
        expected.setdefault(number, []).append((text.split(), score * np.log(2)))
    lines = (translation.folder / "test.de").read_text().splitlines()
    found = Translator(folder).translate(lines, beam=4, max_len_a=0, max_len_b=30)
    hypotheses = [[(each.pieces, each.score) for each in line.hypotheses] for line in found]
    assert_same(hypotheses, [expected[number] for number in range(len(lines))], tie=2e-4)  # fairseq prints 4 digits


def test_a_language_model_has_the_loss_of_fairseq_eval_lm(edited, tmp_path):
    trained = commands.trained("softmax")
    folder, _ = export(trained.last, tmp_path / "model", "--format=float32")
    model, tokens = LanguageModel(folder), []
    for line in (trained.folder / "valid.text").read_text().splitlines():
        tokens += [*model.types.encode(line.split()), model.special.eos]
    said = fairseq("eval-lm", trained.data, *LM, "--path", trained.last, "--gen-subset=valid")
    count, loss, _ = perplexity(said)
    log_probs = model.score_tokens(tokens)
    assert len(log_probs) == count
    assert -log_probs.mean(dtype=np.float64) / np.log(2) == pytest.approx(loss, abs=2e-3)
    of_bytes = tmp_path / "bytes"
    of_bytes.mkdir()
    types = len((trained.data / "dict.txt").read_text().splitlines())
    (of_bytes / "dict.txt").write_text("".join(f"{number} 1\n" for number in range(types)))
    path = edited(trained.last, lambda content: content["task_state"].clear())  # as if its types had been bytes
    _, said = export(path, tmp_path / "numbers", "--data", of_bytes)
    assert "with --bytes" in said
    folder, said = export(path, tmp_path / "small", "--data", of_bytes, "--bytes")
    assert "with --bytes" not in said
    small = LanguageModel(folder)
    assert 1e-5 < np.sqrt(np.mean((small.score_tokens(tokens) - log_probs) ** 2)) < 0.05
    assert config_of(folder)["number_format"] == "int8"
    assert small.segmented.split("\u20ac") == ["226", "130", "172"]


def test_documents_are_translated_as_by_the_project(bible, trained_on_documents, tmp_path):
    folder, _ = export(trained_on_documents / "checkpoint_last.pt", tmp_path / "model", "--format=float32")
    lines = (bible.parent / "test.en").read_text().splitlines()
    documents = [[*lines[:3], " ", *lines[3:5]], [], lines[5:], ["", ""]]
    hub = MegaTransformerModel.from_pretrained(str(trained_on_documents), "checkpoint_last.pt", str(bible))
    found = Translator(folder).translate_documents(documents)
    assert found == hub.translate_documents(documents)
    assert list(map(len, found)) == list(map(len, documents))
    assert config_of(folder)["documents"]["window_tokens"] == 200


def test_models_of_documents_with_any_number_of_lines_are_exported_with_exact_ones(
    bible, trained_on_documents, edited, tmp_path
):
    path = edited(
        trained_on_documents / "checkpoint_last.pt", lambda c: c["cfg"]["task"].update(sentence_counts="free")
    )
    folder, _ = export(path, tmp_path / "model", "--format=float32", "--data", bible)
    differences = config_of(folder)["differences"]
    assert (differences["sentence counts"], differences["same hypotheses"]) == ("exact, not free", "4 of 4")


@pytest.mark.parametrize("kind", ["bytes", "values"])
def test_classifiers_predict_as_the_project(classifiers, tmp_path, kind):
    trained = classifiers(kind)
    folder, _ = export(trained.last, tmp_path / "model", "--format=float32")
    project, ours = load_classifier(str(trained.last), None, cpu=True), Classifier(folder)
    if kind == "values":
        inputs = list(np.load(trained.data / "valid.npy"))
    else:
        columns = [(trained.data / f"valid.{name}").read_bytes().split(b"\n")[:-1] for name in ("input", "input1")]
        inputs = list(zip(*columns))
    found = ours.predict(inputs)
    assert_same_predictions(found, project.predict(inputs))
    assert len(found) == len(inputs)


def test_segmentation_is_exported_and_languages_that_the_training_found_by_names_of_files_are_found_again(
    translation, exported, edited, refuses, tmp_path
):
    pieces_model = few_pieces(tmp_path, (exported[0] / "source.txt").read_text().split("\n")[4:-1])
    path = edited(translation.last, lambda content: content["cfg"]["task"].update(source_lang=None, target_lang=None))
    folder, _ = export(path, tmp_path / "model", "--sentencepiece-model", pieces_model)
    assert config_of(folder)["text"]["kind"] == "pieces"
    assert (folder / "pieces.model").read_bytes() == pieces_model.read_bytes()
    assert Translator(folder).segmented.split("der Hase") == Pieces(pieces_model).split("der Hase")
    assert (folder / "source.txt").read_bytes() == (exported[0] / "source.txt").read_bytes()
    refuses(
        "export", path, tmp_path / "other", "--data", tmp_path, words=["edited.pt does not say its languages", "--data"]
    )


def test_zeros_before_the_numbers_of_bytes_are_refused(refuses, tmp_path):
    types = Dictionary()
    for number in range(256):
        types.add_symbol(f"{number:03}")
    with pytest.raises(UserError, match="256 types, of which 100 are not bytes; leave --bytes out"):
        check_bytes(types)


@pytest.mark.parametrize("of_bytes", [True, False])
def test_text_of_another_kind_or_segmentation_is_refused(refuses, pieces_model, tmp_path, of_bytes):
    trained = commands.trained("softmax")
    text = ["--bytes"] if of_bytes else ["--sentencepiece-model", pieces_model]
    words = [*("types, of which", "are not"), "leave --bytes out" if of_bytes else f"{pieces_model}; give"]
    refuses("export", trained.last, tmp_path / "model", "--data", trained.data, *text, words=words)


def types_of(pieces, *others):
    types = Dictionary()
    for word in [*map(pieces.id_to_piece, range(3, len(pieces))), *others]:
        types.add_symbol(word)
    return types


def test_pieces_of_another_model_are_doubted(tmp_path):
    """Words of characters that no piece has are types of the training, too."""
    paths = {size: pieces_of_chapters(tmp_path / f"{size}", vocab_size=size) for size in (150, 200, 300, 340)}
    right = types_of(Pieces(paths[300]).model, *"\u6c34\u706b\u6728\u91d1", "\u571f\u6708")
    assert check_pieces(paths[300], right, right) is None
    many = types_of(Pieces(paths[300]).model, *map(chr, range(0x4E00, 0x5000)))
    assert check_pieces(paths[300], many, many) is None
    assert re.search("of 302 types .* are not in", check_pieces(paths[150], right, right))
    source = types_of(Pieces(paths[150]).model)
    assert re.search("of its 297 pieces are in no type", check_pieces(paths[300], source, source))
    assert re.search("of its 197 pieces are in no type", check_pieces(paths[200], source, source))
    half = types_of(Pieces(paths[300]).model, *map(str, range(99)))
    half.symbols = half.symbols[:100] + half.symbols[200:]
    assert check_pieces(paths[300], right, half) is check_pieces(paths[300], half, right) is None
    in_bytes = pieces_of_chapters(tmp_path / "bytes", vocab_size=400, byte_fallback=True)
    with_bytes = types_of(Pieces(in_bytes).model)
    assert check_pieces(in_bytes, with_bytes, with_bytes) is None
    merged = types_of(Pieces(paths[300]).model)  # of a text of few words, where most pieces are parts of others
    kept = [word for word in merged.symbols[merged.nspecial :] if sum(word in other for other in merged.symbols) == 1]
    merged.symbols = [*merged.symbols[: merged.nspecial], *kept]
    assert len(kept) < 200
    assert check_pieces(paths[300], merged, merged) is None
    assert "0 of its" in check_pieces(paths[300], types_of(Pieces(paths[340]).model), right)
    joined = types_of(Pieces(paths[150]).model, *(f"{number}der" for number in range(200)))  # with a larger model
    assert re.search("200 of 347 types .* 0 of its 147 pieces", check_pieces(paths[150], joined, joined))
    characters = pieces_of_chapters(tmp_path / "characters", model_type="char")
    with pytest.raises(UserError, match="give the SentencePiece model of its text"):  # that of the source
        check_pieces(
            characters,
            types_of(Pieces(few_pieces(tmp_path, tuple("\u6c34\u706b\u6728"))).model, *map(chr, range(0x4E00, 0x4F00))),
            types_of(Pieces(characters).model),
        )
    words = Dictionary()
    words.add_symbol("\u6c34\u706b")
    for other in (words, types_of(Pieces(few_pieces(tmp_path)).model, *(f"{number}der" for number in range(99)))):
        with pytest.raises(UserError, match="types, of which .* give the SentencePiece model of its text"):
            check_pieces(paths[300], other, other)


def test_bytes_are_for_language_models(translation, refuses, tmp_path):
    refuses("export", translation.last, tmp_path / "model", "--bytes", words=["not a language model", "--bytes"])


# ------------------------------------------------------------------------------------------- folders


def test_an_exported_folder_is_replaced_only_if_asked(translation, exported, refuses, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "model")
    (folder / "README.md").write_text("years of work")
    (folder / "text.onnx").write_text("of another kind of model")
    before = config_of(folder)
    refuses("export", translation.last, folder, words=[f"{folder} exists", "--force", "new folder"])
    assert config_of(folder) == before
    export(translation.last, folder, "--force")
    assert (before["number_format"], config_of(folder)["number_format"]) == ("float32", "int8")
    Translator(folder)
    assert (folder / "README.md").read_text() == "years of work"
    names = {"config.json", "README.md", *config_of(folder)["files"]}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert set(folders.NAMES) > names - {"README.md"}


def test_a_folder_on_another_file_system_is_replaced(translation, exported, refuses, tmp_path):
    other = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=other) as place:
        folder = shutil.copytree(exported[0], Path(place) / "model")
        (tmp_path / "link").symlink_to(folder)
        (folder / "config.json").unlink()  # as after an export that was killed
        (folder / ".unfinished").mkdir()
        data = ["--data", tmp_path]
        refuses("export", translation.last, tmp_path / "link", "--force", *data, words=["dict.de.txt, which"])
        export(translation.last, tmp_path / "link", "--force")
        Translator(tmp_path / "link")
        assert {path.name for path in folder.iterdir()} == {"config.json", *config_of(folder)["files"]}


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_what_is_no_exported_folder_is_never_replaced(translation, refuses, tmp_path, force):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/weights.bin").write_text("of another program")
    (tmp_path / "link").symlink_to("nothing")
    for name in ("folder", "file", "other", "weights", "link"):
        refuses(
            "export",
            translation.last,
            tmp_path / name,
            *force,
            words=[f"{tmp_path / name} exists; give the name of a new"],
        )
    assert (tmp_path / "folder/thesis.tex").read_text() == "years of work"


def test_killed_exports_leave_no_folder_under_their_name(translation, tmp_path):
    for fault in (faults.killed_while_exporting, faults.killed_after_export):
        code, said = Running("mega-fairseq", "export", translation.last, tmp_path / "model", fault=fault).wait()
        assert code == -signal.SIGKILL, said
        assert not (tmp_path / "model").exists()
        if fault is faults.killed_while_exporting:
            with pytest.raises(FolderError):
                Translator(tmp_path / "model.unfinished")
    export(translation.last, tmp_path / "model")
    Translator(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_files_of_others_in_an_unfinished_folder_stay(translation, refuses, tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished/notes").write_text("of somebody")
    (tmp_path / "other.unfinished").write_text("of somebody")
    for name in ("model", "other"):
        refuses("export", translation.last, tmp_path / name, words=[f"{name}.unfinished, where", "files; rename it"])


def test_only_one_export_writes_a_folder(translation, refuses, tmp_path):
    with alone_in(tmp_path / "model.unfinished"):
        (tmp_path / "model.unfinished/weights.bin").write_text("half of them")
        words = ["another export writes", f"{tmp_path}/model.unfinished; wait"]
        refuses("export", translation.last, tmp_path / "model", words=words)
        assert (tmp_path / "model.unfinished/weights.bin").read_text() == "half of them"


def test_a_folder_that_appears_during_an_export_stays(translation, tmp_path):
    fault = functools.partial(faults.folder_after_export, tmp_path / "model")
    code, said = Running("mega-fairseq", "export", translation.last, tmp_path / "model", fault=fault).wait()
    assert code == 1
    assert "Directory not empty" in said
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["text.onnx"]


def test_a_full_disk_leaves_nothing(translation, tmp_path):
    fault = functools.partial(faults.no_space, 20_000)
    code, said = Running("mega-fairseq", "export", translation.last, tmp_path / "model", fault=fault).wait()
    assert code == 1
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- refusals


def test_models_that_cannot_be_exported_are_refused_by_option(classifiers, refuses, tmp_path):
    trained = commands.trained("adaptive")
    words = ["--adaptive-input, --adaptive-softmax-cutoff"]
    refuses("export", trained.last, tmp_path / "model", "--data", trained.data, words=words)
    trained = classifiers("tokens")
    refuses(
        "export",
        trained.last,
        tmp_path / "model",
        "--data",
        trained.data,
        words=["--encoder-token-mixer other than mega"],
    )


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("translation", {"_name": "translation_multi_simple_epoch"}, ["translation_multi_simple_epoch", "of --task"]),
        ("softmax", {"_name": "multilingual_language_modeling"}, ["multilingual_language_modeling", "of --task"]),
        ("softmax", {"_name": "language_modeling", "add_bos_token": True}, ["--add-bos-token"]),
    ],
)
def test_tasks_that_add_tokens_are_refused(edited, refuses, tmp_path, kind, changes, words):
    path = edited(commands.trained(kind).last, lambda content: content["cfg"]["task"].update(changes))
    refuses("export", path, tmp_path / "model", words=words)


def test_a_classifier_takes_no_pieces(classifiers, pieces_model, refuses, tmp_path):
    words = ["checkpoint_last.pt is a classifier", "leave --sentencepiece-model out"]
    refuses(
        "export", classifiers("values").last, tmp_path / "model", "--sentencepiece-model", pieces_model, words=words
    )


def test_dictionaries_that_are_missing_or_of_other_data_are_refused(translation, edited, refuses, tmp_path):
    target, text = tmp_path / "model", commands.trained("softmax")
    path = edited(text.last, lambda content: content["cfg"]["task"].update(data=None))
    refuses("export", path, target, words=["edited.pt does not say where its dictionary is", "--data"])
    refuses("export", text.last, target, "--data", tmp_path, words=[str(tmp_path / "dict.txt"), "--data"])
    shutil.copytree(translation.data, tmp_path / "bin")
    path = tmp_path / "bin/dict.de.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-8]))
    refuses("export", translation.last, target, "--data", tmp_path / "bin", words=["types", f"{tmp_path / 'bin'}"])
    path.write_bytes(b"\xff 3\n")
    refuses("export", translation.last, target, "--data", tmp_path / "bin", words=["dict.de.txt", "damaged"])
    path.unlink()
    refuses("export", translation.last, target, "--data", tmp_path / "bin", words=["dict.de.txt", "missing"])


def test_other_wrong_arguments_are_refused(translation, refuses, tmp_path, monkeypatch):
    target = tmp_path / "model"
    refuses("export", tmp_path / "none.pt", target, words=["none.pt"])
    (tmp_path / "text").write_text("text")
    refuses("export", tmp_path / "text", target, words=["text is not a checkpoint"])
    refuses("export", translation.last, ".", words=[". exists", "new folder"])
    for name, shown in ((tmp_path / "none",) * 2, (tmp_path / "text",) * 2, ("", "empty")):
        words = [f"--sentencepiece-model is {shown}", "not a SentencePiece model"]
        refuses("export", translation.last, target, "--sentencepiece-model", name, words=words)
    find = importlib.util.find_spec
    for package in ("onnx", "mega_runtime"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util, "find_spec", lambda name, missing=package: None if name == missing else find(name)
            )
            refuses("export", translation.last, target, words=[f"{package} is not installed", "pip install"])


def test_weights_that_are_not_finite_are_refused(translation, refuses, edited, tmp_path):
    path = edited(translation.last, lambda content: content["model"]["encoder.layers.0.mixer.ema.omega"].fill_(np.nan))
    refuses("export", path, tmp_path / "model", words=["NaN or infinity", "omega"])
