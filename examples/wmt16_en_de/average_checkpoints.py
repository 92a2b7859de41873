"""Average the parameters of fairseq checkpoints: average_checkpoints.py OUTPUT INPUT...

The result is the last input with the mean of all parameters and without the optimizer's state: it can be decoded
with, not trained on. One input at a time is in memory.
"""

import pickle
import sys
from typing import Any, Dict, List

import torch

from mega_fairseq.models.checkpoints import allow_plain_containers


def load(path: str) -> Dict[str, Any]:
    """The checkpoint, without running any code that it may hold (`weights_only`)."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        sys.exit(f"error: {path} is damaged, or holds more than numbers, text and options: {error}")


def average(paths: List[str]) -> Dict[str, Any]:
    total: Dict[str, torch.Tensor] = {}
    for path in paths:
        state = load(path)
        print(f"  read {path}", file=sys.stderr, flush=True)
        model = state["model"]
        if total and {name: tensor.shape for name, tensor in model.items()} != {n: t.shape for n, t in total.items()}:
            sys.exit(f"error: {path} is of another architecture than {paths[0]}")
        # float64: adding up half-precision parameters would lose what averaging is to gain.
        total = {name: tensor.double() + total.get(name, 0) for name, tensor in model.items()}
    state["model"] = {
        name: (total[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.items()
    }
    state.pop("last_optimizer_state", None)
    return state


def main() -> None:
    output, *inputs = sys.argv[1:]
    allow_plain_containers()
    torch.save(average(inputs), output)


if __name__ == "__main__":
    main()
