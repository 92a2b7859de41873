"""Benchmarks of language models check correctness before they measure time, and draw the measurements."""

import json
import lzma
import sys

import pytest
import torch

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from benchmarks import contenders_lm, eval_lm, extrapolation, models, quality_lm, quality_seed, runs
from mega_fairseq.cli.sweep import Point
from tests.helpers.commands import preprocess_text
from tests.helpers.forking import benchmark, python


@pytest.mark.slow
def test_the_evaluation_benchmark_fills_all_tables_and_writes_its_numbers(tmp_path):
    out = tmp_path / "eval_lm.json"
    out.write_text('{"earlier": 1, "head": 2}')
    benchmark("eval_lm.py", "--quick", "--json", out)
    numbers = json.loads(out.read_text())
    assert set(numbers) == {"machine", "earlier", *eval_lm.TABLES}
    assert numbers["head"]["difference"] < 1e-4
    assert all(time > 0 for time in numbers["head"]["seconds"].values())
    for row in numbers["evaluation"]:
        assert all(row[name]["tokens_per_second"] > 0 for name in ("transformer", "chunk 1024"))
    assert [row["tokens"] for row in numbers["stream"]] == [2000]
    assert len(numbers["sampling"]["ms_per_token"]) == 3


def test_the_evaluation_benchmark_rejects_wrong_scores_before_timing(monkeypatch):
    monkeypatch.setattr(contenders_lm, "adaptive_log_probs", lambda softmax, x, targets: torch.zeros(len(x)))
    with pytest.raises(AssertionError):
        eval_lm.head(quick=True)


def test_the_transformer_scores_every_token_once_in_its_windows():
    words, tokens = models.task(50).source_dictionary, contenders_lm.like_words(50, 700)
    batches = contenders_lm.as_windows(words, tokens)
    starts = [start for batch in batches for start in batch["start_indices"]]
    rows = [row for batch in batches for row in batch["target"]]
    scored = torch.cat([row[start:] for row, start in zip(rows, starts)])
    assert torch.equal(scored[scored != words.pad()], tokens)
    context, window = contenders_lm.CONTEXT, contenders_lm.WINDOW
    assert all(start == context for start in starts[window // (window - context) + 1 :])


@pytest.mark.slow
def test_the_benchmark_of_shared_segments_fills_all_tables(tmp_path):
    """It compares with a single process first; test_sequence_parallel.py shows that such a comparison can fail."""
    out = tmp_path / "sequence_parallel.json"
    benchmark("sequence_parallel.py", "--quick", "--json", out)
    numbers = json.loads(out.read_text())
    one, two = numbers["processes"]["rows"]
    assert two["mib"] < 0.7 * one["mib"]
    states, outputs = 2 * 4 * 4 * 128 * 16, 4 * 1024
    assert (one["bytes"], two["bytes"]) == (0, states + outputs)
    for row in numbers["paper"]["rows"]:
        shared, data_parallel, ring = row["tokens_per_second"].values()
        assert ring < shared < data_parallel


@pytest.mark.slow
def test_text_is_converted_to_bytes_and_split_like_enwik8(tmp_path):
    text = bytes(range(256)) * 10
    (tmp_path / "text.xz").write_bytes(lzma.compress(text))
    quality_lm.prepare(tmp_path / "text.xz", tmp_path / "data")
    parts = [(tmp_path / "data" / f"{name}.bytes").read_text().split() for name in quality_lm.PARTS]
    assert bytes(int(number) for part in parts for number in part) == text
    assert [len(part) for part in parts] == [2304, 128, 128]
    assert (tmp_path / "data/bin/dict.txt").exists()


@pytest.mark.slow
def test_a_run_is_trained_once_and_resumed_if_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    small = ["--decoder-layers", "1", "--decoder-chunk-size", "32", "--disable-validation"]
    words = [str(preprocess_text(tmp_path)), *quality_lm.MEGA, *quality_lm.recipe("5e-3", 5), *small]
    folder, log = tmp_path / "run", tmp_path / "run/train.log"
    runs.train(folder, 1, *words, "--max-update", "1")
    once = log.read_text()
    assert (folder / "checkpoint_last.pt").exists()
    runs.train(folder, 1, *words, "--max-update", "1")
    assert log.read_text() == once
    runs.train(folder, 2, *words, "--max-update", "2")
    assert log.read_text().startswith(once)
    assert "Loaded checkpoint" in log.read_text()[len(once) :]
    assert '"train_num_updates": "2"' in log.read_text()


@pytest.mark.slow
def test_the_quality_benchmark_prepares_text_trains_evaluates_collects_and_draws(tmp_path):
    text, data, runs_in, out = (tmp_path / name for name in ("text", "data", "runs", "quality_lm.json"))
    text.write_bytes(b"so it was, and so it is. " * 4000)  # eight samples of a Transformer to validate
    benchmark("quality_lm.py", data, "--prepare", text)
    words = [data, runs_in, "--models=mega-simple,transformer", "--lr=4e-3", "--seeds=1", "--updates=1"]
    assert benchmark("quality_lm.py", *words).count("evaluating ") == 8
    assert benchmark("quality_lm.py", *words) == ""  # done before
    benchmark("quality_lm.py", data, runs_in, "--collect", out)
    found = json.loads(out.read_text())
    assert set(found["mega-simple-4e-3-1"]["bits_per_byte"]["test"]) == {"chunk 64", "chunk 128", "chunk 256"}
    assert set(found["transformer-4e-3-1"]["bits_per_byte"]["test"]) == {"window 0", "window 256", "window 384"}
    benchmark("quality_lm.py", "--plot", out)
    assert out.with_suffix(".png").stat().st_size > 5000


def test_the_quality_benchmark_compares_language_models_of_equal_size():
    """Within 2%, built from the benchmark's own options, with the dictionary of its bytes."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    sizes, words = {}, models.task(208).source_dictionary
    for name, arguments in quality_lm.MODELS.items():
        parser = options.get_training_parser()
        given = ["data", *arguments, *quality_lm.recipe("5e-3", 10)]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))
        task = tasks.TASK_REGISTRY[cfg.task._name](cfg.task, words)
        sizes[name] = sum(p.numel() for p in task.build_model(cfg.model).parameters())
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


@pytest.mark.slow
def test_the_time_weighting_experiment_trains_on_characters(tmp_path):
    text, data, runs_in, out = (tmp_path / name for name in ("text", "data", "runs", "quality_seed.json"))
    text.mkdir()
    for name in quality_seed.SUBSETS:
        (text / f"{name}.txt").write_text("It was \u201cso\u201d,\nand it is. " * 40, encoding="utf-8")
    benchmark("quality_seed.py", data, "--prepare", text)
    numbers = (data / "valid.characters").read_text().split()
    assert "".join(chr(int(number)) for number in numbers) == (text / "valid.txt").read_text(encoding="utf-8")
    words = [data, runs_in, "--models=aft", "--seeds=1", "--updates=1"]
    assert benchmark("quality_seed.py", *words).count("evaluating ") == 2
    benchmark("quality_seed.py", data, runs_in, "--collect", out)
    assert set(json.loads(out.read_text())["aft-1"]["bits_per_byte"]) == {"valid", "test"}


def test_sweeps_of_several_models_are_drawn_in_one_figure(tmp_path):
    points = [
        Point(chunk, cut, 1, context, 900, bits=bits)
        for chunk, cut, context, bits in (
            (128, "splits:1", 900, 2.2),
            (256, "splits:1", 900, 2.1),
            (256, "size:90", 90, 2.4),
        )
    ]
    points.append(Point(512, "splits:1", 1, 900, 900, refused="beyond its reach"))
    (tmp_path / "simple.json").write_text(json.dumps({"points": [point._asdict() for point in points]}))
    chunks, contexts = extrapolation.lines([point._asdict() for point in points], trained=256)
    assert (chunks, contexts) == ([(128, 2.2), (256, 2.1)], [(90, 2.4), (900, 2.1)])
    figure = tmp_path / "figure.png"
    benchmark("extrapolation.py", figure, f"simple={tmp_path / 'simple.json'}")
    assert figure.stat().st_size > 5000
