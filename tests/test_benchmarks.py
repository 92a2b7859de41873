"""The benchmark runs as its help says, checks before it times, and writes what its plot reads."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, decode, layer, measure, models, quality
from tests.test_examples_wmt16 import bible_recipe, small_corpus

ROOT = Path(__file__).parent.parent


def run(*arguments: str, script: str = "layer.py") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_benchmark_times_every_layer_and_writes_its_numbers(tmp_path):
    out = tmp_path / "layer.json"
    result = run("--quick", "--lengths", "256", "--tables", "layer,flat,memory", "--json", str(out))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("correct:")
    numbers = json.loads(out.read_text())
    timed = numbers["layer"][0]["seconds"]
    assert set(timed) >= {"torch", *contenders.MEGA}
    assert all(time > 0 for time in timed.values())
    assert all(mib > 0 for mib in numbers["memory"][0]["mib"].values())
    assert numbers["machine"]["layer"]["threads"] == "1"
    assert run("--plot", str(out)).returncode == 0
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_benchmark_fills_its_other_tables(tmp_path):
    out = tmp_path / "layer.json"
    out.write_text('{"rival": "measured where mega-pytorch was installed"}')
    result = run("--quick", "--lengths", "1024", "--tables", "projections,ema,forms,rival", "--json", str(out))
    assert result.returncode == 0, result.stderr
    numbers = json.loads(out.read_text())
    assert set(numbers) == {"projections", "ema", "forms", "rival", "machine"}
    if importlib.util.find_spec("mega_pytorch") is None:
        assert "mega-pytorch is not installed: pip install" in result.stdout
        assert isinstance(numbers["rival"], str)
    assert numbers["ema"]["rows"][0]["length"] == numbers["forms"][0]["length"] == 1024


def test_tables_are_written_beside_earlier_ones_each_with_what_it_was_measured_on(tmp_path, monkeypatch):
    out = str(tmp_path / "numbers.json")
    for cpu, tables in (("old", {"a": 1, "b": 2}), ("new", {"b": 3, "c": 4})):
        monkeypatch.setattr(measure, "machine", lambda cpu=cpu: {"cpu": cpu})
        measure.write_json(out, tables)
    machines = {"a": {"cpu": "old"}, "b": {"cpu": "new"}, "c": {"cpu": "new"}}
    assert json.loads(Path(out).read_text()) == {"a": 1, "b": 3, "c": 4, "machine": machines}


def test_the_gate_stops_a_wrong_layer_before_it_is_timed(monkeypatch):
    right = contenders.textbook_ema
    monkeypatch.setattr(contenders, "textbook_ema", lambda x, *parameters: right(x, *parameters) * 1.0001)
    with pytest.raises(AssertionError):
        layer.gate()


def test_an_unknown_table_is_one_clear_sentence():
    result = run("--tables", "layer,speed")
    assert result.returncode == 2
    assert "--tables has speed; choose from layer, " in result.stderr


def test_the_textbook_rival_is_the_recurrence_that_it_claims_to_be():
    torch.manual_seed(0)
    parameters = [p.double() for p in layer.ema_parameters()]
    x = torch.randn(1, 5, contenders.DIM, dtype=torch.float64)
    weight, damping = torch.sigmoid(parameters[0]), torch.sigmoid(parameters[1])
    state, ys = torch.zeros_like(weight), []
    for t in range(x.size(1)):
        state = (1 - weight * damping) * state + weight * parameters[2] * x[0, t].unsqueeze(-1)
        ys.append((state * parameters[3]).sum(-1) / contenders.NDIM**0.5 + parameters[4] * x[0, t])
    torch.testing.assert_close(contenders.textbook_ema(x, *parameters)[0], torch.stack(ys), rtol=0, atol=1e-10)


def test_the_decode_benchmark_times_both_models_and_writes_its_numbers(tmp_path):
    out = tmp_path / "decode.json"
    result = run("--quick", "--json", str(out), script="decode.py")
    assert result.returncode == 0, result.stderr
    assert "correct: step by step = all at once" in result.stdout
    rows = json.loads(out.read_text())["decode"]
    assert [row["length"] for row in rows] == [16, 32]
    assert set(rows[0]["ms_per_token"]) == {"transformer", "mega", "mega_chunk128"}


def test_the_decode_benchmark_compares_a_long_translation_with_short_ones():
    result = run("--flat", "--quick", script="decode.py")
    assert result.returncode == 0, result.stderr
    assert "16 tokens" in result.stdout.splitlines()[-1]


def test_the_decode_gate_stops_a_model_that_decodes_wrongly():
    model = decode.mega(models.task(50), 64, encoder_layers=1, decoder_layers=1)
    decode.gate({"mega": model})
    right = model.decoder.get_incremental_state

    def forgetful(incremental_state, key):
        state = right(incremental_state, key)
        return state and state._replace(blocks=tuple(block._replace(mixer=None) for block in state.blocks))

    model.decoder.get_incremental_state = forgetful
    with pytest.raises(AssertionError):
        decode.gate({"mega": model})


def test_the_quality_benchmark_collects_and_draws_what_runs_have_come_to(tmp_path):
    run_folder = tmp_path / "runs" / "mega-scaled-1"
    run_folder.mkdir(parents=True)
    entry = '{{"epoch": 1, "valid_nll_loss": "{}", "valid_num_updates": "{}"}}'
    lines = ["x | INFO | fairseq_cli.train | num. shared model params: 2,038,391 (num. trained: 2,038,391)"]
    lines += [f"x | INFO | valid | {entry.format(loss, update)}" for loss, update in ((8.2, 200), (6.1, 400))]
    (run_folder / "train.log").write_text("\n".join(lines))
    (run_folder / "scores.txt").write_text("BLEU|x = 1.23\n")
    out = tmp_path / "quality.json"
    quality.collect(tmp_path / "runs", out)
    (found,) = json.loads(out.read_text()).values()
    assert found == {
        "parameters": 2038391,
        "valid_bits_per_token": [[200, 8.2], [400, 6.1]],
        "scores": ["BLEU|x = 1.23"],
    }
    assert run("--plot", str(out), script="quality.py").returncode == 0
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_quality_benchmark_trains_scores_collects_and_draws(tmp_path):
    def quality(*words):
        result = run(*map(str, words), script="quality.py")
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    bible, runs_in, out = bible_recipe(tmp_path, small_corpus(tmp_path)), tmp_path / "runs", tmp_path / "quality.json"
    bible.run("prepare.sh")
    words = [bible.data, runs_in, "--models=mega,mega-scaled", "--seeds=1", "--updates=2"]
    assert quality(*words).count("\nscoring ") == 2
    assert quality(*words) == ""  # done before
    quality(bible.data, runs_in, "--collect", out)
    found = json.loads(out.read_text())
    assert sorted(found) == ["mega-1", "mega-scaled-1"]
    for one in found.values():
        assert [update for update, _ in one["valid_bits_per_token"]] == [2]
        assert [re.search(r"BLEU|chrF2", score).group() for score in one["scores"]] == ["BLEU", "chrF2"]
    quality("--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


def test_the_quality_benchmark_compares_models_of_equal_size():
    """Within 3%: built as the benchmark's own options say, with a joined dictionary of its vocabulary."""
    sizes = [models.size_of(models.as_told([*words, *quality.recipe(10)], 3908)) for words in quality.MODELS.values()]
    assert max(sizes) < 1.03 * min(sizes)


def test_the_training_benchmark_times_models_of_equal_size_and_writes_its_numbers(tmp_path):
    out = tmp_path / "train.json"
    result = run("--quick", "--json", str(out), script="train.py")
    assert result.returncode == 0, result.stderr
    tables = json.loads(out.read_text())
    for name in ("small", "base", "language"):
        sizes = tables[name]["parameters"]
        assert max(sizes.values()) < 1.05 * min(sizes.values())
        (row,) = tables[name]["rows"]
        assert set(row["tokens_per_second"]) == {"transformer", "mega"}
        assert all(speed > 0 for speed in row["tokens_per_second"].values())
    assert run("--tables", "small,large", script="train.py").returncode == 2
