"""Benchmarks of quality train, score, collect and draw models of equal size, and repeat nothing."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch

from benchmarks import models, quality_classify, quality_documents, quality_lm, quality_translation, recall, runs
from tests.helpers.commands import ROOT
from tests.helpers.forking import benchmark, python
from tests.helpers.recipes import small_bible


def results(experiment, folder):
    """The results of all runs, drawn too."""
    path = folder / "quality.json"
    experiment.collect(folder, path)
    experiment.plot(path)
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
    benchmark("quality_translation.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000
    bible = json.loads(out.read_text())["bible-transformer-1e-3-1"]
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
def test_documents_are_translated_in_windows_and_asked_for_what_they_said(
    prepared_bible, tmp_path, monkeypatch, capsys
):
    data, folder = tmp_path / "data", tmp_path / "runs"
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
    scores = results(quality_documents.Documents(), folder)["continued-transformer-4e-3-1"]["scores"]
    assert "s-BLEU" in capsys.readouterr().out
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
    text, data, folder = (tmp_path / name for name in ("text", "data", "runs"))
    text.write_bytes(b"so it was, and so it is. " * 4000)  # eight samples of a Transformer to validate
    benchmark("quality_lm.py", data, "--prepare", text)
    words = [data, folder, "--tasks=wikipedia", "--models=gmlp,transformer", "--lr=4e-3", "--updates=1"]
    assert benchmark("quality_lm.py", *words).count("scoring ") == 2
    assert benchmark("quality_lm.py", *words) == ""  # done before
    scores = {name: set(run["scores"]) for name, run in results(quality_lm.LanguageModels(), folder).items()}
    windows = (0, 256, 384)
    assert scores == {
        "wikipedia-gmlp-4e-3-1": {"valid, chunk 256", "test, chunk 256"},
        "wikipedia-transformer-4e-3-1": {"valid, window 384", *(f"test, window {window}" for window in windows)},
    }


@pytest.mark.slow
def test_classifiers_are_trained_scored_and_collected(tmp_path):
    data, folder = tmp_path / "data", tmp_path / "runs"
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
    runs_found = results(quality_classify.Classifiers(), folder).values()
    assert all(0 <= run["scores"]["accuracy on test"] <= 100 for run in runs_found)


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


def looked_up(inputs, places):
    """Scores that are right for recall: the symbol behind the first place of the key."""
    keys = inputs.gather(1, places)
    first = (inputs.unsqueeze(1) == keys.unsqueeze(2)).int().argmax(2)
    return torch.nn.functional.one_hot(inputs.gather(1, first + 1), recall.SYMBOLS).float()


@pytest.mark.parametrize("pairs", [4, 8])
def test_recall_asks_for_the_values_of_all_keys_and_never_shows_an_answer(pairs):
    data = inputs, places, answers = recall.made(pairs, 16 * pairs, 500, seed=1)
    keys, values, half = inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2], recall.SYMBOLS // 2
    assert keys.min() > 0
    assert keys.max() < half <= values.min()
    assert all(len(set(row)) == pairs for symbols in (keys, values, places) for row in symbols.tolist())
    assert places.min() >= 2 * pairs
    assert torch.equal(inputs.gather(1, places), keys)
    assert torch.equal(answers, values)
    rest = inputs[:, 2 * pairs :].scatter(1, places - 2 * pairs, 0)
    assert rest.count_nonzero() == 0  # so that an answer is seen in its pair only
    gaps = places[:, 0].sub(2 * pairs).div(2).long().bincount() / 500  # a power law: 1 / (1 + gap), nearly
    assert gaps[0] == pytest.approx(2 * gaps[1], rel=0.5)
    assert gaps[0] > 4 * gaps[8:].max()
    again, other = (recall.made(pairs, 16 * pairs, 500, seed) for seed in (1, 2))
    assert all(map(torch.equal, data, again))
    assert not torch.equal(inputs, other[0])
    everywhere = {"all": 1.0, "near": 1.0, "far": 1.0}
    assert recall.accuracy(looked_up, data, recall.CHUNK) == everywhere


def test_accuracy_of_recall_is_that_of_the_guess():
    data = recall.made(4, 64, 500, seed=1)

    def guess(inputs, places):
        return torch.randn(*places.shape, recall.SYMBOLS, generator=torch.Generator().manual_seed(2))

    def right_if_near(inputs, places):
        return looked_up(inputs, places) * (places < recall.CHUNK).unsqueeze(2)

    def one_of_the_values(inputs, places):  # the first, for all queries
        return torch.nn.functional.one_hot(inputs[:, 1:2].expand_as(places), recall.SYMBOLS).float()

    assert recall.accuracy(guess, data, recall.CHUNK)["all"] < 0.01
    assert recall.accuracy(one_of_the_values, data, recall.CHUNK)["all"] == 0.25
    found, near = recall.accuracy(right_if_near, data, recall.CHUNK), (data[1] < recall.CHUNK).float().mean().item()
    assert found == {"all": pytest.approx(near), "near": 1.0, "far": 0.0}


def test_the_page_has_the_tables_of_recall():
    page = (ROOT / "docs/results.md").read_text()
    for table in recall.tables(json.loads((ROOT / "docs/recall.json").read_text()).values()).values():
        assert table in page


def test_parity_counts_ones_up_to_each_place():
    inputs, places, answers = recall.made(0, 40, 50, seed=1)
    assert set(inputs.flatten().tolist()) == {0, 1}
    for row in range(50):
        assert places[row].tolist() == list(range(2, 40))
        assert answers[row].tolist() == [2 + sum(inputs[row, : place + 1].tolist()) % 2 for place in range(2, 40)]


@pytest.mark.parametrize("contender", recall.CHOICES["model"])
def test_models_of_recall_answer_from_the_past_alone(contender):
    torch.manual_seed(1)
    model, (inputs, places, _) = recall.Model(contender, 64, recall.SYMBOLS, 64), recall.made(4, 64, 2, seed=1)
    query = places[:, :1]
    changed = torch.where(torch.arange(64) > query, 5, inputs)
    torch.testing.assert_close(model(inputs, query), model(changed, query))
    assert model(inputs, query).shape == (2, 1, recall.SYMBOLS)


@pytest.mark.slow
def test_recall_is_trained_resumed_and_put_in_a_table(tmp_path, monkeypatch):
    out = tmp_path / "recall.json"
    words = [out, "--quick", "--task=recall-64,parity", "--model=ema", "--width=64", "--seed=1"]
    said = benchmark("recall.py", *words, "--lr=1e-3,1e-2", "--epochs=1")
    rows = json.loads(out.read_text())
    assert len(rows) == 4
    for row in rows.values():
        assert row["updates"] == 2
        assert all(0 <= row[places] <= 1 for places in recall.PLACES)
    assert said.count("| ema | ") == len(recall.tables(rows.values())) == 2
    assert said.count(" of 2: loss ") == 4
    again = benchmark("recall.py", *words, "--lr=1e-3,1e-2", "--epochs=1")  # done before
    assert again.strip() == said[said.index("recall-64, width 64, epochs: 1\n") :].strip()
    assert list(tmp_path.iterdir()) == [out]

    run = {"task": "recall-64", "model": "ema", "width": "64", "lr": "1e-2", "seed": "1", "epochs": 2, **recall.QUICK}
    whole = recall.trained("", run, tmp_path / "none.pt")
    monkeypatch.setattr(recall, "SAVED", 0)  # after each update
    interrupted = tmp_path / "interrupted.pt"
    monkeypatch.setattr(recall, "accuracy", stopped)
    with pytest.raises(KeyboardInterrupt):
        recall.trained("", {**run}, interrupted)
    monkeypatch.undo()
    resumed = recall.trained("", run, interrupted)
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


def stopped(*_):
    raise KeyboardInterrupt
