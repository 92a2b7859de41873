"""Position scores: what layers learned to add to attention scores by distance, and which distances were trained.

A distance that no training sample contained still has its initial score, which means nothing.
"""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.checkpoint.untrusted import is_stored

MOST_POSITIONS = 4096  # of one layer: a chunk may have any size
PARTS = {"mixer": "", "cross_attention": " cross attention"}  # of a layer, and their names after the layer's
Shapes = Mapping[str, torch.Size]  # of parameters, in the order of the optimizer


def position_scores(
    checkpoint: Checkpoint, stacks: Sequence[Tuple[str, nn.Module]], shapes: Shapes
) -> List[Dict[str, Any]]:
    """For each part with learned scores: the scores by distance (key minus query position), and the trained range.

    The range is empty if none was trained, and None if the checkpoint does not contain Adam's state.
    """
    moments, found = _second_moments(checkpoint.optimizer, shapes), []
    for side, i, layer in ((side, i, layer) for side, stack in stacks for i, layer in enumerate(stack.layers)):
        for part_name, title in PARTS.items():
            part = getattr(layer, part_name)
            learned = None if part is None else part.learned_scores(MOST_POSITIONS)
            if learned is None:
                continue
            first, values = learned
            reached = _reached(part, f"{side}.layers.{i}.{part_name}.", moments)
            distances = None if reached is None else (first + reached.nonzero().flatten()).tolist()
            found.append(
                {
                    "name": f"{side} layer {i}{title}",
                    "first": first,
                    "values": [float(f"{value:.6g}") for value in values.tolist()],  # the digits of a float32
                    "trained": [distances[0], distances[-1]] if distances else distances,
                }
            )
    return found


class _Scores(nn.Module):
    """A part's learned scores as a function of its parameters."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self) -> Tensor:
        return self.part.learned_scores(MOST_POSITIONS)[1]


def _reached(part: nn.Module, prefix: str, moments: Mapping[str, Tensor]) -> Optional[Tensor]:
    """Whether each score depends on trained entries of parameters: whether its derivative by them is not 0."""
    parameters = dict(part.named_parameters(prefix="part"))
    found = [moments.get(name.replace("part.", prefix, 1)) for name in parameters]
    if any(each is None for each in found):
        return None
    trained = {name: (each > 0).to(parameters[name].dtype) for name, each in zip(parameters, found)}
    return jvp(lambda values: functional_call(_Scores(part), values, ()), (parameters,), (trained,))[1] != 0


def _second_moments(optimizer: Mapping[str, Any], shapes: Shapes) -> Dict[str, Tensor]:
    """Adam's second moments by parameter: 0 where an entry had no gradient, at least not for thousands of updates."""
    states, found = optimizer.get("state"), {}
    for number, state in states.items() if isinstance(states, dict) else ():
        moments = state.get("exp_avg_sq") if isinstance(state, dict) else None
        if isinstance(moments, Tensor) and is_stored(moments):
            found[number] = moments
    sizes = [shape.numel() for shape in shapes.values()]
    if [moments.numel() for moments in found.values()] == [sum(sizes)]:  # --fp16 flattens all parameters
        parts = next(iter(found.values())).flatten().split(sizes)
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts)}
    return {name: found[i] for i, (name, shape) in enumerate(shapes.items()) if i in found and found[i].shape == shape}
