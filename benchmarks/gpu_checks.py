"""Comparisons: CUDA graphs with the same steps without, and layers, models, search and fairseq's commands with the CPU.

References are computed in float64 on the CPU. Their parameters and inputs are rounded to bfloat16 first, so that all
number formats have the same. A check yields cases: a name, and a function that yields Findings.
"""

import os
import re
import subprocess
import tempfile
from argparse import Namespace
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from benchmarks import contenders as c
from benchmarks import quality_lm, runs, train
from benchmarks.models import NO_DROPOUT, built, classifier, from_args, like_words
from mega_fairseq.data.classification.inputs import byte_dictionary
from mega_fairseq.modules import EXAMPLES, Block, FeedForwardConfig, MixerConfig

CPU = torch.device("cpu")
# Largest relative difference of outputs and of gradients. TF32 is off.
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (1e-2, 5e-2), torch.float16: (1e-2, 5e-2)}
PIECES = (1, 5, 64)  # tokens of the first pieces of a stream; the rest follows
SINGLE = 3  # last tokens, which come one at a time
DROPOUT = [*NO_DROPOUT, "--hidden-dropout=0"]
TYPES, SENTENCES, TOKENS = 500, 4, 23
TRANSLATION = ["--task=translation", "--arch=mega_transformer_tiny", "--share-all-embeddings", *DROPOUT]
LANGUAGE = [*quality_lm.MODELS["mega"], *DROPOUT]


class Finding(NamedTuple):
    case: str
    difference: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.limit  # also False for NaN


Case = Tuple[str, Callable[[], Iterator[Finding]]]
Passed = Tuple[Tensor, Tensor]  # outputs, and gradients of all parameters and of the input in one row


def compared(case: str, passed: Callable[..., Passed], device: torch.device) -> Iterator[Finding]:
    """Compares `passed(device, dtype)` in each number format with the CPU."""
    truth = passed(CPU, torch.float64)
    for dtype, limits in LIMITS.items():
        for what, limit, ours, theirs in zip(("outputs", "gradients"), limits, passed(device, dtype), truth):
            yield Finding(f"{case}, {str(dtype)[6:]}, {what}", difference(ours, theirs), limit)


def difference(ours: Tensor, truth: Tensor) -> float:
    ours, truth = ours.double().cpu(), truth.double().cpu()
    return ((ours - truth).norm() / truth.norm()).item()


@torch.no_grad()
def rounded(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return module


def gradients(module: nn.Module, *inputs: Tensor) -> Tensor:
    tensors = [*module.parameters(), *inputs]
    return torch.cat([t.grad.flatten().double().cpu() for t in tensors if t.grad is not None])


# ------------------------------------------------------------------------------------------- layers


def layers(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every mixer, small and at the width of the measurements, with pads; streams in pieces and token by token."""
    configs = [*EXAMPLES.items()][: 3 if quick else None]
    for name in [] if quick else c.OTHERS:
        configs += [
            (f"{name}, causal={causal}", c.mixer(name, causal=causal, init="scaled"))
            for causal in ((True,) if c.mixer(name).causal_only else (True, False))
        ]
    for case, config in configs:
        yield case, partial(_layer, case, config, device, 97 if config.dim < c.DIM else 997)


def _layer(case: str, config: MixerConfig, device: torch.device, length: int) -> Iterator[Finding]:
    torch.manual_seed(0)
    block = rounded(Block(config, FeedForwardConfig(config.dim)))
    inputs = torch.randn(2, length, config.dim).bfloat16().double()
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, length // 2 :] = True

    def passed(place: torch.device, dtype: torch.dtype) -> Passed:
        module, x = deepcopy(block).to(place, dtype), inputs.to(place, dtype, copy=True).requires_grad_()
        y = module(x, padding_mask=padding.to(place))
        y = (y[0] if config.causal else y).masked_fill(padding.to(place).unsqueeze(-1), 0)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
        (y * weights).sum().backward()
        return y.detach(), gradients(module, x)

    yield from compared(case, passed, device)
    if config.causal:
        streamed = _in_pieces(deepcopy(block).to(device).eval(), inputs[:1].to(device, torch.float32))
        truth = deepcopy(block).double()(inputs[:1])[0]
        yield Finding(f"{case}, stream", difference(streamed, truth), LIMITS[torch.float32][0])


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


def models(device: torch.device, quick: bool) -> Iterator[Case]:
    """Loss and gradients of whole models on padded batches."""
    torch.manual_seed(0)
    whole = {"translation": from_args(TRANSLATION, TYPES)}
    names = ["mega"] if quick else [name for name in quality_lm.COMPARED if name != "transformer"]
    whole.update({f"language model, {n}": from_args([*quality_lm.MODELS[n], *DROPOUT], TYPES) for n in names})
    whole["classifier"] = classifier(["--arch=mega_classifier_small", *DROPOUT], "bytes", byte_dictionary(), ["0", "1"])
    for name, model in whole.items():
        yield name, partial(compared, name, partial(_trained, rounded(model)), device)


def _trained(model: BaseFairseqModel, device: torch.device, dtype: torch.dtype) -> Passed:
    model, (batch, targets) = deepcopy(model).to(device, dtype).train(), _batch(model)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if hasattr(model, "classification_heads"):
        (head,) = model.classification_heads
        scores, targets = model(**batch, features_only=True, classification_head_name=head)[0], targets[:, 0] % 2
    else:
        scores = model(**batch)[0].flatten(0, 1)
    scores = scores if dtype == torch.float64 else scores.float()
    loss = F.cross_entropy(scores, targets.flatten().to(device))
    loss.backward()
    return loss.detach(), gradients(model)


def _batch(model: BaseFairseqModel) -> Tuple[Dict[str, Tensor], Tensor]:
    """Sentences of different lengths and their targets."""
    torch.manual_seed(1)
    pad = (model.encoder if hasattr(model, "encoder") else model.decoder).dictionary.pad()
    lengths = TOKENS - torch.arange(SENTENCES)
    source, before, targets = (torch.randint(4, 256, (SENTENCES, TOKENS)) for _ in range(3))
    source[torch.arange(TOKENS) >= lengths.unsqueeze(1)] = pad
    batch = {"src_tokens": source, "src_lengths": lengths}
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        batch["prev_output_tokens"] = before
    return batch, targets


# ------------------------------------------------------------------------------------------- search


def search(device: torch.device, quick: bool) -> Iterator[Case]:
    """Scores of beam search, step by step with caches, and of a text that is longer than a chunk."""
    torch.manual_seed(0)
    task, model = built(TRANSLATION, TYPES)
    yield "beam search", partial(_scored, "beam search", partial(_best_scores, task), model, device)
    for name in ["mega"] if quick else ["mega", "flash", "sparse"]:
        case, model = f"scores of a text, {name}", from_args(quality_lm.MODELS[name], TYPES)
        yield case, partial(_scored, case, _text_scores, model, device)


@torch.no_grad()
def _scored(case: str, scores: Callable, model: BaseFairseqModel, device: torch.device) -> Iterator[Finding]:
    truth, ours = (scores(deepcopy(model).to(place).eval()) for place in (CPU, device))
    yield Finding(f"{case}, float32", difference(ours, truth), LIMITS[torch.float32][1])


def _text_scores(model: BaseFairseqModel) -> Tensor:
    return model(like_words(TYPES, 700).unsqueeze(0).to(next(model.parameters()).device))[0]


def _best_scores(task: FairseqTask, model: BaseFairseqModel) -> Tensor:
    (batch, _), device = _batch(model), next(model.parameters()).device
    sample = {"net_input": {name: batch[name].to(device) for name in ("src_tokens", "src_lengths")}}
    model.make_generation_fast_(need_attn=False)
    generator = task.build_generator([model], Namespace(beam=4, max_len_a=0, max_len_b=TOKENS))
    return torch.stack([hypotheses[0]["score"] for hypotheses in task.inference_step(generator, [model], sample)])


# ------------------------------------------------------------------------------------------- CUDA graphs

UPDATES, STEADY = 6, ["--adam-eps=1", "--lr=0.3", "--clip-norm=0"]  # updates proportional to gradients
OFF = ["--cuda-graphs=off"]


def graphs(device: torch.device, quick: bool) -> Iterator[Case]:
    """Updates and translations with CUDA graphs and --task mega_translation, and without."""
    limits = {"float32": 1e-3} if device.type == "cpu" else {"float32": 1e-3, "bf16": 0.2}
    for task, words in [("translation", TRANSLATION), ("language model", LANGUAGE)][: 1 if quick else 2]:
        words = [*words, *STEADY, *["--cpu"] * (device.type == "cpu")]
        for name, limit in limits.items():
            case, of_type = f"updates, {task}, {name}", [*words, *["--bf16"] * (name == "bf16")]
            yield case, partial(_same_updates, case, of_type, [*of_type, *OFF], limit)
    for form, more in {"graphs": [], "mega_translation": ["--task=mega_translation"]}.items():
        for dtype in (torch.float32,) if quick else (torch.float32, torch.float16):
            yield (case := f"beam search, {form}, {str(dtype)[6:]}"), partial(_same_search, case, more, device, dtype)


def _same_updates(case: str, words: List[str], eager: List[str], limit: float) -> Iterator[Finding]:
    yield Finding(case, difference(_updates(words), _updates(eager)), limit)


def _updates(words: List[str]) -> Tensor:
    """How weights change in updates on two batches each, one with pads."""
    trainer = train.build(words, TYPES)
    samples = [train.sample(trainer, rows, length) for rows, length in ((4, 23), (2, 64))]
    samples[1]["net_input"]["src_tokens"][0, -3:] = trainer.task.source_dictionary.pad()
    before = nn.utils.parameters_to_vector(trainer.get_model().parameters()).double()
    for _ in range(UPDATES):
        trainer.train_step(samples, raise_oom=True)
    return nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach().double() - before


@torch.no_grad()
def _same_search(case: str, more: List[str], device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    found = []
    for words in ([*TRANSLATION, *more], [*TRANSLATION, *OFF]):
        torch.manual_seed(0)
        task, model = built(words, TYPES)
        found.append(_best_scores(task, model.to(device, dtype).eval()))
    yield Finding(case, difference(*found), LIMITS[dtype][0])


# ------------------------------------------------------------------------------------------- fairseq's commands

DOCS = Path(__file__).resolve().parent.parent / "docs"
HALF = [["--fp16"], ["--memory-efficient-fp16", "--optimizer=mega_adam"], ["--amp"]]
LOSS, HALF_LOSS, EVALUATION = 0.01, 0.03, 1e-3  # largest relative differences of losses
RECIPE = [
    *["--optimizer=adam", "--lr=5e-3", "--clip-norm=1.0", "--num-workers=0", "--log-format=json", "--log-interval=10"],
    *["--no-epoch-checkpoints", "--disable-validation", "--max-update=30"],
    "--fp16-init-scale=4",  # with fairseq's, 128, the first updates overflow and are left out
]


def commands(device: torch.device, quick: bool) -> Iterator[Case]:
    """On bytes of docs/: fairseq-train in each number format and on two GPUs if there are, and fairseq-eval-lm."""
    gpus = 0 if device.type == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder:
        text, data = Path(folder, "docs"), f"{folder}/wikipedia/bin"
        text.write_text("".join(page.read_text() for page in sorted(DOCS.glob("*.md"))[: 2 if quick else None]))
        quality_lm.LanguageModels().prepare(text, Path(folder))

        def train(name: str, count: int, *options: str) -> Callable[[], float]:
            words = [data, *quality_lm.MEGA, *RECIPE, "--max-tokens=2048", f"--save-dir={folder}/{name}", *options]
            words += ["--max-update=2", "--log-interval=2", "--decoder-layers=1"] * quick
            return lambda: runs.curve(_run(count, "train", *words), "train_inner", "loss")[-1][1]

        def evaluate(count: int, block: str) -> Callable[[], float]:
            words = [data, *quality_lm.TASK, f"--path={folder}/cpu/checkpoint_last.pt", f"--valid-block={block}"]
            return lambda: float(re.search(r"Loss \(base 2\): ([\d.]+)", _run(count, "eval_lm", *words))[1])

        truth = lru_cache(train("cpu", 0))
        for options in [[]] if quick else [[], ["--bf16"], *HALF * gpus]:
            case, limit = (f"training {options[0]}", HALF_LOSS) if options else ("training in float32", LOSS)
            yield case, partial(_losses, case, train(case, gpus, *options), truth, limit)
        for block in ["documents"] if quick else ["documents", "splits:7"]:
            case, both = f"evaluation, {block}", [evaluate(count, block) for count in (gpus, 0)]
            yield case, partial(_losses, case, *both, EVALUATION)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            two = ["--distributed-world-size=2"]
            case, one = "training on two GPUs", train("twice", 1, "--update-freq=2")
            yield case, partial(_losses, case, train(case, 2, *two), one, LOSS)
            case, one = "segments shared by two GPUs", train("whole", 1, "--max-tokens=4096")  # as large a batch
            yield case, partial(_losses, case, train(case, 2, *two, "--sequence-parallel-size=2"), one, LOSS)


def _losses(case: str, ours: Callable[[], float], theirs: Callable[[], float], limit: float) -> Iterator[Finding]:
    truth = theirs()
    yield Finding(case, abs(ours() - truth) / abs(truth), limit)


def _run(gpus: int, command: str, *words: str) -> str:
    """What a command of fairseq prints that sees this number of GPUs, or runs on the CPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    line = [*runs.fairseq(command), *words, *runs.WITH_PLUGIN, *([] if gpus else ["--cpu"])]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} failed: {done.stdout[-2000:]}")
    return done.stdout
