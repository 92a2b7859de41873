"""Read and write .safetensors files: a JSON header with the place of each tensor, and their bytes. No code is in them.

A file may come from anybody: each size is checked before memory is allocated for it.
"""

import json
import math
import os
from typing import Dict, Iterator, Mapping

import torch
from torch import Tensor

from mega_fairseq.cli import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LONGEST_HEADER = 100_000_000  # bytes, as in the format's own library
REMARK = "__metadata__"


def load(path: str) -> Dict[str, Tensor]:
    """The tensors of a file by name; UserError for anything but a complete file."""
    size, tensors = os.path.getsize(path), {}
    with open(path, "rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError
            header = json.loads(file.read(length).decode())
            header.pop(REMARK, None)
            stop = 0
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                (start, end), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], entry["shape"]
                if start != stop or end > size or end - start != dtype.itemsize * math.prod(shape):
                    raise ValueError
                content = bytearray(end - start)  # of this tensor alone: torch would save a view with all its storage
                file.readinto(content)
                tensors[name] = torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(0)
                stop = end
            if 8 + length + stop != size:
                raise ValueError
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            types = ", ".join(DTYPES)
            raise UserError(
                f"is not a complete .safetensors file of the types {types}; copy or download it again"
            ) from None
    return tensors


def pack(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """The content of a file with these tensors, in pieces."""
    names, header, stop = {dtype: name for name, dtype in DTYPES.items()}, {REMARK: {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
