"""Read and write .safetensors files: a JSON header with the place of each tensor, and their bytes. No code is in them.

A file may come from anybody: each size is checked before memory is allocated for it.
"""

import json
import os
from typing import Any, Dict, Iterator, Mapping

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
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length).decode())
            if not isinstance(header, dict):
                raise ValueError("its header is not a table")
            header.pop(REMARK, None)
            places = {name: _place(entry) for name, entry in header.items()}
            stop = 0
            for start, end, _, _ in sorted(places.values(), key=lambda place: place[:2]):
                if start != stop:
                    raise ValueError("its tensors overlap or leave gaps")
                stop = end
            if 8 + length + stop != size:
                raise ValueError(f"it has {size:,} bytes and its header describes {8 + length + stop:,}")
        except (RecursionError, ValueError) as error:  # of JSON and UTF-8 too
            raise UserError(f"is not a complete .safetensors file ({error}); copy or download it again") from None
        tensors = {}
        for name, (start, end, dtype, shape) in places.items():
            content = bytearray(end - start)  # of each tensor alone: torch would save a view with all of its storage
            file.seek(8 + length + start)
            file.readinto(content)
            tensors[name] = torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(0)
        return tensors


def _place(entry: Any) -> tuple:
    """First and last byte, dtype and shape of a tensor."""
    if not isinstance(entry, dict) or entry.get("dtype") not in DTYPES:
        raise ValueError("it has a tensor of an unknown type")
    dtype, shape, place = DTYPES[entry["dtype"]], entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(shape, list) and isinstance(place, list) and len(place) == 2):
        raise ValueError("it has a tensor without a shape or place")
    if any(type(number) is not int or not 0 <= number < 2**63 for number in (*shape, *place)):
        raise ValueError("it has a shape or place that is not made of whole numbers")
    numbers = 1
    for width in shape:
        numbers *= width
    if place[1] - place[0] != numbers * dtype.itemsize:
        raise ValueError("it has a tensor with another number of bytes than its shape says")
    return place[0], place[1], dtype, shape


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
