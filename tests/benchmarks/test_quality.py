"""Benchmarks of quality train, score, collect and draw models of equal size, and repeat nothing."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch

from benchmarks import models, quality_classify, quality_documents, quality_lm, quality_translation, runs
from tests.helpers.forking import benchmark, python
from tests.helpers.recipes import small_bible


def results(path):
    """A JSON file of results, drawn too."""
    benchmark("quality_lm.py", "--plot", path)
    assert path.with_suffix(".png").stat().st_size > 5000
    return json.loads(path.read_text())


@pytest.mark.slow
def test_translation_is_trained_scored_collected_and_drawn(prepared_bible, tmp_path):
    data, folder, out = tmp_path / "data", tmp_path / "runs", tmp_path / "quality.json"
    shutil.copytree(prepared_bible.data, data / "bible")
    words = [data, folder, "--models=transformer", "--lr=1e-3"]
    assert "scoring" not in benchmark("quality_translation.py", *words, "--tasks=bible", "--updates=1", "--unscored")
    said = benchmark("quality_translation.py", *words, "--tasks=bible", "--updates=3")
    assert (said.count("training "), said.count("scoring ")) == (1, 1)  # continues
    assert benchmark("quality_translation.py", *words, "--tasks=bible", "--updates=3") == ""  # done before
    assert "BLEU" in benchmark("quality_translation.py", data, folder, "--collect", out)
    bible = results(out)["bible-transformer-1e-3-1"]
    assert [update for update, _ in bible["curve"]] == [1, 3]
    assert set(bible["scores"]) == {"BLEU", "chrF2"}
    assert bible["parameters"] > 1e5


@pytest.mark.slow
def test_the_recipe_for_few_pairs_is_scored_after_several_updates_of_one_run(tmp_path, monkeypatch):
    pairs, data, folder = 60, tmp_path / "data", tmp_path / "runs"
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setattr(quality_translation, "PAIRS", {"pairs5000": (pairs, 0.3)})
    monkeypatch.setattr(quality_translation, "SCORED", (1, 2))
    experiment = quality_translation.Translation()
    experiment.prepare(small_bible(tmp_path), data)
    for language in ("en", "de"):
        whole, part = (place / f"train.{language}" for place in (tmp_path, data / "pairs5000/raw"))
        assert part.read_text().splitlines() == whole.read_text().splitlines()[:pairs]
    monkeypatch.setattr(sys, "argv", ["", str(data), str(folder), "--tasks=pairs5000", "--models=tiny-bf16"])
    experiment.main("")
    (log,) = folder.glob("*/train.log")
    scores = json.loads(log.with_name("scores.json").read_text())
    assert set(scores) == {f"{name} after {count}" for name in ("bits", "BLEU", "chrF2") for count in (1, 2)}
    assert scores["bits after 2"] < scores["bits after 1"]
    once = log.read_text()
    experiment.main("")  # done before
    assert log.read_text() == once


@pytest.mark.slow
def test_documents_are_translated_in_windows_and_asked_for_what_they_said(prepared_bible, tmp_path, monkeypatch):
    data, folder, out = tmp_path / "data", tmp_path / "runs", tmp_path / "quality.json"
    shutil.copytree(prepared_bible.data, data / "bible")
    benchmark("quality_documents.py", data, "--prepare", data / "bible")
    words = [data, folder, "--models=transformer", "--updates=1"]
    benchmark("quality_documents.py", *words, "--tasks=lines", "--unscored")
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setattr(sys, "argv", ["quality_documents.py", *map(str, words), "--tasks=continued"])
    monkeypatch.setattr(quality_documents, "EXAMPLES", 4)
    monkeypatch.setattr(quality_documents, "WINDOWS", (0, 128))
    quality_documents.Documents().main("")
    log = (folder / "continued-transformer-4e-3-1/train.log").read_text()
    assert "lines-transformer-4e-3-1/checkpoint_last.pt" in log
    assert "s-BLEU" in benchmark("quality_documents.py", data, folder, "--collect", out)
    scores = results(out)["continued-transformer-4e-3-1"]["scores"]
    assert {f"{kind}-BLEU, windows of 128" for kind in "sd"} < set(scores)
    assert {f"{form}, 1" for form in quality_documents.FORMS} < set(scores)


def test_recall_asks_at_a_distance_for_one_of_different_answers():
    document = [(f"line {number}", f"Zeile {number}") for number in range(40)]
    for form in quality_documents.FORMS:
        for distance in quality_documents.DISTANCES:
            for lines, wrong in quality_documents.examples(form, distance, [document]):
                assert len(lines) == distance + 1
                assert lines[1:-1] == [line for line in document if line in lines]
                assert lines[-1][1] not in wrong
                assert form == "target" or lines[0][0].split()[-1] == f"{lines[-1][1].split()[-1]}"
    longer = quality_documents.with_recall(document, random.Random(1))
    assert len(longer) == len(document) + 6
    assert [line for line in longer if line in document] == document


@pytest.mark.slow
def test_language_models_are_prepared_trained_scored_and_collected(tmp_path):
    text, data, folder, out = (tmp_path / name for name in ("text", "data", "runs", "quality.json"))
    text.write_bytes(b"so it was, and so it is. " * 4000)  # eight samples of a Transformer to validate
    benchmark("quality_lm.py", data, "--prepare", text)
    words = [data, folder, "--tasks=wikipedia", "--models=gmlp,transformer", "--lr=4e-3", "--updates=1"]
    assert benchmark("quality_lm.py", *words).count("scoring ") == 2
    assert benchmark("quality_lm.py", *words) == ""  # done before
    benchmark("quality_lm.py", data, folder, "--collect", out)
    scores = {name: set(run["scores"]) for name, run in results(out).items()}
    windows = (0, 256, 384)
    assert scores == {
        "wikipedia-gmlp-4e-3-1": {"valid, chunk 256", "test, chunk 256"},
        "wikipedia-transformer-4e-3-1": {"valid, window 384", *(f"test, window {window}" for window in windows)},
    }


@pytest.mark.slow
def test_classifiers_are_trained_scored_and_collected(tmp_path):
    data, folder, out = tmp_path / "data", tmp_path / "runs", tmp_path / "quality.json"
    for task in ("fashion", "addresses"):  # few images and passages in place of those that the recipes make
        made, classes = data / task / "small/bin", quality_classify.TASKS[task].classes
        made.mkdir(parents=True)
        (data / task / "complete").touch()
        for split in ("train", "valid", "test"):
            chance, labels = random.Random(split), [number % classes for number in range(2 * classes)]
            (made / f"{split}.label").write_text("".join(f"{label}\n" for label in labels))
            if task == "fashion":
                np.save(made / f"{split}.npy", np.array([[chance.randrange(256)] * 784 for _ in labels], np.uint8))
            else:
                (made / f"{split}.input").write_text("".join(f"{'so ' * chance.randint(3, 9)}\n" for _ in labels))
    words = [data, folder, "--tasks=fashion,addresses", "--models=aft-local,transformer", "--lr=4e-3", "--updates=1"]
    assert benchmark("quality_classify.py", *words).count("training ") == 4
    assert benchmark("quality_classify.py", *words) == ""  # done before
    benchmark("quality_classify.py", data, folder, "--collect", out)
    assert all(0 <= run["scores"]["accuracy on test"] <= 100 for run in results(out).values())


@pytest.mark.slow
def test_compared_models_have_equal_sizes():
    common = [*quality_translation.COMMON, "--lr=1"]
    with torch.device("meta"):
        translation = {n: models.from_args([*w, *common], 3908) for n, w in quality_translation.MODELS.items()}
        language = {n: models.from_args(quality_lm.MODELS[n], 208) for n in quality_lm.COMPARED}
        classifiers = [
            {name: quality_classify.build(task, name) for name in quality_classify.MODELS}
            for task in quality_classify.TASKS
        ]
    for limit, built in zip((1.03, 1.02, 1.02, 1.02, 1.02), (translation, language, *classifiers)):
        sizes = {name: models.used_size(model) for name, model in built.items()}
        assert max(sizes.values()) < limit * min(sizes.values()), sizes


def test_figures_show_each_model_at_its_best_rate(tmp_path, monkeypatch):
    curves = {"1e-3-1": 2.0, "4e-3-1": 1.5, "4e-3-2": 1.0, "1e-2-1": 3.0}
    found = {f"short-mega-{run}": {"curve": [[1, 9.0], [2, last]]} for run, last in curves.items()}
    (tmp_path / "quality.json").write_text(json.dumps(found))
    drawn = []
    monkeypatch.setattr(runs, "draw", lambda panels, path: drawn.extend(panels))
    quality_translation.Translation().plot(tmp_path / "quality.json")
    assert [(panel.title, panel.lines) for panel in drawn] == [("short", {"mega": [[1, 9.0], [2, 1.5]]})]
