"""Pruning and dropping layers of an encoder or decoder, and recomputing their activations."""

import re
from contextlib import contextmanager, nullcontext
from typing import Any, Iterator, List, Mapping

import torch
from fairseq.dataclass import FairseqDataclass
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from mega_fairseq.fairseq_options import is_training, option_of_command

TORCH_DDP = ("pytorch_ddp", "c10d")


def keep_layers(cfg: FairseqDataclass, side: str) -> None:
    """Checks the options for dropping and pruning layers, and sets the number of layers kept (Fan et al. 2019)."""
    rate, given = getattr(cfg, f"{side}_layerdrop"), getattr(cfg, f"{side}_layers_to_keep")
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"--{side}-layerdrop is {rate}; it must be a probability from 0 up to, but not including, 1")
    if rate > 0.0:
        _check_backend(cfg, side)
    if not given:
        return
    layers, numbers = getattr(cfg, f"{side}_layers"), given.split(",")
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(map(str, range(layers))):
        raise ValueError(
            f"--{side}-layers-to-keep is {given!r} and there are {layers} layers; give numbers from 0 to {layers - 1}, "
            "separated by commas"
        )
    setattr(cfg, f"{side}_layers", len(numbers))


def _check_backend(cfg: FairseqDataclass, side: str) -> None:
    """torch's DDP fails in the second update if a layer had no gradient and it does not look for unused parameters."""
    if not is_training(cfg):
        return
    given = option_of_command(cfg, "distributed_training")
    if given.distributed_world_size > 1 and given.ddp_backend in TORCH_DDP and not given.find_unused_parameters:
        raise ValueError(
            f"--{side}-layerdrop leaves out layers, and --ddp-backend {given.ddp_backend} expects gradients of all of "
            "them in every update; add --find-unused-parameters, or give --ddp-backend legacy_ddp"
        )


def count_layers(state_dict: Mapping[str, Tensor], side: str) -> int:
    found = (re.match(rf"{side}\.layers\.(\d+)\.", name) for name in state_dict)
    return len({match.group(1) for match in found if match})


def layers_to_run(stack: nn.Module, rate: float) -> List[int]:
    """Numbers of the layers that run in this step: in training, each is dropped with probability `rate`."""
    count = len(stack.layers)
    if not stack.training or rate == 0.0:
        return list(range(count))
    return (torch.rand(count) >= rate).nonzero().flatten().tolist()


def run_layer(cfg: FairseqDataclass, layer: nn.Module, x: Tensor, *rest: Any) -> Any:
    """`layer(x, *rest)`; with --checkpoint-activations, backward recomputes its activations."""
    if not (cfg.checkpoint_activations or cfg.offload_activations) or not torch.is_grad_enabled():
        return layer(x, *rest)
    with save_on_cpu(pin_memory=x.is_cuda) if cfg.offload_activations else nullcontext():
        return checkpoint(
            layer, x, *rest, use_reentrant=False, context_fn=lambda: (nullcontext(), _buffers_kept(layer))
        )


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Discards changes of buffers: batch norm must not count a batch again when its layer is recomputed."""
    originals = [(part, dict(part._buffers)) for part in module.modules()]
    for part, buffers in originals:
        part._buffers.update({name: t.clone() for name, t in buffers.items() if t is not None})
    try:
        yield
    finally:
        for part, buffers in originals:
            part._buffers.update(buffers)
