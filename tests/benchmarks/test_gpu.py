"""`make gpu` finds differences, says what it could not do, and runs to its end; here with the CPU as the device."""

import json
from types import SimpleNamespace

import pytest
import torch
from fairseq.trainer import Trainer
from torch.autograd import DeviceType

from benchmarks import contenders, gpu, gpu_checks, gpu_tables
from benchmarks.gpu_checks import CPU, Finding
from benchmarks.gpu_tables import Contender
from tests.helpers.commands import ROOT
from tests.helpers.forking import benchmark


@pytest.fixture
def report(tmp_path):
    return gpu.Report(CPU, quick=True, minutes=1, limit=60, commit="abc", path=tmp_path / "gpu.json")


@pytest.mark.slow
def test_all_parts_run_to_the_end(tmp_path):
    out = tmp_path / "gpu.json"
    said = benchmark("gpu.py", "--device=cpu", "--quick", "--json", out)
    found = json.loads(out.read_text())
    assert {*found["checks"], *found["tables"]} == {*gpu.CHECKS, *gpu.TABLES} == set(gpu.PARTS)
    assert all(finding["ok"] for findings in found["checks"].values() for finding in findings)
    assert all(found["tables"].values())
    assert len(found["commit"].split("-")[0]) == 40
    count = sum(map(len, found["checks"].values()))
    assert f"{count} of {count} comparisons agree." in said
    assert gpu.markdown(found) in said
    assert "- not done: training on two GPUs" in said
    assert "- not done: Triton kernels" in said


def test_a_stream_that_loses_its_state_and_rough_numbers_are_found(monkeypatch):
    monkeypatch.setattr(gpu_checks, "_in_pieces", lambda block, x: torch.cat([block(p)[0] for p in x.split(40, 1)], 1))
    monkeypatch.setitem(gpu_checks.LIMITS, torch.bfloat16, (1e-5, 1e-5))
    findings = gpu_checks._layer("FLASH", contenders.mixer("FLASH", init="scaled"), CPU, 97)
    wrong = [finding.case for finding in findings if not finding.ok]
    assert wrong == [f"FLASH, {what}" for what in ("bfloat16, outputs", "bfloat16, gradients", "stream")]


def test_updates_with_gradients_of_earlier_ones_are_found(monkeypatch):
    right, words = gpu_checks._updates, ["--cuda-graphs=off", "--cpu", *gpu_checks.TRANSLATION, *gpu_checks.STEADY]

    def updates(given):
        with monkeypatch.context() as patch:
            if given == "stale":
                patch.setattr(Trainer, "zero_grad", lambda trainer: None)
            return right(words)

    monkeypatch.setattr(gpu_checks, "_updates", updates)
    monkeypatch.setattr(gpu_checks, "UPDATES", 2)
    assert [finding.ok for finding in gpu_checks._same_updates("", "stale", words, 1e-3)] == [False]


def test_a_failed_case_is_reported_and_late_ones_are_listed(monkeypatch, capsys, report):
    def fails():
        yield Finding("first", 0.0, 0.1)
        raise RuntimeError("no kernel")

    cases = {"second": fails, "third": lambda: iter([Finding("third", 0.0, 0.1)])}
    monkeypatch.setitem(gpu.CHECKS, "layers", lambda device, quick: cases.items())
    report.check("layers")
    assert [finding["ok"] for finding in report.json["checks"]["layers"]] == [True, False, True]
    assert "WRONG second: RuntimeError: no kernel" in capsys.readouterr().out
    report.deadline = 0
    report.check("layers")
    assert report.missing == ["layers, from second on: no time was left"]


def test_a_contender_that_fails_hides_no_others_and_late_ones_are_listed(monkeypatch, report):
    def fails():
        raise RuntimeError("no kernel")

    def contenders(device, quick):
        yield Contender("short", "torch", lambda: (lambda: None, 1.0), 2)
        yield Contender("short", "Mega", fails, 2)
        yield Contender("short", "last", lambda: (lambda: None, 0.0), 2)
        report.deadline = 0
        yield Contender("long", "torch", fails, 2)

    monkeypatch.setitem(gpu.TABLES, "peers", gpu.TABLES["peers"]._replace(contenders=contenders))
    report.json["ceilings"] = {"products": 1.0}
    report.measure("peers")
    kept = json.loads(report.path.read_text())["tables"]["peers"]
    assert [row["contender"] for row in kept] == ["torch", "last"]
    assert report.missing == [
        "peers, short, Mega: RuntimeError: no kernel",
        "peers, from long, torch on: no time was left",
    ]


def test_kernels_are_counted_without_annotations():
    def event(name, milliseconds, device=DeviceType.CUDA, annotation=False):
        elapsed = SimpleNamespace(elapsed_us=lambda: 1000 * milliseconds)
        return SimpleNamespace(name=name, device_type=device, time_range=elapsed, is_user_annotation=annotation)

    calls = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamSynchronize"]
    events = [event(name, 9, DeviceType.CPU) for name in [*calls, "cudaEventRecord", "cudaDeviceSynchronize"]]
    events += [event("gemm", 2), event("Memcpy DtoH", 1), event("Optimizer.step#Adam.step", 5, annotation=True)]
    assert gpu_tables.kernels(events) == {"device ms": 3, "launches": 4}


def test_tables_have_ratios_to_the_first_contender_of_a_case():
    rows = [
        {"case": case, "contender": name, "numbers": {"speed": speed, "device ms": 1.5, **more}}
        for case, name, speed, more in (
            ("a", "torch", 200.0, {}),
            ("b", "torch", 10.0, {}),
            ("a", "Mega", 300.0, {"MiB": 50.0}),
        )
    ]
    printed = gpu.markdown({"device": "X", "machine": {"torch": "2"}, "commit": "abc", "tables": {"peers": rows}})
    assert printed.startswith("X, torch 2, commit abc")
    assert printed.splitlines()[-3:] == [
        "| a | torch | 200 | 1.5 |  |",
        "|  | Mega | 300 (1.50x) | 1.5 | 50 |",
        "| b | torch | 10 | 1.5 |  |",
    ]


def test_the_page_has_the_tables_of_the_last_run():
    tables = gpu.markdown(json.loads((ROOT / "docs/gpu.json").read_text()), gpu.PAGE)
    assert tables in (ROOT / "docs/performance.md").read_text()
