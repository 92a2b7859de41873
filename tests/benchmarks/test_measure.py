"""Tables are measured, printed, kept and drawn; wrong contenders are refused before they are timed."""

import json
import os

import pytest
import torch

from benchmarks import contenders, layer, measure, train
from benchmarks.figures import Panel, draw, lines
from mega_fairseq.cli.cpu import GLIBC, KEEP_MEMORY
from tests.helpers.commands import ROOT
from tests.helpers.forking import benchmark

ROWS = [{"case": 512, "numbers": {"torch": 2000.0, "Mega": 3000.0}}, {"case": 8192, "numbers": {"Mega": 5.0}}]


def test_tables_are_added_to_earlier_ones_with_their_machine(tmp_path, monkeypatch):
    out = tmp_path / "numbers.json"
    for cpu, tables in (("old", {"a": 1, "b": 2}), ("new", {"b": 3, "c": 4})):
        monkeypatch.setattr(measure, "machine", lambda cpu=cpu: {"cpu": cpu})
        measure.write_json(out, tables)
    machines = {"a": {"cpu": "old"}, "b": {"cpu": "new"}, "c": {"cpu": "new"}}
    assert json.loads(out.read_text()) == {"a": 1, "b": 3, "c": 4, "machine": machines}


def test_memory_is_measured_in_another_process():
    assert measure.Meter().apart(os.getpid) != os.getpid() == measure.Meter(quick=True).apart(os.getpid)


def still_in_use():
    """MiB that a process keeps of a tensor of 64 MiB after it was freed."""
    before = measure._status("VmRSS")
    torch.ones(2**24)
    return measure._status("VmRSS") - before


@pytest.mark.slow
@pytest.mark.skipif(not GLIBC, reason="only glibc has the settings")
@pytest.mark.parametrize("given", [{}, KEEP_MEMORY])
def test_measured_processes_keep_freed_memory(monkeypatch, given):
    for name in KEEP_MEMORY:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert measure.in_new_process(still_in_use) > 60
    assert measure.in_new_process(still_in_use, keep=False) < 30


def test_markdown_has_ratios_to_the_first_contender():
    assert measure.markdown(ROWS).splitlines()[2:] == ["| 512 | 2,000 | 3,000 (1.50x) |", "| 8,192 |  | 5 |"]
    assert measure.markdown(ROWS[:1]).splitlines()[2:] == ["| torch | 2,000 |", "| Mega | 3,000 (1.50x) |"]


def test_figures_have_a_line_for_each_contender(tmp_path):
    drawn = lines(ROWS)
    assert drawn == {"torch": [(512, 2000.0)], "Mega": [(512, 3000.0), (8192, 5.0)]}
    draw([Panel("", "x", "y", drawn, log=True)], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_layer_of_another_size_is_refused(monkeypatch):
    monkeypatch.setattr(contenders, "FEED_FORWARD", 1000)
    with pytest.raises(AssertionError, match="GAU"):
        layer.check(["GAU, windows"])


@pytest.mark.slow
def test_whole_models_have_equal_sizes():
    with torch.device("meta"):
        train.check(["language", "base"])  # `train.py` checks `small` below


def test_memory_is_measured_by_types_and_criterion():
    rows = list(train.memory(train.Table(40, 16, [8], train.SMALL), measure.Meter(quick=True)))
    assert [case.split(",")[0] for case, _ in rows] == ["40 types", "40 types", "320 types"]
    assert all(set(peaks) == set(train.SMALL) and min(peaks.values()) > 0 for _, peaks in rows)


PROGRAMS = {
    "layer.py": [],
    "decode.py": [],
    "deploy.py": [],
    "train.py": ["--tables=small,small updates"],
    "documents.py": [],
    "encoder.py": [],
    "context.py": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_quick_run_fills_all_tables(program, tmp_path):
    out = tmp_path / "numbers.json"
    said = benchmark(program, "--quick", *PROGRAMS[program], "--json", out)
    numbers = json.loads(out.read_text())
    machines = numbers.pop("machine")
    assert set(machines) == set(numbers) != set()
    for name, table in numbers.items():
        assert table["rows"], name
        assert table["title"] in said
        assert all(min(row["numbers"].values()) >= 0 for row in table["rows"])
        assert measure.markdown(table["rows"]) in said
    if program == "layer.py":
        benchmark(program, "--plot", out)
        assert out.with_suffix(".png").stat().st_size > 5000


def test_headline_figures_of_the_readme_are_those_that_were_measured():
    readme, docs = (ROOT / "README.md").read_text(), ROOT / "docs"
    measured = {path.stem: json.loads(path.read_text()) for path in docs.glob("*.json")}

    def row(*words):
        """The cells of the row of a table with these words, without the first."""
        (line,) = (line for line in readme.splitlines() if line.startswith("| ") and all(w in line for w in words))
        return [cell.strip() for cell in line.split("|")[2:-1]]

    runs = [f"bible-{run}-{seed}" for run in ("mega-8e-3", "transformer-4e-3") for seed in (1, 2)]
    scores = [measured["quality_translation"][run]["scores"]["BLEU"] for run in runs]
    assert row("BLEU", "Bible")[:2] == [f"{sum(both) / 2:.1f}" for both in (scores[:2], scores[2:])]
    trained = {row["case"]: row["numbers"] for row in measured["train"]["base"]["rows"]}[128]
    assert row("CPU", "training")[0] == f"{trained['Mega'] / trained['Transformer']:.2f}x"
    decoded = {row["case"]: row["numbers"] for row in measured["decode"]["decode"]["rows"]}[2048]
    assert row("CPU", "translating")[0] == f"{decoded['Transformer'] / decoded['Mega, chunks of 128']:.1f}x"
    gpu = measured["gpu"]["tables"]
    for table, case, contender in (
        ("training", "base, 128 tokens, fp16", "Mega"),
        ("translating", "batch 64", "Mega, --task mega_translation"),
    ):
        speeds = {(row["case"], row["contender"]): row["numbers"]["speed"] for row in gpu[table]}
        assert row("H200", table)[0] == f"{speeds[case, contender] / speeds[case, 'Transformer']:.1f}x"
