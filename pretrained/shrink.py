"""Write a checkpoint of fairseq-train for --finetune-from-model: parameters in float16, no optimizer, no paths.

python pretrained/shrink.py INPUT OUTPUT
"""

import io
import sys
from pathlib import Path
from typing import Any, Dict

import torch

import mega_fairseq.models  # noqa: F401 - torch.load may then read what fairseq saves
from mega_fairseq.cli.output import write


def without_paths(value: Any) -> Any:
    """Settings with the last part of each absolute path."""
    if isinstance(value, dict):
        return {name: without_paths(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_paths, value))
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def main() -> None:
    source, target = sys.argv[1:]
    state = torch.load(source, map_location="cpu", weights_only=True)
    written: Dict[bytes, torch.Tensor] = {}  # tied parameters, such as embeddings, are written once
    for name, tensor in state["model"].items():
        half = tensor.half() if tensor.is_floating_point() else tensor
        state["model"][name] = written.setdefault(half.numpy().tobytes() + str(half.shape).encode(), half)
    del state["last_optimizer_state"]
    model = state.pop("model")
    content = io.BytesIO()
    torch.save({**without_paths(state), "model": model}, content)
    write(target, content.getbuffer())


if __name__ == "__main__":
    main()
