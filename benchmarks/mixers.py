"""All token mixers side by side: a Transformer layer's worth of each, feed-forward included, with equal parameters.

    python benchmarks/mixers.py                     all tables (about an hour); --json saves the numbers
    python benchmarks/mixers.py --tables layer      one of: layer, flat, products, memory, decode, models
    python benchmarks/mixers.py --mixers flash,aft  only names that contain one of these words, beside the Transformer
    python benchmarks/mixers.py --quick             a minute, at small lengths, to check that everything runs
    python benchmarks/mixers.py --plot FILE.json    draws FILE.png from what --json wrote

layer: forward and backward, 8,192 tokens per step, or one sequence if it is longer. flat: the same with 65,536 tokens
per step, for layers whose time should not depend on length. products: the share of matrix products with weights in the
time of a layer. memory: peak of a step. decode: the last tokens of a sequence, five rows. models: the language models
of quality_lm.py, training steps of 4,096 tokens and evaluation of a text as one stream.
Windows and tables have 512 places, chunks of FLASH 256, blocks of sparse attention 64, AFT-local reaches 32 tokens.
Every layer is checked token by token before it is timed. CPU time of one thread.
"""

import argparse
import json
import logging
import sys
import warnings
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import BaseFairseqModel

from benchmarks import contenders as c
from benchmarks import contenders_lm, eval_lm, quality_lm, train
from benchmarks.measure import chosen_names, in_fresh_process, machine, peak_mib, seconds, write_json
from benchmarks.models import from_args, used_size
from mega_fairseq.modules import MIXERS, Block, FeedForwardConfig

TOKENS = 8192
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
LONGEST_QUADRATIC = 8192
DECODED = [64, 256, 1024, 4096, 8192]
WINDOW, FLASH_CHUNK, STRIDE, REACH = 512, 256, 64, 32
WIDTHS = {"shared_dim": c.SHARED, "value_dim": c.VALUES}
ROPE = {"heads": c.HEADS, "rotary_dims": 32}

# name -> mixer and options; GAU and FLASH have twice the layers and no feed-forward.
LAYERS: Dict[str, Dict[str, Any]] = {
    "Mega, chunks": {"mixer": "mega", "position_bias": "rotary", "chunk_size": WINDOW, **WIDTHS},
    "GAU, full": {"mixer": "gau", "position_bias": "rope", **WIDTHS},
    "GAU, windows": {"mixer": "gau", "position_bias": "rope", "chunk_size": WINDOW, **WIDTHS},
    "FLASH": {"mixer": "flash", "position_bias": "rope", "chunk_size": FLASH_CHUNK, **WIDTHS},
    "attention, full": {"mixer": "attention", **ROPE},
    "attention, windows": {"mixer": "attention", "chunk_size": WINDOW, **ROPE},
    "time weighting before": {
        "mixer": "attention", "chunk_size": WINDOW, "time_weight": "before", "beta": True, "gamma": True, **ROPE,
    },
    "time weighting after": {
        "mixer": "attention", "chunk_size": WINDOW, "time_weight": "after", "alpha": True, "beta": True, **ROPE,
    },
    "gMLP": {"mixer": "gmlp", "chunk_size": WINDOW, "heads": c.HEADS, "expansion": 2},
    "AFT": {"mixer": "aft", "chunk_size": WINDOW, "heads": c.HEADS},
    "AFT-local": {"mixer": "aft", "form": "local", "reach": REACH, "heads": c.HEADS},
    "sparse, strided": {"mixer": "sparse", "pattern": "strided", "stride": STRIDE, **ROPE},
    "sparse, fixed": {"mixer": "sparse", "pattern": "fixed", "stride": STRIDE, "summary": 8, **ROPE},
}  # fmt: skip
QUADRATIC = ("torch", "GAU, full", "attention, full")
FLAT = [name for name in LAYERS if name not in QUADRATIC and not name.startswith("sparse")]


class CausalTransformerLayer(nn.Module):
    """torch's Transformer layer with causal fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = c.torch_layer()

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        return self.layer(x, src_mask=future(LONGEST_QUADRATIC, x.device)[:length, :length], is_causal=True)


@lru_cache(maxsize=None)
def future(length: int, device: torch.device) -> Tensor:
    """The mask, which torch asks for and then leaves to its fused attention; made once, before the measurements."""
    return nn.Transformer.generate_square_subsequent_mask(length, device)


class Stack(nn.Module):
    """Blocks one after the other, without a state."""

    def __init__(self, blocks: List[Block]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def stack(name: str) -> Stack:
    """As many parameters as torch's layer, within 2%: the feed-forward layer is as wide as that takes.

    Its width is a multiple of 8: GPUs multiply matrices of other widths at half the speed.
    """
    options = dict(LAYERS[name])
    mixer = MIXERS[options.pop("mixer")]
    config = mixer(c.DIM, **options)
    if name.startswith(("GAU", "FLASH")):
        return Stack([Block(config), Block(config)])
    missing = c.size_of(CausalTransformerLayer()) - c.size_of(Block(config))
    width = missing // (2 * c.DIM + 1) // 8 * 8
    return Stack([Block(config, FeedForwardConfig(c.DIM, hidden_dim=width))])


def layer(name: str) -> nn.Module:
    return CausalTransformerLayer() if name == "torch" else stack(name)


def gate(names: List[str]) -> None:
    """Raises unless each stack equals itself run token by token, and has the parameters of torch's layer within 2%."""
    torch.manual_seed(0)
    size = c.size_of(layer("torch"))
    for name in names:
        module = layer(name)
        assert abs(c.size_of(module) / size - 1) < 0.02, f"{name}: {c.size_of(module):,} parameters, torch {size:,}"
        if name == "torch":
            continue
        x, ys = torch.randn(1, 140, c.DIM, dtype=torch.float64), []
        module, states = module.double(), [None] * len(module.blocks)
        with torch.no_grad():
            for token in x.split(1, 1):
                for i, block in enumerate(module.blocks):
                    token, states[i] = block(token, states[i])
                ys.append(token)
            torch.testing.assert_close(module(x), torch.cat(ys, 1), rtol=0, atol=1e-9)
    print("correct: whole sequences = token by token, equal parameters")


# ------------------------------------------------------------------------------------------- tables


def layer_table(names: List[str], lengths: List[int], tokens: int, repeats: int) -> Dict:
    """Tokens per CPU second, forward and backward."""
    rows = []
    for length in lengths:
        fitting = [name for name in names if length <= LONGEST_QUADRATIC or name not in QUADRATIC]
        count = max(tokens, length)
        steps = {n: c.training_step(layer(n), count // length, length) for n in fitting}
        times = seconds(steps, repeats) if count == tokens else seconds(steps, 1, warm_up=0)  # a long step is stable
        rows.append({"length": length, "tokens": count, "seconds": times})
        print(
            f"L={length:>6} tokens/CPU-s: " + ", ".join(f"{n} {count / t:,.0f}" for n, t in times.items()), flush=True
        )
    return {"parameters": {name: c.size_of(layer(name)) for name in names}, "rows": rows}


def flat_table(names: List[str], lengths: List[int], tokens: int, repeats: int) -> Dict:
    """Tokens per CPU second at the same number of tokens per step: the effect of length alone, measured in turns."""
    found: Dict[str, Dict[int, float]] = {}
    for name in names:
        module = layer(name)
        steps = {length: c.training_step(module, tokens // length, length) for length in lengths}
        found[name] = seconds(steps, repeats, warm_up=0)
        print(
            f"{name} tokens/CPU-s: " + ", ".join(f"L={n} {tokens / t:,.0f}" for n, t in found[name].items()), flush=True
        )
    return {"tokens": tokens, "seconds": found}


class Products(nn.Module):
    """The matrix products of a module's projections alone."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.linears = nn.ModuleList(part for part in module.modules() if isinstance(part, nn.Linear))
        self.inputs = {linear.in_features: None for linear in self.linears}

    def forward(self, x: Tensor) -> Tensor:
        wide = {n: x.repeat(1, 1, -(-n // x.size(2)))[..., :n] for n in self.inputs}
        return sum(linear(wide[linear.in_features]).sum() for linear in self.linears)


def products_table(names: List[str], length: int, tokens: int, repeats: int) -> Dict:
    """The share of matrix products with weights in the time of a layer."""
    found = {}
    for name in names:
        module = layer(name)
        if name == "torch":  # its projections of queries, keys and values are not modules
            continue
        steps = {"layer": module, "products": Products(module)}
        found[name] = seconds({n: c.training_step(m, tokens // length, length) for n, m in steps.items()}, repeats)
        print(f"{name}: products {found[name]['products'] / found[name]['layer']:.0%}", flush=True)
    return {"length": length, "seconds": found}


def memory_table(names: List[str], lengths: List[int], tokens: int) -> List[Dict]:
    """Peak MiB of a step, gradients included, in a fresh process each."""
    rows = []
    for length in lengths:
        fitting = [name for name in names if length <= LONGEST_QUADRATIC or name not in QUADRATIC]
        row = {name: in_fresh_process(__file__, "step", name, length, tokens)[0] for name in fitting}
        rows.append({"length": length, "tokens": max(tokens, length), "mib": row})
        print(f"L={length:>6} peak MiB: " + ", ".join(f"{n} {mib:.0f}" for n, mib in row.items()), flush=True)
    return rows


def decode_table(names: List[str], lengths: List[int], repeats: int) -> List[Dict]:
    """Milliseconds of a token in beam search, mean of the last ones of a sequence."""
    rows = []
    for length in lengths:
        steps = {}
        for name in (n for n in names if n != "torch"):
            block = layer(name).blocks[0].eval()
            with torch.no_grad():
                _, state = block(torch.randn(5, length - c.SINGLE_TOKENS, c.DIM))
                steps[name] = c.single_token(block.step(), 5, state)
        times = {name: time / c.SINGLE_TOKENS for name, time in seconds(steps, repeats).items()}
        rows.append({"tokens": length, "seconds": times})
        print(f"{length:>6} tokens, ms: " + ", ".join(f"{n} {1e3 * t:.2f}" for n, t in times.items()), flush=True)
    return rows


def models_table(names: List[str], length: int, tokens: int, repeats: int) -> Dict:
    """Whole language models of 0.89M parameters: tokens per CPU second and peak MiB, in training and evaluation."""
    models = {name: language_model(name).train() for name in names}
    steps = {name: train.training(model, length, tokens) for name, model in models.items()}
    found = {}
    for name, time in seconds(steps, repeats).items():
        mib, speed, evaluation_mib = in_fresh_process(__file__, "model", name, length, tokens)
        found[name] = {
            "parameters": used_size(models[name]),
            "training": {"tokens_per_second": tokens / time, "mib": mib},
            "evaluation": {"tokens_per_second": speed, "mib": evaluation_mib},
        }
        print(
            f"{name}: training {tokens / time:,.0f}, {mib:.0f} MiB; evaluation {speed:,.0f}, {evaluation_mib:.0f} MiB"
        )
    return {"length": length, "tokens": tokens, "models": found}


def language_model(name: str) -> BaseFairseqModel:
    torch.manual_seed(0)
    return from_args(quality_lm.MODELS[name], contenders_lm.TYPES["enwik8"])


# ------------------------------------------------------------------------------------------- in a separate process


def one_step(name: str, length: int, tokens: int) -> List[float]:
    """Peak memory of a step, after a small one that makes the libraries allocate what they keep."""
    module = layer(name)
    c.training_step(module, 1, 256)()
    return [peak_mib(c.training_step(module, max(1, tokens // length), length))]


def one_model(name: str, length: int, tokens: int) -> List[float]:
    """Peak memory of a training step; tokens per second and peak memory of an evaluation."""
    model = language_model(name).train()
    train.training(model, 256, 256)()
    mib = peak_mib(train.training(model, length, tokens))
    words, text = model.decoder.dictionary, contenders_lm.like_words(len(model.decoder.dictionary), 4 * tokens)
    batches = contenders_lm.as_windows if name == "transformer" else contenders_lm.as_stream
    with torch.no_grad():
        return [mib, *eval_lm.scored(model.eval(), batches(words, text), len(text))]


def plot(source: Path) -> None:
    """Draws tokens per second against length, next to a file that --json wrote."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = json.loads(source.read_text())
    rows = results["layer"]["rows"]
    figure, axis = pyplot.subplots(figsize=(9, 5))
    for number, name in enumerate(rows[0]["seconds"]):
        points = [(row["length"], row["tokens"] / row["seconds"][name]) for row in rows if name in row["seconds"]]
        style = {"color": "black", "linewidth": 2.5} if name == "torch" else {"color": f"C{number % 10}"}
        axis.plot(*zip(*points), marker="os^"[number // 10], label=c.LABELS.get(name, name), **style)
    axis.set(xscale="log", xlabel="sequence length", ylabel="tokens per CPU second")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    lengths = [row["length"] for row in rows]
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    axis.set_title(
        f"A layer of 3.25M parameters, forward + backward, one thread of {results['machine']['layer']['cpu']}"
    )
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = "layer,flat,products,memory,decode,models"
    parser.add_argument("--tables", default=tables, help=f"which to run, of {tables}")
    parser.add_argument("--mixers", default="", help="words, separated by commas; by default all mixers")
    parser.add_argument("--lengths", help="comma-separated sequence lengths instead of 512 ... 65,536")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="lengths up to 1024 and one round")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the numbers of this file, next to it")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # step or model, name, length, tokens
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)  # fairseq's
    torch.set_num_threads(1)
    if args.plot:
        return plot(args.plot)
    if args.one:
        what, name, length, tokens = args.one
        print(*{"step": one_step, "model": one_model}[what](name, int(length), int(tokens)))
        return
    words = args.mixers.lower().split(",")
    names = ["torch", *(name for name in LAYERS if any(word in name.lower() for word in words))]
    compared = [name for name in quality_lm.LABELS if not name.endswith("-scaled")]  # the same speed
    compared = [name for name in compared if name == "transformer" or any(word in name for word in words)]
    gate(names)
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    lengths, decoded, tokens, repeats = LENGTHS, DECODED, TOKENS, args.repeats
    if args.quick:
        lengths, decoded, tokens, repeats = [512, 1024], [64], 1024, 1
    if args.lengths:
        lengths = [int(n) for n in args.lengths.split(",")]
    flat_lengths = sorted({min(1024, max(lengths)), max(lengths)})
    tables: Dict[str, Callable[[], Any]] = {
        "layer": partial(layer_table, names, lengths, tokens, repeats),
        "flat": partial(flat_table, [n for n in FLAT if n in names], flat_lengths, max(flat_lengths), repeats),
        "products": partial(products_table, names, min(4096, max(lengths)), tokens, repeats),
        "memory": partial(memory_table, names, [n for n in lengths if n <= 16384], tokens),
        "decode": partial(decode_table, names, decoded, repeats),
        "models": partial(models_table, compared, 512, tokens // 2, repeats),
    }
    for name in chosen_names(parser, "tables", args.tables, tables):
        print(f"\n{name}: {tables[name].func.__doc__}")
        result = tables[name]()
        if args.json and result:
            write_json(args.json, {name: result})


if __name__ == "__main__":
    main()
