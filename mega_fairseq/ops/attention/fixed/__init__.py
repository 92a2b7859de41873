"""Keys and values in storage of a fixed size, so that every step takes the same operations, as a CUDA graph needs.

Positions are tensors there: a graph would repeat a Python number at every step. When beams continue others, keys and
values stay where they are: a table tells in which row each position of a row is.

`attend_in_storage` appends and attends: on NVIDIA GPUs in one kernel (triton.py), elsewhere by `FixedKeyValues.append`,
followed by the usual attention at one position (naive.py).
"""

from mega_fairseq.ops.attention.fixed.naive import attend_in_storage_naive
from mega_fairseq.ops.attention.fixed.storage import FixedKeyValues, FixedPlace
from mega_fairseq.ops.backend import Forms, without_gradients

__all__ = ["FixedKeyValues", "FixedPlace", "attend_in_storage"]


attend_in_storage = Forms(
    attend_in_storage_naive,
    triton="mega_fairseq.ops.attention.fixed.triton:attend_in_storage",
    suits=without_gradients,
)
