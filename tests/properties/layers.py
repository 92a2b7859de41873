"""Hypothesis strategies for the layers to test: every kind of module, with every option.

Parameters are far from their initial values, because layers with weights near zero hide most mistakes.
"""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mega_fairseq.modules import (
    EXAMPLES,
    MIXERS,
    Block,
    BlockState,
    DampedEMA,
    FeedForwardConfig,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    MixerConfig,
    NormalizedFeedForward,
)
from mega_fairseq.modules.config import ModuleConfig
from mega_fairseq.modules.normalization import BATCH_NORMS
from mega_fairseq.modules.timestep_norm import TimestepNorm
from tests.properties.contracts import Layer

DIM, SOURCE_DIM = 4, 5
REACH = 64  # of the simple bias: more than any sequence here, padded or not
LENGTHS = (None, 0, 1, 2, 3, 5, 7, 8, 40)  # chunks, truncations and the like
WIDTHS = (1, 2, 3, 4, 8)

BOTH_WAYS = [name for name, config in MIXERS.items() if not config.causal_only]
CAUSAL = ("ema", "timestep_norm", *MIXERS, "cross_attention", "feed_forward", "block", "decoder_block")
BIDIRECTIONAL = ("bidirectional_ema", *(f"bidirectional_{name}" for name in BOTH_WAYS), "bidirectional_block")


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
    options: Dict[str, Any]  # arguments of the module
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
        kind = self.kind.replace("bidirectional_", "")
        if kind in MIXERS:
            return self.options["config"].build()
        makers = {
            "ema": DampedEMA,
            "timestep_norm": TimestepNorm,
            "cross_attention": GatedCrossAttention,
            "feed_forward": NormalizedFeedForward,
        }
        return makers.get(kind, Block)(**self.options)


# ------------------------------------------------------------------------------------------- strategies

seeds = st.integers(0, 2**20)


@st.composite
def varied(draw: Callable[[st.SearchStrategy], Any], config: ModuleConfig) -> ModuleConfig:
    """A config with other values of its fields, as far as it accepts them: all choices, switches and sizes."""
    for f in fields(config):
        fixed = ("dim", "causal", "side", "init", "max_positions", "source_dim", "positions", "window")
        if f.name in fixed or f.type is float:
            continue
        values = {bool: (True, False), int: WIDTHS, Optional[int]: LENGTHS}.get(f.type, f.metadata["choices"])
        value = draw(st.sampled_from(values))
        with suppress(ValueError):  # not with the values of other fields
            config = replace(config, **{f.name: value})
    return config


def mixer_configs(name: str, causal: bool) -> st.SearchStrategy[MixerConfig]:
    """Configs of a mixer, causal or not."""
    examples = [replace(e, dim=DIM, causal=causal) for e in EXAMPLES.values() if type(e) is MIXERS[name]]
    examples = [replace(e, max_positions=REACH) if hasattr(e, "max_positions") else e for e in examples]
    return st.sampled_from(examples).flatmap(varied)


def feed_forward_configs(
    causal: bool, token_shift: Sequence[bool] = (True, False), cross: bool = False
) -> st.SearchStrategy:
    drawn = varied(FeedForwardConfig(DIM, hidden_dim=6)).map(lambda c: replace(c, two_hop=c.two_hop and not cross))
    allowed = drawn.map(lambda c: replace(c, norm="rmsnorm") if causal and c.norm in BATCH_NORMS else c)
    return st.builds(lambda c, shift: replace(c, token_shift=shift), allowed, st.sampled_from(token_shift))


def block_options(causal: bool, cross: bool) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "mixer": st.one_of([mixer_configs(name, causal) for name in (MIXERS if causal else BOTH_WAYS)]),
            "feed_forward": st.one_of(feed_forward_configs(causal, cross=cross), st.none()),
            "cross_attention": varied(CROSS) if cross else st.none(),
        }
    )


CROSS = GatedCrossAttentionConfig(DIM, shared_dim=2, source_dim=SOURCE_DIM, max_positions=REACH)


def options_of(kind: str) -> st.SearchStrategy:
    name, causal = kind.replace("bidirectional_", ""), kind in CAUSAL
    if name == "ema":
        sizes = {"ndim": st.integers(1, 3), "truncation": st.sampled_from([n for n in LENGTHS if n != 0])}
        return st.fixed_dictionaries({"dim": st.just(DIM), "bidirectional": st.just(not causal), **sizes})
    if name == "timestep_norm":
        return st.fixed_dictionaries({"dim": st.just(DIM), "groups": st.sampled_from((1, 2))})
    if name.endswith("block"):
        return block_options(causal, name == "decoder_block")
    if name == "cross_attention":
        return st.fixed_dictionaries({"config": varied(CROSS)})
    if name == "feed_forward":
        return st.fixed_dictionaries({"config": feed_forward_configs(True, (False,))})
    return st.fixed_dictionaries({"config": mixer_configs(name, causal)})


def recipes(kind: str) -> st.SearchStrategy:
    return st.builds(Recipe, kind=st.just(kind), options=options_of(kind), seed=seeds)


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
