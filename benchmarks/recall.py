"""Recall and parity: what two layers of each token mixer learn to look up, and to count.

    python benchmarks/recall.py OUT.json --task recall-64 --width 64 --lr 1e-3,3e-3 --seed 1

Runs in OUT.json are not repeated, interrupted ones continue; one process at a time may write a file. `recall-64` and
`recall-128` are multi-query associative recall with the data of figure 2 in Arora et al. (2023), *Zoology*: 64 or 128
symbols, out of 8,192, begin with 4 or 8 pairs of a key and a value. Each key comes once more, by a power law soon
rather than late; there the model must name its value. All else is the symbol 0. The place of a query alone tells 29%
(16%) of the answers. `parity` asks after each bit whether the number of ones is odd, at lengths 3 to 40 in training and
3 to 256 in the test.

As in *Zoology*, a model is an embedding, mixers with norms and residual connections, a norm, and the embedding again;
AdamW has a cosine schedule without warm-up; runs end when 99% of the test is right. Unlike there, all have two layers,
nothing is dropped, batches are 64 sequences, not 512, and --epochs are fewer than 64.
"""

import argparse
import json
import math
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import as_table, names, prepare_process
from mega_fairseq import modules as m
from mega_fairseq.modules.projection import linear

LAYERS, CHUNK, SYMBOLS, PAIRS = 2, 32, 8192, {"recall-64": 4, "recall-128": 8, "parity": 0}
RATES, POWER = ("1e-4", "3e-4", "1e-3", "3e-3", "1e-2"), 0.01  # of the law by which keys come again: Zoology's power_a
BUDGET, QUICK = {"examples": 100_000, "tests": 3000, "batch": 64}, {"examples": 128, "tests": 32, "batch": 64}
SOLVED, TESTED, SAVED = 0.99, 200, 60  # updates between tests, seconds between checkpoints
PLACES = ("all", "near", "far")  # far: from place 32 on, parity 40


def contenders(width: int, longest: int) -> Dict[str, Optional[m.MixerConfig]]:
    shared: Dict[str, Any] = {"dim": width, "init": "scaled"}
    single = {**shared, "shared_dim": width // 2, "value_dim": 2 * width}  # one head, as in Mega's presets
    tables = {**shared, "heads": 4, "chunk_size": longest}
    return {
        "attention": m.AttentionConfig(**shared, heads=1, rotary_dims=32),
        "mega": m.GatedAttentionConfig(**single, position_bias="rotary"),
        "mega-chunk": m.GatedAttentionConfig(**single, position_bias="rotary", chunk_size=CHUNK),
        "ema": None,  # Mega's layer without attention
        "megalodon": m.MegalodonConfig(**single),
        "attention-chunk": m.AttentionConfig(**shared, heads=1, rotary_dims=32, chunk_size=CHUNK),
        "gmlp": m.GatedMLPConfig(**tables, alpha=True, beta=True),
        "flash": m.FlashConfig(**single, position_bias="rope", chunk_size=CHUNK),
        "aft-local": m.AFTConfig(**shared, form="local", reach=CHUNK, heads=4),
        "time-weighted": m.AttentionConfig(**tables, time_weight="before", beta=True, gamma=True),
    }


CHOICES = {"task": PAIRS, "model": contenders(64, 64), "width": ("64", "128"), "lr": RATES, "seed": ("1", "2", "3")}


def made(pairs: int, length: int, examples: int, seed: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Sequences (N, L), the places of queries (N, Q) and their answers (N, Q)."""
    random = torch.Generator().manual_seed(seed)
    if not pairs:  # parity; the answers, 2 (even) and 3 (odd), are no bits
        bits = torch.randint(2, (examples, length), generator=random)
        return bits, torch.arange(2, length).expand(examples, -1), 2 + bits.cumsum(1)[:, 2:] % 2
    half, start = SYMBOLS // 2, 2 * pairs  # keys are 1 to half - 1, values half to SYMBOLS - 1
    keys = torch.stack([torch.randperm(half - 1, generator=random)[:pairs] + 1 for _ in range(examples)])
    values = torch.stack([torch.randperm(half, generator=random)[:pairs] + half for _ in range(examples)])
    inputs = F.pad(torch.stack([keys, values], -1).flatten(1), (0, length - start))
    chances = torch.arange(1.0, (length - start) // 2 + 1) ** (POWER - 1)
    places = start + 2 * torch.multinomial(chances.expand(examples, -1), pairs, generator=random)
    return inputs.scatter(1, places, keys), places, values


class Average(nn.Module):
    """Mega's layer without attention: eq. 3-5, and 12-15 with O = 0."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.ema = m.SequenceNorm("layernorm", width), m.DampedEMA(width)
        self.gates = linear(width, 2 * width, "scaled")

    def forward(self, x: Tensor) -> Tuple[Tensor, None]:
        averaged, _ = self.ema(self.norm(x))  # X' (B, L, D)
        update, candidate = self.gates(averaged).chunk(2, -1)
        return torch.lerp(x, F.silu(candidate), torch.sigmoid(update)), None


class Model(nn.Module):
    """Scores of all symbols at some places: (B, L), (B, Q) -> (B, Q, symbols)."""

    def __init__(self, contender: str, width: int, symbols: int, longest: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        config = contenders(width, longest)[contender]
        self.layers = nn.ModuleList(m.Block(config) if config else Average(width) for _ in range(LAYERS))
        self.norm = m.SequenceNorm("layernorm", width)

    def forward(self, inputs: Tensor, places: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for each in self.layers:
            x, _ = each(x)
        asked = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.size(-1)))  # (B, Q, D)
        return F.linear(self.norm(asked), self.embedding.weight)


@torch.no_grad()
def accuracy(model: Callable[[Tensor, Tensor], Tensor], data: Sequence[Tensor], border: int) -> Dict[str, float]:
    """The share of right answers to `made` questions, by PLACES."""
    found = torch.cat([model(*part).argmax(-1) for part in zip(data[0].split(250), data[1].split(250))])
    right, far = found == data[2], data[1] >= border
    return {name: right[which].float().mean().item() for name, which in zip(PLACES, (far | ~far, ~far, far))}


def trained(name: str, run: Dict[str, Any], checkpoint: Path) -> Dict[str, Any]:
    """The row of a run, which begins at its checkpoint if there is one."""
    pairs, examples, batch, seed = PAIRS[run["task"]], run["examples"], run["batch"], int(run["seed"])
    length, longest, border = (16 * pairs, 16 * pairs, CHUNK) if pairs else (40, 256, 40)
    inputs, places, answers = made(pairs, length, examples, 2 * seed)
    test = made(pairs, longest, run["tests"], 2 * seed + 1)
    torch.manual_seed(seed)
    model = Model(run["model"], int(run["width"]), SYMBOLS if pairs else 4, longest)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    row = {**run, "parameters": sum(p.numel() for p in model.parameters()), "all": 0.0, "curve": []}
    step, spent, begun, saved = 0, 0.0, time.process_time(), time.time()
    if checkpoint.exists():
        weights, moments, row, step, spent = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    per_epoch, last = examples // batch, examples // batch * run["epochs"]
    while step < last and row["all"] <= SOLVED:
        order = torch.randperm(examples, generator=torch.Generator().manual_seed(step // per_epoch))
        rows = order[step % per_epoch * batch :][:batch]
        optimizer.param_groups[0]["lr"] = float(run["lr"]) * (1 + math.cos(math.pi * step / last)) / 2
        loss = F.cross_entropy(model(inputs[rows], places[rows]).flatten(0, 1), answers[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, seconds = step + 1, spent + time.process_time() - begun
        if step % TESTED == 0 or step == last:
            row.update(accuracy(model, test, border), updates=step, seconds=round(seconds))
            row["curve"].append([step, round(loss.item(), 4), round(row["all"], 4)])
            print(f"{name}, {step} of {last}: loss {loss:.3f}, {row['all']:.1%} right, {seconds:.0f} s", flush=True)
        if time.time() - saved > SAVED:
            saved, kept = time.time(), [model.state_dict(), optimizer.state_dict(), row, step, seconds]
            torch.save(kept, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return row


def tables(rows: Iterable[Dict[str, Any]]) -> Dict[str, str]:
    """A table for each task, width and number of epochs: contenders at their best rate, by the mean of the seeds."""
    groups: Dict[str, Any] = {}
    for row in rows:
        models = groups.setdefault("{task}, width {width}, epochs: {epochs}".format(**row), {})
        models.setdefault(row["model"], {}).setdefault(row["lr"], []).append(row)
    for title, models in groups.items():
        lines, several = [], any(len(rates) > 1 for rates in models.values())
        for model, rates in models.items():
            means = {lr: [mean(row[key] for row in of) for key in PLACES] for lr, of in rates.items()}
            best = max(means, key=means.get)
            updates, shares = mean(row["updates"] for row in rates[best]), map("{:.1%}".format, means[best])
            others = ", ".join(f"{lr}: {means[lr][0]:.1%}" for lr in sorted(means, key=float))
            lines.append([model, *shares, f"{updates:,.0f}", *[best, others] * several])
        groups[title] = as_table(["", *PLACES, "updates", *["best rate", "all, by rate"] * several], lines)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    for key, some in CHOICES.items():
        parser.add_argument(f"--{key}", type=names(some), default=some, help=f"of {', '.join(some)}; without it, all")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a few sequences, to check that everything runs")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    prepare_process()
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    for chosen in () if args.table else product(*(getattr(args, key) for key in CHOICES)):
        run = {**dict(zip(CHOICES, chosen)), "epochs": args.epochs, **(QUICK if args.quick else BUDGET)}
        name = "-".join([*chosen, str(args.epochs)])
        if name not in rows:
            checkpoint = args.out.with_name(f"{args.out.stem}-{name}.pt")
            rows[name] = trained(name, run, checkpoint)
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
            args.out.with_suffix(".new").write_text(f"{{\n{lines}\n}}\n")
            args.out.with_suffix(".new").replace(args.out)
            checkpoint.unlink(missing_ok=True)
    print("\n\n".join(f"{title}\n\n{table}" for title, table in tables(rows.values()).items()))


if __name__ == "__main__":
    main()
