"""A folder that is incomplete, changed, too new or something else is refused in one sentence with a remedy."""

import hashlib
import json
import shutil

import pytest

from mega_fairseq.cli.export import replace
from mega_fairseq.export.folder import write_config
from mega_fairseq.models.half_lives import of_states
from mega_runtime import Classifier, FolderError, LanguageModel, Translator
from mega_runtime import folder as folders
from mega_runtime.folder import FORMAT
from tests.helpers.exported import language, translation

FILES = {
    "translation": ["encoder.onnx", "source.txt", "step.onnx", "target.txt", "weights.bin"],
    "translation, int8": ["encoder.onnx", "probe.onnx", "source.txt", "step.onnx", "target.txt", "weights.bin"],
    "language": ["step.onnx", "target.txt", "text.onnx", "weights.bin"],
}
CASES = [(kind, name) for kind, names in FILES.items() for name in names]


@pytest.fixture
def copied(tmp_path):
    """A copy of an exported folder, and the class that reads it."""

    def make(kind):
        build, reader = (language, LanguageModel) if kind == "language" else (translation, Translator)
        _, loaded = build("int8" if "int8" in kind else "float32")
        return shutil.copytree(loaded.folder.path, tmp_path / "copy"), reader

    return make


def refused(call, *words):
    """Checks that it fails with one sentence with these words."""
    with pytest.raises(FolderError) as error:
        call()
    said = str(error.value)
    assert said.isprintable()
    assert said.count(";") == 1
    assert not [word for word in map(str, words) if word not in said], said


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_consists_of_these_files_and_can_be_moved(kind, copied, tmp_path):
    folder, reader = copied(kind)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", *FILES[kind]])
    moved = folder.rename(tmp_path / "gr\u00fc\u00dfe und so")
    reader(moved)
    reader(str(moved))


def test_a_name_that_is_not_utf8_is_refused(copied):
    folder, reader = copied("translation")
    refused(lambda: reader(folder.rename(folder.with_name("bad\udcff"))), "not UTF-8", "rename")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_missing_file_is_named(kind, name, copied):
    folder, reader = copied(kind)
    (folder / name).unlink()
    refused(lambda: reader(folder), folder / name, "No such file", "copy the folder again")


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        *((*case, "middle") for case in CASES),
        *(("translation", "weights.bin", change) for change in ("first", "last", "cut", "longer", "empty")),
    ],
)
def test_a_changed_file_is_named(kind, name, change, copied):
    folder, reader = copied(kind)
    content = bytearray((folder / name).read_bytes())
    place = {"first": 0, "middle": len(content) // 2, "last": -1}.get(change)
    if place is not None:
        content[place] ^= 1
    content = {"cut": content[:-1], "longer": content + b"\0", "empty": b""}.get(change, content)
    (folder / name).write_bytes(content)
    refused(lambda: reader(folder), folder / name, "incomplete or was changed", "copy the folder again")


@pytest.mark.parametrize("change", ["cut", "empty", "list", "binary", "number", "no format", "infinite", "deep"])
def test_a_damaged_config_is_named(change, copied):
    folder, reader = copied("translation")
    path = folder / "config.json"
    content = {
        "cut": path.read_bytes()[:-20],
        "empty": b"",
        "list": b"[1, 2]",
        "binary": b"\xff\xfe\x00",
        "number": b"1",
        "no format": b'{"kind": "translation model"}',
        "infinite": b'{"kind": "translation model", "format": 1e999}',
        "deep": b"[" * 100_000,
    }[change]
    path.write_bytes(content)
    refused(lambda: reader(folder), path, "is damaged", "copy the folder again")


@pytest.mark.parametrize(("one", "other"), [("200", "201"), ('"beam": 5', '"beam": 4'), ("\n ", "\n"), ("}\n", "}")])
def test_a_changed_config_is_named(one, other, copied):
    folder, reader = copied("translation")
    text = (folder / "config.json").read_text()
    assert one in text
    (folder / "config.json").write_text(text.replace(one, other))
    refused(lambda: reader(folder), folder / "config.json", "incomplete or was changed", "copy the folder again")


def test_a_config_of_earlier_versions_has_no_checksum_of_itself(copied):
    folder, reader = copied("translation")
    config = json.loads((folder / "config.json").read_text())
    del config["checksum"]
    (folder / "config.json").write_text(json.dumps(config))
    reader(folder)


@pytest.mark.parametrize("place", ["../secret", "/etc/hostname"])
def test_files_elsewhere_are_not_read(place, copied, tmp_path):
    folder, reader = copied("translation")
    config = json.loads((folder / "config.json").read_text())
    (folder.parent / "secret").write_text("one\n")
    del config["checksum"]
    kept = json.dumps(config)
    config["text"]["target"] = place
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: reader(folder), folder / "config.json", "damaged", "copy the folder again")
    config = json.loads(kept)
    config["files"][place] = "0"
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: reader(folder), place, "not in the folder", "copy the folder again")


@pytest.mark.parametrize("graph", ["encoder.onnx", "step.onnx"])
@pytest.mark.parametrize("kind", ["translation", "translation, int8"])
def test_an_export_that_is_replaced_while_it_is_read_is_not_mixed(kind, graph, copied, tmp_path, monkeypatch):
    folder, reader = copied("translation")
    newer = shutil.copytree(translation("int8" if "int8" in kind else "float32")[1].folder.path, tmp_path / "newer")
    config = json.loads((newer / "config.json").read_text())
    write_config(newer, {**config, "differences": {}})  # as of other weights
    load = folders.onnxruntime.InferenceSession

    def replaced(path, *rest, **options):
        if path.endswith(graph) and newer.exists():
            replace(folder, newer)
            shutil.rmtree(newer)
        return load(path, *rest, **options)

    monkeypatch.setattr(folders.onnxruntime, "InferenceSession", replaced)
    refused(lambda: reader(folder), folder, "was replaced while it was read", "start again")
    reader(folder)


def test_a_graph_that_onnx_runtime_refuses_is_named(copied):
    folder, reader = copied("translation")
    config = json.loads((folder / "config.json").read_text())
    (folder / "step.onnx").write_text("of another version")
    config["files"]["step.onnx"] = hashlib.sha256(b"of another version").hexdigest()
    del config["checksum"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: reader(folder), "ONNX Runtime cannot load", folder / "step.onnx", "copy the folder")


def test_a_newer_format_asks_for_a_newer_runtime(copied):
    folder, reader = copied("translation")
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == FORMAT
    (folder / "config.json").write_text(json.dumps({"format": FORMAT + 1, "kind": "something new"}))
    refused(lambda: reader(folder), folder, f"format {FORMAT + 1}", "install a newer mega_runtime")


def test_something_else_than_a_folder_is_refused(tmp_path, copied):
    for reader in (Translator, LanguageModel, Classifier):
        refused(
            lambda reader=reader: reader(tmp_path / "none"), tmp_path / "none", "No such file", "mega-fairseq export"
        )
        refused(lambda reader=reader: reader(tmp_path), tmp_path, "No such file", "mega-fairseq export")
    (tmp_path / "file").write_text("")
    refused(lambda: Translator(tmp_path / "file"), tmp_path / "file", "Not a directory", "mega-fairseq export")
    folder, reader = copied("translation")
    (folder / "config.json").unlink()
    refused(lambda: reader(folder), "config.json", "No such file", "mega-fairseq export")


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        ("translation", LanguageModel, "contains a translation model; give the folder of a language model"),
        ("language", Translator, "contains a language model; give the folder of a translation model"),
        ("language", Classifier, "contains a language model; give the folder of a classifier"),
    ],
)
def test_another_kind_of_model_is_named(kind, other, words, copied):
    folder, _ = copied(kind)
    refused(lambda: other(folder), folder, words)


@pytest.mark.parametrize(("kind", "layers"), [("translation", 6), ("language", 2)])
def test_the_half_lives_are_those_of_the_model(kind, layers):
    """One row for each layer and direction, as `mega-fairseq inspect` shows them."""
    model, loaded = (language if kind == "language" else translation)("float32")
    found = loaded.config["half_lives"]
    assert found == of_states(model)["half_lives"]
    assert len(found) == layers
