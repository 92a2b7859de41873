"""What `mega-fairseq inspect` reports: known numbers, the tables and the figure."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli.inspect.numbers import half_lives
from mega_fairseq.cli.main import main
from mega_fairseq.modules import DampedEMA
from mega_fairseq.ops.position import rotate, t5_bucket
from tests import released
from tests.commands import MEGA, MEGA_SIZES, PLUGIN, TRAINING, as_words, fairseq, preprocess_pairs, records
from tests.sweeps import CHUNK, TASK
from tests.sweeps import SIZES as LM_SIZES
from tests.sweeps import UPDATES as LM_UPDATES

DIM, ORDER, WIDTH, SHARED = (MEGA_SIZES[f"encoder_{name}"] for name in ("embed_dim", "n_dim", "hidden_dim", "z_dim"))
FEED_FORWARD, LONGEST = MEGA_SIZES["encoder_ffn_embed_dim"], 1024
QUANTILES = ("min", "10%", "median", "90%", "max")


@pytest.fixture(scope="session")
def translation(tmp_path_factory):
    """A translation model after three updates, validated once, and the output of its training."""
    folder = tmp_path_factory.mktemp("inspected")
    few = ["--source-lang=de", "--target-lang=en", "--max-update=3", f"--save-dir={folder}"]
    said = fairseq("train", preprocess_pairs(folder), *PLUGIN, *MEGA, *TRAINING, *few)
    return SimpleNamespace(last=folder / "checkpoint_last.pt", said=said)


@pytest.fixture
def inspect(tmp_path, capsys):
    """Run the command in this process; returns stdout and PREFIX.json."""

    def call(path):
        code, (out, err) = main(["inspect", str(path), f"--out={tmp_path / 'out'}"]), capsys.readouterr()
        assert (code, err) == (0, ""), err
        return out, json.loads((tmp_path / "out.json").read_text())

    return call


@pytest.fixture
def edited(tmp_path):
    """Write a checkpoint after applying `change` to its content."""

    def make(path, change):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, tmp_path / "edited.pt")
        return tmp_path / "edited.pt"

    return make


def logit(p):
    return torch.tensor(np.log(p / (1 - p)))


def set_half_lives(content, name, lives, damping):
    """Give an EMA these half-lives (..., D, N): phi = 1 - alpha delta with delta = damping."""
    alpha = (1 - 0.5 ** (1 / lives)) / damping
    for leaf, value in (("alpha", alpha), ("delta", np.full_like(alpha, damping))):
        tensor = content["model"][f"{name}.mixer.ema.{leaf}"]
        tensor.copy_(logit(value).reshape(tensor.shape))


def row(found, name):
    (chosen,) = [row for row in found["half_lives"]["rows"] if row["name"] == name]
    return chosen


def line(out, table, start):
    """The words of a line in one of the tables."""
    (block,) = [block for block in out.split("\n\n") if block.startswith(table)]
    (found,) = [line for line in block.splitlines() if line.startswith(start)]
    return found.split()


# -------------------------------------------------------------------------------------------- half-lives


def test_known_half_lives_are_reported_for_each_layer_and_direction(translation, inspect, edited):
    states, chance = DIM * ORDER, np.random.default_rng(1)
    sides = {"encoder layer 0 forward": 1.0, "encoder layer 0 backward": 3.0, "decoder layer 0": 5.0}
    lives = {name: factor * np.geomspace(0.5, 1000, states) for name, factor in sides.items()}

    def change(content):
        both = [chance.permutation(lives[f"encoder layer 0 {way}"]) for way in ("forward", "backward")]
        set_half_lives(content, "encoder.layers.0", np.stack(both), damping=0.9)
        set_half_lives(content, "decoder.layers.0", chance.permutation(lives["decoder layer 0"]), damping=0.95)

    out, found = inspect(edited(translation.last, change))
    assert [row["name"] for row in found["half_lives"]["rows"]] == list(lives)
    for name, expected in lives.items():
        seen = row(found, name)
        at = [expected[round(share * (states - 1))] for share in (0, 0.1, 0.5, 0.9, 1)]
        assert [seen[quantile] for quantile in QUANTILES] == pytest.approx(at, rel=1e-4)
        beyond = (expected > 5).mean()  # the chunk of both sides
        assert 0.2 < beyond < 1
        assert (seen["chunk"], seen["beyond_chunk"]) == (5, pytest.approx(beyond))
        damping = 0.95 if name == "decoder layer 0" else 0.9
        assert (seen["delta"]["min"], seen["delta"]["max"]) == pytest.approx((damping, damping))
        assert seen["alpha"]["max"] == pytest.approx((1 - 0.5 ** (1 / expected[0])) / damping)
        printed = line(out, "half-lives", f"{name} ")
        as_printed = [f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in at]
        assert printed == [*name.split(), *as_printed, f"{beyond:.1%}"]


def test_histograms_count_each_state_once(translation, inspect, edited):
    lives = np.repeat([1.0, 8.0, 100.0], [DIM, 2 * DIM, DIM])
    halves = [lives, np.full_like(lives, 2.0)]
    path = edited(translation.last, lambda c: set_half_lives(c, "encoder.layers.0", np.stack(halves), damping=0.9))
    _, found = inspect(path)
    edges = found["half_lives"]["edges"]
    counts = row(found, "encoder layer 0 forward")["counts"]
    seen = [(count, edges[i], edges[i + 1]) for i, count in enumerate(counts) if count]
    assert [count for count, *_ in seen] == [DIM, 2 * DIM, DIM]
    for (_, low, high), value in zip(seen, (1.0, 8.0, 100.0)):
        assert low * (1 - 1e-4) <= value <= high * (1 + 1e-4)
    assert sum(row(found, "encoder layer 0 backward")["counts"]) == DIM * ORDER


def test_half_of_a_state_is_left_after_its_half_life():
    torch.manual_seed(1)
    ema, steps = DampedEMA(3, ndim=2), 7
    with torch.no_grad():
        ema.alpha.mul_(10)
        _, first = ema(torch.ones(1, 1, 3))
        _, later = ema(torch.zeros(1, steps, 3), first)
        expected = 0.5 ** (steps / half_lives(ema.coefficients(0).log_decay))
    np.testing.assert_allclose((later / first).flatten(), expected, rtol=1e-4)


def test_states_that_never_decay_have_infinite_half_lives(translation, inspect, edited):
    def change(content):
        alpha = content["model"]["decoder.layers.0.mixer.ema.alpha"]
        alpha[0, : DIM // 2] = -200.0  # an input weight of 0 in float32
        alpha[0, DIM // 2 :] = content["model"]["decoder.layers.0.mixer.ema.delta"][0, DIM // 2 :] = 50.0

    out, found = inspect(edited(translation.last, change))
    seen = row(found, "decoder layer 0")
    assert 0 < seen["min"] < 0.1
    assert (seen["90%"], seen["max"], seen["beyond_chunk"]) == (None, None, 0.5)
    assert line(out, "half-lives", "decoder layer 0")[-3:] == ["infinite", "infinite", "50.0%"]
    assert sum(seen["counts"]) == DIM * ORDER // 2


def test_a_model_with_equal_half_lives_is_drawn(sweep_folder, inspect, edited):
    def change(content):
        for name in ("decoder.layers.0", "decoder.layers.1"):
            content["model"][f"{name}.mixer.ema.alpha"].fill_(-200.0)

    _, found = inspect(edited(sweep_folder / "rotary.pt", change))
    assert sum(sum(row["counts"]) for row in found["half_lives"]["rows"]) == 0


def test_without_chunks_no_share_is_beyond_them(sweep_folder, inspect, edited, drawn):
    path = edited(sweep_folder / "rotary.pt", lambda c: c["cfg"]["model"].update(decoder_chunk_size=-1))
    out, found = inspect(path)
    assert row(found, "decoder layer 1")["beyond_chunk"] is None
    assert line(out, "half-lives", "decoder layer 1")[-2:] == ["no", "chunks"]
    assert ", no chunk, " in out.splitlines()[1]
    assert not drawn["vlines"]


# -------------------------------------------------------------------------------------------- parameters


def as_loaded(path):
    ((model,), _, _) = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model


def test_parameters_are_counted_as_in_the_loaded_model(translation, inspect):
    out, found = inspect(translation.last)
    model, counted = as_loaded(translation.last), found["parameters"]
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
    assert line(out, "parameters", "total  ")[1:] == [f"{counted['total']:,}"]
    assert line(out, "parameters", "total, tied")[4:] == [f"{counted['unique']:,}"]
    header = next(line for line in out.splitlines() if line.startswith("parameters "))
    assert " ".join(header.split()) == "parameters embedding mixer EMA feed-forward cross attention norms all"
    printed = [line for line in out.splitlines() if line.startswith("decoder layer 0 ")][0]
    assert header.index("cross attention") + len("cross attention") == printed.index(f"{cross:,}") + len(f"{cross:,}")


def test_tied_tensors_stored_twice_are_counted_once(translation, inspect, edited):
    def change(content):
        content["model"] = {name: tensor.clone() for name, tensor in content["model"].items()}  # as averaging does

    assert inspect(edited(translation.last, change))[1]["parameters"] == inspect(translation.last)[1]["parameters"]


def test_tied_adaptive_tables_are_counted_once(sweep_folder, inspect, tmp_path):
    sizes = as_words({f"decoder_{name}": size for name, size in {**LM_SIZES, "layers": 1, "chunk_size": CHUNK}.items()})
    adaptive = ["--adaptive-input", "--adaptive-softmax-cutoff=6,10", "--adaptive-softmax-factor=2"]
    tied = ["--adaptive-input-factor=2", "--tie-adaptive-weights", "--tie-adaptive-proj"]
    criterion = ["--criterion=mega_lm_cross_entropy", "--max-update=1", f"--save-dir={tmp_path}"]
    words = ["--arch=mega_lm", "--rel-pos-bias=rotary", *sizes, *adaptive, *tied, *LM_UPDATES, *criterion]
    fairseq("train", sweep_folder / "data", *TASK, *words)
    out, found = inspect(tmp_path / "checkpoint_last.pt")
    model, counted = as_loaded(tmp_path / "checkpoint_last.pt"), found["parameters"]
    assert counted["unique"] == sum(parameter.numel() for parameter in model.parameters())
    tables, projections = 6 * 16 + 4 * 8 + (len(model.decoder.dictionary) - 10) * 4, 16 * 8 + 16 * 4
    assert counted["total"] - counted["unique"] == tables + projections
    assert "head           adaptive softmax with cutoffs 6,10, tied to the embedding" in out.splitlines()


# ------------------------------------------------------------------------------------------ architecture


def test_the_architecture_and_the_training_are_reported(translation, inspect):
    out, found = inspect(translation.last)
    seen = found["architecture"]
    for side in ("encoder", "decoder"):
        sizes = {"D": DIM, "chunk": 5, "z": SHARED, "v": WIDTH, "N": ORDER}
        types = len(as_loaded(translation.last).decoder.dictionary)
        assert seen[side]["sizes"] == sizes
        assert (seen[side]["layers"], seen[side]["feed_forward"]) == (1, FEED_FORWARD)
        shown = f"{side}        1 layer, D 32, chunk 5, z 16, v 64, N 4, feed-forward 64, {types} types"
        assert shown in out.splitlines()
    (validated,) = records(translation.said, "valid")[-1:]
    assert (seen["updates"], seen["epoch"], seen["metric"]) == (3, 1, "loss")
    assert (seen["validation"], seen["best"]) == (pytest.approx(validated["valid_loss"]),) * 2
    for line in (
        "model          mega_transformer, task translation, de to en",
        "decoder mixer  mega, attention softmax, position bias simple, max positions 1024, activation silu",
        "norm           layernorm, before each layer",
        "head           softmax, tied to the embedding",
        f"trained        3 updates, epoch 1, criterion label_smoothed_cross_entropy, loss {seen['best']:.4g}, "
        f"best so far {seen['best']:.4g}",
        "precision      stored as float32, trained in float32",
    ):
        assert line in out.splitlines()


def test_the_epoch_is_that_of_the_last_update(translation, inspect, edited):
    """At an epoch's end fairseq stores the number of the next."""
    ended = {"epoch": 4, "iterations_in_epoch": 0}
    out, found = inspect(edited(translation.last, lambda c: c["extra_state"]["train_iterator"].update(ended)))
    assert found["architecture"]["epoch"] == 3
    assert "3 updates, epoch 3," in out


def test_a_language_model_has_only_a_decoder(sweep_folder, inspect):
    out, found = inspect(sweep_folder / "rotary.pt")
    seen = found["architecture"]["decoder"]
    options = {"D": "embed_dim", "v": "hidden_dim", "z": "z_dim", "N": "n_dim"}
    sizes = {name: LM_SIZES[option] for name, option in options.items()}
    assert (seen["layers"], seen["sizes"]) == (LM_SIZES["layers"], {**sizes, "chunk": CHUNK})
    assert "encoder" not in out
    assert "no validation" in out
    assert "cross attention" not in out
    model = as_loaded(sweep_folder / "rotary.pt")
    assert found["parameters"]["unique"] == sum(parameter.numel() for parameter in model.parameters())


def test_precision_and_truncation_are_reported(translation, inspect, edited):
    def change(content):
        content["model"] = {name: tensor.half() for name, tensor in content["model"].items()}
        content["cfg"]["common"].update(fp16=True, memory_efficient_fp16=True)
        content["cfg"]["model"].update(truncation_length=9, decoder_truncation_length=0, encoder_ffn_embed_dim=0)
        for name in [name for name in content["model"] if name.startswith("encoder.layers.0.feed_forward")]:
            del content["model"][name]
        content["cfg"]["task"]["source_lang"] = None  # as if taken from the names of the data
        content["extra_state"]["val_loss"] = float("nan")

    out, found = inspect(edited(translation.last, change))
    assert "precision      stored as float16, trained in fp16" in out.splitlines()
    assert "model          mega_transformer, task translation" in out.splitlines()
    assert "no feed-forward, " in out
    assert "encoder mixer  mega, truncation 9," in out
    assert found["architecture"]["decoder"]["options"]["truncation"] == 0
    assert found["architecture"]["validation"] is None
    before = row(inspect(translation.last)[1], "decoder layer 0")["median"]
    assert row(found, "decoder layer 0")["median"] == pytest.approx(before, rel=1e-2)


def test_data_and_files_of_embeddings_are_not_needed(translation, inspect, edited):
    def change(content):
        content["cfg"]["task"]["data"] = "nowhere"
        content["cfg"]["model"].update(encoder_embed_path="nowhere.txt", decoder_embed_path="nowhere.txt")

    assert inspect(edited(translation.last, change))[1]["parameters"] == inspect(translation.last)[1]["parameters"]


@pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
@pytest.mark.parametrize(
    ("kind", "name", "head"),
    [
        ("mega_model", "post_softmax_simple_enc8_decfull_trunc4", "softmax"),
        ("mega_lm", "adaptive_untied_simple_chunk8", "adaptive softmax with cutoffs 16,28"),
        ("mega_lm", "ce_softmax_rotary_chunk8", "softmax, tied to the embedding"),
    ],
)
def test_converted_checkpoints_are_inspected(kind, name, head, inspect, tmp_path, capsys):
    case = released.model(name, kind)
    path = released.convert(released.checkpoint(case), tmp_path)
    converted = capsys.readouterr().out
    out, found = inspect(path)
    assert f"{found['parameters']['unique']:,} parameters" in converted
    assert "number of updates unknown" in out
    assert found["architecture"]["head"] == head
    alpha, delta = (torch.sigmoid(case.parameters[f"decoder.layers.0.mega_layer.move.{n}"]) for n in ("delta", "alpha"))
    lives = np.log(0.5) / torch.log(1 - alpha * delta)
    seen = row(found, "decoder layer 0")
    assert (seen["min"], seen["max"]) == pytest.approx((lives.min().item(), lives.max().item()), rel=1e-4)
    assert seen["delta"]["max"] == pytest.approx(delta.max().item())  # the paper's delta, which the release calls alpha


# --------------------------------------------------------------------------------------- position scores


def scores(found):
    return {each["name"]: (each["first"], each["values"]) for each in found["position_scores"]}


def trained(found):
    return {each["name"]: each["trained"] for each in found["position_scores"]}


def test_simple_scores_are_reported_for_the_distances_that_occur(translation, inspect):
    tensors = torch.load(translation.last, weights_only=True)["model"]
    own, causal, cross = (
        tensors[f"{name}.position_bias.weight"]
        for name in ("encoder.layers.0.mixer", "decoder.layers.0.mixer", "decoder.layers.0.cross_attention")
    )
    assert scores(inspect(translation.last)[1]) == {
        "encoder layer 0": (-4, pytest.approx(own.tolist(), rel=1e-5)),
        "decoder layer 0": (-4, pytest.approx(causal[:5].tolist(), rel=1e-5)),  # nothing from the future
        "decoder layer 0 cross attention": (1 - LONGEST, pytest.approx(cross.tolist(), rel=1e-5)),
    }


def test_scores_that_had_no_gradient_are_reported_as_untrained(translation, inspect):
    """Sentences have up to 15 words of two pieces, position bias of cross attention has 1,024 positions."""
    tensors = torch.load(translation.last, weights_only=True)["model"]
    tensor = tensors["decoder.layers.0.cross_attention.position_bias.weight"]
    out, found = inspect(translation.last)
    first, last = trained(found)["decoder layer 0 cross attention"]
    assert -40 < first < -10
    assert 10 < last < 40
    assert 0.015 < tensor[: LONGEST - 1 + first].std() < 0.025  # as initialised
    assert trained(found)["encoder layer 0"] == [-4, 4]
    printed = " ".join(line(out, "position scores", "decoder layer 0 cross attention")[5:])
    assert printed == f"-1,023 to 1,023 {first} to {last}"


def test_without_an_optimizer_state_options_bound_what_was_trained(translation, inspect, edited):
    def change(content):
        content["last_optimizer_state"] = None
        content["cfg"]["dataset"]["max_tokens"] = 300
        content["cfg"]["task"].update(max_source_positions=200, max_target_positions=500)

    _, found = inspect(edited(translation.last, change))
    assert trained(found)["decoder layer 0 cross attention"] == [-299, 199]


def test_a_flattened_optimizer_state_is_read(translation, inspect, edited):
    """As --fp16 stores it."""

    def change(content):
        state = content["last_optimizer_state"]["state"]
        flat = {
            name: torch.cat([state[i][name].flatten() for i in sorted(state)]) for name in ("exp_avg", "exp_avg_sq")
        }
        content["last_optimizer_state"]["state"] = {0: flat}

    assert trained(inspect(edited(translation.last, change))[1]) == trained(inspect(translation.last)[1])


def test_segments_bound_what_a_language_model_without_chunks_learned(sweep_folder, inspect, edited):
    def change(content):
        content["cfg"]["model"].update(decoder_chunk_size=-1, max_target_positions=100)
        content["cfg"]["task"].update(tokens_per_sample=6, variant_block_multiple_max=3)

    _, found = inspect(edited(sweep_folder / "rotary.pt", change))
    assert {each["first"] for each in found["position_scores"]} == {-99}
    assert set(map(tuple, trained(found).values())) == {(-17, 0)}


def test_rotary_scores_are_inner_products_of_rotated_vectors(sweep_folder, inspect):
    tensors = torch.load(sweep_folder / "rotary.pt", weights_only=True)["model"]
    found = scores(inspect(sweep_folder / "rotary.pt")[1])
    assert list(found) == ["decoder layer 0", "decoder layer 1"]
    positions = torch.arange(CHUNK)
    for layer, (first, values) in enumerate(found.values()):
        a, b = (tensors[f"decoder.layers.{layer}.mixer.position_bias.{name}"] for name in "ab")
        expected = rotate(a, positions) @ rotate(b, positions).t()  # of query i and key j
        assert first == 1 - CHUNK
        assert values == pytest.approx(expected[-1].tolist(), rel=1e-4, abs=1e-6)


def with_bias(content, kind):
    content["cfg"]["model"]["rel_pos_bias"] = kind
    content["last_optimizer_state"] = None
    for name in [name for name in content["model"] if ".position_bias." in name]:
        del content["model"][name]
    if kind == "t5":
        for layer in range(LM_SIZES["layers"]):
            content["model"][f"decoder.layers.{layer}.mixer.position_bias.weight"] = layer + torch.arange(32.0)


def test_t5_scores_are_looked_up_by_bucket(sweep_folder, inspect, edited):
    out, found = inspect(edited(sweep_folder / "rotary.pt", lambda content: with_bias(content, "t5")))
    buckets = t5_bucket(torch.arange(1 - CHUNK, 1), causal=True)
    assert scores(found) == {f"decoder layer {i}": (1 - CHUNK, (i + buckets).tolist()) for i in range(2)}
    assert ", position bias t5," in out


@pytest.mark.parametrize("kind", ["rope", "alibi", "none"])
def test_without_a_learned_bias_there_are_no_scores(kind, sweep_folder, inspect, edited, drawn):
    out, found = inspect(edited(sweep_folder / "rotary.pt", lambda content: with_bias(content, kind)))
    assert found["position_scores"] == []
    assert f", position bias {kind}," in out
    assert "position scores" not in out
    assert not drawn["plot"]
    assert len(drawn["set_title"]) == 1


# ---------------------------------------------------------------------------------------------- the figure


@pytest.fixture
def drawn(monkeypatch):
    """The calls of matplotlib's methods, by name."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    calls = {"fill_between": [], "vlines": [], "plot": [], "set_title": [], "set_xlim": []}

    def listen(name, method):
        def call(self, *given, **how):
            calls[name].append((how.get("label"), *given) if name == "plot" else given)
            return method(self, *given, **how)

        monkeypatch.setattr(axes, name, call)

    for name in calls:
        listen(name, getattr(axes, name))
    return calls


def test_the_figure_has_a_histogram_for_each_row_and_a_panel_for_each_kind_of_scores(
    translation, inspect, drawn, tmp_path
):
    _, found = inspect(translation.last)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rows = found["half_lives"]["rows"]
    for (edges, base, tops), seen, place in zip(drawn["fill_between"], reversed(rows), range(3)):
        assert edges == found["half_lives"]["edges"]
        assert base == place
        heights = np.array(tops[:-1]) - place
        assert heights == pytest.approx(0.9 * np.array(seen["counts"]) / max(seen["counts"]))
    assert len(drawn["fill_between"]) == len(rows) == 3
    assert drawn["vlines"] == [((5, 5, 5), (0, 1, 2), (1, 2, 3))]
    titles = [title for (title,) in drawn["set_title"]]
    assert titles[1:] == [f"position scores, {part}" for part in ("encoder", "decoder", "decoder cross attention")]
    whole, reached = drawn["plot"][::2], drawn["plot"][1::2]
    assert [(x[0], x[-1], len(y)) for _, x, y in whole] == [(-4, 4, 9), (-4, 0, 5), (-1023, 1023, 2047)]
    assert [(label, [x[0], x[-1]]) for label, x, _ in reached] == list(trained(found).items())
    limits = [low for low, *_ in drawn["set_xlim"] if isinstance(low, float)]
    assert limits[-1] > -60  # most distances that training did not reach are beyond the panel


def test_without_matplotlib_there_is_no_figure(translation, tmp_path, monkeypatch, capsys):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    code = main(["inspect", str(translation.last), f"--out={tmp_path / 'out'}"])
    out, err = capsys.readouterr()
    assert (code, out.splitlines()[-1]) == (0, f"wrote {tmp_path / 'out.json'}"), err
    assert err == (
        f"{tmp_path / 'out'}.png was not drawn without matplotlib; install it and run the same command again\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
