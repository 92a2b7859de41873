"""`torch.compile(block, fullgraph=True)` gives the same values, states and gradients.

Three backends: "eager" runs the traced graph, since tracing is where a full graph can fail; "aot_eager" also traces the
backward pass of each operator, and "inductor" generates code.
"""

import pytest
import torch

from mega_fairseq.modules import (
    EXAMPLES,
    MIXERS,
    Block,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedCrossAttentionConfig,
)
from tests.properties.contracts import leaves
from tests.properties.layers import random_input, randomise

pytestmark = pytest.mark.slow

DIM, LENGTH, CHUNK = 4, 11, 4
MASK = torch.zeros(2, LENGTH, dtype=torch.bool)
MASK[1, :5] = True


def attends(**options):
    # widths with which softmax uses the fused kernel
    return GatedAttentionConfig(
        **{"dim": DIM, "shared_dim": 4, "value_dim": 4, "ndim": 2, "max_positions": 32, "chunk_size": CHUNK, **options}
    )


CROSS = GatedCrossAttentionConfig(DIM, shared_dim=2, max_positions=32)
BLOCKS = {  # the first example of each mixer, and one with other options and token shift
    **{name: (example,) for name, example in EXAMPLES.items() if name in MIXERS or example.token_shift},
    # As wide as queries and keys with the columns of a rotary bias.
    "rotary": (attends(position_bias="rotary", value_dim=8),),
    "relu2, both directions, alibi": (
        attends(attention="relu2", causal=False, position_bias="alibi"),
        FeedForwardConfig(DIM, norm="scalenorm"),
    ),
    "truncated, both directions, rope": (attends(truncation=3, chunk_size=None, causal=False, position_bias="rope"),),
    "laplace, without chunks, simple": (
        attends(attention="laplace", chunk_size=None, position_bias="simple"),
        FeedForwardConfig(DIM, norm="rmsnorm"),
    ),
    "cross attention": (attends(), FeedForwardConfig(DIM, activation="geglu"), CROSS),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(*shape):
    return random_input(2, *shape).requires_grad_()


def compare(module, x, *args, backend="eager"):
    """Checks that values, states and gradients of the compiled module equal those of the eager one."""
    asked, results = [x, *module.parameters()], []
    for run in (module, torch.compile(module, fullgraph=True, backend=backend)):
        found = [leaf for leaf in leaves(run(x, *args)) if isinstance(leaf, torch.Tensor)]
        loss = sum((t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in found if t.requires_grad)
        results.append([*found, *torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True)])
    assert len(results[0]) == len(results[1])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_compiled_block_equals_the_eager_one_padded_and_after_a_state(name):
    block, x = randomise(Block(*BLOCKS[name]), 1), inputs(2, LENGTH, DIM)
    source = inputs(2, 7, DIM) if block.cross_attention is not None else None
    backend = "aot_eager" if name in (*MIXERS, "cross attention") else "eager"  # once for each operator
    compare(block.train(), x, None, MASK, source, backend=backend)
    if block.causal:
        with torch.no_grad():
            _, state = block.eval()(x, source=source)
        compare(block, x, state)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_compiled_layer_supports_other_lengths(causal):
    module = randomise(attends(causal=causal).build(), 1)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for length in (LENGTH, LENGTH + 1, 1):  # from the second on, dynamo treats the length as a variable
        x = inputs(2, length, DIM)
        torch.testing.assert_close(leaves(compiled(x))[0], leaves(module(x))[0], rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler does not quote the folder of torch")
def test_inductor_compiles_a_chunked_causal_layer_with_padding():
    module = randomise(attends(attention="laplace").build(), 1)
    compare(module, inputs(2, 2 * CHUNK, DIM), None, MASK[:, : 2 * CHUNK], backend="inductor")
