"""What `mega-fairseq inspect` reports: half-lives, parameters and the architecture."""

import re

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.cli.inspect.numbers import half_lives
from mega_fairseq.modules import DampedEMA
from tests.helpers import released
from tests.helpers.commands import MEGA_SIZES, as_words, fairseq, records
from tests.helpers.sweeps import CHUNK, TASK
from tests.helpers.sweeps import SIZES as LM_SIZES
from tests.helpers.sweeps import UPDATES as LM_UPDATES

pytestmark = pytest.mark.slow

DIM, ORDER, WIDTH, SHARED = (MEGA_SIZES[f"encoder_{name}"] for name in ("embed_dim", "n_dim", "hidden_dim", "z_dim"))
FEED_FORWARD, LONGEST = MEGA_SIZES["encoder_ffn_embed_dim"], 1024
QUANTILES = ("min", "10%", "median", "90%", "max")


def logit(p):
    return torch.tensor(np.log(p / (1 - p)))


def set_half_lives(content, name, lives, damping):
    """Gives an EMA these half-lives (..., D, N): phi = 1 - alpha delta with delta = damping."""
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


def test_a_state_decays_to_half_after_its_half_life():
    torch.manual_seed(1)
    ema, steps = DampedEMA(3, ndim=2), 7
    with torch.no_grad():
        ema.alpha.mul_(10)
        _, first = ema(torch.ones(1, 1, 3))
        _, later = ema(torch.zeros(1, steps, 3), first)
        expected = 0.5 ** (steps / half_lives(ema.coefficients()[0].log_decay))
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


def test_without_chunks_no_share_beyond_the_chunk_is_reported(sweep_folder, inspect, edited, drawn):
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
    assert seen["best"] == pytest.approx(validated["valid_loss"])
    for line in (
        "model          mega_transformer, task translation, de to en",
        "decoder mixer  mega, position bias simple, max positions 1024, attention softmax, activation silu",
        "norm           layernorm, before each layer",
        "head           softmax, tied to the embedding",
        f"trained        3 updates, epoch 1, criterion label_smoothed_cross_entropy, best loss {seen['best']:.4g}",
        "precision      stored as float32, trained in float32",
    ):
        assert line in out.splitlines()


def test_the_epoch_is_that_of_the_last_update(translation, inspect, edited):
    """At the end of an epoch, fairseq stores the number of the next one."""
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
        content["extra_state"]["best"] = float("nan")

    out, found = inspect(edited(translation.last, change))
    assert "precision      stored as float16, trained in fp16" in out.splitlines()
    assert "model          mega_transformer, task translation" in out.splitlines()
    assert "no feed-forward, " in out
    assert re.search(r"^encoder mixer  mega, .*truncation 9,", out, re.MULTILINE)
    assert found["architecture"]["decoder"]["options"]["truncation"] == 0
    assert found["architecture"]["best"] is None
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


@pytest.mark.parametrize(
    ("kind", "inputs", "head"),
    [
        ("bytes", "260 types", "2 classes, of the mean over positions of both inputs"),
        ("values", "real numbers", "2 classes, of the mean over positions"),
    ],
)
def test_a_classifier_is_shown_with_its_inputs_and_classes(classifiers, inspect, kind, inputs, head):
    trained = classifiers(kind)
    said, numbers = inspect(trained.last)
    assert re.search(rf"^encoder +1 layer, D 32, chunk 5, .*, {inputs}$", said, re.MULTILINE)
    assert re.search(rf"^head +{head}$", said, re.MULTILINE)
    weights = torch.load(trained.last, weights_only=True)["model"]
    buffers = sum(tensor.numel() for name, tensor in weights.items() if "running" in name or "tracked" in name)
    assert numbers["parameters"]["unique"] == sum(tensor.numel() for tensor in weights.values()) - buffers
    assert [row["name"] for row in numbers["half_lives"]["rows"]] == [
        f"encoder layer 0 {d}ward" for d in ("for", "back")
    ]
