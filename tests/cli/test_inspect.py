"""`mega-fairseq inspect`: half-lives and parameters are those of the checkpoint's tensors."""

import json

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.cli.inspect import QUANTILES
from mega_fairseq.modules import EXAMPLES
from tests.helpers.commands import MEGA_SIZES
from tests.helpers.small_models import mixer_of
from tests.helpers.sweeps import language_checkpoint

pytestmark = pytest.mark.slow

DIM, ORDER, FEED_FORWARD = (MEGA_SIZES[f"encoder_{name}"] for name in ("embed_dim", "n_dim", "ffn_embed_dim"))


@pytest.fixture
def inspect(cli, tmp_path):
    """Runs the command; returns stdout and the content of PREFIX.json."""

    def run_inspect(path):
        code, out, err = cli("inspect", path, f"--out={tmp_path / 'out'}")
        assert (code, err) == (0, ""), err
        return out, json.loads((tmp_path / "out.json").read_text())

    return run_inspect


def row(numbers, name):
    (chosen,) = [row for row in numbers["half_lives"] if row["name"] == name]
    return chosen


def as_loaded(path):
    ((model,), _, _) = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model


# -------------------------------------------------------------------------------------------- half-lives


def set_half_lives(content, name, lives, damping):
    """Gives an EMA these half-lives (..., D, N): phi = 1 - alpha delta with delta = damping."""
    alpha = (1 - 0.5 ** (1 / lives)) / damping
    for leaf, value in (("alpha", alpha), ("delta", np.full_like(alpha, damping))):
        tensor = content["model"][f"{name}.mixer.ema.{leaf}"]
        tensor.copy_(torch.tensor(np.log(value / (1 - value))).reshape(tensor.shape))


def test_known_half_lives_are_reported_for_each_direction(translation, inspect, edited):
    states, chance = DIM * ORDER, np.random.default_rng(1)
    sides = {"encoder layer 0 forward": 1.0, "encoder layer 0 backward": 3.0, "decoder layer 0": 5.0}
    lives = {name: factor * np.geomspace(0.5, 1000, states) for name, factor in sides.items()}

    def change(content):
        both = [chance.permutation(lives[f"encoder layer 0 {way}"]) for way in ("forward", "backward")]
        set_half_lives(content, "encoder.layers.0", np.stack(both), damping=0.9)
        set_half_lives(content, "decoder.layers.0", chance.permutation(lives["decoder layer 0"]), damping=0.95)

    out, numbers = inspect(edited(translation.last, change))
    assert [row["name"] for row in numbers["half_lives"]] == list(lives)
    for name, expected in lives.items():
        reported = row(numbers, name)
        at = [expected[round(share * (states - 1))] for share in QUANTILES.values()]
        assert [reported[quantile] for quantile in QUANTILES] == pytest.approx(at, rel=1e-4)
        beyond = (expected > 5).mean()  # the chunk of both sides
        assert (reported["chunk"], reported["beyond_chunk"]) == (5, pytest.approx(beyond))
        assert f"{beyond:.1%}" in (line.split()[-1] for line in out.splitlines() if line.strip())


def test_states_that_never_decay_have_infinite_half_lives(translation, sweep_folder, inspect, edited):
    def change(content):
        alpha = content["model"]["decoder.layers.0.mixer.ema.alpha"]
        alpha[0, : DIM // 2] = -200.0  # an input weight of 0 in float32
        alpha[0, DIM // 2 :] = content["model"]["decoder.layers.0.mixer.ema.delta"][0, DIM // 2 :] = 50.0

    _, numbers = inspect(edited(translation.last, change))
    reported = row(numbers, "decoder layer 0")
    assert 0 < reported["min"] < 0.1
    assert (reported["90%"], reported["max"], reported["beyond_chunk"]) == (None, None, 0.5)

    def never(content):
        for name in ("decoder.layers.0", "decoder.layers.1"):
            content["model"][f"{name}.mixer.ema.alpha"].fill_(-200.0)

    _, numbers = inspect(edited(sweep_folder / "rotary.pt", never))
    assert {row["min"] for row in numbers["half_lives"]} == {None}


# ------------------------------------------------------------------------- parameters, architecture


def test_parameters_are_counted_as_in_the_loaded_model(translation, inspect, edited):
    out, numbers = inspect(translation.last)
    model, counted = as_loaded(translation.last), numbers["parameters"]
    types = len(model.decoder.dictionary)
    assert counted["unique"] == sum(parameter.numel() for parameter in model.parameters())
    assert counted["total"] == counted["unique"] + types * DIM  # encoder and decoder share their embeddings
    encoder, decoder = (sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.decoder))
    assert counted["parts"] == {"encoder": encoder, "decoder": decoder}
    assert f"{counted['total']:,}" in out
    assert f"{counted['unique']:,}" in out

    def untie(content):
        content["model"] = {name: tensor.clone() for name, tensor in content["model"].items()}  # as averaging does

    assert inspect(edited(translation.last, untie))[1]["parameters"] == counted


def test_the_architecture_is_that_of_the_options(translation, inspect, edited):
    def change(content):
        content["model"] = {name: tensor.half() for name, tensor in content["model"].items()}
        content["cfg"]["task"]["data"] = "nowhere"
        content["cfg"]["model"].update(truncation_length=9, encoder_embed_path="nowhere.txt")

    found = inspect(edited(translation.last, change))[1]["architecture"]
    assert (found["model"], found["task"], found["updates"]) == ("mega_transformer", "translation", 3)
    assert found["stored_as"] == "float16"
    for side in ("encoder", "decoder"):
        assert (found[side]["layers"], found[side]["mixer"], found[side]["feed_forward"]) == (1, "mega", FEED_FORWARD)
        assert {"dim": DIM, "chunk_size": 5}.items() <= found[side]["config"].items()


@pytest.mark.parametrize("name", {mixer_of(name): name for name in EXAMPLES}.values())
def test_every_mixer_is_inspected(name, sweep_folder, inspect, tmp_path):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", name)
    out, numbers = inspect(path)
    assert numbers["architecture"]["decoder"]["mixer"] == mixer_of(name)
    decaying = [f"decoder layer {layer}" for layer in range(2)] if EXAMPLES[name].build().log_decays() else []
    assert [row["name"] for row in numbers["half_lives"]] == decaying
    assert ("no half-lives" in out) == (not decaying)
    turning = decaying if mixer_of(name) == "megalodon" else []
    assert [row["name"] for row in numbers["periods"]] == turning
    assert ("periods of states" in out) == bool(turning)


# --------------------------------------------------------------------------------------------- files


def test_an_inspection_replaces_an_earlier_one_but_no_other_files(sweep_folder, inspect, refuses, tmp_path):
    path = sweep_folder / "rotary.pt"
    for _ in range(2):
        inspect(path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json"]
    assert json.loads((tmp_path / "out.json").read_text())["checkpoint"] == str(path)
    for name, text in (("a.json", "precious"), ("b.json", "[1]")):
        (tmp_path / name).write_text(text)
        refuses("inspect", path, f"--out={tmp_path / name[0]}", words=[tmp_path / name, "--out"])
    refuses("inspect", "none.pt", "--out=missing/out", words=["missing"])


def test_a_diverged_model_is_refused_with_the_name_of_a_tensor(sweep_folder, refuses, edited, tmp_path):
    def change(content):
        content["model"]["decoder.layers.1.mixer.ema.alpha"][0, 0, 0] = float("nan")

    path = edited(sweep_folder / "rotary.pt", change)
    refuses("inspect", path, f"--out={tmp_path / 'out'}", words=["decoder.layers.1.mixer.ema.alpha"])
