"""Average the parameters of fairseq checkpoints.

OUTPUT is the last INPUT with the mean of all parameters and without the optimizer state: it is for evaluation, not for
further training. Inputs are loaded one at a time.
"""

import argparse
import io
import sys
from typing import Any, Dict, List

import torch

import mega_fairseq.models  # noqa: F401 - torch.load may then read what fairseq saves
from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write


def load(path: str) -> Dict[str, Any]:
    """Load a checkpoint without running any code in it (`weights_only`)."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        sys.exit(f"error: {path} does not exist: give checkpoints saved by fairseq-train")
    except OSError as error:
        sys.exit(f"error: {path} cannot be read ({error.strerror}): give checkpoints saved by fairseq-train")
    except Exception as error:  # torch's unpickler raises many kinds for other files
        reason = " ".join(f"{type(error).__name__}: {error}".splitlines()[:1])
        sys.exit(f"error: {path} is not a complete checkpoint of tensors, text and options ({reason}): leave it out")
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        sys.exit(f"error: {path} has no parameters under 'model': give a checkpoint saved by fairseq-train")
    if not all(torch.isfinite(tensor).all() for tensor in model.values()):
        sys.exit(f"error: {path} has parameters that are NaN or infinite: the model has diverged; leave it out")
    return state


def average(paths: List[str]) -> Dict[str, Any]:
    total: Dict[str, torch.Tensor] = {}
    for path in paths:
        state = load(path)
        print(f"  read {path}", file=sys.stderr, flush=True)
        model = state["model"]
        if total and {name: tensor.shape for name, tensor in model.items()} != {n: t.shape for n, t in total.items()}:
            sys.exit(f"error: {path} and {paths[0]} have different architectures: average checkpoints of one run")
        # In float64: sums in half precision would lose what averaging gains.
        total = {name: tensor.double() + total.get(name, 0) for name, tensor in model.items()}
    state["model"] = {
        name: (total[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.items()
    }
    state.pop("last_optimizer_state", None)
    return state


def save(state: Dict[str, Any], path: str) -> None:
    content = io.BytesIO()
    torch.save(state, content)
    try:
        write(path, content.getbuffer())
    except UserError as error:
        sys.exit(f"error: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", help="file to write")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="checkpoints of one run")
    args = parser.parse_args()
    save(average(args.inputs), args.output)


if __name__ == "__main__":
    main()
