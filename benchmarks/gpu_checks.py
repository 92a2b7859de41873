"""Comparisons of a device with the CPU: layers, models and search give the same numbers there.

References are computed in float64 on the CPU. Their parameters and inputs are rounded to bfloat16 first, so that all
number formats have the same. Each check yields its cases; what they compare yields Findings.
"""

from copy import deepcopy
from functools import partial
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from benchmarks import contenders as c
from benchmarks import contenders_lm, quality, quality_lm
from benchmarks.mixers import LAYERS
from benchmarks.models import classifier, from_args
from mega_fairseq.data.classification.inputs import byte_dictionary
from mega_fairseq.modules import MIXERS, Block, FeedForwardConfig
from mega_fairseq.ops.gates import gated_output

# Largest relative difference of outputs and of gradients. TF32 is off.
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (1e-2, 5e-2), torch.float16: (1e-2, 5e-2)}
LENGTH, QUICK_LENGTH = 997, 97
PIECES = (1, 5, 64)  # tokens of the first pieces of a stream; the rest follows
SINGLE = 3  # last tokens, which come one at a time


class Finding(NamedTuple):
    case: str
    difference: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.limit  # also False for NaN


Case = Tuple[str, Callable[[], Iterator[Finding]]]


class Passed(NamedTuple):
    """A forward and backward pass."""

    outputs: Tensor
    gradients: Tensor  # of all parameters and of the input, in one row


# ------------------------------------------------------------------------------------------- layers


def layers(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every mixer, causal and bidirectional, with pads; streams in pieces and token by token."""
    for name in ["Mega, chunks", "FLASH"] if quick else LAYERS:
        for causal in (True, False):
            case = f"{name}, {'causal' if causal else 'bidirectional'}"
            yield case, partial(_layer, case, name, causal, device, QUICK_LENGTH if quick else LENGTH)
    yield "gates with dropout", partial(_gates, "gates with dropout", device)


def _layer(case: str, name: str, causal: bool, device: torch.device, length: int) -> Iterator[Finding]:
    torch.manual_seed(0)
    block = rounded(_block(name, causal))
    x = torch.randn(2, length, c.DIM).bfloat16().double()
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, length // 2 :] = True
    truth = _passed(deepcopy(block).double(), x, padding)
    for dtype in LIMITS:
        found = _passed(deepcopy(block).to(device, dtype), x.to(device, dtype), padding.to(device))
        yield from compared(f"{case}, {_name(dtype)}", found, truth, dtype)
    if causal:
        alone = x.to(device, torch.float32)[:1]
        streamed = _in_pieces(deepcopy(block).to(device).eval(), alone)
        yield Finding(f"{case}, stream", difference(streamed, truth.outputs[:1]), LIMITS[torch.float32][0])


def _gates(case: str, device: torch.device) -> Iterator[Finding]:
    """The layers above have no dropout, since each device draws another mask."""
    torch.manual_seed(0)
    x, o, residual = (torch.randn(300, width) for width in (c.DIM, c.VALUES, c.DIM))
    linear = [nn.Linear(c.DIM, 2 * c.DIM + c.VALUES), nn.Linear(c.VALUES, c.DIM)]
    parameters = [t.detach() for module in linear for t in module.parameters()]
    given, keep = [t.bfloat16().double() for t in (x, o, residual, *parameters)], torch.rand(300, c.DIM) > 0.3

    def passed(place: torch.device, dtype: torch.dtype) -> Passed:
        tensors = [t.to(place, dtype, copy=True).requires_grad_() for t in given]
        x, o, residual, weight, bias, output, output_bias = tensors
        y = gated_output(x, o, residual, (weight, bias), (output, output_bias), "silu", keep.to(place), 1 / 0.7)
        (y * given[2].to(y)).sum().backward()
        return Passed(y.detach(), gathered(tensors))

    truth = passed(torch.device("cpu"), torch.float64)
    for dtype in LIMITS:
        yield from compared(f"{case}, {_name(dtype)}", passed(device, dtype), truth, dtype)


def _block(name: str, causal: bool) -> Block:
    options = dict(LAYERS[name])
    mixer = MIXERS[options.pop("mixer")](c.DIM, causal=causal, init="scaled", **options)
    alone = name.startswith(("GAU", "FLASH"))  # attention and feed-forward layer in one
    return Block(mixer, None if alone else FeedForwardConfig(c.DIM, hidden_dim=c.DIM))


def _passed(block: Block, x: Tensor, padding: Tensor) -> Passed:
    x = x.detach().requires_grad_()
    y = block(x, padding_mask=padding)
    y = (y[0] if block.causal else y).masked_fill(padding.unsqueeze(-1), 0)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
    (y * weights).sum().backward()
    return Passed(y.detach(), gradients(block, x))


@torch.no_grad()
def _in_pieces(block: Block, x: Tensor) -> Tensor:
    """A stream: some pieces, a long one, and single tokens with the form for them."""
    rest = x.size(1) - sum(PIECES) - SINGLE
    outputs, state, step = [], None, block.step()
    for number, piece in enumerate(x.split([*PIECES, rest, *[1] * SINGLE], 1)):
        y, state = (step if number > len(PIECES) else block)(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


# ------------------------------------------------------------------------------------------- models

NO_DROPOUT = ["--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0", "--hidden-dropout", "0"]
TYPES, SENTENCES, TOKENS = 500, 4, 23


def models(device: torch.device, quick: bool) -> Iterator[Case]:
    """Loss and gradients of whole models on padded batches."""
    for name, model in _models(quick):
        yield name, partial(_model, name, model, device)


def _model(name: str, model: BaseFairseqModel, device: torch.device) -> Iterator[Finding]:
    truth = _trained(deepcopy(rounded(model)).double(), None)
    for dtype in LIMITS:
        found = _trained(deepcopy(model).to(device, dtype), device)
        yield from compared(f"{name}, {_name(dtype)}", found, truth, dtype)


def _models(quick: bool) -> Iterator[Tuple[str, BaseFairseqModel]]:
    torch.manual_seed(0)
    yield "translation", _translation()
    names = ["mega"] if quick else [n for n in quality_lm.LABELS if n != "transformer"]
    for name in names:
        yield f"language model, {name}", from_args([*quality_lm.MODELS[name], *NO_DROPOUT], TYPES)
    words = ["--arch=mega_classifier_small", "--dropout=0", "--attention-dropout=0", "--hidden-dropout=0"]
    yield "classifier", classifier(words, "bytes", byte_dictionary(), ["0", "1"])


def _translation() -> BaseFairseqModel:
    words = [*quality.MODELS["mega-scaled"], "--task", "translation", "--share-all-embeddings", *NO_DROPOUT]
    return from_args(words, TYPES)


def _trained(model: BaseFairseqModel, device: Optional[torch.device]) -> Passed:
    given, targets = _batch(model)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    if hasattr(model, "classification_heads"):
        (head,) = model.classification_heads
        scores, targets = model(**given, features_only=True, classification_head_name=head)[0], targets[:, 0] % 2
    else:
        scores = model.train()(**given)[0].flatten(0, 1)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    loss = F.cross_entropy(scores, targets.flatten().to(device))
    loss.backward()
    return Passed(loss.detach(), gradients(model))


def _batch(model: BaseFairseqModel) -> Tuple[Dict[str, Tensor], Tensor]:
    """Sentences of different lengths and their targets, on the CPU."""
    torch.manual_seed(1)
    pad = (model.encoder if hasattr(model, "encoder") else model.decoder).dictionary.pad()
    lengths = TOKENS - torch.arange(SENTENCES)
    source, before, targets = (torch.randint(4, 256, (SENTENCES, TOKENS)) for _ in range(3))
    source[torch.arange(TOKENS) >= lengths.unsqueeze(1)] = pad
    given = {"src_tokens": source, "src_lengths": lengths}
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        given["prev_output_tokens"] = before
    return given, targets


# ------------------------------------------------------------------------------------------- search


def search(device: torch.device, quick: bool) -> Iterator[Case]:
    """Scores of beam search, step by step with caches, and of a text that is longer than a chunk."""
    torch.manual_seed(0)
    yield "beam search", partial(_on_both, "beam search", _best_scores, _translation().eval(), device)
    for name in ["mega"] if quick else ["mega", "flash", "sparse"]:
        case, model = f"scores of a text, {name}", from_args(quality_lm.MODELS[name], TYPES).eval()
        yield case, partial(_on_both, case, _scores, model, device)


Scores = Callable[[BaseFairseqModel, torch.device], Tensor]


def _on_both(case: str, scores: Scores, model: BaseFairseqModel, device: torch.device) -> Iterator[Finding]:
    truth, found = (scores(deepcopy(model).to(place), place) for place in (torch.device("cpu"), device))
    yield Finding(f"{case}, float32", difference(found, truth), LIMITS[torch.float32][1])


@torch.no_grad()
def _scores(model: BaseFairseqModel, device: torch.device) -> Tensor:
    return model(contenders_lm.like_words(TYPES, 700).unsqueeze(0).to(device))[0]


def _best_scores(model: BaseFairseqModel, device: torch.device) -> Tensor:
    given, _ = _batch(model)
    sample = {"net_input": {name: given[name].to(device) for name in ("src_tokens", "src_lengths")}}
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=4, max_len_a=0, max_len_b=TOKENS)
    return torch.stack([found[0]["score"] for found in generator.generate([model], sample)])


# ------------------------------------------------------------------------------------------- comparing


@torch.no_grad()
def rounded(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return module


def gradients(module: nn.Module, *inputs: Tensor) -> Tensor:
    return gathered([*module.parameters(), *inputs])


def gathered(tensors: List[Tensor]) -> Tensor:
    """Their gradients, in one row."""
    return torch.cat([t.grad.flatten().double().cpu() for t in tensors if t.grad is not None])


def difference(found: Tensor, truth: Tensor) -> float:
    found, truth = found.double().cpu(), truth.double().cpu()
    return ((found - truth).norm() / truth.norm()).item()


def compared(case: str, found: Passed, truth: Passed, dtype: torch.dtype) -> Iterator[Finding]:
    for what, limit, ours, theirs in zip(Passed._fields, LIMITS[dtype], found, truth):
        yield Finding(f"{case}, {what}", difference(ours, theirs), limit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")
