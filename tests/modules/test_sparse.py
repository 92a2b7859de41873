"""Sparse attention as a mixer: options that are refused, initialisation, and what its state remembers."""

import pytest
import torch

from mega_fairseq.modules.mixer_state import select
from mega_fairseq.modules.mixers.sparse import SparseConfig

DIM = 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads is 3 and does not divide the width of the model, 64; give a divisor"),
        ({"rotary_dims": 3}, "rotary_dims is 3; give an even number up to the width of a head, 8"),
        ({"rotary_dims": 10}, "rotary_dims is 10; give an even number up to the width of a head, 8"),
        ({"stride": 4, "summary": 5}, "summary is 5 .* stride 4"),
        ({"stride": 4, "summary": 1, "subblocks": 5}, "summary is 1 times subblocks 5"),
        ({"pattern": "dense"}, "pattern is 'dense'; choose one of strided, fixed"),
        ({"combine": "both"}, "combine is 'both'; choose one of interleaved, merged, heads"),
        ({"stride": 0}, "stride is 0"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        SparseConfig(DIM, **options)


def test_errors_name_the_options_of_the_command_line():
    with pytest.raises(ValueError, match="--decoder-sparse-summary is 40 .*--decoder-sparse-stride 32"):
        SparseConfig(DIM, stride=32, summary=40, side="decoder")


def test_released_init_is_that_of_all_mixers_and_scaled_init_that_of_the_sparse_transformer():
    for init, std, output_std in (("released", 0.02, 0.02), ("scaled", 0.125 / 16, 0.125 / 16 / 12**0.5)):
        made = SparseConfig(256, init=init, layers=6).build()
        for layer in (made.query, made.key, made.value):
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
            assert not layer.bias.any()
        assert made.output.weight.std().item() == pytest.approx(output_std, rel=0.05)
        assert not made.output.bias.any()


def made(**options):
    torch.manual_seed(0)
    return SparseConfig(16, **{"heads": 4, "init": "scaled", "layers": 1, **options}).build().double().eval()


@pytest.mark.parametrize("combine", ["merged", "heads", "interleaved"])
@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("sizes", [(1,), (3,), (13, 2), (40,)], ids=str)
@torch.no_grad()
def test_the_state_of_the_fixed_pattern_has_the_open_block_and_the_summaries_of_finished_ones(combine, window, sizes):
    stride, kept = 5, 4
    module = made(stride=stride, summary=2, subblocks=2, chunk_size=window, combine=combine)
    x, state, place = torch.randn(2, 40, 16).double(), None, 0
    width = 0 if combine == "interleaved" else 16  # layer 0 sees no summaries
    while place < 40:
        size = sizes[place % len(sizes)]
        _, state = module(x[:, place : place + size], state)
        place = min(40, place + size)
        blocks, rest = divmod(place % (window or 41), stride)
        assert state.open.keys.shape == state.open.values.shape == (2, rest, 16)
        assert state.summaries.keys.shape == state.summaries.values.shape == (2, blocks * kept, width)


def test_a_state_of_another_stride_is_refused():
    x = torch.randn(2, 7, 16).double()
    _, state = made(stride=8, summary=2)(x)
    with pytest.raises(ValueError, match="state has another stride"):
        made(stride=4, summary=2)(x, state)
    _, state = made(stride=5, summary=1)(x)
    with pytest.raises(ValueError, match="state has another stride or summary"):
        made(stride=5, summary=2)(x, state)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("options", [{"pattern": "strided"}, {"summary": 1, "subblocks": 2, "chunk_size": 6}], ids=str)
def test_compiled_sparse_attention_gives_the_same_outputs_and_gradients(options, causal):
    torch._dynamo.reset()
    module = made(stride=4, rotary_dims=2, causal=causal, **options)
    found, x = [], torch.randn(2, 13, 16, dtype=torch.float64, requires_grad=True)
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        y = run(x)[0] if causal else run(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("lengths", [(4, 9), (6, 7), (9, 9)], ids=str)
@torch.no_grad()
def test_selected_rows_may_be_at_equal_places_of_different_blocks_or_at_different_places_of_one(lengths):
    module = made(stride=5, summary=2, combine="merged")
    x, tail = torch.randn(3, 10, 16).double(), torch.randn(2, 3, 16).double()
    mask = torch.arange(10) >= torch.tensor([*lengths, 2]).unsqueeze(1)
    _, state = module(x, None, mask)
    found, _ = module(tail, select(state, torch.tensor([1, 0])))
    for row, origin in enumerate((1, 0)):
        _, alone = module(x[origin : origin + 1, : lengths[origin]])
        torch.testing.assert_close(found[row], module(tail[row : row + 1], alone)[0][0])
