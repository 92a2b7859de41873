"""Benchmarks of layers, decoding and training check correctness first and write the numbers that plots read."""

import importlib.util
import json
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, decode, layer, measure, models, quality
from mega_fairseq.ops.linear import INT8_WORKS
from tests.helpers.forking import benchmark
from tests.helpers.recipes import bible_recipe, small_bible


@pytest.mark.slow
def test_the_layer_benchmark_times_whole_layers_of_equal_size(tmp_path):
    out = tmp_path / "layer.json"
    said = benchmark("layer.py", "--quick", "--lengths=128", "--tables=layer,flat,memory", "--json", out)
    assert said.startswith("correct:")
    numbers = json.loads(out.read_text())
    sizes, (row,) = numbers["layer"]["parameters"], numbers["layer"]["rows"]
    assert max(sizes.values()) < 1.02 * min(sizes.values())
    assert set(sizes) == set(row["seconds"]) == {"torch", *contenders.MEGA}
    assert all(time > 0 for time in row["seconds"].values())
    assert all(mib > 0 for mib in numbers["memory"][0]["mib"].values())
    assert numbers["machine"]["layer"]["threads"] == "1"
    benchmark("layer.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_layer_benchmark_fills_its_other_tables(tmp_path):
    out = tmp_path / "layer.json"
    out.write_text('{"rival": "measured where mega-pytorch was installed"}')
    tables = ["projections", "ema", "forms", "token", "rival"]
    said = benchmark("layer.py", "--quick", "--lengths=1024", f"--tables={','.join(tables)}", "--json", out)
    numbers = json.loads(out.read_text())
    assert set(numbers) == {*tables, "machine"}
    if importlib.util.find_spec("mega_pytorch") is None:
        assert "mega-pytorch is not installed: pip install" in said
        assert isinstance(numbers["rival"], str)
    assert numbers["ema"]["rows"][0]["length"] == numbers["forms"][0]["length"] == 1024


def test_tables_are_added_to_earlier_ones_each_with_its_machine(tmp_path, monkeypatch):
    out = str(tmp_path / "numbers.json")
    for cpu, tables in (("old", {"a": 1, "b": 2}), ("new", {"b": 3, "c": 4})):
        monkeypatch.setattr(measure, "machine", lambda cpu=cpu: {"cpu": cpu})
        measure.write_json(out, tables)
    machines = {"a": {"cpu": "old"}, "b": {"cpu": "new"}, "c": {"cpu": "new"}}
    assert json.loads(Path(out).read_text()) == {"a": 1, "b": 3, "c": 4, "machine": machines}


def test_the_layer_benchmark_rejects_a_wrong_result_before_timing(monkeypatch):
    right = contenders.textbook_ema
    monkeypatch.setattr(contenders, "textbook_ema", lambda x, *parameters: right(x, *parameters) * 1.0001)
    with pytest.raises(AssertionError):
        layer.gate()


def test_an_unknown_table_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        measure.chosen_names(ArgumentParser(), "tables", "layer,speed", ["layer", "flat"])
    assert "--tables: speed is unknown; choose from layer, flat" in capsys.readouterr().err


def test_the_textbook_form_equals_the_recurrence():
    torch.manual_seed(0)
    parameters = [p.double() for p in layer.ema_parameters()]
    x = torch.randn(1, 5, contenders.DIM, dtype=torch.float64)
    weight, damping = torch.sigmoid(parameters[0]), torch.sigmoid(parameters[1])
    state, ys = torch.zeros_like(weight), []
    for t in range(x.size(1)):
        state = (1 - weight * damping) * state + weight * parameters[2] * x[0, t].unsqueeze(-1)
        ys.append((state * parameters[3]).sum(-1) / contenders.NDIM**0.5 + parameters[4] * x[0, t])
    torch.testing.assert_close(contenders.textbook_ema(x, *parameters)[0], torch.stack(ys), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_benchmark_of_mixers_times_layers_and_models_of_equal_size(tmp_path):
    out = tmp_path / "mixers.json"
    said = benchmark("mixers.py", "--quick", "--lengths=512", "--mixers=aft-local", "--json", out)
    assert "correct: whole sequences = token by token, equal parameters" in said
    numbers = json.loads(out.read_text())
    layers = {"torch", "AFT-local"}
    (row,), (memory,), (decoded,) = numbers["layer"]["rows"], numbers["memory"], numbers["decode"]
    assert set(row["seconds"]) == set(memory["mib"]) == layers
    parts = (decoded, numbers["products"], numbers["flat"])
    assert all(set(part["seconds"]) == {"AFT-local"} for part in parts)
    assert set(numbers["models"]["models"]) == {"transformer", "aft-local"}
    for found in numbers["models"]["models"].values():
        assert all(value > 0 for part in ("training", "evaluation") for value in found[part].values())
    benchmark("mixers.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_decode_benchmark_times_all_models_and_writes_its_numbers(tmp_path):
    out = tmp_path / "decode.json"
    said = benchmark("decode.py", "--quick", "--json", out)
    assert "correct: step by step = all at once" in said
    assert "16 tokens" in said.splitlines()[-1]  # a long translation between short ones
    found = json.loads(out.read_text())
    assert [row["length"] for row in found["decode"]] == [16, 32]
    assert set(found["decode"][0]["ms_per_token"]) == {"transformer", "mega", "mega_chunk128"}
    (row,) = found["batches"]
    assert row["batch"] == 2
    models = {"transformer", "mega", *(["mega_int8"] if INT8_WORKS else [])}
    assert {name for name, speed in row["sentences_per_second"].items() if speed > 0} == models


def test_the_decode_benchmark_rejects_a_model_that_decodes_wrongly():
    model = decode.mega(models.task(50), 64, encoder_layers=1, decoder_layers=1)
    decode.gate({"mega": model})
    right = model.decoder.get_incremental_state

    def forgetful(incremental_state, key):
        state = right(incremental_state, key)
        return state and state._replace(blocks=tuple(block._replace(mixer=None) for block in state.blocks))

    model.decoder.get_incremental_state = forgetful
    with pytest.raises(AssertionError):
        decode.gate({"mega": model})


@pytest.mark.slow
def test_the_quality_benchmark_trains_scores_collects_and_draws(tmp_path):
    bible, runs_in, out = bible_recipe(tmp_path, small_bible(tmp_path)), tmp_path / "runs", tmp_path / "quality.json"
    bible.run("prepare.sh")
    words = [bible.data, runs_in, "--models=mega-scaled", "--seeds=1", "--updates=2"]
    assert benchmark("quality.py", *words).count("\nscoring ") == 1
    assert benchmark("quality.py", *words) == ""  # done before
    benchmark("quality.py", bible.data, runs_in, "--collect", out)
    (found,) = json.loads(out.read_text()).values()
    assert [update for update, _ in found["valid_bits_per_token"]] == [2]
    assert [re.search(r"BLEU|chrF2", score).group() for score in found["scores"]] == ["BLEU", "chrF2"]
    assert found["parameters"] > 1e5
    benchmark("quality.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_translation_benchmark_averages_scores_measures_collects_and_draws(tmp_path):
    data, runs_in, out = tmp_path / "data", tmp_path / "runs", tmp_path / "quality_translation.json"
    recipe = bible_recipe(tmp_path, small_bible(tmp_path))
    recipe.run("prepare.sh", DATA=data / "bible")
    words = [data, runs_in, "--corpora=bible", "--lr=1e-3"]
    assert benchmark("quality_translation.py", *words, "--updates=1", "--unscored").count("training ") == 2
    said = benchmark("quality_translation.py", *words, "--updates=3", "--models=transformer")
    assert (said.count("training "), said.count("\nscoring ")) == (1, 1)  # of one, which continues
    assert "training " not in benchmark("quality_translation.py", *words, "--updates=3", "--models=transformer")
    benchmark("quality_translation.py", data, runs_in, "--speeds", "--updates=2")
    benchmark("quality_translation.py", data, runs_in, "--collect", out)
    found = json.loads(out.read_text())
    scored, started = found["bible-transformer-1e-3-1"], found["bible-mega-1e-3-1"]
    assert [update for update, _ in scored["valid_bits_per_token"]] == [1, 3]
    assert set(scored["speeds"]) == {"training", "1", "16", "64"}
    assert min(scored["speeds"].values()) > 0
    assert [re.search(r"BLEU|chrF2", score).group() for score in scored["scores"]] == ["BLEU", "chrF2"]
    assert (started["scores"], started["speeds"]) == (None, {})
    benchmark("quality_translation.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


def test_the_quality_benchmark_compares_models_of_equal_size():
    """Within 3%, built from the benchmark's own options, with a joined dictionary of its vocabulary."""
    sizes = [
        models.used_size(models.from_args([*words, *quality.recipe(10)], 3908)) for words in quality.MODELS.values()
    ]
    assert max(sizes) < 1.03 * min(sizes)


@pytest.mark.slow
def test_the_training_benchmark_times_models_of_equal_size_and_writes_its_numbers(tmp_path):
    out = tmp_path / "train.json"
    benchmark("train.py", "--quick", "--tables=small,language", "--json", out)
    tables = json.loads(out.read_text())
    for name in ("small", "language"):
        sizes = tables[name]["parameters"]
        assert max(sizes.values()) < 1.05 * min(sizes.values())
        (row,) = tables[name]["rows"]
        assert set(row["tokens_per_second"]) == {"transformer", "mega"}
        assert all(speed > 0 for speed in row["tokens_per_second"].values())
