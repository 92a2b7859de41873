"""`mega-fairseq inspect`: half-lives, parameters, curves and memories are those of the checkpoint's tensors."""

import json

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.cli.inspect.command import QUANTILES, half_lives
from mega_fairseq.cli.main import main
from mega_fairseq.cli.split import load_split
from mega_fairseq.modules import EXAMPLES, DampedEMA
from mega_fairseq.ops.attention.position import rotate, t5_bucket
from tests.helpers import released
from tests.helpers.commands import MEGA_SIZES, refused_by
from tests.helpers.mixer_checkpoints import HEADS, language_checkpoint
from tests.helpers.small_models import mixer_of
from tests.helpers.sweeps import CHUNK
from tests.helpers.sweeps import SIZES as LM_SIZES

pytestmark = pytest.mark.slow

DIM, ORDER, WIDTH, SHARED = (MEGA_SIZES[f"encoder_{name}"] for name in ("embed_dim", "n_dim", "hidden_dim", "z_dim"))
FEED_FORWARD, LONGEST = MEGA_SIZES["encoder_ffn_embed_dim"], 1024


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run_inspect(path, *options, out=tmp_path / "out"):
        return main(["inspect", str(path), f"--out={out}", *map(str, options)]), *capsys.readouterr()

    return run_inspect


def row(numbers, name):
    (chosen,) = [row for row in numbers["half_lives"]["rows"] if row["name"] == name]
    return chosen


def as_loaded(path):
    ((model,), _, _) = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model


def tensors_of(path, prefix):
    tensors = torch.load(path, weights_only=False)["model"]
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
    assert [row["name"] for row in numbers["half_lives"]["rows"]] == list(lives)
    for name, expected in lives.items():
        reported = row(numbers, name)
        at = [expected[round(share * (states - 1))] for share in QUANTILES.values()]
        assert [reported[quantile] for quantile in QUANTILES] == pytest.approx(at, rel=1e-4)
        beyond = (expected > 5).mean()  # the chunk of both sides
        assert (reported["chunk"], reported["beyond_chunk"]) == (5, pytest.approx(beyond))
        damping = 0.95 if name == "decoder layer 0" else 0.9
        assert (reported["delta"]["min"], reported["delta"]["max"]) == pytest.approx((damping, damping))
        assert reported["alpha"]["max"] == pytest.approx((1 - 0.5 ** (1 / expected[0])) / damping)
        assert sum(reported["counts"]) == states
        assert f"{beyond:.1%}" in (line.split()[-1] for line in out.splitlines() if line.strip())


def test_a_state_decays_to_half_after_its_half_life():
    torch.manual_seed(1)
    ema, steps = DampedEMA(3, ndim=2), 7
    with torch.no_grad():
        ema.alpha.mul_(10)
        _, first = ema(torch.ones(1, 1, 3))
        _, later = ema(torch.zeros(1, steps, 3), first)
        expected = 0.5 ** (steps / half_lives(ema.coefficients().log_decay[0]))
    np.testing.assert_allclose((later / first).flatten(), expected, rtol=1e-4)


def test_states_that_never_decay_have_infinite_half_lives(translation, sweep_folder, inspect, edited):
    def change(content):
        alpha = content["model"]["decoder.layers.0.mixer.ema.alpha"]
        alpha[0, : DIM // 2] = -200.0  # an input weight of 0 in float32
        alpha[0, DIM // 2 :] = content["model"]["decoder.layers.0.mixer.ema.delta"][0, DIM // 2 :] = 50.0

    _, numbers = inspect(edited(translation.last, change))
    reported = row(numbers, "decoder layer 0")
    assert 0 < reported["min"] < 0.1
    assert (reported["90%"], reported["max"], reported["beyond_chunk"]) == (None, None, 0.5)
    assert sum(reported["counts"]) == DIM * ORDER // 2

    def never(content):
        for name in ("decoder.layers.0", "decoder.layers.1"):
            content["model"][f"{name}.mixer.ema.alpha"].fill_(-200.0)

    _, numbers = inspect(edited(sweep_folder / "rotary.pt", never))
    assert sum(sum(row["counts"]) for row in numbers["half_lives"]["rows"]) == 0


# ------------------------------------------------------------------------- parameters, architecture


def test_parameters_are_counted_as_in_the_loaded_model(translation, inspect, edited):
    out, numbers = inspect(translation.last)
    model, counted = as_loaded(translation.last), numbers["parameters"]
    types = len(model.decoder.dictionary)
    assert counted["unique"] == sum(parameter.numel() for parameter in model.parameters())
    assert counted["total"] == counted["unique"] + types * DIM  # encoder and decoder share their embeddings
    attention = sum(
        (DIM * WIDTH + WIDTH, DIM * SHARED + SHARED, (DIM + 1) * (DIM + WIDTH + DIM), WIDTH * DIM + DIM, 4 * SHARED)
    )
    cross = (DIM * SHARED + SHARED) * 2 + DIM * 2 * DIM + 2 * DIM + 2 * (DIM * DIM + DIM) + 2 * LONGEST - 1
    layer = {"mixer": attention + 2 * 5 - 1, "feed-forward": 2 * DIM * FEED_FORWARD + FEED_FORWARD + DIM}
    assert counted["parts"] == {
        "encoder": {"embedding": types * DIM, "norms": 2 * DIM},
        "encoder layer 0": {**layer, "EMA": 2 * 4 * DIM * ORDER + DIM, "norms": 2 * 2 * DIM},
        "decoder": {"embedding": types * DIM, "norms": 2 * DIM},
        "decoder layer 0": {**layer, "EMA": 4 * DIM * ORDER + DIM, "cross attention": cross, "norms": 3 * 2 * DIM},
    }
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


@pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("mega_model", "post_softmax_simple_enc8_decfull_trunc4"), ("mega_lm", "adaptive_untied_simple_chunk8")],
)
def test_converted_checkpoints_are_inspected(kind, name, inspect, tmp_path, capsys):
    case = released.model(name, kind)
    path = released.convert(released.checkpoint(case), tmp_path)
    converted = capsys.readouterr().out
    _, numbers = inspect(path)
    assert f"{numbers['parameters']['unique']:,} parameters" in converted
    alpha, delta = (torch.sigmoid(case.parameters[f"decoder.layers.0.mega_layer.move.{n}"]) for n in ("delta", "alpha"))
    lives = np.log(0.5) / torch.log(1 - alpha * delta)
    reported = row(numbers, "decoder layer 0")
    assert (reported["min"], reported["max"]) == pytest.approx((lives.min().item(), lives.max().item()), rel=1e-4)
    assert reported["delta"]["max"] == pytest.approx(delta.max().item())  # the paper's delta; the release swaps names


# -------------------------------------------------------------------------------------------- curves

SCORES, W, F = "position scores", "time weight w(t - u)", "time weight f(t - u)"
ALPHA, BETA, LOG_BETA = "query weight alpha(t)", "key weight beta(u)", "key weight log beta(u)"
GAMMA, C = "output factor gamma(t)", "bias c(t)"
# The parameter of each kind of curve, by names of EXAMPLES. Tables over t - u appear from their end.
PARAMETERS = {
    "mega": {SCORES: ""},
    "gau": {SCORES: ""},
    "flash": {SCORES: ""},
    "attention": {},
    "attention, before": {W: "log_weight", LOG_BETA: "log_beta", GAMMA: "gamma"},
    "attention, after": {F: "time_weight", ALPHA: "alpha", BETA: "beta"},
    "gmlp": {F: "time_weight", ALPHA: "alpha", BETA: "beta", GAMMA: "gamma"},
    "gmlp, paper": {F: "time_weight", C: "spatial_bias"},
    "aft": {W: "log_weight", LOG_BETA: "log_beta", GAMMA: "gamma"},
    "aft, local": {W: "log_weight"},
    "aft, simple": {},
    "sparse": {},
}


def expected_curve(tensors, kind, parameter):
    """The first distance or place, and the curves: (H, n)."""
    if kind == SCORES:
        a, b = (rotate(tensors[f"position_bias.{name}"], torch.arange(CHUNK)) for name in "ab")
        return 1 - CHUNK, (a[-1] @ b.t()).unsqueeze(0)
    values = tensors[parameter].reshape(-1, tensors[parameter].size(-1))
    return (1 - values.size(1), values.flip(1)) if kind in (W, F) else (0, values)


def curves_of(numbers, name):
    return {curve["kind"]: curve for curve in numbers["curves"] if curve["name"] == name}


def test_every_mixer_with_a_description_is_inspected():
    described = {mixer_of(name) for name, config in EXAMPLES.items() if config.build().describe(1)}
    assert described <= {mixer_of(name) for name in PARAMETERS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_curves_and_decays_are_those_of_the_parameters(name, sweep_folder, inspect, drawn, tmp_path):
    options = {"rel_pos_bias": "rotary"} if SCORES in PARAMETERS[name] else {}
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", name, **options)
    out, numbers = inspect(path)
    assert numbers["architecture"]["decoder"]["mixer"] == mixer_of(name)
    lines = 0
    for layer in range(2):
        tensors, curves = (
            tensors_of(path, f"decoder.layers.{layer}.mixer."),
            curves_of(numbers, f"decoder layer {layer}"),
        )
        assert list(curves) == list(PARAMETERS[name])
        for kind, parameter in PARAMETERS[name].items():
            first, expected = expected_curve(tensors, kind, parameter)
            assert curves[kind]["first"] == first
            torch.testing.assert_close(torch.tensor(curves[kind]["values"]), expected, rtol=1e-5, atol=1e-5)
            one = kind in (SCORES, GAMMA)
            assert curves[kind]["labels"] == ([""] if one else [f"head {head}" for head in range(HEADS)])
            lines += len(expected)
    assert len(drawn["plot"]) == lines
    decaying = [f"decoder layer {layer}" for layer in range(2)] if name == "mega" else []
    assert [row["name"] for row in numbers["half_lives"]["rows"]] == decaying
    assert (tmp_path / "out.png").exists() == bool(lines or decaying)
    assert ("no learned decays" in out) == (not lines and not decaying)


def test_scores_are_reported_for_the_distances_that_occur(translation, inspect):
    names = {
        "encoder layer 0": "encoder.layers.0.mixer",
        "decoder layer 0": "decoder.layers.0.mixer",
        "decoder layer 0 cross attention": "decoder.layers.0.cross_attention",
    }
    _, numbers = inspect(translation.last)
    assert [curve["name"] for curve in numbers["curves"]] == list(names)
    for curve, name in zip(numbers["curves"], names.values()):
        weight = tensors_of(translation.last, f"{name}.position_bias.")["weight"]
        expected = weight[:5] if name == "decoder.layers.0.mixer" else weight  # causal
        assert curve["first"] == (1 - LONGEST if name.endswith("cross_attention") else -4)
        assert curve["values"] == [pytest.approx(expected.tolist(), rel=1e-5)]


@pytest.mark.parametrize("kind", ["t5", "rope"])
def test_scores_of_other_biases(kind, sweep_folder, inspect, edited):
    def change(content):
        content["cfg"]["model"]["rel_pos_bias"] = kind
        for name in [name for name in content["model"] if ".position_bias." in name]:
            del content["model"][name]
        for layer in range(LM_SIZES["layers"] if kind == "t5" else 0):
            content["model"][f"decoder.layers.{layer}.mixer.position_bias.weight"] = layer + torch.arange(32.0)

    _, numbers = inspect(edited(sweep_folder / "rotary.pt", change))
    buckets = t5_bucket(torch.arange(1 - CHUNK, 1), causal=True)
    expected = [[(layer + buckets).tolist()] for layer in range(LM_SIZES["layers"])] if kind == "t5" else []
    assert [curve["values"] for curve in numbers["curves"]] == expected


# -------------------------------------------------------------------------------------------- memory


@torch.no_grad()
def expected_norms(path, tokens):
    """Norms of M / (g c) in each layer, M summed over all tokens of the g finished chunks at once."""
    inputs, model, norms = {}, as_loaded(path).eval(), []
    for number, layer in enumerate(model.decoder.layers):
        layer.mixer.register_forward_pre_hook(lambda mixer, given, i=number: inputs.update({i: given[0]}))
    model.decoder.extract_features(tokens)
    for number, layer in enumerate(model.decoder.layers):
        x = layer.mixer.norm(inputs[number])
        values, shared = (torch.nn.functional.silu(project(x)) for project in (layer.mixer.values, layer.mixer.shared))
        _, (keys, *_) = layer.mixer.linear_maps(shared, torch.arange(tokens.size(1)))
        ends = range(CHUNK, tokens.size(1) + 1, CHUNK)
        norms.append([(keys[:end].t() @ values[0, :end]).norm().item() / end for end in ends])
    return norms


@pytest.mark.parametrize("shift", [False, True])
def test_the_memory_of_flash_is_shown_after_a_text(sweep_folder, inspect, drawn, tmp_path, shift):
    data, options = sweep_folder / "data", {"rel_pos_bias": "rope", "decoder_token_shift": shift}
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", "flash", **options)
    _, numbers = inspect(path, f"--data={data}")
    memory = numbers["memory"]
    assert memory["tokens"] == [CHUNK * (i + 1) for i in range(len(memory["tokens"]))]
    assert memory["tokens"][-1] + CHUNK > memory["text"]["tokens"] > 5 * CHUNK
    if not shift:
        streams = load_split(str(data), "valid").streams(f"size:{memory['tokens'][-1]}")
        tokens = streams.collater([streams[0]])["net_input"]["src_tokens"]
        for each, expected in zip(memory["rows"], expected_norms(path, tokens)):
            assert each["norms"] == pytest.approx(expected, rel=1e-4)
    assert len(drawn["plot"]) == len(memory["rows"])


def test_data_without_use_or_of_another_dictionary_is_refused(sweep_folder, translation, call, tmp_path):
    data, flash = sweep_folder / "data", tmp_path / "model.pt"
    language_checkpoint(sweep_folder / "rotary.pt", flash, "flash")
    for path in (sweep_folder / "rotary.pt", translation.last):
        refused_by("inspect", call(path, f"--data={data}"), path, "--data")
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "dict.txt", "a") as dictionary:
        dictionary.write("more 1\n")
    refused_by("inspect", call(flash, f"--data={tmp_path}"), flash, "dict.txt")


# --------------------------------------------------------------------------------------------- files


def test_the_figure_has_a_histogram_for_each_row_and_a_panel_for_each_kind(translation, inspect, drawn, tmp_path):
    _, numbers = inspect(translation.last)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn["fill_between"]) == len(drawn["vlines"]) == len(numbers["half_lives"]["rows"]) == 3
    assert len(drawn["set_title"]) == 1 + len(numbers["curves"])


def test_an_inspection_replaces_an_earlier_one_but_no_other_files(sweep_folder, call, tmp_path):
    path = sweep_folder / "rotary.pt"
    for _ in range(2):
        assert call(path)[0] == 0
        assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json", "out.png"]
    assert json.loads((tmp_path / "out.json").read_text())["checkpoint"] == str(path)
    for name, text in (("a.json", "precious"), ("b.json", "[1]"), ("d.png", "precious")):
        (tmp_path / name).write_text(text)
        refused_by("inspect", call(path, out=tmp_path / name[0]), tmp_path / name, "--out")
        assert (tmp_path / name).read_text() == text
    refused_by("inspect", call("none.pt", out="missing/out"), "missing")


def test_a_diverged_model_is_refused_with_the_name_of_a_tensor(sweep_folder, call, edited):
    def change(content):
        content["model"]["decoder.layers.1.mixer.ema.alpha"][0, 0, 0] = float("nan")

    refused_by("inspect", call(edited(sweep_folder / "rotary.pt", change)), "decoder.layers.1.mixer.ema.alpha")
