"""Single-head attention O = f(Q K^T / tau + b) V with f one of softmax, relu2, laplace (paper, eq. 11 and 16-17).

Shapes: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e); G counts chunks of sentences, z and e may differ.
`causal` aligns the last query with the last key: query i sees keys 0 .. m - n + i.
`bias` (n + m - 1,) is b as a function of distance: the score of query i and key j gains bias[j - i + n - 1], so that a
relative bias never becomes a matrix of its own; its gradient comes back as such a vector.
`key_padding` (G, m) bool, True = pad. A row that sees no key at all gives zeros.

Four forms of one function:

    attention_naive   plain matrices, plain autograd; the truth that the others are tested against
    one position      queries that see the same keys at the same distances, as in decoding: `weights_at_one_position`
    fused             torch's scaled_dot_product_attention, for softmax wherever one of its fused kernels can run
    tiled             rows in tiles that fit the cache; backward computes the scores again, so nothing of size n x m
                      outlives its tile: laplace, relu2, and softmax where no fused kernel takes z != e
"""

import math
from typing import Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.precision import at_least_float32, autocast_dtype, is_compiling, without_autocast

ATTENTION_FUNCTIONS = ("softmax", "relu2", "laplace")
LAPLACE_MEAN, LAPLACE_STD = (
    0.707107,
    0.282095,
)  # the released constants: sqrt(1/2) and sqrt(1/(4 pi)) to six digits

TILE = 1 << 19  # scores in a tile: 2 MiB of float32, which stays in a core's share of the cache
TILE_GPU = 1 << 26
MASKED = -1e30  # finite, so that a row without any key has no NaN in its gradient


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (eq. 16, Primer)."""
    return torch.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """0.5 (1 + erf((x - mu) / (sigma sqrt 2))) (eq. 17): relu2 with bounded value and slope."""
    return 0.5 * (1.0 + torch.erf((x - LAPLACE_MEAN) / (LAPLACE_STD * math.sqrt(2.0))))


def _laplace_slope(x: Tensor) -> Tensor:
    slope = ((x - LAPLACE_MEAN) / LAPLACE_STD).square_().mul_(-0.5).exp_()
    return slope.mul_(1.0 / (LAPLACE_STD * math.sqrt(2.0 * math.pi)))


def _weights(scores: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return torch.softmax(scores, -1)
    return relu2(scores) if function == "relu2" else laplace(scores)


def _weights_backward(grad: Tensor, scores: Tensor, weights: Tensor, function: str) -> Tensor:
    """From the gradient of the weights to that of the scores."""
    if function == "softmax":
        return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    if function == "relu2":
        return grad.mul_(torch.relu(scores)).mul_(2.0)
    return grad.mul_(_laplace_slope(scores))


def temperature(
    q: Tensor, k: Tensor, function: str, causal: bool, key_padding: Optional[Tensor]
) -> Union[float, Tensor]:
    """1 / tau: sqrt(z) for softmax, else the number of keys that each row may see; shaped to multiply q."""
    queries, keys = q.size(1), k.size(1)
    if function == "softmax":
        return q.size(-1) ** -0.5
    if causal:
        seen = torch.arange(keys - queries + 1, keys + 1, device=q.device)
        if key_padding is not None:
            real = (~key_padding).cumsum(-1)[:, keys - queries :]  # (G, n)
            seen = real.clamp_min(1)
    elif key_padding is not None:
        seen = (~key_padding).sum(-1, keepdim=True).clamp_min(1)  # (G, 1)
    else:
        return 1.0 / keys
    return seen.to(at_least_float32(q.dtype)).reciprocal().to(q.dtype).unsqueeze(-1)


def bias_matrix(bias: Tensor, queries: int, keys: int) -> Tensor:
    """The distance vector as the matrix that it stands for: (n + m - 1,) -> (n, m)."""
    return bias.unfold(0, keys, 1).flip(0)[:queries]


def _bias_vector(grad: Tensor) -> Tensor:
    """The transpose of `bias_matrix`, sums along diagonals: (n, m) -> (n + m - 1,)."""
    queries, keys = grad.shape
    skewed = F.pad(grad.flip(0), (0, queries)).flatten()[:-queries]
    return skewed.view(queries, keys + queries - 1).sum(0)


def _visible(q: Tensor, k: Tensor, causal: bool, key_padding: Optional[Tensor]) -> Optional[Tensor]:
    """The keys that each query may see: (n, m), (G, 1, m) or (G, n, m) bool, or None for all."""
    queries, keys = q.size(1), k.size(1)
    visible = None
    if causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if key_padding is not None:
        real = ~key_padding.unsqueeze(1)
        visible = real if visible is None else visible & real
    return visible


def attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: str,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """The definition, in whole matrices, for q already divided by tau; `keep` (G, n, m) and `scale` are dropout's."""
    scores = torch.bmm(q, k.transpose(1, 2)).to(at_least_float32(q.dtype))
    if bias is not None:
        queries, keys = (torch.arange(size, device=bias.device) for size in scores.shape[1:])
        scores = scores + bias[keys - queries.unsqueeze(1) + scores.size(1) - 1]
    visible = _visible(q, k, causal, key_padding)
    if visible is not None:
        scores = scores.masked_fill(~visible, MASKED)
    weights = _weights(scores, function)
    if key_padding is not None:
        weights = weights.masked_fill(~visible, 0.0)  # a row without any key
    if keep is not None:
        weights = weights * keep * scale
    return torch.bmm(weights.to(v.dtype), v)


class _Tiled(torch.autograd.Function):
    """`attention_naive` over tiles of rows and of groups; backward recomputes each tile's scores."""

    @staticmethod
    def forward(ctx, q, k, v, bias, key_padding, keep, scale, function, causal):
        out = q.new_empty(q.size(0), q.size(1), v.size(2), dtype=v.dtype)
        for tile in _tiles(q, k, causal):
            groups, rows, keys = tile
            _, weights = _tile_weights(q, k, bias, key_padding, function, causal, tile)
            if keep is not None:
                weights.mul_(keep[tile]).mul_(scale)
            torch.bmm(weights.to(v.dtype), v[groups, keys], out=out[groups, rows])
        ctx.save_for_backward(q, k, v, bias, key_padding, keep)
        ctx.scale, ctx.function, ctx.causal = scale, function, causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, bias, key_padding, keep = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dbias = None if bias is None else torch.zeros_like(bias)
        with without_autocast(q):
            for tile in _tiles(q, k, ctx.causal):
                groups, rows, keys = tile
                # The first tile of a group reaches every key and so starts the sums of dk and dv.
                first = rows.stop == q.size(1)
                scores, weights = _tile_weights(q, k, bias, key_padding, ctx.function, ctx.causal, tile)
                grad = torch.bmm(dout[groups, rows], v[groups, keys].transpose(1, 2)).to(scores.dtype)
                kept = weights
                if keep is not None:
                    kept = weights * keep[tile] * ctx.scale
                    grad.mul_(keep[tile]).mul_(ctx.scale)
                _accumulate(dv[groups, keys], kept.to(v.dtype).transpose(1, 2), dout[groups, rows], first)
                dscores = _weights_backward(grad, scores, weights, ctx.function)
                if bias is not None:
                    high = q.size(1) - rows.start + keys.stop - 1
                    dbias[q.size(1) - rows.stop : high] += _bias_vector(dscores.sum(0)).to(bias.dtype)
                dscores = dscores.to(q.dtype)
                torch.bmm(dscores, k[groups, keys], out=dq[groups, rows])
                _accumulate(dk[groups, keys], dscores.transpose(1, 2), q[groups, rows], first)
        return dq, dk, dv, dbias, None, None, None, None, None


def _tiles(q: Tensor, k: Tensor, causal: bool):
    """Slices (groups, rows, keys) that cover the scores, the last rows of a group first."""
    groups, queries, keys = q.size(0), q.size(1), k.size(1)
    budget = TILE if q.device.type == "cpu" else TILE_GPU
    rows = min(queries, max(1, budget // keys), 256)
    together = max(1, budget // (rows * keys))
    for g in range(0, groups, together):
        for end in range(queries, 0, -rows):
            reach = keys - queries + end if causal else keys
            yield slice(g, min(g + together, groups)), slice(max(0, end - rows), end), slice(0, reach)


def _tile_weights(q, k, bias, key_padding, function, causal, tile):
    groups, rows, keys = tile
    scores = torch.bmm(q[groups, rows], k[groups, keys].transpose(1, 2)).to(at_least_float32(q.dtype))  # (G', T, keys)
    count = rows.stop - rows.start
    if bias is not None:
        low = q.size(1) - rows.stop
        scores += bias_matrix(bias[low : low + count + keys.stop - 1], count, keys.stop)
    if causal and count > 1:  # only the last `count` keys can lie in a row's future
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., keys.stop - count :].masked_fill_(future, MASKED)
    if key_padding is not None:
        padding = key_padding[groups, None, keys]
        scores.masked_fill_(padding, MASKED)
    weights = _weights(scores, function)
    if key_padding is not None:
        weights.masked_fill_(padding, 0.0)
        if causal and count > 1:  # a padded row sees nothing, not evenly its future
            weights[..., keys.stop - count :].masked_fill_(future, 0.0)
    return scores, weights


def _accumulate(target: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.bmm(a, b, out=target)
    else:
        target.baddbmm_(a, b)


def weights_at_one_position(
    q: Tensor, k: Tensor, function: str, bias: Optional[Tensor] = None, key_padding: Optional[Tensor] = None
) -> Tensor:
    """f(Q K^T / tau + b) of queries (G, n, z) that all stand at one position, such as the beams of a sentence.

    bias (m,) is a score per key -> (G, n, m), to be multiplied with v.
    """
    q = q * temperature(q[:, :1], k, function, False, key_padding)
    # Tall times narrow: for a few queries the CPU's product is twice as fast this way round.
    scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).to(at_least_float32(q.dtype))
    if bias is not None:
        scores = scores + bias
    if key_padding is None:
        return _weights(scores, function).to(q.dtype)
    padding = key_padding.unsqueeze(1)
    return _weights(scores.masked_fill(padding, MASKED), function).masked_fill(padding, 0.0).to(q.dtype)


def fused_kernel_runs(q: Tensor, v: Tensor, function: str, columns: int = 0, dropout: float = 0.0) -> bool:
    """Whether torch's fused softmax attention takes these tensors: on CUDA always, on the CPU where widths agree."""
    if function != "softmax":
        return False
    return q.device.type == "cuda" or (q.size(-1) + columns == v.size(-1) and dropout == 0.0)


def attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention by scaled_dot_product_attention, for q already divided by tau."""
    square = causal and q.size(1) == k.size(1) and bias is None and key_padding is None
    mask = None if square else _visible(q, k, causal, key_padding)
    if key_padding is not None:
        blind = ~mask.any(-1, keepdim=True)  # rows without any key: see all, then give zeros
        mask = mask | blind
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if bias is not None:
        matrix = bias_matrix(bias, q.size(1), k.size(1)).to(q.dtype)
        mask = matrix if mask is None else matrix.masked_fill(~mask, float("-inf"))
    q, k, v = (t.unsqueeze(1) for t in (q, k, v))  # (G, 1, n, z): one head
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, square, scale=1.0).squeeze(1)
    return out if key_padding is None else out.masked_fill(blind, 0.0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: str = "softmax",
    causal: bool = False,
    bias: Optional[Tensor] = None,
    columns: Optional[Tuple[Tensor, Tensor]] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in the form that is fastest here: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e).

    `columns` (n, r), (m, r) ride along as extra columns of q and k: a bias that is an inner product of positions.
    """
    if function not in ATTENTION_FUNCTIONS:
        raise ValueError(f"function is {function!r}; choose one of {', '.join(ATTENTION_FUNCTIONS)}")
    dtype = autocast_dtype(q.device.type) or q.dtype
    q, k, v = (t.to(dtype) for t in (q, k, v))
    if q.size(1) == 1 and columns is None and dropout == 0.0:
        with without_autocast(q):
            return torch.bmm(weights_at_one_position(q, k, function, bias, key_padding), v)
    q = q * temperature(q, k, function, causal, key_padding)
    with without_autocast(q):
        fused = fused_kernel_runs(q, v, function, 0 if columns is None else columns[0].size(-1), dropout)
        if columns is not None:
            q, k = (torch.cat([t, c.to(dtype).expand(t.size(0), -1, -1)], -1) for t, c in zip((q, k), columns))
        if fused:
            return attention_fused(q, k, v, causal, bias, key_padding, dropout)
        keep, scale = keep_mask((q.size(0), q.size(1), k.size(1)), dropout, q.device)
        if is_compiling():
            return attention_naive(q, k, v, function, causal, bias, key_padding, keep, scale)
        return _Tiled.apply(q, k, v, bias, key_padding, keep, scale, function, causal)
