"""fairseq's Adam with one operation for all weights, where fairseq has eight for each of them.

With --memory-efficient-fp16 and --memory-efficient-bf16, fairseq leaves float32 to its optimizer. This one then keeps
float32 weights in its state, so it computes what fairseq's Adam does with --fp16 and --bf16.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any, Callable, Dict, List, Optional, Union

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam
from omegaconf import II
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mega_fairseq.fairseq_options import option


@dataclass
class MegaAdamConfig(FairseqDataclass):
    adam_betas: Any = option((0.9, 0.999), "decay of the averages of gradients and of their squares")
    adam_eps: float = option(1e-8, "added to the square root of the average of squares")
    weight_decay: float = option(0.0, "weight decay, separate from gradients as in AdamW")
    lr: List[float] = II("optimization.lr")


@register_optimizer("mega_adam", dataclass=MegaAdamConfig)
class MegaAdam(FairseqAdam):
    def __init__(self, cfg: MegaAdamConfig, params: List[Tensor]):
        FairseqOptimizer.__init__(self, cfg)
        if any(_is_half(p) and hasattr(p, "param_group") for p in params):
            raise ValueError(
                "--optimizer composite cannot resume with --memory-efficient-fp16 or --memory-efficient-bf16; leave "
                "that option out"
            )
        self._optimizer = FusedAdam(params, **self.optimizer_config)

    def multiply_grads(self, c: Union[float, Tensor]) -> None:
        """In one operation also with fairseq 0.12.2."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, c)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable] = None) -> Tensor:
        gradients = [p.grad for p in self.params if p.grad is not None]
        if not gradients:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp_(max=1))
        return norm


class FusedAdam(Adam):
    """State of a weight: fairseq's (`step`, `exp_avg`, `exp_avg_sq`), and `master`, its float32 copy if it is half."""

    disable_mem_eff_fp16_loading_hack = True  # fairseq's would leave the loaded state on the CPU

    @property
    def supports_step_with_scale(self) -> bool:
        # With float32 copies of its own and bf16, fairseq would never reset the scale.
        return any(_is_half(p) for group in self.param_groups for p in group["params"])

    def step(self, closure: Optional[Callable] = None, scale: Union[float, Tensor] = 1.0) -> Optional[Tensor]:
        """An update by gradients divided by `scale`, which fairseq gives for half precision only."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            by_step: Dict[int, List[Tensor]] = defaultdict(list)  # layerdrop leaves out weights
            for p in group["params"]:
                if p.grad is not None:
                    by_step[self._state(p)["step"]].append(p)
            for step, weights in by_step.items():
                self._update(group, step + 1, weights, scale)
        return loss

    def _state(self, p: Tensor) -> Dict[str, Any]:
        state = self.state[p]
        if "step" not in state:
            state.update({name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}, step=0)
        if _is_half(p) and "master" not in state:
            state["master"] = p.detach().float()
        return state

    @torch.no_grad()
    def _update(self, group: Dict[str, Any], step: int, weights: List[Tensor], scale: Union[float, Tensor]) -> None:
        states = [self.state[p] for p in weights]
        masters = [state.get("master", p) for state, p in zip(states, weights)]
        gradients = [p.grad for p in weights]
        if any(map(_is_half, gradients)):
            gradients = _unflatten_dense_tensors(_flatten_dense_tensors(gradients).float().div_(scale), gradients)
        # The fused operation requires equal strides, and does not check them on a CPU.
        pairs = zip(gradients, masters)
        gradients = [g if g.stride() == master.stride() else torch.empty_like(master).copy_(g) for g, master in pairs]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            masters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.full((), float(step), device=masters[0].device)] * len(masters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**step),  # fairseq corrects the bias of the root with epsilon
            amsgrad=False,
            maximize=False,
        )
        halves = [(p, master) for p, master in zip(weights, masters) if p is not master]
        if halves:
            torch._foreach_copy_(*map(list, zip(*halves)))
        for state in states:
            state["step"] = step

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state, also that of fairseq's Adam, in float32: torch would round it like the weights."""
        super().load_state_dict(state_dict)
        weights, numbers = (
            chain(*(group["params"] for group in groups)) for groups in (self.param_groups, state_dict["param_groups"])
        )
        for p, number in zip(weights, numbers):
            if number in state_dict["state"]:
                state = dict(state_dict["state"][number])
                tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                state.update({name: t.to(p.device, torch.float32, copy=True) for name, t in tensors.items()})
                if "master" in state and not torch.equal(state["master"].to(p.dtype), p):
                    del state["master"]  # the weights are others, as after averaging checkpoints
                self.state[p] = state


def _is_half(t: Tensor) -> bool:
    return t.dtype in (torch.float16, torch.bfloat16)
