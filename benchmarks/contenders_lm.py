"""Language models to measure: ours, fairseq's transformer_lm of the same size, and both implementations of scoring.

They read random tokens, distributed like words: Mega as one stream, the Transformer with the sliding window of
fairseq's documentation.
"""

from argparse import Namespace
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from fairseq.data import Dictionary, ListDataset, LMContextWindowDataset, MonolingualDataset, TokenBlockDataset
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor

from benchmarks.models import preset
from mega_fairseq.data import Corpus, StreamDataset
from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.modules.adaptive_input import AdaptiveInput

TYPES = {"wt103": 267_744, "enwik8": 208}
TRANSFORMERS = {  # of the same size: 247M with adaptive input and softmax, 38M
    "wt103": {"arch": "transformer_lm_wiki103"},
    "enwik8": {
        "arch": "transformer_lm",
        "decoder_layers": 12,
        "decoder_ffn_embed_dim": 2048,
        "decoder_attention_heads": 8,
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
    },
}
WINDOW, CONTEXT = 512, 400


def like_words(types: int, count: int) -> Tensor:
    """Random types, distributed by Zipf's law, without the special ones (0-3)."""
    chances = 1 / torch.arange(1, types - 3, dtype=torch.float64)
    torch.manual_seed(1)
    return torch.multinomial(chances, count, replacement=True) + 4


# ------------------------------------------------------------------------------------------------ scoring targets


def heads(types: int, tokens: int, cutoffs: List[int]) -> Dict[str, Callable[[], Tensor]]:
    """Log-probabilities of `tokens` targets from their features, with one adaptive softmax."""
    softmax, targets = softmax_of(types, 1024, cutoffs), like_words(types, tokens)
    x = torch.randn(tokens, 1024)
    return {
        "ours": lambda: adaptive_log_probs(softmax, x, targets),
        "stock": lambda: stock_scores(softmax, x, targets, tokens),
        "stock by 256": lambda: stock_scores(softmax, x, targets, 256),
    }


def softmax_of(types: int, dim: int, cutoffs: List[int]) -> AdaptiveSoftmax:
    torch.manual_seed(0)
    tables = AdaptiveInput(types, 1, dim, dim, cutoffs, 4.0)
    return AdaptiveSoftmax(types, dim, cutoffs, 0.2, adaptive_inputs=tables, tie_proj=True).eval()


def stock_scores(softmax: AdaptiveSoftmax, x: Tensor, targets: Tensor, batch: int) -> Tensor:
    """As in fairseq's SequenceScorer, `batch` tokens at a time (--softmax-batch)."""
    found = []
    for start in range(0, len(x), batch):
        features, wanted = x[None, start : start + batch], targets[None, start : start + batch]
        log_probs = softmax.get_log_prob(features, wanted)  # (1, batch, V)
        found.append(log_probs.gather(2, wanted.unsqueeze(-1)).flatten())
    return torch.cat(found)


# ------------------------------------------------------------------------------------------------ models


def mega(shape: str, task: Namespace, chunk: int, quick: bool) -> BaseFairseqModel:
    options = {"decoder_chunk_size": chunk}
    if quick:
        options.update(decoder_layers=1, decoder_embed_dim=64, decoder_hidden_dim=64, decoder_ffn_embed_dim=64)
    if quick and shape == "wt103":
        options.update(adaptive_softmax_cutoff="200,600")
    return preset(f"mega_lm_{shape}", task, **options)


def as_words(shape: str) -> List[str]:
    """The Transformer's options for a command line."""
    options = ((f"--{name.replace('_', '-')}", value) for name, value in TRANSFORMERS[shape].items())
    return [part for name, value in options for part in ([name] if value is True else [name, str(value)])]


def transformer(shape: str, task: Namespace, quick: bool) -> BaseFairseqModel:
    options = {**TRANSFORMERS[shape], "tokens_per_sample": WINDOW, "max_target_positions": WINDOW}
    if quick:
        options.update(decoder_layers=1, decoder_ffn_embed_dim=64)
    if quick and shape == "wt103":
        options.update(adaptive_softmax_cutoff="200,600", adaptive_input_cutoff="200,600")
    args = Namespace(**options)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    for name, value in vars(MODEL_DATACLASS_REGISTRY["transformer_lm"]()).items():
        setattr(args, name, getattr(args, name, value))
    return MODEL_REGISTRY["transformer_lm"].build_model(args, task).eval()


# The batches that the task's eval_lm_dataloader yields for one sequence of tokens:


def as_stream(words: Dictionary, tokens: Tensor) -> List[Dict[str, Any]]:
    """One batch with the whole sequence."""
    corpus = Corpus([tokens.numpy()], np.array([len(tokens)]))
    streams = StreamDataset(corpus, np.array([0, len(tokens)]), words.pad(), words.eos()).for_scoring()
    return [streams.collater([streams[0]])]


def as_windows(words: Dictionary, tokens: Tensor) -> List[Dict[str, Any]]:
    """Samples of up to WINDOW tokens; the first CONTEXT of them were scored before."""
    lines = ListDataset([tokens], np.array([len(tokens)]))
    size = WINDOW - CONTEXT  # eval-lm subtracts the context from the samples, and the window adds it
    blocks = TokenBlockDataset(lines, lines.sizes, size, words.pad(), words.eos(), include_targets=True)
    samples = MonolingualDataset(blocks, blocks.sizes, words, words, targets=["future"], shuffle=False)
    windows = LMContextWindowDataset(samples, size, CONTEXT, words.pad())
    order = list(range(len(windows)))
    return [windows.collater([windows[i] for i in order[j : j + 16]]) for j in range(0, len(order), 16)]
