"""Position scores: what learned position biases add to attention scores, and which of them training reached.

The score of a distance that no training sample contained is still as initialised, so it means nothing.
"""

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.modules.position import PositionBias, SimpleBias, T5Bias

CPU = torch.device("cpu")
MOST_DISTANCES = 4096  # listed for one layer: a chunk may be of any size
Shapes = Mapping[str, torch.Size]  # of parameters, in the order of the optimizer


def position_scores(checkpoint: Checkpoint, model: nn.Module, shapes: Shapes) -> List[Dict[str, Any]]:
    """For each learned bias its scores by distance (key minus query position), and the range that training reached."""
    longest, moments = _longest_samples(checkpoint), _second_moments(checkpoint.optimizer, shapes)
    found = []
    for name, bias in model.named_modules():
        if not isinstance(bias, PositionBias) or not list(bias.parameters()):
            continue
        side, _, number, part, _ = name.split(".")
        c, cross = model.get_submodule(name.rpartition(".")[0]).config, part == "cross_attention"
        reach = min(getattr(c, "chunk_size", None) or c.max_positions, MOST_DISTANCES)
        first, last = 1 - reach, 0 if side == "decoder" and not cross else reach - 1
        found.append(
            {
                "name": f"{side} layer {number}" + (" cross attention" if cross else ""),
                "first": first,
                "values": [float(f"{value:.6g}") for value in bias(first, last + 1, CPU).tolist()],  # float32's digits
                "trained": _trained(
                    max(first, 1 - (longest[side] or reach)),
                    min(last, (longest["encoder" if cross else side] or reach) - 1),
                    bias,
                    moments.get(f"{name}.weight"),
                ),
            }
        )
    return found


def _trained(first: int, last: int, bias: PositionBias, moments: Optional[Tensor]) -> Optional[Tuple[int, int]]:
    """The distances first .. last without those whose table entries never received a gradient."""
    if moments is None or not isinstance(bias, (SimpleBias, T5Bias)):
        return first, last
    reached = functional_call(bias, {"weight": moments}, (first, last + 1, CPU)).nonzero()
    return (first + int(reached.min()), first + int(reached.max())) if len(reached) else None


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
    states = optimizer.get("state")
    found = {i: s["exp_avg_sq"] for i, s in states.items() if "exp_avg_sq" in s} if isinstance(states, dict) else {}
    sizes = [shape.numel() for shape in shapes.values()]
    if len(found) == 1 and found[0].numel() == sum(sizes):  # --fp16 flattens all parameters
        parts = found[0].flatten().split(sizes)
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts)}
    return {name: found[i] for i, (name, shape) in enumerate(shapes.items()) if i in found and found[i].shape == shape}
