"""Speed and memory of a Mega layer against torch's Transformer layer, and of the EMA against its textbook form.

    python benchmarks/layer.py                      all tables (about 40 minutes); --json saves the numbers
    python benchmarks/layer.py --tables ema,forms   some tables: see --help
    python benchmarks/layer.py --quick              a minute, at small lengths, to check that everything runs
    python benchmarks/layer.py --plot FILE.json     draws FILE.png from what --json wrote

`layer` compares whole layers of equal size: a Mega block with its feed-forward and nn.TransformerEncoderLayer.
Everything is checked against its naive form before it is timed.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import contenders as c
from benchmarks.measure import chosen_names, in_fresh_process, machine, peak_mib, seconds, write_json
from mega_fairseq.modules import DampedEMA
from mega_fairseq.ops.ema import blocks as ema_blocks
from mega_fairseq.ops.ema import ema, ema_coefficients, ema_naive

TOKENS = 8192  # per step, or one sequence if it is longer
LENGTHS = [128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
LONGEST_QUADRATIC = 8192  # beyond it, torch's layer and full attention take minutes per step
BEAM = 5  # rows of `token`


# ------------------------------------------------------------------------------------------- correctness


def gate() -> None:
    """Raises unless our layer equals itself run token by token, and our EMA the textbook's."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name in (n for n in c.MEGA if "causal" in n):
            layer, x, state, ys = c.layer(name, 140).double(), torch.randn(1, 140, c.DIM, dtype=torch.float64), None, []
            whole, _ = layer(x)
            for t in range(x.size(1)):
                y, state = layer(x[:, t : t + 1], state)
                ys.append(y)
            torch.testing.assert_close(whole, torch.cat(ys, 1), rtol=0, atol=1e-10)
    parameters = [p.double() for p in ema_parameters()]
    x = torch.randn(2, 300, c.DIM, dtype=torch.float64)
    ours, _ = ema(x, ema_coefficients(*parameters[:4]), skip=parameters[4])
    torch.testing.assert_close(ours, textbook(x, parameters), rtol=0, atol=1e-8)
    naive, _ = ema_naive(x, ema_coefficients(*parameters[:4]))
    torch.testing.assert_close(ours, naive + parameters[4] * x, rtol=0, atol=1e-10)
    print("correct: chunked = token by token, EMA = textbook = naive")


def ema_parameters() -> List[torch.Tensor]:
    module = DampedEMA(c.DIM, c.NDIM)
    return [p.detach() for p in (module.alpha, module.delta, module.beta, module.eta)] + [module.omega.detach()]


# ------------------------------------------------------------------------------------------- tables


def layer_table(lengths: List[int], tokens: int, repeats: int) -> Dict:
    """Whole layers of equal size: tokens per CPU second, forward and backward."""
    sizes = {name: c.size_of(c.layer(name, min(lengths))) for name in ("torch", *c.MEGA)}
    print("parameters: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    rows = []
    for length in lengths:
        names = ["torch", *c.MEGA] if length <= LONGEST_QUADRATIC else c.CHUNKED
        rows.append(speed_row(names, length, max(tokens, length), repeats))
    return {"parameters": sizes, "rows": rows}


def speed_row(names: Iterable[str], length: int, tokens: int, repeats: int) -> Dict:
    steps = {name: c.training_step(c.layer(name, length), tokens // length, length) for name in names}
    times = seconds(steps, repeats)
    cells = []
    for name, time in times.items():
        ratio = f" ({times['torch'] / time:.2f}x)" if "torch" in times else ""
        cells.append(f"{name} {tokens / time:,.0f}{ratio}")
    print(f"L={length:>6} tokens/CPU-s: " + ", ".join(cells), flush=True)
    return {"length": length, "tokens": tokens, "seconds": times}


def flat_table(lengths: List[int], tokens: int, repeats: int) -> List[Dict]:
    """The chunked layers at the same number of tokens per step: the effect of length alone."""
    return [speed_row(c.CHUNKED, length, tokens, repeats) for length in lengths]


def projections_table(length: int, tokens: int, repeats: int) -> Dict:
    """Share of a chunked layer's time that its matrix products alone take."""
    modules = {"projections": c.Projections(), **{name: c.layer(name, length) for name in c.CHUNKED}}
    times = seconds({n: c.training_step(m, tokens // length, length) for n, m in modules.items()}, repeats)
    for name, time in times.items():
        print(f"L={length} {name}: {time:.3f} CPU-s, projections {times['projections'] / time:.0%} of it", flush=True)
    return {"length": length, "seconds": times}


def rival_table(length: int, tokens: int, repeats: int) -> Dict:
    """PyPI's mega-pytorch: full causal gated attention at the same widths; empty if it is not installed."""
    rival = c.mega_pytorch()
    if rival is None:
        print("mega-pytorch is not installed: pip install --no-deps mega-pytorch einops")
        return {}
    modules = {"mega_pytorch": rival, "full_causal_rotary": c.gated_attention("full_causal_rotary", length)}
    times = seconds({n: c.training_step(m, tokens // length, length) for n, m in modules.items()}, repeats)
    print(f"L={length}: ours is {times['mega_pytorch'] / times['full_causal_rotary']:.1f}x as fast", flush=True)
    return {"length": length, "tokens": tokens, "seconds": times}


def memory_table(lengths: List[int], tokens: int) -> List[Dict]:
    """Whole layers: peak MiB of a step, gradients included, in a fresh process each."""
    rows = []
    for length in lengths:
        row = {name: in_fresh_process(__file__, "layer", name, length, tokens)[0] for name in ("torch", *c.MEGA)}
        rows.append({"length": length, "tokens": max(tokens, length), "mib": row})
        cells = (f"{n} {mib:.0f} ({mib / row['torch']:.2f}x)" for n, mib in row.items())
        print(f"L={length:>6} peak MiB: " + ", ".join(cells), flush=True)
    return rows


def textbook(x: torch.Tensor, parameters: List[torch.Tensor]) -> torch.Tensor:
    return c.textbook_ema(x, *(p[0] for p in parameters[:4]), parameters[4])


def ema_steps(length: int, tokens: int) -> Dict[str, Callable[[], None]]:
    parameters = [p.requires_grad_() for p in ema_parameters()]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ema(x, ema_coefficients(*parameters[:4]), skip=parameters[4])[0]

    batch = max(1, tokens // length)
    return {
        "ours": c.training_step(ours, batch, length),
        "textbook": c.training_step(lambda x: textbook(x, parameters), batch, length),
    }


def ema_table(lengths: List[int], tokens: int, repeats: int) -> Dict:
    """The EMA alone, forward and backward: against the textbook, and time per token as length grows."""
    rows = []
    for length in lengths:
        times = seconds(ema_steps(length, tokens), repeats)
        mib = {n: in_fresh_process(__file__, "ema", n, length, tokens)[0] for n in times}
        rows.append({"length": length, "seconds": times, "mib": mib})
        print(
            f"L={length:>6} EMA: {times['textbook'] / times['ours']:.1f}x the textbook's speed "
            f"({times['ours'] * 1e3:.0f} against {times['textbook'] * 1e3:.0f} ms), "
            f"1/{mib['textbook'] / mib['ours']:.1f} of its memory ({mib['ours']:.0f} and {mib['textbook']:.0f} MiB)",
            flush=True,
        )
    long = max(LENGTHS) if max(lengths) >= TOKENS else max(lengths)  # the latter for --quick
    per_token = seconds({n: ema_steps(n, long)["ours"] for n in (min(1024, long), long)}, repeats)
    ratio = per_token[long] / per_token[min(1024, long)]
    print(f"EMA, {long} tokens a step: time per token at L={long} is {ratio:.2f} of that at L={min(1024, long)}")
    return {"rows": rows, "long": long, "long_ratio": ratio}


def forms_table(lengths: List[int], tokens: int, repeats: int) -> List[Dict]:
    """The implementations of the EMA, in both directions: the crossovers behind the constants in ops/ema_blocks.py."""
    rows, chosen = [], ema_blocks.BLOCK
    for direction in ("causal", "bidirectional"):
        for length in lengths:
            steps = {name: c.training_step(form, tokens // length, length) for name, form in ema_forms(direction)}
            rows.append({"direction": direction, "length": length, "seconds": seconds(steps, repeats)})
            cells = (f"{name} {time * 1e3:.0f}" for name, time in rows[-1]["seconds"].items())
            print(f"{direction}, L={length:>6} ms: " + ", ".join(cells), flush=True)
    ema_blocks.BLOCK = chosen
    return rows


def ema_forms(direction: str) -> Iterator[Tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    *parameters, skip = (p.requires_grad_() for p in ema_parameters())
    directions = 1 if direction == "causal" else 2

    def run(x: torch.Tensor, block: int) -> torch.Tensor:
        ema_blocks.BLOCK = block
        return ema(x, ema_coefficients(*(p.expand(directions, -1, -1) for p in parameters)), skip=skip)[0]

    yield from ((f"blocks_{block}", partial(run, block=block)) for block in (16, 32, 64, 128))


def token_table(truncation: int, repeats: int) -> Dict:
    """One token of gated attention in beam search: milliseconds of its step and of the layer itself."""
    steps = {}
    for name, taps in (("recurrent EMA", None), (f"truncated to {truncation:,} taps", truncation)):
        layer = c.gated_attention(c.CHUNKED[0], truncation, truncation=taps).eval()
        with torch.no_grad():
            _, state = layer(torch.randn(BEAM, truncation, c.DIM))
            steps[f"{name}, step"] = c.single_token(layer.step(), BEAM, state)
            steps[f"{name}, layer"] = c.single_token(layer, BEAM, state)
    found = {name: time / c.SINGLE_TOKENS for name, time in seconds(steps, repeats).items()}
    for name, time in found.items():
        print(f"{name}: {1e3 * time:.2f} ms", flush=True)
    return {"rows": BEAM, "taps": truncation, "seconds": found}


# ------------------------------------------------------------------------------------------- one process, one number


def one(kind: str, name: str, length: int, tokens: int) -> float:
    """Peak memory of a step, after a small one that makes the libraries allocate what they keep."""
    if kind == "ema":
        ema_steps(64, 256)[name]()
        return peak_mib(ema_steps(length, tokens)[name])
    layer = c.layer(name, length)
    c.training_step(layer, 1, min(length, 256))()
    return peak_mib(c.training_step(layer, max(1, tokens // length), length))


def plot(source: Path) -> None:
    """Draws tokens per second and memory against length, next to a file that --json wrote."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = json.loads(source.read_text())
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, rows, value, title in (
        (speed, results["layer"]["rows"], lambda row, n: row["tokens"] / row["seconds"][n], "tokens per CPU second"),
        (memory, results["memory"], lambda row, n: row["mib"][n] * TOKENS / row["tokens"], "peak MiB per 8192 tokens"),
    ):
        key = "seconds" if axis is speed else "mib"
        for name in rows[0][key]:
            points = [(row["length"], value(row, name)) for row in rows if name in row[key]]
            axis.plot(*zip(*points), marker="o", label=c.LABELS[name])
        axis.set(xscale="log", xlabel="sequence length", title=title, ylim=(0, None))
        lengths = [row["length"] for row in rows]
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    speed.legend(fontsize=8)
    cpu = results["machine"]["layer"]["cpu"]
    size = results["layer"]["parameters"]["torch"] / 1e6
    title = f"One layer of {size:.1f}M parameters, feed-forward included, forward + backward, one thread of {cpu}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = "layer,projections,flat,memory,ema,forms,token,rival"
    parser.add_argument("--tables", default=tables, help=f"which to run, of {tables}")
    parser.add_argument("--lengths", help="comma-separated sequence lengths instead of 128 ... 65,536")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="lengths up to 1024 and one round")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the numbers of this file, next to it")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # kind, name, length and tokens of one step
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plot:
        return plot(args.plot)
    if args.one:
        kind, name, length, tokens = args.one
        print(one(kind, name, int(length), int(tokens)))
        return
    gate()
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    lengths, tokens, repeats, flat_tokens = LENGTHS, TOKENS, args.repeats, max(LENGTHS)
    if args.quick:
        lengths, tokens, repeats, flat_tokens = [512, 1024], 1024, 1, 1024
    if args.lengths:
        lengths = [int(n) for n in args.lengths.split(",")]
    quadratic = [n for n in lengths if n <= LONGEST_QUADRATIC]
    longest = max(quadratic, default=LONGEST_QUADRATIC)
    tables = {
        "layer": (layer_table, lengths, tokens, repeats),
        "projections": (projections_table, min(4096, longest), max(tokens, 4096), repeats),
        "flat": (flat_table, sorted({min(512, max(lengths)), max(lengths)}), flat_tokens, min(3, repeats)),
        "rival": (rival_table, min(1024, longest), tokens, min(2, repeats)),
        "memory": (memory_table, quadratic, tokens),
        "ema": (ema_table, [n for n in quadratic if n >= 1024], tokens, repeats),
        "forms": (forms_table, quadratic, tokens, repeats),
        "token": (token_table, 32 if args.quick else 1024, repeats),
    }
    for name in chosen_names(parser, "tables", args.tables, tables):
        table, *arguments = tables[name]
        print(f"\n{name}: {table.__doc__.splitlines()[0]}")
        result = table(*arguments)
        if args.json and result:
            write_json(args.json, {name: result})


if __name__ == "__main__":
    main()
