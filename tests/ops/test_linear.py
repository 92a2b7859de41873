"""Projections packed for a few rows equal plain ones."""

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.ops import linear as ops
from mega_fairseq.ops.linear import packing_runs, ready_linear


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packing", [True, False])
def test_a_ready_projection_equals_the_plain_projection(monkeypatch, packing, dtype, rows):
    monkeypatch.setattr(ops, "PACKING_WORKS", packing and ops.PACKING_WORKS)
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((30, 16), (30,), (rows, 16)))
    for b in (bias, None):
        torch.testing.assert_close(ready_linear(weight, b)(x), F.linear(x, weight, b))
    transposed = weight.t().contiguous().t()
    torch.testing.assert_close(ready_linear(transposed)(x), F.linear(x, weight))


def test_packed_products_are_used_for_float32_if_onednn_is_available():
    assert packing_runs(torch.randn(3, 4)) == torch.backends.mkldnn.is_available()
    assert not packing_runs(torch.randn(3, 4).double())


@pytest.mark.parametrize("error", [AttributeError(), RuntimeError("not built in"), TypeError("arguments")], ids=repr)
def test_packing_is_not_used_if_an_operator_fails(monkeypatch, error):
    class Operators:
        _reorder_linear_weight = staticmethod(lambda weight: weight)

        @staticmethod
        def _linear_pointwise(*arguments):
            raise error

    monkeypatch.setattr(torch.ops, "mkldnn", Operators)
    assert not ops._packing_works()
