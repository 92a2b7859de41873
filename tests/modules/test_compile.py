"""`torch.compile(module, fullgraph=True)` gives the same values and gradients.

Three backends: "eager" runs the traced graph, for every option that changes it, since tracing is where a full graph can
fail; "aot_eager" also traces the backward pass, for one block; "inductor" also generates and compiles code, for one
layer. tests/ops/test_operators.py compiles each operator.
"""

import pytest
import torch

from mega_fairseq.modules import (
    POSITION_BIASES,
    DampedEMA,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    MegaBlock,
    MovingAverageGatedAttention,
    NormalizedFeedForward,
)
from tests.properties.contracts import leaves
from tests.properties.layers import random_input, randomise

pytestmark = pytest.mark.slow

DIM, LENGTH, CHUNK = 4, 11, 4
TOLERANCE = 1e-9
MASK = torch.zeros(2, LENGTH, dtype=torch.bool)
MASK[1, :5] = True


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attends(**options):
    return GatedAttentionConfig(
        **{"dim": DIM, "shared_dim": 2, "value_dim": 8, "ndim": 2, "max_positions": 32, **options}
    )


def crosses(**options):
    return GatedCrossAttentionConfig(**{"dim": DIM, "shared_dim": 2, "max_positions": 32, **options})


def ready(module):
    return randomise(module, 1).train()


def inputs(*shape):
    return random_input(2, *shape).requires_grad_()


def compare(module, *args, backend="eager", **kwargs):
    """Checks that values, states and gradients of the compiled module equal those of the eager one."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    asked = [*module.parameters(), *tensors]
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    results = []
    for run in (module, compiled):
        found = leaves(run(*args, **kwargs))
        floats = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        loss = sum((leaf * torch.linspace(1, 2, leaf.numel()).view(leaf.shape).to(leaf)).sum() for leaf in floats)
        results.append((found, torch.autograd.grad(loss, asked, allow_unused=True)))
    (eager, eager_grads), (fast, fast_grads) = results
    assert len(eager) == len(fast)
    for a, b in zip([*fast, *fast_grads], [*eager, *eager_grads]):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert a == b


@pytest.mark.parametrize("truncation", [None, 3])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
def test_a_compiled_ema_equals_the_eager_one(bidirectional, truncation):
    compare(ready(DampedEMA(DIM, 3, bidirectional, truncation)), inputs(2, LENGTH, DIM), padding_mask=MASK)


def test_a_compiled_truncated_ema_continues_from_a_state():
    module = ready(DampedEMA(DIM, 3, truncation=3))
    _, state = module(inputs(2, 3, DIM))
    state = state.detach().requires_grad_()
    compare(module, inputs(2, LENGTH, DIM), state, MASK)
    compare(module, inputs(2, 1, DIM), state)


# every pair of a chunk size, a direction and a padding
@pytest.mark.parametrize(
    ("function", "chunk_size", "causal", "mask"),
    [
        ("softmax", None, True, None),
        ("relu2", CHUNK, False, None),
        ("laplace", CHUNK, True, MASK),
        ("softmax", None, False, MASK),
    ],
)
def test_compiled_gated_attention_equals_the_eager_one(function, chunk_size, causal, mask):
    module = ready(MovingAverageGatedAttention(attends(attention=function, chunk_size=chunk_size, causal=causal)))
    compare(module, inputs(2, LENGTH, DIM), padding_mask=mask)


@pytest.mark.parametrize("bias", POSITION_BIASES)
def test_compiled_gated_attention_supports_every_position_bias(bias):
    # widths with which softmax uses the fused kernel
    config = attends(shared_dim=4, value_dim=8 if bias == "rotary" else 4, position_bias=bias, chunk_size=CHUNK)
    compare(ready(MovingAverageGatedAttention(config)), inputs(2, LENGTH, DIM))


@pytest.mark.parametrize(("chunk_size", "mask"), [(None, None), (CHUNK, MASK)], ids=["unpadded", "padded"])
def test_compiled_gated_attention_continues_from_a_state(chunk_size, mask):
    module = ready(MovingAverageGatedAttention(attends(chunk_size=chunk_size)))
    with torch.no_grad():
        _, state = module(inputs(2, LENGTH, DIM), None, mask)
    compare(module, inputs(2, LENGTH, DIM), state, mask)
    compare(module, inputs(2, 1, DIM), state)


@pytest.mark.parametrize("mask", [None, MASK], ids=["unpadded", "padded"])
def test_compiled_cross_attention_equals_the_eager_one(mask):
    module = ready(GatedCrossAttention(crosses()))
    source_mask = None if mask is None else mask[:, -7:]
    compare(module, inputs(2, LENGTH, DIM), inputs(2, 7, DIM), None, mask, source_mask)
    with torch.no_grad():
        _, state = module(inputs(2, LENGTH, DIM), inputs(2, 7, DIM), None, mask, source_mask)
    compare(module, inputs(2, 1, DIM), None, state)


@pytest.mark.parametrize("norm", ["layernorm", "scalenorm", "rmsnorm", "batchnorm"])
def test_a_compiled_feed_forward_layer_equals_the_eager_one(norm):
    module = ready(NormalizedFeedForward(FeedForwardConfig(DIM, hidden_dim=6, norm=norm)))
    compare(module.eval() if norm == "batchnorm" else module, inputs(2, LENGTH, DIM), MASK)


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "decoder"])
def test_a_compiled_block_equals_the_eager_one(kind):
    attention = attends(chunk_size=CHUNK, causal=kind != "bidirectional")
    module = ready(MegaBlock(attention, FeedForwardConfig(DIM, hidden_dim=6), crosses() if kind == "decoder" else None))
    source = inputs(2, 7, DIM) if kind == "decoder" else None
    compare(module, inputs(2, LENGTH, DIM), None, MASK, source)


def test_the_backward_pass_is_traced_too():
    attention = attends(attention="laplace", chunk_size=CHUNK)
    module = ready(MegaBlock(attention, FeedForwardConfig(DIM, hidden_dim=6), crosses()))
    compare(module, inputs(2, LENGTH, DIM), None, MASK, inputs(2, 7, DIM), backend="aot_eager")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_compiled_layer_supports_other_lengths(causal):
    module = ready(MovingAverageGatedAttention(attends(chunk_size=CHUNK, causal=causal)))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for length in (LENGTH, LENGTH + 1, 1):  # from the second on, dynamo treats the length as a variable
        x = inputs(2, length, DIM)
        torch.testing.assert_close(leaves(compiled(x))[0], leaves(module(x))[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_inductor_compiles_a_chunked_causal_layer_with_padding():
    module = ready(MovingAverageGatedAttention(attends(chunk_size=CHUNK, attention="laplace")))
    compare(module, inputs(2, 2 * CHUNK, DIM), padding_mask=MASK[:, : 2 * CHUNK], backend="inductor")
