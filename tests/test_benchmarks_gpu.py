"""`make gpu` finds differences, says what it could not do, and runs to its end; here with the CPU as the device."""

import json
import sys
import time

import pytest
import torch

from benchmarks import gpu, gpu_checks
from benchmarks.gpu_checks import Finding
from tests.forking import benchmark

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_parts_run_and_are_written_to_a_page(tmp_path):
    out = tmp_path / "gpu.json"
    benchmark("gpu.py", "--device=cpu", "--quick", "--json", out)
    found, page = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert list(found["checks"]) == list(gpu.CHECKS)
    assert list(found["measured"]) == list(gpu.MEASURED)
    assert all(finding["ok"] for findings in found["checks"].values() for finding in findings)
    assert found["measured"].pop("memory")  # numbers for a GPU only
    assert all(min(row["numbers"].values()) > 0 for rows in found["measured"].values() for row in rows)
    count = sum(map(len, found["checks"].values()))
    assert f"{count} of {count} comparisons with the CPU agree." in page
    assert "- not done: training on two GPUs: there are not two" in page
    assert all(f"## {table.__doc__}" in page for table in gpu.MEASURED.values())


def test_a_stream_that_loses_its_state_and_rough_numbers_are_found(monkeypatch):
    def forgets(block, x):
        return torch.cat([block(piece)[0] for piece in x.split(40, 1)], 1)

    monkeypatch.setattr(gpu_checks, "_in_pieces", forgets)
    monkeypatch.setitem(gpu_checks.LIMITS, torch.bfloat16, (1e-5, 1e-5))
    found = list(gpu_checks._layer("FLASH", True, CPU, gpu_checks.QUICK_LENGTH))
    wrong = [finding.case for finding in found if not finding.ok]
    assert wrong == [f"FLASH, causal, {what}" for what in ("bfloat16, outputs", "bfloat16, gradients", "stream")]


def test_a_failed_check_is_reported_and_a_late_one_stopped(monkeypatch, capsys):
    def fails(device, quick):
        yield Finding("first", 0.0, 0.1)
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu.CHECKS, "layers", fails)
    later, missing = time.monotonic() + 60, []
    first, failed = gpu.check("layers", CPU, True, later, missing)
    assert (first.ok, failed.ok, missing) == (True, False, [])
    assert failed.case == "layers: RuntimeError: no kernel"
    assert gpu.check("layers", CPU, True, time.monotonic() - 1, missing) == [first]
    assert missing == ["layers, after first: no time was left"]
    assert "WRONG layers: RuntimeError: no kernel" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="^no CUDA GPU was found by torch: mega-fairseq doctor says why$"):
        gpu.main()
