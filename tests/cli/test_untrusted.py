"""`inspect`, `sweep`, `convert` and `classify` read untrusted checkpoints without executing code in them.

fairseq's own commands do so too, with the plugin and torch 2.6 or newer.
"""

import random
import struct
import zipfile
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import untrusted
from tests.helpers import released
from tests.helpers.commands import Running, fairseq
from tests.helpers.released import save
from tests.helpers.sweeps import TASK

pytestmark = pytest.mark.slow

LEGACY = {"_use_new_zipfile_serialization": False}


class Hostile:
    """Creates a file when it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def content(sweep_folder):
    return torch.load(sweep_folder / "rotary.pt", weights_only=True)


@pytest.fixture
def inspect_refuses(refuses, tmp_path):
    """Checks that `inspect`, and so `sweep`, refuses a checkpoint."""
    return lambda path, *words: refuses("inspect", path, f"--out={tmp_path / 'out'}", words=words)


# -------------------------------------------------------------------------------------- code in checkpoints


@pytest.mark.parametrize(
    ("place", "how"), [("all", {}), ("options", {}), ("model", LEGACY), ("extra_state", {}), ("args", {})]
)
def test_code_in_a_checkpoint_is_refused_and_not_executed(content, inspect_refuses, tmp_path, place, how):
    hostile = Hostile(tmp_path / "trap")
    if place == "all":
        content = hostile
    elif place == "options":
        content["cfg"]["optimizer"] = Namespace(lr=hostile)
    else:
        content[place] = hostile
    path = save(content, tmp_path / "hostile.pt", **how)
    inspect_refuses(path, path, "asks for", "open", "not executed")
    torch.load(path, weights_only=False)
    assert (tmp_path / "trap").exists(), "this checkpoint contains no code that would be executed"


@pytest.mark.parametrize("command", ["inspect", "sweep", "convert", "classify"])
def test_code_is_refused_even_if_process_and_environment_trust_it(
    content, sweep_folder, refuses, tmp_path, monkeypatch, command
):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trusted = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([open])
    try:
        during = set(torch.serialization.get_safe_globals())
        out = f"--out={tmp_path / 'out'}"
        rest = {"inspect": [out], "classify": ["-"], "convert": [tmp_path / "ours.pt"]}
        rest["sweep"] = [sweep_folder / "data", "--chunks=8", "--cpu", out]
        refuses(command, path, *rest[command], words=["open", "not executed"])
        assert set(torch.serialization.get_safe_globals()) == during
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(trusted)


@pytest.mark.skipif(not released.READS_SAFELY, reason="older torch executes code in checkpoints")
def test_fairseqs_commands_refuse_code_with_this_torch(content, sweep_folder, tmp_path):
    path = save({**content, "extra_state": Hostile(tmp_path / "trap")}, tmp_path / "hostile.pt")
    code, said = Running("eval-lm", sweep_folder / "data", *TASK, f"--path={path}", "--gen-subset=test", "--cpu").wait()
    assert code, said
    assert "UnpicklingError" in said
    assert not (tmp_path / "trap").exists()


def test_a_torchscript_program_is_refused_before_torch_loads_it(inspect_refuses, tmp_path, monkeypatch):
    class Program(torch.nn.Module):
        def forward(self, x):
            return x

    path = tmp_path / "program.pt"
    torch.jit.script(Program()).save(str(path))
    monkeypatch.setattr(torch, "load", None)
    inspect_refuses(path, path, "TorchScript")


def test_arrays_in_a_training_log_are_ignored_whatever_they_contain(content, tmp_path, cli):
    class Forged:
        """An array whose bytes numpy would interpret as object addresses."""

        def __reduce__(self):
            dtype = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 8, 63)
            return np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), dtype, False, b"A" * 8)

    path = save({**content, "extra_state": {"counts": Forged()}}, tmp_path / "forged.pt")
    code, _, err = cli("inspect", path, f"--out={tmp_path / 'out'}")
    assert code == 0, err


# ------------------------------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("what", [b"", b"hello, world\n", b"cos\nsystem\n(S'ls'\ntR.", b"PK\x03\x04 no archive"])
def test_a_file_that_torch_did_not_write_is_refused(inspect_refuses, tmp_path, what):
    path = tmp_path / "any.pt"
    path.write_bytes(what)
    inspect_refuses(path, path)


@pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_truncated_checkpoint_is_refused(content, inspect_refuses, tmp_path, how):
    path = save(content, tmp_path / "part.pt", **how)
    whole = path.read_bytes()
    for share in (0.0, 0.01, 0.5, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        inspect_refuses(path, path, "only a part of one", "again")


def test_a_flipped_bit_never_gives_other_weights(content, inspect_refuses, refuses, tmp_path):
    """torch does not compare the checksums of the archive that it reads."""
    path, old = save(content, tmp_path / "flipped.pt"), tmp_path / "old.pt"
    save(released.checkpoint(released.model("pre_softmax_simple_noffn")), old)
    bits, whole, whole_old = random.Random(1), path.read_bytes(), old.read_bytes()

    inside = []  # where the contents of records are: after a header with name and padding
    for record in zipfile.ZipFile(path).infolist():
        start = record.header_offset + 30 + sum(struct.unpack_from("<2H", whole, record.header_offset + 26))
        inside.append((start, start + record.file_size))

    def flipped(whole, place):
        return whole[:place] + bytes([whole[place] ^ 1 << bits.randrange(8)]) + whole[place + 1 :]

    for _ in range(60):
        place = bits.randrange(len(whole))
        path.write_bytes(flipped(whole, place))
        try:
            tensors = untrusted.load(str(path), "somebody")["model"]
        except UserError:
            continue
        assert not any(start <= place < end for start, end in inside)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in content["model"].items())
    name = "decoder.layers.1.mixer.hidden.weight"
    path.write_bytes(flipped(whole, whole.index(content["model"][name].numpy().tobytes()) + 3))
    assert not torch.equal(torch.load(path, weights_only=True)["model"][name], content["model"][name])
    inspect_refuses(path, path, "only a part of one")
    old.write_bytes(flipped(whole_old, len(whole_old) // 2))
    if released.READS_SAFELY:
        refuses("convert", old, tmp_path / "ours.pt", words=[old, "only a part of one"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: torch.zeros(3), "contains no model"),
        (lambda content: {**content, "model": {**content["model"], "more": 1.0}}, "contains 'more'"),
        (lambda content: {**content, "model": {"expanded": torch.zeros(1).expand(9)}}, "contains 'expanded'"),
        (lambda content: {**content, "model": {"sparse": torch.ones(1).to_sparse()}}, "contains 'sparse'"),
        (lambda content: {**content, "model": {"short": torch.ones(1).to(torch.float8_e4m3fn)}}, "contains 'short'"),
        (lambda content: {**content, "model": {"meta": torch.ones(1, device="meta")}}, "contains 'meta'"),
        (lambda content: {**content, "cfg": None}, "contains no options"),
    ],
)
def test_content_other_than_a_checkpoint_is_refused(content, inspect_refuses, tmp_path, change, words):
    inspect_refuses(save(change(content), tmp_path / "any.pt"), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder_layers": 10**9}, "1000000000 layers"),
        ({"decoder_embed_dim": -8}, "--decoder-embed-dim is -8"),
        ({"rel_pos_bias": "\x1b[31mX\x1b]0;owned\x07"}, "invalid model options"),
        ({"decoder_layers": 50, "decoder_embed_dim": 65536}, "do not fit its options"),
        ({"_name": "mega_lm_unheard_of"}, "contains the model mega_lm_unheard_of"),
    ],
)
def test_options_that_do_not_fit_the_tensors_are_refused(content, inspect_refuses, tmp_path, options, words):
    content["cfg"]["model"].update(options)
    inspect_refuses(save(content, tmp_path / "any.pt"), f"{tmp_path / 'any.pt'} ", words)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("decoder.layers.1.mixer.ema.alpha"),
        lambda tensors: tensors.update({"more\x1b[2J": torch.zeros(2)}),
        lambda tensors: tensors.update({"decoder.layers.0.mixer.mu": tensors["decoder.layers.0.mixer.mu"].long()}),
        lambda tensors: tensors.update({"decoder.embed_tokens.weight": torch.tensor(1.0)}),
    ],
)
def test_tensors_that_do_not_fit_the_options_are_refused(content, inspect_refuses, tmp_path, change):
    change(content["model"])
    inspect_refuses(save(content, tmp_path / "any.pt"), "do not fit its options")


# ------------------------------------------------------------------------------------ complete checkpoints


def test_a_released_checkpoint_must_be_converted_first(inspect_refuses, tmp_path):
    content = released.checkpoint(released.model("pre_softmax_simple_noffn"))
    inspect_refuses(save(content, tmp_path / "old.pt"), "convert")


def test_a_namespace_of_options_and_arrays_of_a_training_log_are_read(tmp_path):
    content = {"counts": np.array([3, 2, 1]), "score": np.float64(2.5), "options": Namespace(lr=[0.1]), "raw": b"bytes"}
    found = untrusted.load(str(save(content, tmp_path / "any.pt")), "somebody")
    del found["counts"], found["score"]  # of any type
    assert found == {"options": Namespace(lr=[0.1]), "raw": b"bytes"}


def test_other_classes_are_refused(tmp_path):
    with pytest.raises(UserError, match="types.SimpleNamespace"):
        untrusted.load(str(save(SimpleNamespace(), tmp_path / "any.pt")), "somebody")


def test_options_without_a_dataclass_are_read(content, sweep_folder, sweep, cli, tmp_path):
    """As fairseq saves those of --optimizer sgd."""
    content["cfg"]["optimizer"] = Namespace(lr=[0.1])
    path = save(content, tmp_path / "model.pt")
    fairseq("eval-lm", sweep_folder / "data", *TASK, f"--path={path}", "--gen-subset=test", "--cpu")
    assert cli("inspect", path, f"--out={tmp_path / 'inspected'}")[0] == 0
    assert sweep("--chunks=8", model=path)[0] == 0


def test_memory_that_fairseq_leaves_uninitialised_may_be_nan():
    nan = torch.tensor([torch.nan])
    untrusted.check_finite({"decoder.adaptive_softmax.head._float_tensor": nan})
    with pytest.raises(UserError, match="'decoder.gamma'"):
        untrusted.check_finite({"decoder.gamma": nan})
