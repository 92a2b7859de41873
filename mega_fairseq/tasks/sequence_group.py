"""Groups of neighbouring processes, each of which shares sequences (--sequence-parallel-size)."""

from typing import Optional

from fairseq.distributed import utils as distributed_utils

from mega_fairseq.ops.sequence_parallel import SequenceGroup


def sequence_group(size: int, for_training: bool) -> Optional[SequenceGroup]:
    """The group of this process: ranks 0 to size - 1, size to 2 size - 1, ... All processes must call this.

    None if processes do not share sequences. A trained model can also be used in one process.
    """
    processes = distributed_utils.get_data_parallel_world_size()
    if size == 1 or processes == 1 and not for_training:
        return None
    if processes % size:
        raise ValueError(
            f"--sequence-parallel-size is {size} and does not divide the number of processes, {processes}; give a "
            "divisor, or a multiple of it as --distributed-world-size"
        )
    ranks = [list(range(first, first + size)) for first in range(0, processes, size)]
    return SequenceGroup(distributed_utils.new_groups(ranks))
