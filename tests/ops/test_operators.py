"""Operators are freed at once, and traced as a whole; tests/modules/test_compile.py traces those of blocks."""

import gc
import weakref

import torch

from mega_fairseq.ops.attention.segments import Bias, Segments, attention_in_segments
from mega_fairseq.ops.operators import operator
from tests.ops.helpers import noise


def attend_by_line(x):
    segments = Segments(*(torch.arange(32, dtype=torch.int32).view(2, 8, 2) // n for n in (2, 3)))
    return attention_in_segments(x, x, x, segments, Bias(x[0, :5], -1, 1), "laplace")


def test_compiled_attention_by_line_equals_the_eager_one_with_gradients():
    torch._dynamo.reset()
    results = []
    for run in (attend_by_line, torch.compile(attend_by_line, fullgraph=True, backend="aot_eager")):
        x = noise(2, 8, 4, grad=True)
        y = run(x)
        results.append((y, *torch.autograd.grad((y * y).sum(), x)))
    torch.testing.assert_close(*results)


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
