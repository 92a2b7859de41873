"""`make gpu` finds differences, says what it could not do, and runs to its end; here with the CPU as the device."""

import json

import pytest
import torch

from benchmarks import contenders, gpu, gpu_checks
from benchmarks.gpu_checks import Finding
from benchmarks.measure import CPU, Meter
from tests.helpers.forking import benchmark


@pytest.mark.slow
def test_all_parts_run_to_the_end(tmp_path):
    out = tmp_path / "gpu.json"
    said = benchmark("gpu.py", "--device=cpu", "--quick", "--json", out)
    found = json.loads(out.read_text())
    assert list(found["checks"]) == list(gpu.CHECKS)
    assert list(found["measured"]) == list(gpu.MEASURED)
    assert all(finding["ok"] for findings in found["checks"].values() for finding in findings)
    assert all(table["rows"] for table in found["measured"].values())
    count = sum(map(len, found["checks"].values()))
    assert f"{count} of {count} comparisons with the CPU agree." in said
    assert "- not done: training on two GPUs" in said
    assert "- not done: Triton kernels" in said


def test_a_stream_that_loses_its_state_and_rough_numbers_are_found(monkeypatch):
    monkeypatch.setattr(gpu_checks, "_in_pieces", lambda block, x: torch.cat([block(p)[0] for p in x.split(40, 1)], 1))
    monkeypatch.setitem(gpu_checks.LIMITS, torch.bfloat16, (1e-5, 1e-5))
    findings = gpu_checks._layer("FLASH", contenders.mixer("FLASH", init="scaled"), CPU, 97)
    wrong = [finding.case for finding in findings if not finding.ok]
    assert wrong == [f"FLASH, {what}" for what in ("bfloat16, outputs", "bfloat16, gradients", "stream")]


def test_a_failed_case_is_reported_and_late_ones_are_listed(monkeypatch, capsys):
    def fails():
        yield Finding("first", 0.0, 0.1)
        raise RuntimeError("no kernel")

    cases = {"second": fails, "third": lambda: iter([Finding("third", 0.0, 0.1)])}
    monkeypatch.setitem(gpu.CHECKS, "layers", lambda device, quick: cases.items())
    report = gpu.Report(Meter(CPU, quick=True), minutes=1)
    report.check("layers")
    assert [finding.ok for finding in report.checks["layers"]] == [True, False, True]
    assert "WRONG second: RuntimeError: no kernel" in capsys.readouterr().out
    late = gpu.Report(Meter(CPU, quick=True), minutes=-1)
    late.check("layers")
    assert late.missing == ["layers, from second on: no time was left"]


def test_a_measurement_that_fails_keeps_its_earlier_rows(monkeypatch):
    def fails(meter):
        """Tokens per second"""
        yield "short", {"torch": 2.0}
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu.MEASURED, "speed", fails)
    report = gpu.Report(Meter(CPU, quick=True), minutes=1)
    report.measure("speed")
    assert report.measured["speed"]["rows"] == [{"case": "short", "numbers": {"torch": 2.0}}]
    assert report.missing == ["speed, after short: RuntimeError: no kernel"]
