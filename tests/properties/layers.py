"""Hypothesis strategies for the layers to test: every kind of module, with every option.

Parameters are far from their initial values, because layers with weights near zero hide most mistakes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mega_fairseq.modules import (
    MIXERS,
    POSITION_BIASES,
    Block,
    BlockState,
    DampedEMA,
    FeedForwardConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    NormalizedFeedForward,
)
from mega_fairseq.modules.mixers.gau import SCALES
from mega_fairseq.modules.mixers.multi_head import TIME_WEIGHTS
from mega_fairseq.modules.mixers.sparse import COMBINATIONS
from tests.properties.contracts import Layer

DIM, SOURCE_DIM = 4, 5
REACH = 64  # of the simple bias: more than any sequence here, padded or not
FUNCTIONS = ("softmax", "relu2", "laplace")
BIASES = tuple(POSITION_BIASES)
HEADS = (1, 2, 4)
CHUNKS = (None, 1, 2, 3, 5, 8, 40)
TRUNCATIONS = (None, 0, 1, 2, 3, 7, 40)
CAUSAL_NORMS = ("layernorm", "scalenorm", "rmsnorm")
NORMS = (*CAUSAL_NORMS, "batchnorm", "syncbatchnorm")
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_fast", "gelu_sigmoid", "linear")

CAUSAL = ("ema", *MIXERS, "cross_attention", "feed_forward", "block", "decoder_block")
BIDIRECTIONAL = ("bidirectional_ema", *(f"bidirectional_{name}" for name in MIXERS), "bidirectional_block")


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Sets random float64 parameters that are large enough for every term to matter."""
    generator = torch.Generator().manual_seed(seed)

    def noise(t: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(t.shape, generator=generator, dtype=torch.float64)

    module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = ".norm." in f".{name}" and name.endswith("weight")
            parameter.copy_(1.0 + noise(parameter, 0.3) if norm else noise(parameter, 0.7))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():  # statistics of batchnorm
                buffer.copy_(noise(buffer, 0.5).abs() + (0.5 if name.endswith("var") else 0.0))
    return module


def random_input(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------- modules as layers


def with_state(module: nn.Module) -> Layer:
    """The Layer of a module that is called as `y, state = module(x, state, padding_mask)`."""
    return Layer(module, list(module.parameters()))


def stateless(module: nn.Module) -> Layer:
    """The Layer of a module that is called as `y = module(x, padding_mask=...)`."""
    return Layer(lambda x, state, mask: (module(x, padding_mask=mask), None), list(module.parameters()))


def reading(module: nn.Module, source: Tensor, source_mask: Optional[Tensor]) -> Layer:
    """The Layer of gated cross attention, or of a block with it: its first state is the projected source."""
    source = source.detach().clone().requires_grad_()
    in_block = isinstance(module, Block)
    cross = module.cross_attention if in_block else module

    def start() -> Any:
        state = cross.project_source(source, source_mask)
        return BlockState(None, state) if in_block else state

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        return module(x, state=state, padding_mask=mask)

    return Layer(step, [*module.parameters(), source], start)


@dataclass(frozen=True)
class Recipe:
    """A description of a module that is readable when hypothesis reports a failure."""

    kind: str
    options: Dict[str, Any]
    seed: int

    def module(self) -> nn.Module:
        return randomise(self._module(), self.seed).eval()

    def layer(self, batch: int = 1) -> Layer:
        return self.layer_of(self.module(), batch)

    def layer_of(self, module: nn.Module, batch: int = 1) -> Layer:
        if self.kind in ("cross_attention", "decoder_block"):
            lengths = [2 + (self.seed + 3 * i) % 5 for i in range(batch)]
            source = random_input(self.seed + 1, batch, max(lengths), SOURCE_DIM)
            mask = torch.stack([torch.arange(max(lengths)) >= n for n in lengths])
            source = source.to(next(module.parameters()).dtype)
            return reading(module, source, mask if batch > 1 else None)
        causal = self.kind in CAUSAL and self.kind != "feed_forward"
        return with_state(module) if causal else stateless(module)

    def _module(self) -> nn.Module:
        o = self.options
        if self.kind in ("ema", "bidirectional_ema"):
            return DampedEMA(DIM, bidirectional=self.kind != "ema", **o)
        if self.kind.replace("bidirectional_", "") in MIXERS:
            return MIXERS[self.kind.replace("bidirectional_", "")](**o).build()
        if self.kind == "cross_attention":
            return GatedCrossAttention(GatedCrossAttentionConfig(**o))
        if self.kind == "feed_forward":
            return NormalizedFeedForward(FeedForwardConfig(**o))
        mixer, cross = o["mixer"], o["cross"]
        return Block(
            MIXERS[mixer["name"]](**mixer["options"]),
            FeedForwardConfig(**o["feed_forward"]) if o["feed_forward"] else None,
            GatedCrossAttentionConfig(**cross) if cross else None,
        )


# ------------------------------------------------------------------------------------------- strategies

seeds = st.integers(0, 2**20)


def _layer(norms: Sequence[str]) -> Dict[str, st.SearchStrategy]:
    """Options of every layer."""
    return {
        "dim": st.just(DIM),
        "norm": st.sampled_from(norms),
        "norm_affine": st.booleans(),
        "prenorm": st.booleans(),
    }


# Options of single-head attention. With equal widths the fused kernel is used too.
SINGLE_HEAD = {
    "shared_dim": st.sampled_from((2, 4)),
    "attention": st.sampled_from(FUNCTIONS),
    "position_bias": st.sampled_from(BIASES),
    "max_positions": st.just(REACH),
}


def _ema_options() -> st.SearchStrategy:
    return st.fixed_dictionaries({"ndim": st.integers(1, 3), "truncation": st.sampled_from(TRUNCATIONS)})


def _gau_options(**more: st.SearchStrategy) -> st.SearchStrategy:
    wide = {**SINGLE_HEAD, "value_dim": st.sampled_from((4, 8)), "scale": st.sampled_from(SCALES), **more}
    drawn = st.fixed_dictionaries(wide)
    return drawn.map(lambda found: found if found["attention"] == "relu2" else {**found, "scale": "outer"})


_SPARSE = {
    "heads": st.sampled_from((1, 2)),
    "rotary_dims": st.sampled_from((0, 2)),
    "combine": st.sampled_from(COMBINATIONS),
    "layer": st.integers(0, 1),
}
_STRIDED = {**_SPARSE, "pattern": st.just("strided"), "stride": st.sampled_from((1, 2, 3, 5, 8))}
_FIXED = {
    **_SPARSE,
    "pattern": st.just("fixed"),
    "stride": st.sampled_from((4, 5, 7)),
    "summary": st.integers(1, 2),
}
_SUBBLOCKS = {**_FIXED, "heads": st.just(2), "subblocks": st.just(2)}


@st.composite
def _attention_options(draw: Callable[[st.SearchStrategy], Any]) -> Dict[str, Any]:
    time_weight, heads, gamma = draw(st.sampled_from(TIME_WEIGHTS)), draw(st.sampled_from(HEADS)), draw(st.booleans())
    return {
        "time_weight": time_weight,
        "heads": heads,
        "gamma": gamma,
        "alpha": time_weight == "after" and draw(st.booleans()),
        "beta": time_weight != "none" and draw(st.booleans()),
        "talking_heads": heads > 1 and draw(st.booleans()),
        "rotary_dims": draw(st.sampled_from(range(0, DIM // heads + 1, 2))),
        "chunk_size": draw(st.sampled_from(CHUNKS[1:] if gamma or time_weight != "none" else CHUNKS)),
    }


_AFT_WINDOW = {
    "form": st.just("window"),
    "chunk_size": st.sampled_from(CHUNKS[1:]),
    "heads": st.sampled_from((1, 2, DIM)),
    "beta": st.booleans(),
    "gamma": st.booleans(),
}
_UNBOUNDED = {"chunk_size": st.none()}
_AFT_LOCAL = {
    **_UNBOUNDED,
    "form": st.just("local"),
    "heads": st.sampled_from((1, 2, DIM)),
    "reach": st.sampled_from((1, 2, 3, 8, 40)),
}
_AFT = [_AFT_WINDOW, _AFT_LOCAL, {**_UNBOUNDED, "form": st.just("simple")}]

# Each mixer's own options, or a strategy for them where they depend on each other. Tests fail for a mixer that is
# missing here.
MIXER_OPTIONS: Dict[str, Union[Dict[str, st.SearchStrategy], st.SearchStrategy]] = {
    "mega": {
        **SINGLE_HEAD,
        "activation": st.sampled_from(ACTIVATIONS),
        "value_dim": st.sampled_from((4, 8)),
        "ndim": st.integers(1, 3),
        "truncation": st.sampled_from(TRUNCATIONS),
    },
    "gau": _gau_options(),
    "flash": _gau_options(chunk_size=st.sampled_from(CHUNKS[1:])),
    "sparse": st.one_of(*map(st.fixed_dictionaries, (_STRIDED, _FIXED, _SUBBLOCKS))),
    "attention": _attention_options(),
    "aft": st.one_of([st.fixed_dictionaries(form) for form in _AFT]),
    "gmlp": {
        "heads": st.sampled_from(HEADS),
        "expansion": st.integers(1, 2),
        "chunk_size": st.sampled_from(CHUNKS[1:]),
        **{name: st.booleans() for name in ("alpha", "beta", "gamma", "value_norm", "spatial_bias")},
    },
}


def mixer_options(name: str, causal: bool) -> st.SearchStrategy:
    """The options of a mixer, causal or not."""
    common = {
        **_layer(CAUSAL_NORMS if causal else NORMS),
        "causal": st.just(causal),
        "token_shift": st.booleans(),
        "chunk_size": st.sampled_from(CHUNKS),
    }
    own = MIXER_OPTIONS[name]
    if isinstance(own, dict):
        return st.fixed_dictionaries({**common, **own})
    return st.builds(lambda shared, options: {**shared, **options}, st.fixed_dictionaries(common), own)


def _any_mixer(causal: bool) -> st.SearchStrategy:
    drawn = (st.fixed_dictionaries({"name": st.just(n), "options": mixer_options(n, causal)}) for n in MIXERS)
    return st.one_of(*drawn)


def _cross_options() -> st.SearchStrategy:
    own = {"activation": st.sampled_from(ACTIVATIONS), "source_dim": st.just(SOURCE_DIM)}
    return st.fixed_dictionaries({**_layer(CAUSAL_NORMS), **SINGLE_HEAD, **own})


def _feed_forward_options(norms: Sequence[str], shift: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            **_layer(norms),
            "hidden_dim": st.just(6),
            "activation": st.sampled_from((*ACTIVATIONS, "geglu")),
            "token_shift": shift,
        }
    )


def _block_options(causal: bool, cross: bool) -> st.SearchStrategy:
    feed_forward = _feed_forward_options(CAUSAL_NORMS if causal else NORMS, st.booleans())
    return st.fixed_dictionaries(
        {
            "mixer": _any_mixer(causal),
            "feed_forward": st.one_of(feed_forward, st.none()),
            "cross": _cross_options() if cross else st.none(),
        }
    )


OPTIONS: Dict[str, Callable[[], st.SearchStrategy]] = {
    "ema": _ema_options,
    "bidirectional_ema": _ema_options,
    **{name: partial(mixer_options, name, True) for name in MIXERS},
    **{f"bidirectional_{name}": partial(mixer_options, name, False) for name in MIXERS},
    "cross_attention": _cross_options,
    "feed_forward": lambda: _feed_forward_options(CAUSAL_NORMS, st.just(False)),
    "block": lambda: _block_options(True, False),
    "decoder_block": lambda: _block_options(True, True),
    "bidirectional_block": lambda: _block_options(False, False),
}


def recipes(kind: str) -> st.SearchStrategy:
    return st.builds(Recipe, kind=st.just(kind), options=OPTIONS[kind](), seed=seeds)


@st.composite
def pieces_of(draw: Callable[[st.SearchStrategy], Any], length: int) -> List[int]:
    """Sizes of pieces of a sequence: whole, single tokens, or anything in between."""
    if draw(st.booleans()) and draw(st.booleans()):
        return [1] * length
    cuts = [0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=6)) if length > 1 else []), length]
    return [stop - start for start, stop in zip(cuts, cuts[1:])]


@st.composite
def layouts(draw: Callable[[st.SearchStrategy], Any], counts: Sequence[int]) -> Tensor:
    """A mask (B, L) with counts[i] real tokens in row i; each row is padded left, right or anywhere."""
    length = max(1, max(counts) + draw(st.integers(0, 4)))
    mask = torch.ones(len(counts), length, dtype=torch.bool)
    for i, count in enumerate(counts):
        side = draw(st.sampled_from(("right", "left", "scattered")))
        if side == "scattered":
            places = draw(st.permutations(range(length)))[:count]
        else:
            places = range(count) if side == "right" else range(length - count, length)
        mask[i, list(places)] = False
    return mask


@st.composite
def ragged(draw: Callable[[st.SearchStrategy], Any], batch: int, most: int = 8) -> List[Tensor]:
    """Masks of up to four pieces in which each row has any number of tokens, even none."""
    count = draw(st.integers(1, 4))
    return [draw(layouts(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))) for _ in range(count)]
