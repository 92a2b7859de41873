"""The complex EMA by Triton kernels, on NVIDIA GPUs: those of the damped EMA, with complex states (`ops/ema`)."""

from typing import Optional, Tuple

from torch import Tensor

from mega_fairseq.ops.cema.coefficients import CEMACoefficients
from mega_fairseq.ops.ema.triton import recurrence, token


def cema_triton(
    x: Tensor,
    c: CEMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """`cema` by Triton kernels. States are (B, 2 N, D) inside, real parts first."""
    project, imag = c.project.unbind(-1)
    tables = (c.log_decay, c.expand, project, c.turns, imag)
    tables = [t.t().contiguous().unsqueeze(0) for t in tables]  # (1, N, D)
    if state is not None:
        state = state.to(c.expand.dtype).permute(0, 3, 2, 1).flatten(1, 2).contiguous()
    skip = c.expand.new_zeros(x.size(2)) if skip is None else skip.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    y, end, _ = recurrence(x.contiguous(), lengths, state, skip, *tables)
    return y, end.unflatten(1, (2, -1)).permute(0, 3, 2, 1)


def cema_token(
    x: Tensor, c: CEMACoefficients, state: Tensor, skip: Optional[Tensor] = None, decay: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    return token(x, c.log_decay, c.expand, c.project, state, skip, False, c.turns)
