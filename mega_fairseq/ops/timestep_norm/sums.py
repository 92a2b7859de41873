"""The timestep norm of all tokens of a piece, by prefix sums; the formulas are those of __init__.py."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.timestep_norm.naive import own_statistics


def _origin(own: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """s (B, 1, G) that sums are relative to; before the first token it is that token's mean."""
    return torch.where(count.view(-1, 1, 1) > 0, mean.unsqueeze(1), own[:, :1])


def _counts(own: Tensor, count: Tensor) -> Tensor:
    """Tokens up to each one, (B, L, 1)."""
    places = torch.arange(1, own.size(1) + 1, device=own.device)
    return (count.unsqueeze(1) + places).unsqueeze(-1).to(own.dtype)


def _last(lengths: Optional[Tensor], like: Tensor) -> Tensor:
    """The index of each row's last token, as `gather` takes it in (B, L, G): (B, 1, G)."""
    index = like.new_full((like.size(0),), like.size(1), dtype=torch.long) if lengths is None else lengths
    return (index - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, like.size(2))


def forward(x, weight, bias, mean, var, count, lengths, eps) -> Tuple[Tensor, ...]:
    centred, own, spread = own_statistics(x, mean.size(1))
    dtype, own, spread = own.dtype, own.to(mean.dtype), spread.to(mean.dtype)  # (B, L, G)
    pads = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
    if pads is not None:
        own, spread = (t.masked_fill(pads, 0.0) for t in (own, spread))
    origin, counts = _origin(own, mean, count), _counts(own, count)
    away = own - origin if pads is None else (own - origin).masked_fill(pads, 0.0)
    moved = away.cumsum(1) / counts
    before = (var * count.unsqueeze(1)).unsqueeze(1)
    vars_ = ((before + (spread + away.square()).cumsum(1)) / counts - moved.square()).clamp_min(0.0)
    means, scale = origin + moved, torch.rsqrt(vars_ + eps).to(dtype)

    y = centred.add_((own - means).to(dtype).unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(-2)
    y = y if weight is None else y.mul_(1.0 + weight.to(dtype))
    y = (y if bias is None else y.add_(bias)).to(x.dtype)
    last = _last(lengths, means)
    ends = [t.gather(1, last).squeeze(1) for t in (means, vars_)]
    if pads is not None:
        y = y.masked_fill(pads, 0.0)
        empty = (lengths == 0).unsqueeze(1)
        ends = [torch.where(empty, old, new) for old, new in zip((mean, var), ends)]
    return (y, means, scale, *ends)


def fake(x, weight, bias, mean, var, count, lengths, eps):
    shape = (*x.shape[:2], mean.size(1))
    means, scale = x.new_empty(shape, dtype=mean.dtype), x.new_empty(shape, dtype=at_least_float32(x.dtype))
    return x.new_empty(x.shape), means, scale, torch.empty_like(mean), torch.empty_like(var)


def backward(grads, saved, x, weight, bias, mean, var, count, lengths, eps) -> List[Tensor]:
    """With R, A and B sums from t to the end, of g_var / k, g_mean / k and g_var (mean - s) / k:

    dx = r w dy + (A + 2 ((m - s) R - B)) / W + 2 R (x - m) / W
    """
    (dy, _, _, dmean, dvar), (means, scale) = grads, saved
    centred, own, _ = own_statistics(x, mean.size(1))  # (B, L, G, W)
    dtype, wide, own, width = own.dtype, mean.dtype, own.to(mean.dtype), centred.size(-1)
    pads = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
    dy = torch.zeros_like(x) if dy is None else dy
    if pads is not None:
        own, dy = own.masked_fill(pads, 0.0), dy.masked_fill(pads, 0.0)
        centred = centred.masked_fill(pads.unsqueeze(-1), 0.0)
    dy = dy.to(dtype)
    origin, counts = _origin(own, mean, count), _counts(own, count)
    shift = own - means

    parameters = []
    if weight is not None:
        normed = (centred + shift.to(dtype).unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(-2)
        parameters.append(normed.mul_(dy).sum((0, 1)).to(weight.dtype))
    if bias is not None:
        parameters.append(dy.sum((0, 1)).to(bias.dtype))
    g = (dy if weight is None else dy * (1.0 + weight.to(dtype))).view_as(centred)
    total = g.sum(-1).to(wide)
    r = scale.to(wide)
    g_mean = -r * total
    g_var = -0.5 * r.pow(3) * ((g * centred).sum(-1).to(wide) + shift * total)
    last, through = _last(lengths, means), []
    real = None if lengths is None else (lengths > 0).unsqueeze(1)
    for gradient, end in ((g_mean, dmean), (g_var, dvar)):
        if end is not None:
            at_end = end if real is None else end * real
            gradient.scatter_add_(1, last, at_end.unsqueeze(1))
        through.append(0.0 if end is None or real is None else end * ~real)

    def later(t: Tensor) -> Tensor:
        return (t / counts).flip(1).cumsum(1).flip(1)

    of_var, of_mean, of_both = later(g_var), later(g_mean), later(g_var * (means - origin))
    constant = (of_mean + 2.0 * ((own - origin) * of_var - of_both)) / width
    dx = g.mul(scale.unsqueeze(-1)).add_(constant.to(dtype).unsqueeze(-1))
    dx = dx.addcmul_(centred, (of_var * (2.0 / width)).to(dtype).unsqueeze(-1)).flatten(-2).to(x.dtype)
    if pads is not None:
        dx = dx.masked_fill(pads, 0.0)
    n = count.unsqueeze(1)
    return [
        dx,
        *parameters,
        n * (of_mean[:, 0] - 2.0 * of_both[:, 0]) + through[0],
        n * of_var[:, 0] + through[1],
    ]
