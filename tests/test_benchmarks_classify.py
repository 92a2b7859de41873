"""Benchmarks of classifiers compare models of equal size, and check correctness before they measure time."""

import json
import re
import sys

import pytest

from benchmarks import classify, tables
from tests.commands import ROOT, fresh


def run(script, *words):
    return fresh(sys.executable, ROOT / "benchmarks" / script, *words)


@pytest.mark.slow
def test_the_benchmark_of_long_inputs_fills_all_tables(tmp_path, monkeypatch):
    said = run("classify.py", "--quick", "--recipes=pathx", "--json", tmp_path / "classify.json")
    assert "correct: one chunk = full attention" in said
    numbers = json.loads((tmp_path / "classify.json").read_text())
    for table, value in (("training", "seconds"), ("inference", "seconds"), ("memory", "mib")):
        (row,) = numbers[table]
        assert set(row[value]) == {"torch", "mega_chunk"}
        assert numbers["limit"]["mib"]["training"] > 100
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    for table in ("training", "inference", "memory"):
        *_, row = tables.markdown(tables.TABLES[f"classify_{table}"]()).splitlines()
        assert re.fullmatch(r"\| 256 values \| [\d,]+ \|  \| [\d,]+ \([\d.]+x\) \|", row)
    assert "| 8 inputs of 256 values | peak memory" in tables.markdown(tables.classify_limit())


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
