"""Batch independence: a sequence has the same outputs alone and in any batch, with any padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.modules import (
    BlockState,
    GatedAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    SequenceNorm,
)
from mega_fairseq.ops.padding import Alignment
from tests.properties.contracts import assert_close, check_batch_independence, check_ragged_pieces, place, take
from tests.properties.layers import (
    BIDIRECTIONAL,
    CAUSAL,
    DIM,
    SOURCE_DIM,
    layouts,
    random_input,
    randomise,
    reading,
    recipes,
    seeds,
    stateless,
    with_state,
)

row_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@given(data=st.data(), counts=row_lengths, seed=seeds, pad=st.sampled_from((None, math.nan, math.inf)))
def test_a_sequence_has_the_same_outputs_and_gradients_alone_and_in_any_padded_batch(kind, data, counts, seed, pad):
    recipe, mask = data.draw(recipes(kind)), data.draw(layouts(counts))
    rows = [random_input(seed + i, n, DIM) for i, n in enumerate(counts)]
    tails = random_input(seed + 9, len(counts), 3, DIM) if kind in CAUSAL else None
    filler = None if pad is None else torch.full((*mask.shape, DIM), pad, dtype=torch.float64)  # None: large numbers
    layer = recipe.layer(len(counts))
    check_batch_independence(layer, rows, mask, tails, filler)
    # The same from the alignment of the batch, which a stack of layers computes once.
    align, x = Alignment.of(mask, crop=True), place(rows, mask, torch.zeros(*mask.shape, DIM, dtype=torch.float64))
    aligned, _ = layer.step(align.front(x), layer.start(), align.done())
    assert_close(align.back(aligned), layer.step(x, layer.start(), mask)[0], "aligned")


@pytest.mark.parametrize("in_block", [False, True], ids=["cross_attention", "decoder_block"])
@given(data=st.data(), counts=st.lists(st.integers(1, 12), min_size=1, max_size=3), seed=seeds)
def test_a_source_has_the_same_effect_alone_and_in_any_padded_batch(in_block, data, counts, seed):
    module = data.draw(recipes("decoder_block" if in_block else "cross_attention")).module()
    mask = data.draw(layouts(counts))
    sources = [random_input(seed + i, n, SOURCE_DIM) for i, n in enumerate(counts)]
    target = random_input(seed + 9, len(counts), 5, DIM)
    padded = place(sources, mask, 1e4 * random_input(seed + 8, *mask.shape, SOURCE_DIM))
    together = reading(module, padded, mask)
    y, _ = together.step(target, together.start(), None)
    y.square().sum().backward()
    source_grad = together.parameters[-1].grad
    assert not source_grad[mask].any(), "a padded source has a gradient"
    for i, (source, grad) in enumerate(zip(sources, take(source_grad, mask))):
        alone = reading(module, source.unsqueeze(0), None)
        own, _ = alone.step(target[i : i + 1], alone.start(), None)
        own.square().sum().backward()
        assert_close(y[i], own[0], f"row {i}")
        assert_close(grad, alone.parameters[-1].grad[0], f"gradient of source {i}")


@given(data=st.data(), counts=row_lengths, seed=seeds, from_source=st.booleans())
def test_weights_over_the_source_are_those_of_the_row_alone(data, counts, seed, from_source):
    block, mask = data.draw(recipes("decoder_block")).module(), data.draw(layouts(counts))
    rows = [random_input(seed + i, n, DIM) for i, n in enumerate(counts)]
    sources = random_input(seed + 9, len(counts), 5, SOURCE_DIM)
    x = place(rows, mask, 1e4 * random_input(seed + 8, *mask.shape, DIM))
    start = {"source": sources}
    if not from_source:
        start = {"state": BlockState(None, block.cross_attention.project_source(sources))}
    _, _, weights = block(x, padding_mask=mask, need_weights=True, **start)
    assert not weights[mask].any()
    for i, (row, found) in enumerate(zip(rows, take(weights, mask))):
        if len(row):
            _, _, alone = block(row.unsqueeze(0), source=sources[i : i + 1], need_weights=True)
            assert_close(found, alone[0], f"row {i}")


def test_a_source_of_only_pads_gives_finite_outputs_and_does_not_change_other_rows():
    for function in ("softmax", "relu2", "laplace"):
        module = randomise(GatedCrossAttention(GatedCrossAttentionConfig(DIM, shared_dim=4, attention=function)), 3)
        source, x = random_input(1, 2, 5, DIM), random_input(2, 2, 4, DIM)
        mask = torch.tensor([[True] * 5, [False] * 5])
        y, _ = module(x, source, None, None, mask)
        y.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
        assert_close(y[1:], module(x[1:], source[1:])[0], function)
        assert bool(torch.isfinite(y).all())


SHORT = 8  # the reach of a simple bias, and the length of the longest sequence


def limited(cross=False, **options):
    config = (GatedCrossAttentionConfig if cross else GatedAttentionConfig)(
        DIM, shared_dim=2, max_positions=SHORT, **options
    )
    module = GatedCrossAttention(config) if cross else config.build()
    return randomise(module, 5)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_padding_does_not_use_up_the_reach_of_the_simple_bias(chunk_size, causal):
    module = limited(chunk_size=chunk_size, causal=causal)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0, 5:], mask[1, :5] = False, False
    rows = [random_input(1, 8, DIM), random_input(2, 5, DIM)]
    check_batch_independence(with_state(module) if causal else stateless(module), rows, mask)


def test_padding_of_pieces_and_sources_does_not_use_up_the_reach_of_the_simple_bias():
    masks = [torch.tensor([[False, False, True, True, True], [True, True, True, False, True]]) for _ in range(3)]
    rows, padded = [random_input(1, 6, DIM), random_input(2, 3, DIM)], torch.arange(15).expand(2, -1) < 9
    for layer in (with_state(limited()), reading(limited(cross=True), random_input(3, 2, 15, DIM), padded)):
        check_ragged_pieces(layer, rows, masks, random_input(4, 2, 2, DIM))


@pytest.mark.parametrize("kind", ["batchnorm", "syncbatchnorm"])
@given(data=st.data(), counts=st.lists(st.integers(1, 6), min_size=2, max_size=3), seed=seeds)
def test_batchnorm_in_training_takes_its_statistics_from_real_tokens_only(kind, data, counts, seed):
    mask = data.draw(layouts(counts))
    padded, packed = (randomise(SequenceNorm(kind, DIM), seed).train() for _ in range(2))
    rows = [random_input(seed + i, n, DIM) for i, n in enumerate(counts)]
    y = padded(place(rows, mask, torch.full((*mask.shape, DIM), 1e4, dtype=torch.float64)), mask)
    assert_close(torch.cat(take(y, mask)), packed(torch.cat(rows).unsqueeze(0))[0], "outputs")
    assert not y[mask].any()
    for name, buffer in padded.named_buffers():
        assert_close(buffer, packed.get_buffer(name), name)


def test_syncbatchnorm_is_batchnorm_in_one_process_and_refused_among_processes_without_gpus(monkeypatch):
    ours, plain = (randomise(SequenceNorm(kind, DIM), 1).train() for kind in ("syncbatchnorm", "batchnorm"))
    x = random_input(2, 3, 4, DIM)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert_close(ours(x), plain(x), "outputs")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="syncbatchnorm"):
        ours(x)
