"""One segment of a language model shared by several processes: memory, bytes sent and time.

    python benchmarks/sequence_parallel.py --json docs/sequence_parallel.json      some minutes

Forward and backward of mega_lm_small on one segment, shared by 1, 2 and 4 processes, one thread each. Numbers are those
of the process with the most; with fewer cores than processes, the processes take turns.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.measure import Meter, Row, main, peak_mib, prepare_process
from benchmarks.models import from_args
from mega_fairseq.models.mega_lm import MegaLanguageModel
from mega_fairseq.ops.sequence_parallel import SequenceGroup

TYPES = 256


class CountingGroup(SequenceGroup):
    """Counts the bytes that this process sends to all others."""

    sent = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.sent += (self.size - 1) * tensor.numel() * tensor.element_size()
        return super().all_gather(tensor)

    def all_to_all(self, parts: Tensor) -> Tensor:
        self.sent += (self.size - 1) * parts[0].numel() * parts.element_size()
        return super().all_to_all(parts)


def log_probs(model: MegaLanguageModel, length: int) -> Tensor:
    tokens = torch.randint(4, TYPES, (1, length), generator=torch.Generator().manual_seed(1))
    return model(tokens, target=tokens.roll(-1, 1))[0]


def share(rank: int, size: int, length: int, folder: str) -> None:
    """Compares a shared segment with a whole one, and saves what one of `size` processes measures."""
    prepare_process()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.manual_seed(0)
    words = ["--task=mega_language_modeling", "--arch=mega_lm_small", "--dropout=0"]
    model = from_args(words, TYPES).train()
    short = size * model.decoder.cfg.decoder_chunk_size
    with torch.no_grad():
        whole = log_probs(model, short)
    group = CountingGroup()
    model.decoder.share_sequences(group)
    shared = log_probs(model, short)
    torch.testing.assert_close(shared.detach(), whole, rtol=0, atol=1e-4)
    shared.sum().backward()
    group.sent, start = 0, time.process_time()
    mib = peak_mib(lambda: log_probs(model, length).sum().backward())
    numbers = {"MiB": mib, "KiB sent": group.sent / 1024, "CPU seconds": time.process_time() - start}
    torch.save(numbers, Path(folder, f"{rank}.pt"))
    dist.barrier()


def processes(meter: Meter) -> Iterator[Row]:
    """A segment of 32,768 tokens, forward and backward: memory, bytes sent and time of a process, by processes"""
    for size in (1, 2) if meter.quick else (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(share, (size, 2048 if meter.quick else 32_768, folder), nprocs=size)
            measured = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(size)]
        yield size, {name: max(each[name] for each in measured) for name in measured[0]}


if __name__ == "__main__":
    main(__doc__, {"processes": processes})
