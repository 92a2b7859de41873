"""`make gpu` finds differences, says what it could not do, and runs to its end; here with the CPU as the device."""

import json
import sys
import time

import pytest
import torch

from benchmarks import gpu, gpu_checks
from benchmarks.gpu_checks import Finding
from tests.helpers.forking import benchmark

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_parts_run_and_are_printed(tmp_path):
    out = tmp_path / "gpu.json"
    page = benchmark("gpu.py", "--device=cpu", "--quick", "--json", out)
    found = json.loads(out.read_text())
    assert list(found["checks"]) == list(gpu.CHECKS)
    assert list(found["measured"]) == list(gpu.MEASURED)
    assert all(finding["ok"] for findings in found["checks"].values() for finding in findings)
    assert found["measured"].pop("memory")  # numbers for a GPU only
    assert all(min(row["numbers"].values()) > 0 for rows in found["measured"].values() for row in rows)
    count = sum(map(len, found["checks"].values()))
    assert f"{count} of {count} comparisons with the CPU agree." in page
    assert "- not done: training on two GPUs: there are not two" in page
    assert "- not done: Triton kernels: they do not run here" in page
    assert all(f"## {table.__doc__}" in page for table in gpu.MEASURED.values())


def test_a_stream_that_loses_its_state_and_rough_numbers_are_found(monkeypatch):
    def forgets(block, x):
        return torch.cat([block(piece)[0] for piece in x.split(40, 1)], 1)

    monkeypatch.setattr(gpu_checks, "_in_pieces", forgets)
    monkeypatch.setitem(gpu_checks.LIMITS, torch.bfloat16, (1e-5, 1e-5))
    found = list(gpu_checks._layer("FLASH, causal", "FLASH", True, CPU, gpu_checks.QUICK_LENGTH))
    wrong = [finding.case for finding in found if not finding.ok]
    assert wrong == [f"FLASH, causal, {what}" for what in ("bfloat16, outputs", "bfloat16, gradients", "stream")]


def test_a_failed_case_is_reported_and_does_not_hide_the_next_and_late_ones_are_listed(monkeypatch, capsys):
    def fails():
        yield Finding("first", 0.0, 0.1)
        raise RuntimeError("no kernel")

    def passes():
        yield Finding("third", 0.0, 0.1)

    monkeypatch.setitem(gpu.CHECKS, "layers", lambda device, quick: iter([("second", fails), ("third", passes)]))
    later, missing = time.monotonic() + 60, []
    found = gpu.check("layers", CPU, True, later, missing)
    assert [finding.ok for finding in found] == [True, False, True]
    assert missing == []
    assert found[1].case == "second: RuntimeError: no kernel"
    assert "WRONG second: RuntimeError: no kernel" in capsys.readouterr().out
    assert gpu.check("layers", CPU, True, time.monotonic() - 1, missing) == []
    assert missing == ["layers, from second on: no time was left"]


def test_a_measurement_that_fails_keeps_its_earlier_rows_and_says_why(monkeypatch, capsys):
    def fails(of):
        """Tokens per second"""
        yield {"case": "short", "numbers": {"torch": 2.0}}
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu.MEASURED, "speed", fails)
    missing = []
    rows = gpu.measure("speed", gpu.Measurement(CPU, True), time.monotonic() + 60, missing)
    assert [row["case"] for row in rows] == ["short"]
    assert missing == ["speed, after short: RuntimeError: no kernel"]


def test_tables_have_ratios_to_the_first_contender_and_many_contenders_as_rows():
    rows = [{"case": "short", "numbers": {"torch": 2000.0, "Mega": 3000.0}}, {"case": "long", "numbers": {"Mega": 5.0}}]
    assert gpu._table(rows) == [
        "|  | Transformer layer of torch | Mega |",
        "| --- | --- | --- |",
        "| short | 2,000 | 3,000 (1.50x) |",
        "| long |  | 5.0 |",
    ]
    assert gpu._table(rows[:1]) == [
        "|  | short |",
        "| --- | --- |",
        "| Transformer layer of torch | 2,000 |",
        "| Mega | 3,000 (1.50x) |",
    ]


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="^no CUDA GPU was found by torch: mega-fairseq doctor says why$"):
        gpu.main()
