"""Measures how much cross attention of a model trained on windows of documents is on the aligned line.

    python benchmarks/attention_by_line.py CHECKPOINT DATA [SPLIT] [WINDOW_TOKENS]

With references as targets, each row has the mean share of a target token's attention that is on the source line with
the same number, and on that one and its neighbours, by place of the line in its window; the first for uniform weights.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, List, Tuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.checkpoint_utils import load_model_ensemble_and_task

import mega_fairseq.models  # noqa: F401 - registers them
from mega_fairseq.cli.documents.metrics import PLACES


def shares(weights: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Weights (n, m) of tokens of these lines, (m,) and (n,) -> (n, 2): on the same line, and on those within 1."""
    distance = (source - target.unsqueeze(1)).abs()
    near = [weights.masked_fill(distance > limit, 0.0).sum(-1) for limit in (0, 1)]
    return torch.stack(near, -1) / weights.sum(-1, keepdim=True)


def add_weights(weights: List[Tensor], layer: nn.Module, inputs: Tuple, output: Any) -> None:
    weights.append(layer.forward(*inputs, need_weights=True)[2][0])


@torch.no_grad()
def table(checkpoint: str, data: str, split: str = "test", window_tokens: str = "0") -> List[List[str]]:
    overrides = {"data": data, **({"valid_window_tokens": int(window_tokens)} if int(window_tokens) else {})}
    (model,), _, task = load_model_ensemble_and_task([checkpoint], arg_overrides=overrides)
    task.load_dataset(split)
    model.eval()
    layers, weights = model.decoder.layers, []
    for layer in layers:
        layer.cross_attention.register_forward_hook(partial(add_weights, weights))
    first, dataset = torch.tensor(list(PLACES)) - 1, task.dataset(split)
    sums, counts = torch.zeros(1 + len(layers), len(PLACES), 2), torch.zeros(len(PLACES), 1)
    for index in range(len(dataset)):
        inputs = dataset.collater([dataset[index]])["net_input"]  # one window, so there are no pads
        source, target = inputs["src_tokens"][0], inputs["prev_output_tokens"][0]
        weights[:] = [torch.ones(len(target), len(source))]
        model(**inputs)
        ends, starts = source.eq(task.separators[0]), target.eq(task.separators[1])
        line = starts.cumsum(0)
        place = torch.bucketize(line, first, right=True) - 1
        for total, of_layer in zip(sums, weights):
            total.index_add_(0, place, shares(of_layer, ends.cumsum(0) - ends.long(), line))
        counts += place.bincount(minlength=len(PLACES)).unsqueeze(1)
    rows = [[f"{same:.3f}, {near:.3f}" for same, near in (total / counts).tolist()] for total in sums]
    names = ["uniform", *(f"layer {number + 1}" for number in range(len(layers)))]
    head = [
        ["line", *PLACES.values()],
        ["---"] * (1 + len(PLACES)),
        ["tokens", *(f"{count:,.0f}" for (count,) in counts)],
    ]
    return [*head, *([name, *row] for name, row in zip(names, rows))]


if __name__ == "__main__":
    print("\n".join(f"| {' | '.join(row)} |" for row in table(*sys.argv[1:])))
