"""Toeplitz matrices, which have one number on each diagonal: everything that depends on the distance of two places."""

import torch.nn.functional as F
from torch import Tensor


def toeplitz_matrix(diagonals: Tensor, rows: int, columns: int) -> Tensor:
    """(..., n + m - 1) -> (..., n, m), with diagonals[j - i + n - 1] in row i and column j."""
    return diagonals.unfold(-1, columns, 1).flip(-2)[..., :rows, :]


def diagonal_sums(matrix: Tensor) -> Tensor:
    """The transpose of `toeplitz_matrix`: (..., n, m) -> (..., n + m - 1)."""
    rows, columns = matrix.shape[-2:]
    padded = F.pad(matrix, (rows - 1, rows - 1))
    *strides, width, _ = padded.stride()
    return padded.as_strided((*matrix.shape[:-1], columns + rows - 1), (*strides, width + 1, 1)).sum(-2)
