"""Operators with a backward pass of their own, and which tensors they take."""

from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterator, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mega_fairseq.ops.precision import without_autocast


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a tensor, or a fake one, whose numbers an operator may read.

    Others are of classes that give operations another meaning or consist of several tensors: quantised, sharded.
    """
    kind = type(tensor)
    if kind is nn.Parameter or kind is Tensor:
        return True
    return kind.__torch_function__ is torch._C._disabled_torch_function_impl and not hasattr(kind, "__tensor_flatten__")


def operator(
    schema: str,
    forward: Callable,
    fake: Callable,
    backward: Callable,
    saved: slice = slice(1, None),
    gradients: Optional[int] = None,
) -> Callable[..., Any]:
    """Makes `forward(*args)` one operator of torch, which torch.compile and torch.export trace as a whole.

    `schema` is in torch's notation: "name(Tensor x) -> Tensor". `fake(*args)` returns empty tensors like the outputs;
    if they change, so must the name, by which torch finds compiled programs of earlier versions on the disk.
    `backward(grads, saved, *args)` returns the gradients of all real or complex tensors among the arguments, or among
    the first `gradients` of them, where `grads` are those of the outputs, or None for some, and `saved` the outputs in
    that slice. Autocast is off in both. There are no second derivatives.
    """
    run = without_gradient(schema, _without_autocast(forward), fake)

    def contiguous(grads: Sequence, saved: Sequence, *args: Any) -> List[Tensor]:
        return [t.contiguous() for t in _without_autocast(backward)(grads, saved, *args)]

    def fake_backward(grads: Sequence, saved: Sequence, *args: Any) -> List[Tensor]:
        return [t.new_empty(t.shape) for t in tree_flatten(args[:gradients])[0] if _has_gradient(t)]

    name, arguments = schema.split(") -> ")[0].split("(")
    of_backward = f"{name}_backward(Tensor?[] grads, Tensor[] saved, {arguments}) -> Tensor[]"
    run_backward = without_gradient(of_backward, contiguous, fake_backward)

    def save(ctx: Any, inputs: Sequence, output: Any) -> None:
        ctx.set_materialize_grads(False)
        leaves, ctx.structure = tree_flatten(list(inputs))
        ctx.others = [None if isinstance(t, Tensor) else [t] for t in leaves]
        kept = output[saved] if isinstance(output, (tuple, list)) else ()
        ctx.save_for_backward(*(t for t in leaves if isinstance(t, Tensor)), *kept)

    def differentiate(ctx: Any, *grads: Any) -> Any:
        # torch's `once_differentiable` leaves terms out in silence if only derivatives of inputs are computed.
        if torch.is_grad_enabled():
            raise RuntimeError("this layer has no second derivatives; compute the first ones without create_graph=True")
        tensors = iter(ctx.saved_tensors)
        leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
        args = tree_unflatten(leaves, ctx.structure)
        no_gradient = all(t is None for t in grads)
        results = [] if no_gradient else run_backward(list(grads), list(tensors), *args)
        return tuple(_take_gradients(args, results[::-1]))

    run.register_autograd(differentiate, setup_context=save)
    return run


def without_gradient(schema: str, function: Callable, fake: Callable) -> Callable[..., Any]:
    """Makes a function one operator of torch that has no backward pass; see `operator` for the arguments."""
    name, types = schema.split("(", 1)
    run = torch.library.custom_op(f"mega_fairseq::{name}", function, mutates_args=(), schema=f"({types}")
    run.register_fake(fake)
    return run


@contextmanager
def differentiable() -> Iterator[None]:
    """Lets torch differentiate what the backward pass of an operator computes; inside operators it does not."""
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def _without_autocast(function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any) -> Any:
        with without_autocast(next(t for t in args if isinstance(t, Tensor))):
            return function(*args)

    return run


def _take_gradients(arguments: Sequence, results: List[Tensor]) -> List[Any]:
    """The gradient of each argument, removed from `results`: torch copies those of parameters that others refer to."""

    def take(argument: Any) -> Any:
        if isinstance(argument, list) and all(isinstance(t, Tensor) for t in argument):
            return _take_gradients(argument, results)
        return results.pop() if results and _has_gradient(argument) else None

    return list(map(take, arguments))


def _has_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and (argument.is_floating_point() or argument.is_complex())
