"""Time mega_encoder_base beside fairseq's RoBERTa base: one thread, two layers of each, in turns.

python -m benchmarks.encoder 512 2048 8192
"""

import statistics
import sys
import time
from argparse import Namespace
from typing import Dict, List

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaModel
from torch import nn

from mega_fairseq.models import MegaEncoderModel

TYPES, LAYERS, ROUNDS = 8000, 2, 3


def models(length: int) -> Dict[str, nn.Module]:
    dictionary = Dictionary()
    for number in range(TYPES - len(dictionary)):
        dictionary.add_symbol(str(number))
    task = Namespace(source_dictionary=dictionary, cfg=None, state_dict=dict)
    preset = MODEL_DATACLASS_REGISTRY["mega_encoder_base"](encoder_layers=LAYERS)
    return {
        "mega_encoder_base": MegaEncoderModel.build_model(preset, task),
        "roberta_base": RobertaModel.build_model(Namespace(encoder_layers=LAYERS, max_positions=length), task),
    }


def seconds(model: nn.Module, tokens: torch.Tensor, masked: torch.Tensor, train: bool) -> float:
    model.train(train)
    start = time.thread_time()
    with torch.set_grad_enabled(train):
        scores = model(src_tokens=tokens, masked_tokens=masked)[0]
        if train:
            scores.sum().backward()
    return time.thread_time() - start


def main(lengths: List[int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for length in lengths:
        tokens = torch.randint(4, TYPES, (1, length))
        masked = torch.rand(1, length) < 0.15
        both = models(length)
        for kind, train in (("forward", False), ("forward and backward", True)):
            times: Dict[str, List[float]] = {name: [] for name in both}
            for _ in range(ROUNDS):
                for name, model in both.items():
                    times[name].append(seconds(model, tokens, masked, train))
            ours, theirs = (statistics.median(times[name]) for name in both)
            print(f"{length} tokens, {kind}: {ours:.2f} s, RoBERTa {theirs:.2f} s, {theirs / ours:.2f}x", flush=True)


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
