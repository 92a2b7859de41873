"""The choice among the forms of a function, also in graphs of the compiler."""

import sys

import pytest
import torch

from mega_fairseq.ops import backend
from mega_fairseq.ops.backend import Forms

KERNELS = "tests.ops.stand_in_kernels"  # plain functions, so that they run without a GPU


def naive(x, factor=1.0):
    return x * factor


def plain(x, factor=1.0):
    return x * factor + 10.0


def narrow(x, factor=1.0):
    return x.size(-1) < 3


@pytest.fixture(params=["naive", "cpu", "triton"])
def chosen(request, monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", request.param)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    backend._choose.cache_clear()
    yield request.param
    backend._choose.cache_clear()


EXPECTED = {"naive": 2.0, "cpu": 12.0, "triton": 22.0}


def run_eagerly(function, x):
    return function(x)


def run_compiled(function, x):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")(x)


def run_exported(function, x):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.export.export(Module(), (x,), strict=True).module()(x)


RUNS = [run_eagerly, run_compiled, run_exported]


@pytest.mark.parametrize("run", RUNS)
def test_a_call_runs_the_form_of_the_backend(chosen, run):
    forms = Forms(naive, plain, f"{KERNELS}:scaled")
    assert run(lambda x: forms(x, factor=2.0), torch.ones(2)).tolist() == [EXPECTED[chosen]] * 2
    assert (KERNELS in sys.modules) == (chosen == "triton")


@pytest.mark.parametrize("run", RUNS)
def test_kernels_run_only_for_arguments_that_suit_them(chosen, run):
    forms = Forms(naive, plain, f"{KERNELS}:scaled", suits=narrow)
    expected = EXPECTED["cpu" if chosen == "triton" else chosen]
    assert run(lambda x: forms(x, 2.0), torch.ones(3)).tolist() == [expected] * 3
    assert run(lambda x: forms(x=x, factor=2.0), torch.ones(2)).tolist() == [EXPECTED[chosen]] * 2


@pytest.mark.parametrize("run", RUNS)
def test_without_other_forms_the_definition_runs(chosen, run):
    forms = Forms(naive)
    assert run(lambda x: forms(x, 2.0), torch.ones(2)).tolist() == [2.0, 2.0]


def test_forms_may_be_modules(chosen):
    forms, x = Forms(naive, plain, KERNELS), torch.ones(2)
    form = forms.of(x)
    assert form is {"naive": naive, "cpu": plain, "triton": sys.modules.get(KERNELS)}[chosen]
    assert forms.of(x, suits=False) is (naive if chosen == "naive" else plain)


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", "fast")
    backend._choose.cache_clear()
    with pytest.raises(ValueError, match="MEGA_BACKEND is 'fast'"):
        Forms(naive, plain)(torch.ones(2))
    backend._choose.cache_clear()


def test_tensors_without_numbers_take_the_form_of_their_device(monkeypatch):
    monkeypatch.delenv("MEGA_BACKEND", raising=False)
    backend._choose.cache_clear()
    forms = Forms(naive, plain, f"{KERNELS}:scaled")
    assert forms(torch.ones(2, device="meta")).shape == (2,)
    with torch._subclasses.FakeTensorMode():
        assert forms(torch.ones(2)).shape == (2,)
    backend._choose.cache_clear()
