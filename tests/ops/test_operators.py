"""Compilers trace each operator and its gradient as a whole."""

import gc
import weakref

import pytest
import torch

from mega_fairseq.ops.aft import aft
from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.attention.segments import Bias, Segments, attention_in_segments
from mega_fairseq.ops.linear_attention import Memory, chunk_memory
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.sparse import Sparsity, sparse_attention
from mega_fairseq.ops.toeplitz import toeplitz
from tests.ops.helpers import noise


def attend(x):
    return attention(x, x, x, "relu2", True, bias=x[0, :, :1].flatten().repeat(2)[:-1])


def attend_by_line(x):
    segments = Segments(*(torch.arange(32, dtype=torch.int32).view(2, 8, 2) // n for n in (2, 3)))
    return attention_in_segments(x, x, x, segments, Bias(x[0, :5], -1, 1), "laplace")


def remember(x):
    memory = Memory(x.new_zeros(2, 4, 4), torch.zeros(2, dtype=torch.long, device=x.device))
    return chunk_memory(x, x, x, 3, memory)[0]


def attend_sparsely(x):
    heads = x.unflatten(-1, (2, 2))
    return sparse_attention(heads, heads, heads, Sparsity("strided", "merged", 3), dropout=0.0).flatten(2)


def multiply(x):
    return toeplitz(x, x[0].t().repeat(1, 2)[:2, :-1], causal=True)


def average(x):
    return aft(x, x, x[0, :, :2].t())


OPERATORS = [average, attend, attend_by_line, remember, attend_sparsely, multiply]


@pytest.mark.parametrize("function", OPERATORS)
def test_a_compiled_operator_equals_the_eager_one_with_gradients(function):
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        x = noise(2, 8, 4, grad=True)
        y = run(x)
        results.append((y, *torch.autograd.grad((y * y).sum(), x)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_freed_without_the_garbage_collector():
    double = operator("double(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like, lambda grads, *_: [2 * grads[0]])
    gradients, x = [], noise(3, grad=True)
    x.register_hook(lambda grad: gradients.append(weakref.ref(grad)))
    gc.disable()
    try:
        double(x).sum().backward()
        x.grad = None
        assert gradients[0]() is None
    finally:
        gc.enable()
