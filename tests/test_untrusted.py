"""Checkpoints that anybody may have made: `inspect` and `sweep` read them without running what stands in them.

Where torch does the same by itself, since 2.6, fairseq's own commands do so with the plugin loaded. How `convert` reads
a released checkpoint is in test_cli.py.
"""

import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mega_fairseq.cli import untrusted
from mega_fairseq.cli.main import main
from mega_fairseq.cli.refusal import Refusal
from tests import released
from tests.commands import (
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA_LM,
    SIZES,
    STOCK,
    TRAINING,
    Running,
    fairseq,
    write_corpus,
)
from tests.sweeps import TASK, points

LEGACY = {"_use_new_zipfile_serialization": False}


class Hostile:
    """Creates a file when it is unpickled in the ordinary way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def content(sweep_folder):
    return torch.load(sweep_folder / "rotary.pt", weights_only=True)


@pytest.fixture(params=["inspect", "sweep"])
def refuses(request, sweep_folder, tmp_path, capsys):
    """Either command, which must refuse a file with one sentence that says these words, and write nothing."""

    def call(path, *words):
        before = sorted(tmp_path.iterdir())
        rest = {"inspect": [], "sweep": [str(sweep_folder / "data"), "--chunks=8", "--cpu"]}[request.param]
        code = main([request.param, str(path), *rest, f"--out={tmp_path / 'out'}"])
        out, err = capsys.readouterr()
        assert (code, out) == (1, ""), err
        assert err.startswith(f"mega-fairseq {request.param}: ")
        assert err[:-1].isprintable(), err
        assert ";" in err, "no remedy"
        assert not [word for word in map(str, words) if word not in err], err
        assert sorted(tmp_path.iterdir()) == before

    return call


def save(content, path, **how):
    torch.save(content, path, **how)
    return path


# ------------------------------------------------------------------------------------------ hostile ones


def with_hostile(content, place, path):
    if place == "all":
        return Hostile(path)
    if place == "options":
        return {**content, "cfg": {**content["cfg"], "optimizer": Namespace(lr=Hostile(path))}}
    return {**content, place: Hostile(path)}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("all", {}),
        ("cfg", {}),
        ("options", {}),
        ("model", LEGACY),
        ("extra_state", {}),
        ("last_optimizer_state", LEGACY),
    ],
)
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(content, refuses, tmp_path, place, how):
    path = save(with_hostile(content, place, tmp_path / "trap"), tmp_path / "hostile.pt", **how)
    refuses(path, path, "asks for", "open", "not executed")
    torch.load(path, weights_only=False)
    assert (tmp_path / "trap").exists(), "it would have run nothing anyway"


def test_it_is_refused_whatever_process_and_environment_let_torch_trust(content, refuses, tmp_path, monkeypatch):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trusted = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([open])
    try:
        during = set(torch.serialization.get_safe_globals())
        refuses(path, "open", "not executed")
        assert set(torch.serialization.get_safe_globals()) == during
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(trusted)


@pytest.mark.skipif(not released.READS_SAFELY, reason="older torch runs what stands in a checkpoint")
@pytest.mark.parametrize(
    "command",
    [["eval-lm", "--gen-subset=test"], ["generate", "--beam=1"], ["validate", "--valid-subset=test", "--batch-size=1"]],
    ids=lambda command: command[0],
)
def test_fairseqs_own_commands_refuse_it_under_this_torch(content, sweep_folder, tmp_path, command):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    name, *options = command
    code, said = Running(name, sweep_folder / "data", *TASK, f"--path={path}", *options, "--cpu").wait()
    assert code, said
    assert "UnpicklingError" in said
    assert "open was not an allowed global" in said
    assert not (tmp_path / "trap").exists()


@pytest.mark.skipif(not released.READS_SAFELY, reason="older torch runs what stands in a checkpoint")
@pytest.mark.parametrize("option", ["--restore-file", "--finetune-from-model"])
def test_fairseqs_training_does_not_start_from_it(content, sweep_folder, tmp_path, option):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    words = [*MEGA_LM, *LM_HEADS["softmax"], *LM_TRAINING, "--save-dir", tmp_path / "new", "--max-update=1"]
    code, said = Running("train", sweep_folder / "data", *LM, *words, f"{option}={path}").wait()
    assert code == 1, said
    assert "open was not an allowed global" in said
    assert not (tmp_path / "trap").exists()
    assert not list((tmp_path / "new").glob("*.pt"))


@pytest.mark.parametrize("command", ["inspect", "sweep"])
def test_it_is_refused_in_a_shell_as_well(content, sweep_folder, tmp_path, command):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    rest = {"inspect": [], "sweep": [str(sweep_folder / "data"), "--chunks=8", "--cpu"]}[command]
    words = [sys.executable, "-m", "mega_fairseq.cli", command, str(path), *rest]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"mega-fairseq {command}: {path}")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


def test_a_torchscript_program_is_refused_before_torch_reads_it(refuses, tmp_path, monkeypatch):
    class Program(torch.nn.Module):
        def forward(self, x):
            return x

    path = tmp_path / "program.pt"
    torch.jit.script(Program()).save(str(path))
    monkeypatch.setattr(torch, "load", None)
    refuses(path, path, "is a TorchScript program and was not executed")


def test_counts_of_a_log_are_passed_over_whatever_their_pickle_asks_of_numpy(content, tmp_path, capsys):
    class Forged:
        """Numbers whose bytes numpy would take for the addresses of objects."""

        def __reduce__(self):
            dtype = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 8, 63)
            return np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), dtype, False, b"A" * 8)

    path = save({**content, "extra_state": {"counts": Forged()}}, tmp_path / "forged.pt")
    code = main(["inspect", str(path), f"--out={tmp_path / 'out'}"])
    if released.READS_SAFELY:
        assert code == 0, capsys.readouterr().err
    else:  # older torch cannot be told to pass them over
        assert code == 1
        assert "is no checkpoint, or only a part of one" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ no checkpoints


@pytest.mark.parametrize("what", [b"", b"hello, world\n", b"cos\nsystem\n(S'ls'\ntR.", b"PK\x03\x04 no archive"])
def test_a_file_that_torch_did_not_write_is_refused(refuses, tmp_path, what):
    path = tmp_path / "any.pt"
    path.write_bytes(what)
    refuses(path, path)


@pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_part_of_a_checkpoint_is_refused(content, refuses, tmp_path, how):
    path = save(content, tmp_path / "part.pt", **how)
    whole = path.read_bytes()
    for share in (0.01, 0.5, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        refuses(path, path, "only a part of one", "again")


def test_what_is_not_there_or_no_file_is_refused(refuses, tmp_path):
    for name in ("none.pt", "."):
        refuses(tmp_path / name, f"there is no file {tmp_path / name}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: torch.zeros(3), "holds no model"),
        (lambda content: {**content, "model": [1.0]}, "holds no model"),
        (lambda content: {**content, "model": {**content["model"], "more": 1.0}}, "in place of 'more'"),
        (lambda content: {**content, "model": {"seen often": torch.zeros(1).expand(9)}}, "in place of 'seen often'"),
        (lambda content: {**content, "cfg": None}, "holds no options"),
        (lambda content: {**content, "optimizer_history": []}, "does not say how long"),
        (lambda content: {**content, "optimizer_history": [{"num_updates": "many"}]}, "does not say how long"),
    ],
)
def test_content_that_is_no_checkpoint_is_refused(content, refuses, tmp_path, change, words):
    refuses(save(change(content), tmp_path / "any.pt"), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder_layers": 10**9}, "asks for 1000000000 layers and holds"),
        ({"decoder_layers": "many"}, "asks for 'many' layers"),
        ({"decoder_layers": 1}, "do not fit its options"),
        ({"decoder_embed_dim": 8}, "do not fit its options"),
        ({"decoder_embed_dim": -8}, "make no model (--decoder-embed-dim is -8"),
        ({"rel_pos_bias": "none"}, "do not fit its options"),
        ({"rel_pos_bias": "nonsense"}, "make no model"),
        ({"rel_pos_bias": ["rotary"]}, "make no model"),
        ({"dropout": "often"}, "make no model"),
        ({"rel_pos_bias": "\x1b[31mX\x1b]0;owned\x07"}, "make no model"),
        ({"rel_pos_bias": "${"}, "make no model"),
        ({"decoder_layers": torch.zeros(2)}, "asks for"),
        ({"dropout": torch.zeros(2)}, "make no model"),
        ({"decoder_layers": 50, "decoder_embed_dim": 65536}, "do not fit its options"),
        ({"_name": "mega_lm_unheard_of"}, "is of the model mega_lm_unheard_of"),
        ({"_name": ["mega_lm"]}, "is of the model None"),
    ],
)
def test_options_that_are_not_the_tensors_are_refused(content, refuses, tmp_path, options, words):
    content["cfg"]["model"].update(options)
    refuses(save(content, tmp_path / "any.pt"), f"{tmp_path / 'any.pt'} ", words)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("decoder.embed_tokens.weight"),
        lambda tensors: tensors.pop("decoder.layers.1.mixer.ema.alpha"),
        lambda tensors: tensors.update(more=torch.zeros(2)),
        lambda tensors: tensors.update({"decoder.layers.0.mixer.mu": torch.zeros(2, 9)}),
        lambda tensors: tensors.update({"decoder.layers.0.mixer.mu": tensors["decoder.layers.0.mixer.mu"].long()}),
        lambda tensors: tensors.update({"decoder.embed_tokens.weight": torch.tensor(1.0)}),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(content, refuses, tmp_path, change):
    change(content["model"])
    refuses(save(content, tmp_path / "any.pt"))


# -------------------------------------------------------------------------------------- other people's ones


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A Transformer of fairseq's, after an update."""
    folder = tmp_path_factory.mktemp("stock")
    write_corpus(folder)
    files = [f"--{split}pref={folder / split}" for split in SIZES]
    fairseq("preprocess", "-s", "de", "-t", "en", *files, "--destdir", folder / "bin")
    few = ["--max-update=1", "--disable-validation", f"--save-dir={folder}"]
    fairseq("train", folder / "bin", *STOCK, *TRAINING, *few)
    return folder / "checkpoint_last.pt"


def test_a_transformer_is_refused_by_its_name(stock, refuses):
    refuses(stock, stock, "is of the model transformer_iwslt_de_en", "give")


def test_a_name_that_would_do_something_to_a_terminal_is_not_said(content, refuses, tmp_path):
    content["cfg"]["model"]["_name"] = "\x1b[2J"
    refuses(save(content, tmp_path / "any.pt"), "is of the model None")


@pytest.mark.parametrize("kind", ["mega_model", "mega_lm"])
def test_a_released_checkpoint_is_to_be_converted_first(refuses, tmp_path, kind):
    name = {"mega_model": "pre_softmax_simple_noffn", "mega_lm": "ce_softmax_rotary_chunk8"}[kind]
    refuses(save(released.checkpoint(released.model(name, kind)), tmp_path / "old.pt"), "convert it first")


# ------------------------------------------------------------------------------------------- our own ones


NEWER = pytest.mark.skipif(not released.READS_SAFELY, reason="older torch cannot be told of other names")
WAYS = [pytest.param(True, id="torch 2.6", marks=NEWER), pytest.param(False, id="older torch")]


def read(content, path, monkeypatch, names):
    monkeypatch.setattr(untrusted, "takes_names", lambda: names)
    return untrusted.load(str(save(content, path)), "somebody")


@pytest.mark.parametrize("names", WAYS)
def test_plain_options_and_counts_of_a_training_log_are_read(names, tmp_path, monkeypatch):
    content = {"counts": np.array([3, 2, 1]), "score": np.float64(2.5), "options": Namespace(lr=[0.1]), "raw": b"bytes"}
    found = read(content, tmp_path / "any.pt", monkeypatch, names)
    of_numpy = {"counts", "score"}  # which torch 2.6 can be told to pass over
    assert {name: found[name] for name in found.keys() - of_numpy} == {"options": Namespace(lr=[0.1]), "raw": b"bytes"}
    assert names == (not isinstance(found["counts"], np.ndarray)) == (found["score"] != 2.5)


@NEWER
@pytest.mark.parametrize("core", [b"core", b"_core"], ids=["numpy 1", "numpy 2"])
def test_the_plugin_lets_torch_read_numbers_of_another_numpy(core, tmp_path):
    path = save({"counts": np.arange(4)}, tmp_path / "log.pt", **LEGACY)  # names stand in it as lines
    for module in (b"_core", b"core"):
        path.write_bytes(path.read_bytes().replace(b"numpy.%s.multiarray" % module, b"numpy.%s.multiarray" % core))
    assert torch.load(path, weights_only=True)["counts"].tolist() == [0, 1, 2, 3]  # mega_fairseq.models is imported


@pytest.mark.parametrize("names", WAYS)
def test_nothing_else_is_read(names, tmp_path, monkeypatch):
    with pytest.raises(Refusal, match="asks for types.SimpleNamespace, which no checkpoint of somebody needs"):
        read(SimpleNamespace(), tmp_path / "any.pt", monkeypatch, names)


def test_a_training_whose_optimizer_has_no_dataclass_is_swept_and_inspected(sweep_folder, sweep, tmp_path):
    options = ["--arch=mega_lm_small", "--decoder-layers=1", "--decoder-embed-dim=8", "--decoder-chunk-size=8"]
    few = ["--max-update=1", "--max-tokens=200", "--disable-validation", "--cpu", f"--save-dir={tmp_path}"]
    criterion = ["--criterion=mega_lm_cross_entropy", "--optimizer=sgd", "--lr=0.1"]
    fairseq("train", sweep_folder / "data", *TASK, *options, *criterion, *few)
    path = tmp_path / "checkpoint_last.pt"
    assert type(torch.load(path, weights_only=False)["cfg"]["optimizer"]) is Namespace
    assert main(["inspect", str(path), f"--out={tmp_path / 'inspected'}"]) == 0
    assert sweep("--chunks=8", model=path)[0] == 0


def test_a_sweep_does_not_need_the_embeddings_that_training_started_from(content, sweep, tmp_path):
    content["cfg"]["model"]["decoder_embed_path"] = "nowhere.txt"
    path = save(content, tmp_path / "any.pt")
    assert sweep("--chunks=8", model=path)[0] == 0
    found = points(tmp_path / "out.json")
    assert sweep("--chunks=8", "--force")[0] == 0
    assert found[8, "splits:1"]["bits"] == points(tmp_path / "out.json")[8, "splits:1"]["bits"]
