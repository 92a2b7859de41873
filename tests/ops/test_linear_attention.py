"""Linear attention to finished chunks equals its definition, in values and all gradients."""

import pytest
import torch

from mega_fairseq.ops.linear_attention import Memory, chunk_memory, chunk_memory_naive
from tests.ops.helpers import assert_same, noise, with_gradients

BATCH, WIDTH, VALUES, CHUNK = 3, 4, 5, 4


def inputs(total, new):
    tokens = torch.tensor([0, CHUNK, 5 * CHUNK])
    memory = noise(BATCH, WIDTH, VALUES, seed=3) * (tokens > 0).view(-1, 1, 1)
    q, k, v = (noise(BATCH, *shape, seed=i) for i, shape in enumerate(((new, WIDTH), (total, WIDTH), (total, VALUES))))
    tensors = {name: t.requires_grad_() for name, t in (("q", q), ("k", k), ("v", v), ("memory", memory))}
    return {**tensors, "tokens": tokens, "lengths": torch.full((BATCH,), total)}


def of(form):
    """Outputs at real tokens and the next memory."""

    def outputs(q, k, v, memory, tokens, lengths):
        out, after = form(q, k, v, CHUNK, Memory(memory, tokens), lengths)
        place = torch.arange(k.size(1) - q.size(1), k.size(1))
        return out * (place < lengths.unsqueeze(1)).unsqueeze(-1), after.sum, after.tokens

    return outputs


@pytest.mark.parametrize(
    ("total", "new"), [(1, 1), (3, 3), (4, 4), (4, 1), (5, 2), (7, 7), (8, 8), (9, 6), (13, 11), (16, 13)]
)
@pytest.mark.parametrize("ragged", [False, True])
def test_chunks_give_the_values_and_gradients_of_the_definition(total, new, ragged):
    tensors = inputs(total, new)
    if ragged:
        tensors["lengths"] = torch.tensor([total, max(1, total - 3), max(1, total // 2)])
    assert_same(with_gradients(of(chunk_memory), tensors), with_gradients(of(chunk_memory_naive), tensors))


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
        found.append([out.detach(), *torch.autograd.grad(out.sum(), tensors)])
    for wanted, ours in zip(*found):
        assert float((ours.double() - wanted).norm() / wanted.norm()) < 0.01
