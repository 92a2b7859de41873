"""Evaluating and sampling language models against fairseq's transformer_lm of the same size; random weights.

    python benchmarks/eval_lm.py                          all tables (about 40 minutes); with --json a file
    python benchmarks/eval_lm.py --tables head            one of: head, evaluation, stream, sampling
    python benchmarks/eval_lm.py --quick                  a minute, at small sizes, to check that everything runs

head: log-probabilities of targets from features, adaptive softmax of 267,744 types, targets distributed like words,
against fairseq's scorer. evaluation: fairseq-eval-lm, tokens per second and peak memory above the weights, Mega with
chunks of 1024 and 2048, the Transformer with the sliding window of fairseq's documentation (samples of 512, of which
400 are context). stream: memory along one stream. sampling: 20,000 tokens one after the other.

CPU time of one thread; each model in a separate process.
"""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import BaseFairseqModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq_cli.eval_lm import eval_lm

from benchmarks import contenders_lm as c
from benchmarks.measure import chosen_names, in_fresh_process, machine, peak_mib, resident_mib, seconds, write_json
from benchmarks.models import preset, task

# ------------------------------------------------------------------------------------------- tables


def head(quick: bool) -> Dict:
    """Milliseconds per token, and the growth of peak memory with the tail of the vocabulary."""
    types, tokens, cutoffs = (3000, 300, [200, 600]) if quick else (c.TYPES["wt103"], 2048, [20_000, 60_000])
    steps = c.heads(types, tokens, cutoffs)
    difference = (steps["ours"]() - steps["stock"]()).abs().max().item()
    assert difference < 1e-4, difference
    print(f"head, {types:,} types: same numbers to {difference:.1e}")
    times = seconds(steps, 1 if quick else 5)
    for name, value in times.items():
        print(f"  {name:13s} {1000 * value / tokens:6.3f} ms a token ({times['stock'] / value:4.2f}x)", flush=True)
    memory = {}
    for size in (types,) if quick else (types, 2 * types, 4 * types):
        memory[size] = {name: in_fresh_process(__file__, "head", name, size, tokens, *cutoffs)[0] for name in steps}
        print(f"  {size:,} types: " + ", ".join(f"{n} {mib:.0f} MiB" for n, mib in memory[size].items()), flush=True)
    return {"types": types, "tokens": tokens, "seconds": times, "mib_by_types": memory, "difference": difference}


def evaluation(quick: bool) -> List[Dict]:
    """Tokens per second and peak memory of fairseq's own eval_lm."""
    rows = []
    for shape in c.TYPES:
        found: Dict[str, Dict[str, float]] = {}
        for contender in ("transformer", "chunk 1024") if quick else ("transformer", "chunk 1024", "chunk 2048"):
            count = 600 if quick else 16_384 if contender.startswith("chunk") else 4_096
            speed, mib, parameters = in_fresh_process(__file__, "evaluation", shape, contender, count, int(quick))
            found[contender] = {"tokens_per_second": speed, "mib": mib, "parameters": parameters}
            times = speed / found["transformer"]["tokens_per_second"]
            print(
                f"{shape} {contender:12s} {parameters / 1e6:6.1f}M parameters "
                f"{speed:8.1f} tokens/s ({times:5.2f}x), peak {mib:6.0f} MiB above the weights",
                flush=True,
            )
        rows.append({"shape": shape, **found})
    return rows


def stream(quick: bool) -> List[Dict]:
    """Memory of mega_lm_small on one stream of bytes, against its length."""
    rows = []
    for count in (2_000,) if quick else (50_000, 500_000, 5_000_000):
        speed, mib = in_fresh_process(__file__, "stream", count)
        rows.append({"tokens": count, "tokens_per_second": speed, "mib": mib})
        print(f"stream of {count:9,} tokens: {mib:5.0f} MiB above the weights, {speed:7.0f} tokens/s", flush=True)
    return rows


def sampling(quick: bool) -> Dict:
    """CPU milliseconds per sampled token and MiB of mega_lm_small, for each thousand tokens."""
    total, step = (300, 100) if quick else (20_000, 1_000)
    of_bytes = task(c.TYPES["enwik8"])
    words = of_bytes.source_dictionary
    torch.manual_seed(0)
    model = preset("mega_lm_small", of_bytes)
    lengths = {"min_len": total - 1, "max_len_a": 0, "max_len_b": total - 1}
    search = SequenceGenerator([model], words, beam_size=1, search_strategy=Sampling(words), **lengths)
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


# ------------------------------------------------------------------------------------------- in a separate process


def score_head(name: str, types: int, tokens: int, *cutoffs: int) -> List[float]:
    """Peak MiB."""
    return [peak_mib(c.heads(types, tokens, list(cutoffs))[name])]


def evaluate(shape: str, contender: str, count: int, quick: bool) -> Tuple[float, float, int]:
    """Tokens per second, peak MiB, and the number of parameters."""
    made_up = task(3000 if quick and shape == "wt103" else c.TYPES[shape])
    words = made_up.source_dictionary
    tokens = c.like_words(len(words), count)
    torch.manual_seed(0)
    if contender == "transformer":
        model, batches = c.transformer(shape, made_up, quick), c.as_windows(words, tokens)
        softmax_batch = 256  # tokens: a batch of 8192 would take 9 GB of scores at once
    else:
        model, batches = c.mega(shape, made_up, int(contender.split()[1]), quick), c.as_stream(words, tokens)
        softmax_batch = 0
    speed, mib = scored(model, batches, count, softmax_batch=softmax_batch)
    return speed, mib, sum(p.numel() for p in model.parameters())


def scored(model: BaseFairseqModel, batches: List[Dict], count: int, **options: Any) -> Tuple[float, float]:
    """Tokens per second and peak MiB of fairseq's eval_lm."""
    words, times = model.decoder.dictionary, {}

    def run() -> None:
        start = time.process_time()
        found = eval_lm([model], words, iter(batches), target_dictionary=words, **options)
        times["seconds"] = time.process_time() - start
        assert found["loss"] > 0

    mib = peak_mib(run)
    return count / times["seconds"], mib


def read_stream(count: int) -> Tuple[float, float]:
    """Tokens per second, including the time to generate them, and peak MiB."""
    of_bytes = task(c.TYPES["enwik8"])
    words, model = of_bytes.source_dictionary, preset("mega_lm_small", of_bytes)
    start = time.process_time()
    tokens = torch.randint(4, len(words), (count,)).to(torch.int32)
    mib = peak_mib(lambda: eval_lm([model], words, iter(c.as_stream(words, tokens)), target_dictionary=words))
    return count / (time.process_time() - start), mib


# ------------------------------------------------------------------------------------------- main

TABLES = {"head": head, "evaluation": evaluation, "stream": stream, "sampling": sampling}
ALONE = {"head": score_head, "evaluation": evaluate, "stream": read_stream}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.one:
        table, *words = args.one
        print(*ALONE[table](*(int(word) if word.isdigit() else word for word in words)))
        return
    tables = chosen_names(parser, "tables", args.tables, TABLES)
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    for table in tables:
        result = TABLES[table](args.quick)
        if args.json:
            write_json(args.json, {table: result})


if __name__ == "__main__":
    main()
