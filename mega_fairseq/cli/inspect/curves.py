"""Curves: what layers learned by distance or place, and which distances or places training reached.

A distance that no training sample contained still has its initial number, which means nothing.
"""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.data.stored import is_stored
from mega_fairseq.modules.description import Curves

MOST_POSITIONS = 4096  # of one layer: a chunk may have any size
MOST_HEADS = 32  # with a curve each; of more heads (AFT may have one for each channel) quantiles are shown
QUANTILES = {"min": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "max": 1.0}
PARTS = {"mixer": "", "cross_attention": " cross attention"}  # of a layer, and their names after the layer's
Shapes = Mapping[str, torch.Size]  # of parameters, in the order of the optimizer


def curves(checkpoint: Checkpoint, stacks: Sequence[Tuple[str, nn.Module]], shapes: Shapes) -> List[Dict[str, Any]]:
    """A row for each layer and kind of curve: a list of values for each label, and the trained range.

    The range is empty if none was trained, and None if the checkpoint does not contain Adam's state.
    """
    moments, rows = _second_moments(checkpoint.optimizer, shapes), []
    for side, i, layer in ((side, i, layer) for side, stack in stacks for i, layer in enumerate(stack.layers)):
        for part_name, title in PARTS.items():
            part = getattr(layer, part_name)
            described = [] if part is None else _described(part)
            reached = _reached(part, f"{side}.layers.{i}.{part_name}.", moments) if described else []
            for found, range_reached in zip(described, reached):
                labels, values = _labelled(found.values)
                rows.append(
                    {
                        "name": f"{side} layer {i}{title}",
                        "kind": found.name,
                        "axis": found.axis,
                        "first": found.first,
                        "labels": labels,
                        "values": [[float(f"{value:.6g}") for value in curve] for curve in values.tolist()],
                        "trained": _range(found.first, range_reached),
                    }
                )
    return rows


def _described(part: nn.Module) -> List[Curves]:
    return [found for found in part.describe(MOST_POSITIONS) if isinstance(found, Curves)]


def _labelled(values: Tensor) -> Tuple[List[str], np.ndarray]:
    """A curve for each head (H, n), or quantiles over many heads."""
    heads, values = values.size(0), values.double().numpy()
    if heads == 1:
        return [""], values
    if heads <= MOST_HEADS:
        return [f"head {head}" for head in range(heads)], values
    return [f"{name} of {heads} heads" for name in QUANTILES], np.quantile(values, list(QUANTILES.values()), axis=0)


def _range(first: int, reached: Optional[Tensor]) -> Optional[List[int]]:
    """The first and last distance or place that training reached, in any head."""
    if reached is None:
        return None
    found = (first + reached.any(0).nonzero().flatten()).tolist()
    return [found[0], found[-1]] if found else []


class _Values(nn.Module):
    """A part's curves as a function of its parameters."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self) -> Tuple[Tensor, ...]:
        return tuple(found.values for found in _described(self.part))


def _reached(part: nn.Module, prefix: str, moments: Mapping[str, Tensor]) -> List[Optional[Tensor]]:
    """Whether the values of each curve depend on trained entries of parameters: whether derivatives are not 0."""
    parameters = dict(part.named_parameters(prefix="part"))
    found = [moments.get(name.replace("part.", prefix, 1)) for name in parameters]
    if any(each is None for each in found):
        return [None] * len(_described(part))
    trained = {name: (each > 0).to(parameters[name].dtype) for name, each in zip(parameters, found)}
    tangents = jvp(lambda values: functional_call(_Values(part), values, ()), (parameters,), (trained,))[1]
    return [tangent != 0 for tangent in tangents]


def _second_moments(optimizer: Mapping[str, Any], shapes: Shapes) -> Dict[str, Tensor]:
    """Adam's second moments by parameter: 0 where an entry had no gradient, at least not for thousands of updates."""
    states, found = optimizer.get("state"), {}
    for number, state in states.items() if isinstance(states, dict) else ():
        moments = state.get("exp_avg_sq") if isinstance(state, dict) else None
        if isinstance(moments, Tensor) and moments.numel() and is_stored(moments):
            found[number] = moments
    sizes = [shape.numel() for shape in shapes.values()]
    if [moments.numel() for moments in found.values()] == [sum(sizes)]:  # --fp16 flattens all parameters
        parts = next(iter(found.values())).flatten().split(sizes)
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts)}
    return {name: found[i] for i, (name, shape) in enumerate(shapes.items()) if i in found and found[i].shape == shape}
