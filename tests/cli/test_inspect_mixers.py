"""`mega-fairseq inspect` for every token mixer: its curves, decays and memory are those of its parameters."""

import pytest
import torch
from fairseq import checkpoint_utils

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.cli.main import main
from mega_fairseq.cli.split import load_split
from mega_fairseq.modules import MIXERS
from mega_fairseq.ops.attention.position import rotate
from tests.helpers.commands import as_words, fairseq, refused_by
from tests.helpers.mixer_checkpoints import CHUNK, HEADS, MODELS, language_checkpoint, translation_checkpoint
from tests.helpers.sweeps import TASK, UPDATES

pytestmark = pytest.mark.slow

SCORES, W, F = "position scores", "time weight w(t - u)", "time weight f(t - u)"
ALPHA, BETA, LOG_BETA = "query weight alpha(t)", "key weight beta(u)", "key weight log beta(u)"
GAMMA, C = "output factor gamma(t)", "bias c(t)"

# The parameter of each kind of curve. Tables over t - u appear by key minus query, so from their end.
SHOWN = {
    "mega": {SCORES: ""},
    "gau": {SCORES: ""},
    "flash": {SCORES: ""},
    "attention before": {W: "log_weight", LOG_BETA: "log_beta", GAMMA: "gamma"},
    "attention after": {F: "time_weight", ALPHA: "alpha", BETA: "beta", GAMMA: "gamma"},
    "gmlp": {F: "time_weight", ALPHA: "alpha", BETA: "beta", GAMMA: "gamma", C: "spatial_bias"},
    "aft": {W: "log_weight", LOG_BETA: "log_beta", GAMMA: "gamma"},
    "aft local": {W: "log_weight"},
}
DECAYING = {"mega"}
NOTHING = {"gau rope", "attention", "aft simple", "sparse"}


def parameters(path, layer, side="decoder"):
    """The mixer's parameters in a layer of a checkpoint."""
    prefix = f"{side}.layers.{layer}.mixer."
    tensors = torch.load(path, weights_only=False)["model"]
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def expected_curve(own, kind, parameter):
    """The first distance or place, and the curves: (H, n)."""
    if kind == SCORES:
        a, b = (rotate(own[f"position_bias.{name}"], torch.arange(CHUNK)) for name in "ab")
        return 1 - CHUNK, (a[-1] @ b.t()).unsqueeze(0)
    table = own[parameter].reshape(-1, own[parameter].size(-1))
    return (1 - table.size(1), table.flip(1)) if kind in (W, F) else (0, table)


def curves_of(found, name):
    return {each["kind"]: each for each in found["curves"] if each["name"] == name}


def test_every_mixer_is_tested():
    assert {name.split()[0] for name in MODELS} == set(MIXERS)
    assert {*SHOWN, *DECAYING, *NOTHING} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_curves_and_decays_are_those_of_the_parameters(name, sweep_folder, inspect, drawn, tmp_path):
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", name)
    out, found = inspect(path)
    assert found["architecture"]["decoder"]["mixer"] == name.split()[0]
    assert ("N" in found["architecture"]["decoder"]["sizes"]) == (name in DECAYING)
    drawn_lines = 0
    for layer in range(2):
        own, seen = parameters(path, layer), curves_of(found, f"decoder layer {layer}")
        assert list(seen) == list(SHOWN.get(name, {}))
        for kind, parameter in SHOWN.get(name, {}).items():
            first, expected = expected_curve(own, kind, parameter)
            assert seen[kind]["first"] == first
            torch.testing.assert_close(torch.tensor(seen[kind]["values"]), expected, rtol=1e-5, atol=1e-5)
            one = kind in (SCORES, GAMMA)
            assert seen[kind]["labels"] == ([""] if one else [f"head {head}" for head in range(HEADS)])
            assert seen[kind]["trained"] is None
            for label, values in zip(seen[kind]["labels"], seen[kind]["values"]):
                printed = [line for line in out.splitlines() if line.startswith(f"decoder layer {layer} {label}")]
                assert any(line.endswith(f" {values[-1]:.4g}") for line in printed)
            drawn_lines += len(expected)
    assert len(drawn["plot"]) == drawn_lines

    rows = {row["name"]: row for row in found["half_lives"]["rows"]}
    assert list(rows) == ([f"decoder layer {layer}" for layer in range(2)] if name in DECAYING else [])
    for layer, row in enumerate(rows.values()):
        own = parameters(path, layer)
        phi = 1 - torch.sigmoid(own["ema.alpha"]) * torch.sigmoid(own["ema.delta"])
        lives = (torch.tensor(0.5).log() / phi.log()).flatten()
        assert (row["min"], row["max"]) == pytest.approx((lives.min().item(), lives.max().item()), rel=1e-4)


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_a_mixer_without_curves_or_decays_has_a_sentence_instead_of_a_figure(name, sweep_folder, inspect, tmp_path):
    inspect(sweep_folder / "rotary.pt")
    assert (tmp_path / "out.png").exists()
    out, _ = inspect(language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", name))
    sentence = f"The decoder's mixer, {name.split()[0]}, has no learned decays or weights of positions with these"
    assert len([line for line in out.splitlines() if line.startswith(sentence)]) == 1
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'out.json'}"
    assert not (tmp_path / "out.png").exists()  # that of the other model


def test_an_encoder_has_curves_in_both_directions_and_each_side_its_own(translation, inspect, drawn, tmp_path):
    path = translation_checkpoint(
        translation.last,
        tmp_path / "model.pt",
        encoder_token_mixer="aft",
        encoder_attention_heads=HEADS,
        decoder_token_mixer="attention",
        decoder_attention_heads=HEADS,
        max_source_positions=20,
        max_target_positions=20,
    )
    out, found = inspect(path)
    for layer in range(2):
        (seen,) = curves_of(found, f"encoder layer {layer}").values()
        expected = parameters(path, layer, "encoder")["log_weight"].flip(1)
        assert seen["first"] == 1 - CHUNK
        torch.testing.assert_close(torch.tensor(seen["values"]), expected, rtol=1e-5, atol=1e-5)
        assert list(curves_of(found, f"decoder layer {layer} cross attention")) == [SCORES]
    assert "The decoder's mixer, attention, has no" in out
    assert "The encoder's mixer" not in out
    titles = [f"{W}, encoder layer {layer}" for layer in range(2)]
    assert [title for (title,) in drawn["set_title"]] == [*titles, f"{SCORES}, decoder cross attention"]


def test_quantiles_are_shown_of_many_heads(sweep_folder, inspect, tmp_path):
    options = {"decoder_embed_dim": 40, "decoder_attention_heads": 40, "decoder_time_beta": False}
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", "aft", **options)
    _, found = inspect(path)
    seen, table = curves_of(found, "decoder layer 1")[W], parameters(path, 1)["log_weight"].flip(1)
    assert seen["labels"] == [f"{quantile} of 40 heads" for quantile in ("min", "10%", "median", "90%", "max")]
    expected = torch.quantile(table, torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]), dim=0)
    torch.testing.assert_close(torch.tensor(seen["values"]), expected, rtol=1e-5, atol=1e-5)


def test_the_trained_range_of_heads_is_that_of_the_training_segments(sweep_folder, inspect, drawn, tmp_path):
    sizes = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2}
    form = {**sizes, "token_mixer": "aft", "decoder_aft_form": "local", "decoder_aft_reach": 30}
    words = as_words({"arch": "mega_lm", **form, "decoder_chunk_size": -1, "tokens_per_sample": 9})
    training = ["--criterion=mega_lm_cross_entropy", *UPDATES, f"--save-dir={tmp_path}"]
    fairseq("train", sweep_folder / "data", *TASK, *words, *training)
    out, found = inspect(tmp_path / "checkpoint_last.pt")
    (seen,) = found["curves"]
    assert (seen["first"], seen["trained"], len(seen["values"])) == (-29, [-8, 0], 2)
    values = " ".join(f"{seen['values'][1][-1 - distance]:.4g}" for distance in (8, 1, 0))
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert f"decoder layer 0 head 1 {values}" in shown  # nothing at -29 and -10
    lines = [(label, x[0], x[-1]) for label, x, _ in drawn["plot"]]
    assert lines == [(None, -29, 0), ("head 0", -8, 0), (None, -29, 0), ("head 1", -8, 0)]


# -------------------------------------------------------------------------------------------- memory


@torch.no_grad()
def expected_norms(path, tokens):
    """Norms of M / (g c) in each layer, M summed over all tokens of the g finished chunks at once."""
    ((model,), _, _) = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    inputs, layers = {}, model.eval().decoder.layers
    for number, layer in enumerate(layers):
        layer.mixer.register_forward_pre_hook(lambda mixer, given, i=number: inputs.update({i: given[0]}))
    model.decoder.extract_features(tokens)
    found = []
    for number, layer in enumerate(layers):
        values, shared = layer.mixer.values_and_shared(layer.mixer.norm(inputs[number]))
        _, (keys, *_) = layer.mixer.linear_maps(shared, torch.arange(tokens.size(1)))
        ends = range(CHUNK, tokens.size(1) + 1, CHUNK)
        found.append([(keys[:end].t() @ values[0, :end]).norm().item() / end for end in ends])
    return found


@pytest.mark.parametrize("shift", [False, True])
def test_the_memory_of_flash_is_shown_after_a_text(sweep_folder, inspect, drawn, tmp_path, shift):
    data, options = sweep_folder / "data", {"rel_pos_bias": "rope", "decoder_token_shift": shift}
    path = language_checkpoint(sweep_folder / "rotary.pt", tmp_path / "model.pt", "flash", **options)
    out, found = inspect(path)
    assert "--data DATA shows it" in out
    out, found = inspect(path, f"--data={data}")
    memory = found["memory"]
    assert len(memory["tokens"]) > 5
    assert memory["tokens"] == [CHUNK * (i + 1) for i in range(len(memory["tokens"]))]
    assert memory["tokens"][-1] + CHUNK > memory["text"]["tokens"]
    if not shift:
        streams = load_split(str(data), "valid").streams(f"size:{memory['tokens'][-1]}")
        tokens = streams.collater([streams[0]])["net_input"]["src_tokens"]
        for row, expected in zip(memory["rows"], expected_norms(path, tokens)):
            assert row["norms"] == pytest.approx(expected, rel=1e-4)
    (header,) = [line for line in out.splitlines() if line.startswith("norm of the memory per token")]
    assert header.split()[-3:] == ["32", "64", "128"]
    assert [(label, y) for label, _, y in drawn["plot"]] == [(row["name"], row["norms"]) for row in memory["rows"]]


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run_inspect(path, *options):
        return main(["inspect", str(path), f"--out={tmp_path / 'out'}", *map(str, options)]), *capsys.readouterr()

    return run_inspect


def test_data_without_use_or_of_another_dictionary_is_refused(sweep_folder, translation, call, tmp_path):
    data, flash = sweep_folder / "data", tmp_path / "model.pt"
    language_checkpoint(sweep_folder / "rotary.pt", flash, "flash")
    for path in (sweep_folder / "rotary.pt", translation.last):
        refused_by("inspect", call(path, f"--data={data}"), path, "running memory", "leave out --data")
    refused_by("inspect", call(flash, f"--data={tmp_path}"), "dict.txt")
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "dict.txt", "a") as dictionary:
        dictionary.write("more 1\n")
    refused_by("inspect", call(flash, f"--data={tmp_path}"), flash, "does not fit the", "types of dict.txt")
