"""One segment of a language model shared by several processes: memory, bytes sent, time, and what GPUs would reach.

    python benchmarks/sequence_parallel.py                    both tables (some minutes), and with --json a file
    python benchmarks/sequence_parallel.py --tables paper     some of: processes, paper
    python benchmarks/sequence_parallel.py --quick            a short segment, to check that everything runs

`processes` runs forward and backward of mega_lm_small on one segment, shared by 1, 2 and 4 processes, one thread each.
CPU seconds are those of the process that takes longest; with fewer cores than processes, the processes take turns.
`paper` calculates tokens per second of a segment of 2^20 tokens from operations and bytes, under the assumptions below.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.measure import chosen_names, machine, peak_mib, write_json
from benchmarks.models import preset, task
from mega_fairseq.models.mega_lm import MegaLanguageModel
from mega_fairseq.ops.ema.blocks import BLOCK
from mega_fairseq.ops.sequence_parallel import SequenceGroup

TYPES = 256

# ------------------------------------------------------------------------------------------- processes


class Counted(SequenceGroup):
    """Counts the bytes that this process sends to all others."""

    sent = 0

    def all_gather(self, own: Tensor) -> Tensor:
        self.sent += (self.size - 1) * own.numel() * own.element_size()
        return super().all_gather(own)

    def all_to_all(self, parts: Tensor) -> Tensor:
        self.sent += (self.size - 1) * parts[0].numel() * parts.element_size()
        return super().all_to_all(parts)


def log_probs(model: MegaLanguageModel, length: int) -> Tensor:
    tokens = torch.randint(4, TYPES, (1, length), generator=torch.Generator().manual_seed(1))
    return model(tokens, target=tokens.roll(-1, 1))[0]


def share(rank: int, size: int, length: int, folder: str) -> None:
    """Saves what one of `size` processes measures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = preset("mega_lm_small", task(TYPES), dropout=0.0).train()
    short = size * model.decoder.cfg.decoder_chunk_size
    with torch.no_grad():
        whole = log_probs(model, short)
    group = Counted()
    model.decoder.share_sequences(group)
    shared = log_probs(model, short)
    torch.testing.assert_close(shared.detach(), whole, rtol=0, atol=1e-4)
    shared.sum().backward()
    group.sent, times = 0, []

    def step() -> None:
        start = time.process_time()
        log_probs(model, length).sum().backward()
        times.append(time.process_time() - start)

    mib = peak_mib(step)
    torch.save({"mib": mib, "bytes": group.sent, "seconds": times[0]}, Path(folder, f"{rank}.pt"))
    dist.barrier()


def processes(quick: bool) -> Dict[str, Any]:
    length, rows = 2048 if quick else 32768, []
    for size in (1, 2) if quick else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(share, (size, length, folder), nprocs=size)
            found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(size)]
        row = {name: max(each[name] for each in found) for name in found[0]}
        rows.append({"processes": size, **row})
        shown = f"{row['mib']:7,.0f} MiB  {row['bytes']:9,} bytes sent  {row['seconds']:6.1f} CPU seconds"
        print(f"{length:,} tokens in {size} processes: {shown} in a process", flush=True)
    return {"length": length, "rows": rows}


# ------------------------------------------------------------------------------------------- on paper

TOKENS = 2**20
OPERATIONS = 400e12  # of a GPU per second, of dense products in bf16: about half of what an H100 is built for
LINKS = {  # bytes per second that a GPU sends, seconds until a message arrives
    "NVLink": (450e9, 10e-6),
    "100 Gb/s Ethernet": (12.5e9, 50e-6),
}


def paper(quick: bool) -> Dict[str, Any]:
    """mega_lm_big over bytes, against a Transformer of that size with full attention."""
    with torch.device("meta"):
        model = preset("mega_lm_big", task(TYPES))
    c, parameters = model.decoder.cfg, sum(p.numel() for p in model.parameters())
    dim, layers, state = c.decoder_embed_dim, c.decoder_layers, c.decoder_embed_dim * c.decoder_n_dim
    # Multiplications and additions for a token: of all weights, then of what is between tokens. Backward has twice as
    # many. Causal attention computes half of the scores.
    in_chunk = c.decoder_chunk_size * (c.decoder_z_dim + c.decoder_hidden_dim)
    in_ema = 2 * dim * (BLOCK + 2 * c.decoder_n_dim)
    mega = 3 * (2 * parameters + layers * (in_chunk + in_ema))
    full = 3 * (2 * parameters + layers * TOKENS * 2 * dim)
    rows: List[Dict[str, Any]] = []
    for link, (bandwidth, latency) in LINKS.items():
        for gpus in (8, 64):
            own, others = TOKENS / gpus, gpus - 1
            gradients = 2 * others / gpus * 4 * parameters / bandwidth  # all-reduced in float32, not overlapped
            states = 2 * layers * others * (4 * state / bandwidth + latency)  # forward and backward, not overlapped
            # Keys and values in bf16, once forward; backward with their gradients. Overlapped with the products.
            around = 3 * layers * others * (2 * 2 * dim * own / bandwidth + latency)
            seconds = {
                "shared segment": mega * own / OPERATIONS + states + gradients,
                "data parallel": mega * own / OPERATIONS + gradients,
                "ring attention": max(full * own / OPERATIONS, around) + gradients,
            }
            rows.append({"link": link, "gpus": gpus, "tokens_per_second": {n: TOKENS / s for n, s in seconds.items()}})
            shown = "  ".join(f"{name} {TOKENS / s:12,.0f}" for name, s in seconds.items())
            print(f"{gpus} GPUs, {link}: tokens/s  {shown}", flush=True)
    return {"parameters": parameters, "rows": rows}


TABLES = {"processes": processes, "paper": paper}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="a short segment in one and two processes")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    args = parser.parse_args()
    chosen = chosen_names(parser, "tables", args.tables, TABLES)
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    for table in chosen:
        result = TABLES[table](args.quick)
        if args.json:
            write_json(args.json, {table: result})


if __name__ == "__main__":
    main()
