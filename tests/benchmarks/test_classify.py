"""Benchmarks of classifiers compare models of equal size, and check correctness before they measure time."""

import json
import random
import subprocess

import numpy as np
import pytest

from benchmarks import classify, quality_classify
from tests.helpers.forking import benchmark


@pytest.mark.slow
def test_the_benchmark_of_long_inputs_fills_all_tables(tmp_path):
    chosen = ["--recipes=pathx", "--tables=training,inference,memory,limit"]
    said = benchmark("classify.py", "--quick", *chosen, "--json", tmp_path / "classify.json")
    assert "correct: one chunk = full attention" in said
    numbers = json.loads((tmp_path / "classify.json").read_text())
    for table, value in (("training", "seconds"), ("inference", "seconds"), ("memory", "mib")):
        (row,) = numbers[table]
        assert set(row[value]) == {"torch", "mega_chunk"}
        assert numbers["limit"]["mib"]["training"] > 100


def test_the_transformer_drops_attention_weights_only_where_its_name_says_so():
    for name, dropout in (("torch", 0.0), ("torch_dropout", 0.1)):
        for layer in classify.build("text", name).encoder.layers:
            assert layer.self_attn.dropout == dropout
            assert (layer.dropout.p, layer.dropout1.p, layer.dropout2.p) == (0.0, 0.1, 0.1)


def test_the_benchmark_of_long_inputs_rejects_a_wrong_result_before_timing(monkeypatch):
    right = classify.MegaScores.forward
    monkeypatch.setattr(
        classify.MegaScores, "forward", lambda of, x: right(of, x) + 1e-6 * of.model.cfg.encoder_chunk_size
    )
    with pytest.raises(AssertionError, match="not close"):
        classify.gate()


def test_the_benchmark_of_long_inputs_rejects_models_of_unequal_size(monkeypatch):
    presets = {"mega": "mega_lra_text", "mega_chunk": "mega_lra_image_chunk"}
    monkeypatch.setitem(classify.RECIPES, "text", classify.RECIPES["text"]._replace(presets=presets))
    with pytest.raises(AssertionError, match="mega_chunk"):
        classify.gate()


# ------------------------------------------------------------------------------------------- quality_classify.py


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Few images and passages in the place of those that the recipes make."""
    folder = tmp_path_factory.mktemp("data")
    for task in ("fashion", "addresses"):
        made = folder / task / "small/bin"
        made.mkdir(parents=True)
        (folder / task / "complete").touch()
        for split in ("train", "valid", "test"):
            chance = random.Random(split)
            classes = quality_classify.TASKS[task].classes
            labels = [number % classes for number in range(2 * classes)]
            (made / f"{split}.label").write_text("".join(f"{label}\n" for label in labels))
            if task == "fashion":
                np.save(made / f"{split}.npy", np.array([[chance.randrange(256)] * 784 for _ in labels], np.uint8))
            else:
                (made / f"{split}.input").write_text("".join(f"{'so ' * chance.randint(3, 9)}\n" for _ in labels))
    return folder


def test_data_are_made_once_by_the_recipe_of_the_task(tmp_path, monkeypatch):
    recipe = tmp_path / "examples" / quality_classify.TASKS["listops"].recipe
    recipe.mkdir(parents=True)
    monkeypatch.setattr(quality_classify, "ROOT", tmp_path)
    (recipe / "prepare.sh").write_text("mkdir -p $DATA/$SIZE; echo $@ >>$DATA/$SIZE/bin; exit 1")
    with pytest.raises(subprocess.CalledProcessError):
        quality_classify.prepared("listops", tmp_path)
    (recipe / "prepare.sh").write_text("echo again >>$DATA/$SIZE/bin")
    for _ in range(2):
        made = quality_classify.prepared("listops", tmp_path)
    assert made.read_text() == "--train=40000 --valid=1000 --test=2000\nagain\n"


@pytest.mark.slow
def test_the_quality_benchmark_of_classifiers_trains_tests_collects_and_draws(data, tmp_path):
    folders, fixed, out = [data, tmp_path / "runs"], ["--updates=1", "--lr=4e-3"], tmp_path / "quality_classify.json"
    both = ["--tasks=addresses", "--models=aft-local,roberta"]
    assert benchmark("quality_classify.py", *folders, *fixed, *both).count("training ") == 2
    values = ["--tasks=fashion", "--models=transformer,roberta"]
    assert benchmark("quality_classify.py", *folders, *fixed, *values).count("training ") == 1  # of the Transformer
    assert "training " not in benchmark("quality_classify.py", *folders, *fixed, *values)  # done before
    benchmark("quality_classify.py", *folders, "--collect", out)
    found = json.loads(out.read_text())
    assert all(0 <= run["test_accuracy"] <= 100 for run in found.values())
    local, roberta = (found[f"addresses-{model}-4e-3-1"]["parameters"] for model in ("aft-local", "roberta"))
    assert abs(local / roberta - 1) < 0.02
    benchmark("quality_classify.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_quality_benchmark_compares_classifiers_of_equal_size():
    """Within 2%, built from the benchmark's own options; listops has all models."""
    task = "listops"
    sizes = {model: quality_classify.fitted(task, model)[1] for model in quality_classify.models_of(task)}
    assert set(sizes) == set(quality_classify.MODELS) == set(quality_classify.LABELS)
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


def test_the_quality_benchmark_refuses_classifiers_of_unequal_size(monkeypatch):
    sizes = iter([1000, 500, 600, 700])  # the reference; two widths, after which another should give 1000
    monkeypatch.setattr(quality_classify, "_size", lambda task, words: next(sizes))
    quality_classify.fitted.cache_clear()
    with pytest.raises(ValueError, match="gau has 700 parameters for fashion, and mega-chunk 1,000"):
        quality_classify.fitted("fashion", "gau")
    quality_classify.fitted.cache_clear()


@pytest.mark.parametrize(("other", "loss"), [(50.0, 1.0), (60.0, 1.3)])
def test_the_best_learning_rate_is_chosen_on_valid_and_then_by_the_loss(other, loss):
    scores = {
        "1e-3-1": (other, 90.0, loss),
        "4e-3-1": (60.0, 55.0, 1.2),
        "4e-3-2": (40.0, 54.0, 1.2),
        "1e-2-1": (99.0, None, 1.2),
    }
    found = {
        f"speech-mega-chunk-{run}": {"best_valid": valid, "test_accuracy": test, "train_bits": [[1, 2.0], [2, bits]]}
        for run, (valid, test, bits) in scores.items()
    }
    rates = quality_classify.by_model(found)["speech"]["mega-chunk"]
    assert list(rates) == ["4e-3", "1e-3"]
    assert rates["4e-3"] == ["speech-mega-chunk-4e-3-1", "speech-mega-chunk-4e-3-2"]


def test_sounds_are_resampled_without_what_is_above_half_the_new_rate(tmp_path):
    time = np.arange(16_000) / 16_000
    low, high = (np.sin(2 * np.pi * frequency * time) for frequency in (440, 3000))
    np.save(tmp_path / "train.npy", (16384 * np.stack([low, low + 0.5 * high])).astype("<i2"))
    quality_classify.slow_down(tmp_path)
    quality_classify.slow_down(tmp_path)  # after an interruption
    kept = np.load(tmp_path / "train.npy")
    assert kept.dtype == np.float32
    np.testing.assert_allclose(kept, np.stack([0.5 * low[::8]] * 2), atol=1e-3)


@pytest.mark.slow
def test_the_benchmark_of_classifiers_times_the_models_that_are_compared(tmp_path):
    words = ["--quick", "--tables=models", "--tasks=pairs", "--models=aft-local,roberta"]
    benchmark("classify.py", *words, "--json", tmp_path / "classify.json")
    found = json.loads((tmp_path / "classify.json").read_text())["models"]
    assert list(found["pairs"]) == ["aft-local"]  # roberta takes no pairs
    assert all(value > 0 for value in found["pairs"]["aft-local"].values())
