"""Data as fairseq-preprocess writes them, from tokens that are numbers already."""

from pathlib import Path
from typing import Iterable

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from torch import Tensor


def write_indexed(path: Path, rows: Iterable[Tensor]) -> None:
    """Writes `path`.bin and `path`.idx."""
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for row in rows:
        builder.add_item(row)
    builder.finalize(f"{path}.idx")
