"""Operators with a backward pass of their own."""

from functools import wraps
from typing import Any, Callable, List, Sequence

import torch
from torch import Tensor

from mega_fairseq.ops.precision import without_autocast


def operator(
    name: str, arguments: str, outputs: str, forward: Callable, fake: Callable, backward: Callable
) -> Callable[..., Any]:
    """Makes `forward(*args)` one operator of torch, which torch.compile and torch.export trace as a whole.

    `arguments` and `outputs` are types as in torch's schemas; `fake(*args)` returns empty tensors like the outputs.
    `backward(grads, saved, *args)` returns the gradients of all arguments that are real or complex tensors, where
    `grads` are those of the outputs, or None, and `saved` all outputs but the first. Autocast is off in both. There
    are no second derivatives.
    """
    run = torch.library.custom_op(
        f"mega_fairseq::{name}", _without_autocast(forward), mutates_args=(), schema=f"({arguments}) -> {outputs}"
    )
    run.register_fake(fake)

    def contiguous(grads: Sequence, saved: Sequence, *args: Any) -> List[Tensor]:
        return [t.contiguous() for t in _without_autocast(backward)(grads, saved, *args)]

    schema = f"(Tensor?[] grads, Tensor[] saved, {arguments}) -> Tensor[]"
    differentiate = torch.library.custom_op(
        f"mega_fairseq::{name}_backward", contiguous, mutates_args=(), schema=schema
    )
    differentiate.register_fake(lambda _, __, *args: [t.new_empty(t.shape) for t in args if _has_gradient(t)])

    def save(ctx: Any, inputs: Sequence, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.others = [None if isinstance(t, Tensor) else [t] for t in inputs]
        saved = output[1:] if isinstance(output, (tuple, list)) else ()
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)), *saved)

    @once_differentiable
    def gradients(ctx: Any, *grads: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if other is None else other[0] for other in ctx.others]
        found = iter(differentiate(list(grads), list(tensors), *args))
        return tuple(next(found) if _has_gradient(t) else None for t in args)

    run.register_autograd(gradients, setup_context=save)
    return run


def _without_autocast(function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any) -> Any:
        with without_autocast(next(t for t in args if isinstance(t, Tensor))):
            return function(*args)

    return run


def _has_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and (argument.is_floating_point() or argument.is_complex())


def once_differentiable(backward: Callable) -> Callable:
    """Refuses second derivatives.

    torch's decorator of this name leaves terms out in silence if only derivatives with respect to inputs are computed.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("this layer has no second derivatives; compute the first ones without create_graph=True")
        return backward(ctx, *gradients)

    return checked
