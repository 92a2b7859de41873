"""All forms by kernels, with several segments and programs in short sequences."""

import functools
from dataclasses import fields, replace

import pytest

from mega_fairseq.ops import backend

SHORT = 4  # steps of a segment


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    monkeypatch.setattr("mega_fairseq.ops.ema.triton.SEGMENT", SHORT)
    monkeypatch.setattr("mega_fairseq.ops.ema.triton.PROGRAMS", 4)
    monkeypatch.setattr("mega_fairseq.ops.rows.PROGRAMS", 3)
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def faster_interpreter():
    """Triton's interpreter replaces the functions of triton.language when a kernel starts, and again in each call of a
    function from a kernel, and the newest repeats integer arithmetic in 64 bits to find overflows: two thirds of the
    time of these tests."""
    from triton.runtime import interpreter  # here, since pytest also loads this file where Triton is missing

    replace_language = functools.lru_cache(maxsize=None)(interpreter._patch_lang)

    def call(self, *arguments, **options):
        replace_language(self.fn)
        return getattr(self, "rewrite", lambda: self.fn)()(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        options = interpreter.interpreter_builder.options
        checks = {f.name: False for f in fields(options) if f.name == "sanitize_overflow"}
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, **checks))
        yield
