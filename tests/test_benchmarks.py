"""The benchmark runs as its help says, checks before it times, and writes what its plot reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, layer

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / "layer.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_benchmark_times_every_layer_and_writes_its_numbers(tmp_path):
    out = tmp_path / "layer.json"
    result = run("--quick", "--lengths", "256", "--tables", "layer,flat,memory", "--json", str(out))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("correct:")
    numbers = json.loads(out.read_text())
    timed = numbers["layer"][0]["seconds"]
    assert set(timed) >= {"torch", *contenders.MEGA}
    assert all(time > 0 for time in timed.values())
    assert all(mib > 0 for mib in numbers["memory"][0]["mib"].values())
    assert numbers["machine"]["threads"] == "1"


def test_the_gate_stops_a_wrong_layer_before_it_is_timed(monkeypatch):
    right = contenders.textbook_ema
    monkeypatch.setattr(contenders, "textbook_ema", lambda x, *parameters: right(x, *parameters) * 1.0001)
    with pytest.raises(AssertionError):
        layer.gate()


def test_an_unknown_table_is_one_clear_sentence():
    result = run("--tables", "layer,speed")
    assert result.returncode == 2
    assert "--tables has speed; choose from layer, " in result.stderr


def test_the_textbook_rival_is_the_recurrence_that_it_claims_to_be():
    torch.manual_seed(0)
    parameters = [p.double() for p in layer.ema_parameters()]
    x = torch.randn(1, 5, contenders.DIM, dtype=torch.float64)
    weight, damping = torch.sigmoid(parameters[0]), torch.sigmoid(parameters[1])
    state, ys = torch.zeros_like(weight), []
    for t in range(x.size(1)):
        state = (1 - weight * damping) * state + weight * parameters[2] * x[0, t].unsqueeze(-1)
        ys.append((state * parameters[3]).sum(-1) / contenders.NDIM**0.5 + parameters[4] * x[0, t])
    torch.testing.assert_close(contenders.textbook_ema(x, *parameters)[0], torch.stack(ys), rtol=0, atol=1e-10)
