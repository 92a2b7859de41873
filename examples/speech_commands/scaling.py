"""Prints mean and deviation of the samples in a .npy file of 16-bit numbers, as parts of 32,768.

scaling.py train.npy
"""

import sys
from typing import Tuple

import numpy as np

ROWS = 500  # read at a time


def scaling(samples: np.ndarray) -> Tuple[float, float]:
    blocks = (samples[start : start + ROWS].astype(np.float64) / 32768 for start in range(0, len(samples), ROWS))
    sums = np.sum([(block.sum(), (block**2).sum()) for block in blocks], 0)
    mean, square = sums / samples.size
    return mean, np.sqrt(square - mean**2)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print("{:.6f} {:.6f}".format(*scaling(np.load(sys.argv[1], mmap_mode="r"))))
