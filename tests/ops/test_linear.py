"""Projections packed for a few rows: in float32 they equal plain ones, and in int8 they are near them."""

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.ops import linear as ops
from mega_fairseq.ops.linear import INT8_WORKS, packing_runs, ready_linear, weights_in


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
    assert not ops._works(ops._packed_linear, 2)


# ------------------------------------------------------------------------------------------------ int8


int8 = pytest.mark.skipif(not INT8_WORKS, reason="this CPU has no exact products in int8")


def in_int8(weight, bias=None):
    with weights_in("int8"):
        return ready_linear(weight, bias)


@int8
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_projection_in_int8_is_near_the_plain_one(rows):
    weight, bias, x = torch.randn(30, 64), torch.randn(30), torch.randn(rows, 64)
    for b in (bias, None):
        expected = F.linear(x, weight, b)
        assert (in_int8(weight, b)(x) - expected).norm() < 0.02 * expected.norm()
    torch.testing.assert_close(ready_linear(weight)(x), F.linear(x, weight))  # after the context has ended


@int8
def test_a_row_in_int8_does_not_depend_on_other_rows():
    weight, x = torch.randn(30, 64), torch.randn(7, 64) * torch.logspace(-20, 20, 7).unsqueeze(1)
    together, alone = in_int8(weight)(x), torch.cat([in_int8(weight)(row) for row in x.split(1)])
    assert torch.equal(together, alone)
    assert torch.equal(in_int8(weight)(torch.zeros(2, 64)), torch.zeros(2, 30))
    rows = torch.randn(3, 64)
    rows[1, 5] = torch.nan
    assert in_int8(weight)(rows).isnan().all(1).tolist() == [False, True, False]


def test_weights_that_cannot_be_in_int8_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="from float32 on the CPU, and these are torch.float64 on cpu"):
        in_int8(torch.randn(3, 4).double())
    monkeypatch.setattr(ops, "INT8_WORKS", False)
    with pytest.raises(ValueError, match="no exact products in int8 on this CPU; leave out int8"):
        in_int8(torch.randn(3, 4))


def test_int8_is_not_used_if_its_sums_overflow(monkeypatch):
    class Operators:
        qlinear_prepack = staticmethod(lambda weight, shape: weight)

        @staticmethod
        def qlinear_pointwise(x, scale, zero, packed, scales, *others):
            return ((x.float() - zero) @ packed.t().float()).clamp(-(2**15), 2**15 - 1) * scales

    monkeypatch.setattr(torch.ops, "onednn", Operators)
    assert not ops._works(ops._int8_linear, 64)
    monkeypatch.delattr(Operators, "qlinear_prepack")
    assert not ops._works(ops._int8_linear, 64)
