"""Linear attention to finished chunks equals its definition, in values and all gradients."""

import pytest
import torch

from mega_fairseq.ops import linear_attention
from mega_fairseq.ops.linear_attention import Memory, chunk_memory, chunk_memory_naive, whole_memory

BATCH, WIDTH, VALUES, CHUNK = 3, 4, 5, 4


def inputs(total, new, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    tokens = torch.tensor([0, CHUNK, 5 * CHUNK])
    memory = (draw(BATCH, WIDTH, VALUES) * (tokens > 0).view(-1, 1, 1)).detach().requires_grad_()
    return draw(BATCH, new, WIDTH), draw(BATCH, total, WIDTH), draw(BATCH, total, VALUES), memory, tokens


def run(form, leaves, tokens, lengths):
    """Outputs at real tokens and the next memory, with gradients of all inputs."""
    q, k, v, memory = leaves
    out, after = form(q, k, v, CHUNK, Memory(memory, tokens), lengths)
    place = torch.arange(k.size(1) - q.size(1), k.size(1))
    out = out * (place < lengths.unsqueeze(1)).unsqueeze(-1)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + after.sum.square().sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [out, after.sum, *gradients], after.tokens


@pytest.mark.parametrize(
    ("total", "new"), [(1, 1), (3, 3), (4, 4), (4, 1), (5, 2), (7, 7), (8, 8), (9, 6), (13, 11), (16, 13)]
)
@pytest.mark.parametrize("ragged", [False, True])
def test_chunks_give_the_values_and_gradients_of_the_definition(total, new, ragged):
    *leaves, tokens = inputs(total, new)
    lengths = torch.tensor([total, max(1, total - 3), max(1, total // 2)]) if ragged else torch.full((BATCH,), total)
    expected, finished = run(chunk_memory_naive, leaves, tokens, lengths)
    actual, ours = run(chunk_memory, leaves, tokens, lengths)
    for found, wanted in zip(actual, expected):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert ours.tolist() == finished.tolist()


def test_everything_at_once_gives_the_same_as_tiles(monkeypatch):
    *leaves, tokens = inputs(13, 11)
    lengths = torch.tensor([13, 8, 3])
    together, _ = run(chunk_memory, leaves, tokens, lengths)
    monkeypatch.setattr(linear_attention, "TILE_TOKENS", CHUNK)
    for found, wanted in zip(run(chunk_memory, leaves, tokens, lengths)[0], together):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_both_directions_divide_the_sum_over_real_tokens_by_their_number():
    q, k, v, *_ = inputs(7, 7)
    padding = torch.arange(7) >= torch.tensor([7, 4, 1]).unsqueeze(1)
    out = whole_memory(q, k, v, padding)
    for row, count in enumerate((7, 4, 1)):
        expected = sum((q[row] @ k[row, u]).unsqueeze(1) * v[row, u] for u in range(count)) / count
        torch.testing.assert_close(out[row], expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_memory_of_a_million_tokens_in_float32_equals_the_sum_in_double_precision():
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2**16, 8, generator=random) for _ in range(2))
    memory, exact = Memory(torch.zeros(1, 8, 8), torch.zeros(1, dtype=torch.long)), torch.zeros(1, 8, 8).double()
    for _ in range(16):
        _, memory = chunk_memory(k[:, -1:], k, v, 256, memory)
        exact += k.double().transpose(1, 2) @ v.double()
    assert memory.tokens.tolist() == [2**20]
    assert float((memory.sum - exact).abs().max() / exact.abs().max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_by_less_than_a_percent_at_8192_tokens(dtype):
    random = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, 8192, 16, generator=random).to(dtype).double().requires_grad_() for _ in range(3)]
    half = [t.detach().to(dtype).requires_grad_() for t in exact]
    found = []
    for tensors in (exact, half):
        start = Memory(torch.zeros(1, 16, 16, dtype=torch.float64), torch.zeros(1, dtype=torch.long))
        out, _ = chunk_memory(*tensors, 256, start)
        found.append([out, *torch.autograd.grad(out.sum(), tensors)])
    for wanted, ours in zip(*found):
        assert float((ours.double() - wanted).norm() / wanted.norm()) < 0.01
