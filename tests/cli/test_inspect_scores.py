"""Position scores in `mega-fairseq inspect`, the range that training reached, and the figure."""

import sys

import numpy as np
import pytest
import torch

from mega_fairseq.cli.main import main
from mega_fairseq.ops.attention.position import rotate, t5_bucket
from tests.helpers.sweeps import CHUNK
from tests.helpers.sweeps import SIZES as LM_SIZES

pytestmark = pytest.mark.slow

LONGEST = 1024  # positions that fairseq's translation task allows


def scores(found):
    assert all((each["kind"], each["labels"]) == ("position scores", [""]) for each in found["curves"])
    return {each["name"]: (each["first"], *each["values"]) for each in found["curves"]}


def trained(found):
    return {each["name"]: each["trained"] for each in found["curves"]}


def test_simple_scores_are_reported_for_the_distances_that_occur(translation, inspect):
    tensors = torch.load(translation.last, weights_only=True)["model"]
    own, causal, cross = (
        tensors[f"{name}.position_bias.weight"]
        for name in ("encoder.layers.0.mixer", "decoder.layers.0.mixer", "decoder.layers.0.cross_attention")
    )
    assert scores(inspect(translation.last)[1]) == {
        "encoder layer 0": (-4, pytest.approx(own.tolist(), rel=1e-5)),
        "decoder layer 0": (-4, pytest.approx(causal[:5].tolist(), rel=1e-5)),  # causal
        "decoder layer 0 cross attention": (1 - LONGEST, pytest.approx(cross.tolist(), rel=1e-5)),
    }


def test_scores_without_gradients_are_reported_as_untrained(translation, inspect):
    """Sources have up to 15 tokens and targets up to 29; the bias of cross attention has 1,024 positions."""
    tensors = torch.load(translation.last, weights_only=True)["model"]
    tensor = tensors["decoder.layers.0.cross_attention.position_bias.weight"]
    out, found = inspect(translation.last)
    first, last = trained(found)["decoder layer 0 cross attention"]
    assert -40 < first < -10
    assert 10 < last < 40
    assert 0.015 < tensor[: LONGEST - 1 + first].std() < 0.025  # as initialised
    assert trained(found)["encoder layer 0"] == [-4, 4]
    values = tensor[LONGEST - 1 + torch.tensor([first, -10, -4, -1, 0, 1, 4, 10, last])]
    shown = f"-1,023 to 1,023 {first} to {last} " + " ".join(f"{value:.4g}" for value in values.tolist())
    assert f"decoder layer 0 cross attention {shown}" in [" ".join(line.split()) for line in out.splitlines()]


def test_without_an_optimizer_state_the_trained_range_is_unknown(translation, inspect, edited):
    out, found = inspect(edited(translation.last, lambda content: content.update(last_optimizer_state=None)))
    assert set(trained(found).values()) == {None}
    (printed,) = [line for line in out.splitlines() if line.startswith("decoder layer 0 cross attention")]
    words = printed.split()
    assert words[5:9] == ["-1,023", "to", "1,023", "unknown"]
    assert len(words[9:]) == 13  # values at all distances of the table


def test_a_flattened_optimizer_state_is_read(translation, inspect, edited):
    """As saved with --fp16."""

    def change(content):
        state = content["last_optimizer_state"]["state"]
        flat = {
            name: torch.cat([state[i][name].flatten() for i in sorted(state)]) for name in ("exp_avg", "exp_avg_sq")
        }
        content["last_optimizer_state"]["state"] = {0: flat}

    assert trained(inspect(edited(translation.last, change))[1]) == trained(inspect(translation.last)[1])


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
    assert found["curves"] == []
    assert f", position bias {kind}," in out
    assert "position scores" not in out
    assert not drawn["plot"]
    assert len(drawn["set_title"]) == 1


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
    (dotted,) = [(x, y) for label, x, y in drawn["plot"] if label is None]
    assert (dotted[0][0], dotted[0][-1], len(dotted[1])) == (-1023, 1023, 2047)
    reached = [(label, [x[0], x[-1]]) for label, x, _ in drawn["plot"] if label is not None]
    assert reached == list(trained(found).items())
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
