"""Classification examples as fairseq's criterion `sentence_prediction` takes them."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import data_utils
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mega_fairseq.data.batches import InWholeBatches, SizedDataset
from mega_fairseq.data.classification.inputs import Inputs


class Shortened(Inputs):
    """Inputs behind a first token, if there is one, and cut to `longest` positions."""

    def __init__(self, inputs: Inputs, longest: int, first: Optional[int] = None):
        whole = inputs.sizes + (first is not None)
        super().__init__(inputs.source, np.minimum(whole, longest))
        self.inputs, self.longest, self.first, self.cut = inputs, longest, first, int((whole > longest).sum())

    def __getitem__(self, index: int) -> Tensor:
        x = self.inputs[index]
        if self.first is not None:
            x = F.pad(x, (1, 0), value=self.first)
        return x[: self.sizes[index]]

    def about_cut(self) -> str:
        return f"{self.cut:,} of {len(self):,} inputs in {self.source} have more than {self.longest:,} positions"


class ExampleDataset(InWholeBatches, SizedDataset):
    """Examples of one input, or of two, each with a class number unless `classes` is None.

    They have one fixed random order, the one of fairseq's task: the same seed draws the same batches.
    """

    def __init__(self, inputs: Sequence[Shortened], classes: Optional[np.ndarray], pad: float, seed: int):
        self.inputs, self.classes, self.pad, self.seed = inputs, classes, pad, seed
        # Both inputs of a pair are padded to the longer of them, since they are encoded in one batch.
        self.sizes = len(inputs) * np.max([one.sizes for one in inputs], 0)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        example = {"id": index, "inputs": [one[index] for one in self.inputs]}
        return example if self.classes is None else {**example, "class": int(self.classes[index])}

    def collater(self, examples: List[Dict[str, Any]]) -> Dict[str, Any]:
        if not examples:
            return {}
        net_input: Dict[str, Tensor] = {}
        for number, suffix in zip(range(len(self.inputs)), ("", "1")):
            rows = [example["inputs"][number] for example in examples]
            net_input[f"src_tokens{suffix}"] = pad_sequence(
                rows, batch_first=True, padding_value=self.pad
            )  # on the right
            net_input[f"src_lengths{suffix}"] = torch.tensor([len(row) for row in rows])
        batch = {
            "id": torch.tensor([example["id"] for example in examples]),
            "net_input": net_input,
            "nsentences": len(examples),
            "ntokens": sum(len(row) for example in examples for row in example["inputs"]),
        }
        if self.classes is not None:
            batch["target"] = torch.tensor([example["class"] for example in examples])
        return batch

    def ordered_indices(self) -> np.ndarray:
        with data_utils.numpy_seed(self.seed):
            return np.argsort(np.random.permutation(len(self)))

    def filter_indices_by_size(self, indices: np.ndarray, max_positions: Any) -> Tuple[np.ndarray, List[int]]:
        """Keep all: fairseq would leave out the longest examples of a training with a warning."""
        return indices, []

    def batch_by_size(self, indices: np.ndarray, max_tokens: Optional[int] = None, *limits: Any, **others: Any) -> Any:
        longest = int(self.sizes.max())
        if max_tokens is not None and longest > max_tokens:
            raise ValueError(
                f"an example has {longest:,} tokens and --max-tokens is {max_tokens:,}; give at least {longest:,}, "
                "or a smaller --max-positions with --shorten-method truncate"
            )
        return super().batch_by_size(indices, max_tokens, *limits, **others)
