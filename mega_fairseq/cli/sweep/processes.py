"""A sweep in several processes, started by torchrun: they share each stream, and the first one directs the others."""

import os
from typing import Optional, Tuple

import torch
import torch.distributed as dist

from mega_fairseq.cli import UserError
from mega_fairseq.ops.sequence_parallel import SequenceGroup


def join(cpu: bool) -> Optional[SequenceGroup]:
    """All processes that torchrun started, or None in a single one; each uses a GPU of its own if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    cuda = torch.cuda.is_available() and not cpu
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    return SequenceGroup()


def announce(point: Optional[Tuple[int, str]] = None) -> Optional[Tuple[int, str]]:
    """The point that the first process gives, in all processes: a chunk size and a cut, or None at the end."""
    announced = [point]
    try:
        dist.broadcast_object_list(announced, src=0)
    except RuntimeError:
        raise UserError("another process of this sweep has ended; see its own output") from None
    return announced[0]
