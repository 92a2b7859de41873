"""Position scores: what layers learned to add to attention scores by distance, and which of them training reached.

The score of a distance that no training sample contained is still as initialised, so it means nothing.
"""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.checkpoint.untrusted import is_stored

MOST_POSITIONS = 4096  # of one layer: a chunk may be of any size
PARTS = {"mixer": "", "cross_attention": " cross attention"}  # of a layer, and their names after the layer's
Shapes = Mapping[str, torch.Size]  # of parameters, in the order of the optimizer


def position_scores(
    checkpoint: Checkpoint, stacks: Sequence[Tuple[str, nn.Module]], shapes: Shapes
) -> List[Dict[str, Any]]:
    """For each part with learned scores: the scores by distance (key minus query position), and the trained range."""
    longest, moments = _longest_samples(checkpoint), _second_moments(checkpoint.optimizer, shapes)
    found = []
    for side, i, layer in ((side, i, layer) for side, stack in stacks for i, layer in enumerate(stack.layers)):
        for part_name, title in PARTS.items():
            part = getattr(layer, part_name)
            learned = None if part is None else part.learned_scores(MOST_POSITIONS)
            if learned is None:
                continue
            first, values = learned
            queries, keys = longest[side], longest["encoder" if part_name == "cross_attention" else side]
            distances = torch.arange(first, first + len(values))
            trained = _reached(part, f"{side}.layers.{i}.{part_name}.", moments)
            trained &= (distances > -(queries or MOST_POSITIONS)) & (distances < (keys or MOST_POSITIONS))
            distances = distances[trained]
            found.append(
                {
                    "name": f"{side} layer {i}{title}",
                    "first": first,
                    "values": [float(f"{value:.6g}") for value in values.tolist()],  # the digits of a float32
                    "trained": [int(distances[0]), int(distances[-1])] if len(distances) else None,
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


def _reached(part: nn.Module, prefix: str, moments: Mapping[str, Tensor]) -> Tensor:
    """Whether each score depends on trained entries of parameters: whether its derivative by them is not 0."""
    parameters = {f"part.{name}": parameter for name, parameter in part.named_parameters()}
    trained = {
        f"part.{name}": (moments[prefix + name] > 0).to(parameter.dtype)
        if prefix + name in moments
        else torch.ones_like(parameter)
        for name, parameter in part.named_parameters()
    }
    return jvp(lambda values: functional_call(_Scores(part), values, ()), (parameters,), (trained,))[1] != 0


def _longest_samples(checkpoint: Checkpoint) -> Dict[str, Optional[int]]:
    """Tokens of the longest training samples that the options allow; None where they do not say."""

    def number(section: str, name: str) -> Optional[int]:
        value = checkpoint.option(section, name)
        return value if type(value) is int and value > 0 else None

    segment = None
    if checkpoint.option("task", "tokens_per_sample") is not None:  # language modelling
        chunk = number("task", "tokens_per_sample") or number("model", "decoder_chunk_size")
        segment = chunk and chunk * (number("task", "variant_block_multiple_max") or 1)
    batch = number("dataset", "max_tokens")
    limits = {
        "encoder": [number("task", "max_source_positions"), batch],
        "decoder": [number("task", "max_target_positions"), segment, batch],
    }
    return {side: min((value for value in values if value), default=None) for side, values in limits.items()}


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
