"""Evaluating and sampling language models, against fairseq's transformer_lm of the same size; random weights.

    python benchmarks/eval_lm.py                          all tables (about 40 minutes); with --json a file
    python benchmarks/eval_lm.py --tables head            one of: head, evaluation, stream, sampling
    python benchmarks/eval_lm.py --quick                  a minute, at small sizes: does it all run?

head: log-probabilities of targets from features, adaptive softmax of 267,744 types, targets as frequent as words are,
against fairseq's way. evaluation: what fairseq-eval-lm does, tokens per second and peak memory above the weights, Mega
at chunks of 1024 and 2048, the Transformer with the sliding window that fairseq documents (samples of 512, of which 400
are context). stream: memory along one stream. sampling: 20,000 tokens one after the other.

CPU time of one thread; each model in a process of its own.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled, too

from fairseq.data import Dictionary, ListDataset, LMContextWindowDataset, MonolingualDataset, TokenBlockDataset
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from fairseq.modules import AdaptiveSoftmax
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq_cli.eval_lm import eval_lm
from torch import Tensor

import mega_fairseq.models  # noqa: F401 - registers
from benchmarks.measure import in_fresh_process, machine, peak_mib, resident_mib, seconds, write_json
from mega_fairseq.data import Corpus, StreamDataset
from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.modules.adaptive_input import AdaptiveInput

TYPES = {"wt103": 267_744, "enwik8": 208}
CUTOFFS = "20000,60000"
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
TABLES = ("head", "evaluation", "stream", "sampling")


def dictionary(types: int) -> Dictionary:
    words = Dictionary()
    for index in range(types - len(words)):
        words.add_symbol(f"w{index}")
    return words


def like_words(types: int, count: int) -> Tensor:
    """Types by Zipf's law, the special ones (0-3) left out."""
    chances = 1 / torch.arange(1, types - 3, dtype=torch.float64)
    torch.manual_seed(1)
    return torch.multinomial(chances, count, replacement=True) + 4


# ---------------------------------------------------------------------------------------------------------------- head


def softmax_of(types: int, dim: int, cutoffs: List[int]) -> AdaptiveSoftmax:
    torch.manual_seed(0)
    tables = AdaptiveInput(types, 1, dim, dim, cutoffs, 4.0)
    return AdaptiveSoftmax(types, dim, cutoffs, 0.2, adaptive_inputs=tables, tie_proj=True).eval()


def stock_scores(softmax: AdaptiveSoftmax, x: Tensor, targets: Tensor, batch: int) -> Tensor:
    """As fairseq's SequenceScorer has it, `batch` tokens at a time (--softmax-batch)."""
    found = []
    for start in range(0, len(x), batch):
        features, wanted = x[None, start : start + batch], targets[None, start : start + batch]
        log_probs = softmax.get_log_prob(features, wanted)  # (1, batch, V)
        found.append(log_probs.gather(2, wanted.unsqueeze(-1)).flatten())
    return torch.cat(found)


def head_contenders(types: int, tokens: int, cutoffs: List[int]) -> Dict[str, Callable[[], Tensor]]:
    softmax, targets = softmax_of(types, 1024, cutoffs), like_words(types, tokens)
    x = torch.randn(tokens, 1024)
    return {
        "ours": lambda: adaptive_log_probs(softmax, x, targets),
        "stock": lambda: stock_scores(softmax, x, targets, tokens),
        "stock by 256": lambda: stock_scores(softmax, x, targets, 256),
    }


def head(quick: bool) -> Dict:
    """Milliseconds per token; and how peak memory grows with the tail of the vocabulary."""
    types, tokens, cutoffs = (3000, 300, [200, 600]) if quick else (TYPES["wt103"], 2048, [20_000, 60_000])
    steps = head_contenders(types, tokens, cutoffs)
    difference = (steps["ours"]() - steps["stock"]()).abs().max().item()
    assert difference < 1e-4, difference
    print(f"head, {types:,} types: same numbers to {difference:.1e}")
    times = seconds(steps, 1 if quick else 5)
    for name, value in times.items():
        print(f"  {name:13s} {1000 * value / tokens:6.3f} ms a token ({times['stock'] / value:4.2f}x)", flush=True)
    memory = {}
    for size in (types, 2 * types, 4 * types):
        memory[size] = {n: in_fresh_process(__file__, "head", n, *map(str, (size, tokens, *cutoffs))) for n in steps}
        print(f"  {size:,} types: " + ", ".join(f"{n} {mib:.0f} MiB" for n, mib in memory[size].items()), flush=True)
    return {"types": types, "tokens": tokens, "seconds": times, "mib_by_types": memory, "difference": difference}


# ---------------------------------------------------------------------------------------------------------- evaluation


def mega(shape: str, words: Dictionary, chunk: int, quick: bool) -> BaseFairseqModel:
    cfg = MODEL_DATACLASS_REGISTRY[f"mega_lm_{shape}"]()
    cfg.decoder_chunk_size = chunk
    if quick:
        cfg.decoder_layers, cfg.decoder_embed_dim, cfg.decoder_hidden_dim, cfg.decoder_ffn_embed_dim = 1, 64, 64, 64
    if quick and cfg.adaptive_input:
        cfg.adaptive_softmax_cutoff = "200,600"
    task = Namespace(source_dictionary=words, target_dictionary=words)
    return MODEL_REGISTRY[f"mega_lm_{shape}"].build_model(cfg, task).eval()


def transformer(shape: str, words: Dictionary, quick: bool) -> BaseFairseqModel:
    args = Namespace(**TRANSFORMERS[shape])
    ARCH_CONFIG_REGISTRY[args.arch](args)
    for name, value in vars(MODEL_DATACLASS_REGISTRY["transformer_lm"]()).items():
        setattr(args, name, getattr(args, name, value))
    if quick:
        args.decoder_layers, args.decoder_ffn_embed_dim = 1, 64
        args.adaptive_softmax_cutoff = args.adaptive_input_cutoff = "200,600" if shape == "wt103" else None
    args.tokens_per_sample = args.max_target_positions = WINDOW
    task = Namespace(source_dictionary=words, target_dictionary=words)
    return MODEL_REGISTRY["transformer_lm"].build_model(args, task).eval()


def batches(contender: str, words: Dictionary, tokens: Tensor) -> Any:
    """What the task's eval_lm_dataloader yields for one sequence of tokens."""
    if contender != "transformer":
        corpus = Corpus([tokens.numpy()], np.array([len(tokens)]))
        streams = StreamDataset(corpus, np.array([0, len(tokens)]), words.pad(), words.eos()).for_scoring()
        return [streams.collater([streams[0]])]
    lines = ListDataset([tokens], np.array([len(tokens)]))
    size = WINDOW - CONTEXT  # eval-lm takes the context off the samples, and the window puts it back
    blocks = TokenBlockDataset(lines, lines.sizes, size, words.pad(), words.eos(), include_targets=True)
    samples = MonolingualDataset(blocks, blocks.sizes, words, words, targets=["future"], shuffle=False)
    windows = LMContextWindowDataset(samples, size, CONTEXT, words.pad())
    order = list(range(len(windows)))
    return [windows.collater([windows[i] for i in order[j : j + 16]]) for j in range(0, len(order), 16)]


def evaluate(shape: str, contender: str, count: int, quick: bool) -> Dict[str, float]:
    """One model in this process: CPU seconds and peak MiB of fairseq's own eval_lm."""
    words = dictionary(3000 if quick and shape == "wt103" else TYPES[shape])
    tokens = like_words(len(words), count)
    torch.manual_seed(0)
    if contender == "transformer":
        model, size = transformer(shape, words, quick), 256  # tokens: a batch of 8192 would take 9 GB of scores at once
    else:
        model, size = mega(shape, words, int(contender.split()[1]), quick), 0
    data, times = batches(contender, words, tokens), {}

    def run() -> None:
        start = time.process_time()
        found = eval_lm([model], words, iter(data), target_dictionary=words, softmax_batch=size)
        times["seconds"] = time.process_time() - start
        assert found["loss"] > 0

    mib = peak_mib(run)
    parameters = sum(p.numel() for p in model.parameters())
    return {"tokens_per_second": count / times["seconds"], "mib": mib, "parameters": parameters}


def evaluation(quick: bool) -> List[Dict]:
    rows = []
    for shape in TYPES:
        found = {}
        for contender in ("transformer", "chunk 1024", "chunk 2048"):
            count = 600 if quick else 16_384 if contender.startswith("chunk") else 4_096
            numbers = in_child("evaluation", shape, contender, str(count), str(int(quick)))
            found[contender] = dict(zip(("tokens_per_second", "mib", "parameters"), numbers))
            speed = found[contender]["tokens_per_second"]
            times = speed / found["transformer"]["tokens_per_second"]
            print(
                f"{shape} {contender:12s} {found[contender]['parameters'] / 1e6:6.1f}M parameters "
                f"{speed:8.1f} tokens/s ({times:5.2f}x), peak {found[contender]['mib']:6.0f} MiB above the weights",
                flush=True,
            )
        rows.append({"shape": shape, **found})
    return rows


def stream(quick: bool) -> List[Dict]:
    """mega_lm_small on one stream of bytes: does memory grow with its length?"""
    rows = []
    for count in (2_000, 8_000) if quick else (50_000, 500_000, 5_000_000):
        speed, mib = in_child("stream", str(count))
        rows.append({"tokens": count, "tokens_per_second": speed, "mib": mib})
        print(f"stream of {count:9,} tokens: {mib:5.0f} MiB above the weights, {speed:7.0f} tokens/s", flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------------ sampling


def sampling(quick: bool) -> Dict:
    """mega_lm_small: CPU milliseconds per sampled token and MiB, thousand by thousand."""
    total, step = (300, 100) if quick else (20_000, 1_000)
    words = dictionary(TYPES["enwik8"])
    torch.manual_seed(0)
    cfg = MODEL_DATACLASS_REGISTRY["mega_lm_small"]()
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model = MODEL_REGISTRY["mega_lm_small"].build_model(cfg, task).eval()
    search = SequenceGenerator(
        [model],
        words,
        beam_size=1,
        min_len=total - 1,
        max_len_a=0,
        max_len_b=total - 1,
        search_strategy=Sampling(words),
    )
    marks, forward, calls = [], model.decoder.forward, itertools.count()

    def counted(*args: Any, **options: Any) -> Any:
        if next(calls) % step == 0:
            marks.append((time.process_time(), resident_mib()))
        return forward(*args, **options)

    model.decoder.forward = counted
    prefix = torch.full((1, 1), words.eos())
    search.generate([model], {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([1])}})
    marks.append((time.process_time(), resident_mib()))
    each = [1000 * (b[0] - a[0]) / step for a, b in zip(marks, marks[1:])]
    print("sampling, ms a token by thousands: " + " ".join(f"{value:.2f}" for value in each))
    print(f"last thousand against first: {each[-1] / each[0]:.3f}; MiB: {marks[0][1]:.0f} to {marks[-1][1]:.0f}")
    return {"ms_per_token": each, "mib": [mib for _, mib in marks]}


# ---------------------------------------------------------------------------------------------------------------- main


def in_child(*arguments: str) -> List[float]:
    command = [sys.executable, __file__, "--one", *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(word) for word in result.stdout.splitlines()[-1].split()]


@torch.no_grad()
def one(table: str, *arguments: str) -> List[float]:
    """A measurement that wants a process of its own."""
    if table == "head":
        name, types, tokens, *cutoffs = arguments
        step = head_contenders(int(types), int(tokens), [int(c) for c in cutoffs])[name]
        return [peak_mib(step)]
    if table == "evaluation":
        shape, contender, count, quick = arguments
        return list(evaluate(shape, contender, int(count), bool(int(quick))).values())
    words = dictionary(TYPES["enwik8"])
    cfg = MODEL_DATACLASS_REGISTRY["mega_lm_small"]()
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model = MODEL_REGISTRY["mega_lm_small"].build_model(cfg, task).eval()
    count = int(arguments[0])
    start = time.process_time()
    tokens = torch.randint(4, len(words), (count,)).to(torch.int32)
    mib = peak_mib(lambda: eval_lm([model], words, iter(batches("mega", words, tokens)), target_dictionary=words))
    return [count / (time.process_time() - start), mib]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help="some of head, evaluation, stream, sampling")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables that it has stay")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.one:
        print(*one(*args.one))
        return
    tables = args.tables.split(",")
    if set(tables) - set(TABLES):
        parser.error(f"--tables has {', '.join(set(tables) - set(TABLES))}; choose from {', '.join(TABLES)}")
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    with torch.no_grad():
        results = {table: globals()[table](args.quick) for table in tables}
    if args.json:
        write_json(
            args.json, {**(json.loads(Path(args.json).read_text()) if Path(args.json).exists() else {}), **results}
        )


if __name__ == "__main__":
    main()
