"""How many kernels a GPU launches for a layer's training step, counted on a pretended device."""

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules import (
    MIXERS,
    Block,
    BlockState,
    CrossAttentionState,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedAttentionState,
    GatedCrossAttentionConfig,
    MegaBlock,
    NormalizedFeedForward,
)
from mega_fairseq.ops import backend, rows
from mega_fairseq.ops.attention import tile_kernels
from mega_fairseq.ops.attention.fixed import FixedKeyValues, FixedPlace
from mega_fairseq.ops.attention.fixed import triton as fixed
from mega_fairseq.ops.ema import triton as ema
from mega_fairseq.ops.timestep_norm import triton as timestep_norm
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.ops.helpers import Recorder, kept_for_backward

BATCH, CHUNK, DIM, SHARED, VALUES = 2, 8, 16, 4, 32
IN_FUSED_ATTENTION = (1, 3)  # kernels of cuDNN, forward and backward


class FusedAttention(torch.autograd.Function):
    """Stands in for the GPU's kernels, with their layout of outputs and gradients."""

    @staticmethod
    def forward(ctx, recorder, q, k, v):
        ctx.recorder, ctx.tensors = recorder, (q, k, v)
        recorder.launches += IN_FUSED_ATTENTION[0]
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, grad):
        ctx.recorder.launches += IN_FUSED_ATTENTION[1]
        return (None, *map(torch.empty_like, ctx.tensors))


def count_kernels(recorder, modules, monkeypatch):
    """Counts each launch of our kernels in these modules, without running it."""

    def launch(*args, **options):
        recorder.launches += 1

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)


def launches_of(layer, monkeypatch):
    """Of forward, and of forward and backward."""
    recorder = Recorder()

    def attend(q, k, v, *options, **scale):
        return FusedAttention.apply(recorder, q, k, v)

    backend._choose.cache_clear()
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    count_kernels(recorder, (rows, ema, timestep_norm, tile_kernels), monkeypatch)
    with PretendedDevice():
        layer, x = moved(layer.bfloat16()), moved(torch.ones(BATCH, 2 * CHUNK, DIM, dtype=torch.bfloat16))
        x.requires_grad_()
        with recorder:
            y, _ = layer(x)
            forward = recorder.launches
            y.backward(y.detach())
    backend._choose.cache_clear()
    return forward, recorder.launches


def block(norm="layernorm", cross_attention=None):
    sizes = {"shared_dim": SHARED, "value_dim": VALUES, "chunk_size": CHUNK}
    mixer = GatedAttentionConfig(DIM, **sizes, position_bias="rotary", prenorm=True, norm=norm)
    return MegaBlock(mixer, FeedForwardConfig(DIM, prenorm=True, norm=norm), cross_attention)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_training_step_of_a_block_takes_few_launches(norm, monkeypatch):
    forward, total = launches_of(block(norm), monkeypatch)
    assert forward <= 21
    assert total <= 72


def test_a_training_step_of_megalodon_takes_few_launches(monkeypatch):
    sizes = {"shared_dim": SHARED, "value_dim": VALUES, "chunk_size": CHUNK}
    forward, total = launches_of(Block(MIXERS["megalodon"](DIM, **sizes), FeedForwardConfig(DIM)), monkeypatch)
    assert forward <= 48
    assert total <= 115


@pytest.mark.parametrize("gpu", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_feed_forward_layer_saves_its_hidden_layer_once(dropout, gpu, monkeypatch):
    layer, x = (
        NormalizedFeedForward(FeedForwardConfig(DIM, hidden_dim=6, activation_dropout=dropout)),
        torch.ones(3, 500, DIM),
    )
    if gpu:
        monkeypatch.setenv("MEGA_BACKEND", "triton")
        monkeypatch.setattr(rows, "launch", lambda *args, **options: None)
        backend._choose.cache_clear()
        with PretendedDevice(), Recorder():
            kept = kept_for_backward(lambda: moved(layer)(moved(x).requires_grad_()))
        backend._choose.cache_clear()
    else:
        kept = kept_for_backward(lambda: layer(x.requires_grad_()))
    assert (kept.count(3 * 500 * 6) == 1) == (not dropout)


def test_a_replaced_projection_takes_more_launches(monkeypatch):
    replaced = block()
    replaced.mixer.gates.register_forward_hook(lambda module, args, output: None)
    assert launches_of(replaced, monkeypatch) > launches_of(block(), monkeypatch)


@torch.no_grad()
def test_a_decoding_step_of_a_block_takes_few_launches(monkeypatch):
    recorder, layer = Recorder(), block(cross_attention=GatedCrossAttentionConfig(DIM, prenorm=True)).eval()
    count_kernels(recorder, (rows, ema, fixed), monkeypatch)
    backend._choose.cache_clear()
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    with PretendedDevice():
        layer = moved(layer.bfloat16())

        def storage(*shape, dtype=torch.bfloat16):
            return moved(torch.zeros(shape, dtype=dtype))

        place = FixedPlace(storage(dtype=torch.long), CHUNK, storage(BATCH, CHUNK, dtype=torch.long))
        cache = FixedKeyValues(storage(BATCH, CHUNK, SHARED), storage(BATCH, CHUNK, VALUES), place)
        source = (storage(1, 7, DIM // 4), storage(1, 7, DIM), storage(1, 7, dtype=torch.bool))
        state = GatedAttentionState(storage(BATCH, DIM, 16, dtype=torch.float32), cache)
        state, step = BlockState(state, CrossAttentionState(*source, place)), layer.step()
        x = storage(BATCH, 1, DIM)
        step(x, state)  # makes the tables of biases
        recorder.launches = 0
        with recorder:
            step(x, state)
    backend._choose.cache_clear()
    assert recorder.launches <= 21
