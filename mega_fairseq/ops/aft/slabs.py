"""AFT in slabs of channels that fit into the processor's cache, each in tiles, with its own backward."""

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.aft.tiles import (
    LARGEST_FACTOR,
    Older,
    Plan,
    exact,
    exact_backward,
    make_tiles,
    products,
    products_backward,
)
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.precision import at_least_float32, is_compiling, without_autocast

TILE, SMALL_TILE = 128, 32  # places; small ones where w is 0 or entries are computed one by one
SLAB = 2**19  # entries of a tensor that are processed together on the CPU, so that they stay in its cache
SAFE = 60.0  # results are right if no denominator is below e^-60 of its tile's largest key


def _plans(reach: int, tokens: int, causal: bool, checked: bool) -> List[Plan]:
    """Plans from the fastest to the one that is exact for any numbers; only the one between if not `checked`."""

    def plan(size: int, exact: int) -> Plan:
        return Plan(size, min(-(-tokens // size) - 1, -(-(reach - 1) // size)), exact, causal)

    def even(most: int) -> int:
        return -(-tokens // -(-tokens // most))

    fast = plan(even(TILE if reach > SMALL_TILE else SMALL_TILE), -1)
    if reach >= tokens:
        last = plan(tokens, 0)
    else:
        last = plan(min(tokens, max(reach - 1, SMALL_TILE)), 0)
        last = last._replace(exact=last.near)
    small = plan(even(SMALL_TILE), 0)
    return [fast, small, last] if checked else [small]


def channels_first(x: Tensor) -> Tensor:
    """(G, n, D) -> (D, G, n)."""
    return x.reshape(-1, x.size(-1)).t().contiguous().view(x.size(-1), *x.shape[:2])


def channels_last(x: Tensor, like: Tensor) -> Tensor:
    """(D, G, n) -> (G, n, D) in the dtype of `like`."""
    return x.to(like.dtype).flatten(1).t().contiguous().view(*x.shape[1:], -1)


class _Slab(NamedTuple):
    """Some channels, and the layout of their tiles."""

    channels: slice
    heads: slice
    tokens: int
    queries: int
    plan: Plan

    @property
    def first(self) -> int:
        """The first tile with a query."""
        return (self.tokens - self.queries) // self.plan.size

    @property
    def front(self) -> int:
        """Places of that tile before the first query."""
        return self.tokens - self.queries - self.first * self.plan.size

    def keys(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(D, G, m) -> (H, C, G, N, S)."""
        return self._tiles(x, fill, 0)

    def rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(D, G, n) of queries -> (H, C, G, M, S)."""
        return self._tiles(x, fill, self.front)

    def _tiles(self, x: Tensor, fill: float, front: int) -> Tensor:
        x, size = x[self.channels], self.plan.size
        x = x.to(at_least_float32(x.dtype))
        back = -(front + x.size(2)) % size
        if front or back:
            x = F.pad(x, (front, back), value=fill)
        return x.view(self.heads.stop - self.heads.start, -1, x.size(1), x.size(2) // size, size)

    def put_keys(self, x: Tensor, into: Tensor) -> None:
        """The inverse of `keys`: writes x (H, C, G, N, S) to the channels of `into` (D, G, m)."""
        into[self.channels] = x.flatten(3).flatten(0, 1)[..., : self.tokens]

    def put_rows(self, x: Tensor, into: Tensor) -> None:
        into[self.channels] = x.flatten(3).flatten(0, 1)[..., self.front : self.front + self.queries]

    def older(self, largest: Optional[Tensor], numerator: Tensor, denominator: Tensor) -> Optional[Older]:
        """(G, D) of older tokens for these channels."""
        if largest is None:
            return None
        heads = self.heads.stop - self.heads.start
        largest, *sums = (
            t[:, self.channels].t().reshape(heads, -1, t.size(0)) for t in (largest, numerator, denominator)
        )
        return Older(largest, torch.stack(sums, 1))


def _channels(dim: int, heads: int, entries: int, device: torch.device) -> List[Tuple[slice, slice]]:
    """Channels and heads of each slab; `entries` are those of one channel."""
    width, most = dim // heads, dim
    if device.type == "cpu" and not is_compiling():
        most = min(dim, max(1, SLAB // entries))
    count = most // width * width or next(n for n in range(most, 0, -1) if width % n == 0)
    bounds = [(start, min(dim, start + count)) for start in range(0, dim, count)]
    return [(slice(a, b), slice(a // width, max(a // width + 1, b // width))) for a, b in bounds]


# ------------------------------------------------------------------------------------------- forward and backward


def _is_checked(k: Tensor) -> bool:
    """Whether results are looked at: a GPU would have to wait, and a compiled graph has no branches."""
    return k.device.type == "cpu" and not is_compiling()


def _rows(slab: _Slab, k: Tensor, v: Tensor, weight: Tensor, older: Optional[Older]) -> Tuple[Tensor, Tensor, Tensor]:
    """o and the logarithm of its denominators (H, C, G, M, S), and how much larger that is than what may be lost."""
    plan, first = slab.plan, slab.first
    ref, sums = products(make_tiles(k, v), weight, plan, first, older)
    scale = ref = ref.unsqueeze(-1)
    if plan.exact >= 0:
        largest, own = exact(k, v, weight, plan, first)
        scale = torch.maximum(ref, largest)
        sums = sums * torch.exp(ref - scale).unsqueeze(1) + own * torch.exp(largest - scale).unsqueeze(1)
    numerator, denominator = sums.unbind(1)
    denominator = denominator.clamp_min(torch.finfo(denominator.dtype).tiny)
    log_denominator = scale + torch.log(denominator)
    return numerator / denominator, log_denominator, log_denominator - ref


def _compute(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    largest: Optional[Tensor],
    numerator: Optional[Tensor],
    denominator: Optional[Tensor],
    causal: bool,
    queries: int,
) -> Tuple[Tensor, Tensor, List[_Slab]]:
    """From k, v (D, G, m): o (D, G, n), the logarithms of its denominators, and how each slab was computed."""
    dim, groups, tokens = k.shape
    checked = _is_checked(k)
    plans = _plans(weight.size(1) if causal else weight.size(1) // 2 + 1, tokens, causal, checked)
    out, log_denominators = (weight.new_empty(dim, groups, queries) for _ in range(2))
    slabs, lowest = [], torch.finfo(weight.dtype).min
    for channels, heads in _channels(dim, weight.size(0), groups * tokens, k.device):
        for plan in plans:
            slab = _Slab(channels, heads, tokens, queries, plan)
            older = slab.older(largest, numerator, denominator)
            o, log_denominator, margin = _rows(slab, slab.keys(k, lowest), slab.keys(v), weight[heads], older)
            if plan is plans[-1] or float(margin.amin()) > -SAFE:
                break
        if not checked:
            o = o.masked_fill(margin < -LARGEST_FACTOR, float("nan"))
        slab.put_rows(o, out)
        slab.put_rows(log_denominator, log_denominators)
        slabs.append(slab)
    return out, log_denominators, slabs


class _InSlabs(torch.autograd.Function):
    """`_compute`, whose backward computes the tiles again."""

    @staticmethod
    def forward(ctx, k, v, weight, largest, numerator, denominator, causal, queries):
        keys, values = channels_first(k), channels_first(v)
        older = (largest, numerator, denominator)
        out, log_denominators, ctx.slabs = _compute(keys, values, weight, *older, causal, queries)
        out = channels_last(out, v)
        ctx.save_for_backward(keys, values, weight, *older, out, log_denominators)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        k, v, weight, largest, numerator, denominator, out, log_denominators = ctx.saved_tensors
        out, dout = channels_first(out), channels_first(dout)
        dk, dv, dweight = torch.empty_like(k), torch.empty_like(v), torch.zeros_like(weight)
        dolder = None if largest is None else [torch.empty_like(largest) for _ in range(2)]
        lowest, highest = torch.finfo(weight.dtype).min, torch.finfo(weight.dtype).max
        with without_autocast(k):
            for slab in ctx.slabs:
                plan, first, of_heads = slab.plan, slab.first, weight[slab.heads]
                keys, values = slab.keys(k, lowest), slab.keys(v)
                older = slab.older(largest, numerator, denominator)
                tiles, log_denominator = make_tiles(keys, values), slab.rows(log_denominators, highest)
                g = slab.rows(dout)
                go = g * slab.rows(out)
                y = torch.stack([g, -go], 1)
                dx, dw, dsums = products_backward(tiles, of_heads, plan, first, older, y, log_denominator)
                e = tiles.x[:, 1]
                dvalues = dx[:, 0] * e
                dkeys = torch.addcmul(dx[:, 1] * e, dvalues, values)
                if plan.exact >= 0:
                    own = exact_backward(keys, values, of_heads, plan, first, g, go, log_denominator)
                    dkeys, dvalues, dw = dkeys + own[0], dvalues + own[1], dw + own[2]
                slab.put_keys(dkeys, dk)
                slab.put_keys(dvalues, dv)
                dweight[slab.heads] += dw
                if dolder is not None:
                    for into, part in zip(dolder, dsums.unbind(1)):
                        into[:, slab.channels] = part.reshape(-1, part.size(-1)).t()
        return (channels_last(dk, k), channels_last(dv, v), dweight, None, *(dolder or (None, None)), None, None)


def _with_margin(weight: Tensor, causal: bool, tokens: int) -> Tensor:
    """The table; if it covers all tokens, its ends are repeated over the rest of the last tile instead of 0, which
    could be much larger than the weights of tokens in that tile."""
    zero = 0 if causal else weight.size(1) // 2
    if weight.size(1) - zero < tokens:
        return weight
    after = weight[:, -1:].detach().expand(-1, TILE)
    return torch.cat([weight, after] if causal else [weight[:, :1].detach().expand(-1, TILE), weight, after], 1)


def in_slabs(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    largest: Optional[Tensor],
    numerator: Optional[Tensor],
    denominator: Optional[Tensor],
    causal: bool,
    queries: int,
) -> Tensor:
    """`aft_naive` of the same arguments, with keys of the lowest number at pads."""
    older, weight = (largest, numerator, denominator), _with_margin(weight, causal, k.size(1))
    if is_compiling():
        out, _, _ = _compute(channels_first(k), channels_first(v), weight, *older, causal, queries)
        return channels_last(out, v)
    return _InSlabs.apply(k, v, weight, *older, causal, queries)
