"""All forms by kernels, with several segments and parts in short sequences."""

import pytest

from mega_fairseq.ops import backend, rows
from mega_fairseq.ops.ema import triton as ema_triton

SHORT = 4  # steps of a segment


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    monkeypatch.setattr(ema_triton, "SEGMENT", SHORT)
    monkeypatch.setattr(ema_triton, "PARTS", 4)
    monkeypatch.setattr(rows, "PARTS", 3)
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()
