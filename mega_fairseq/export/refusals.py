"""What a graph cannot express, by the name of the option."""

from typing import List

from mega_fairseq.models.decoder import MegaDecoder
from mega_fairseq.models.stack import Stack
from mega_fairseq.modules import GatedAttentionConfig
from mega_fairseq.modules.adaptive_input import AdaptiveInput
from mega_fairseq.modules.position_bias import RotaryEmbedding


def refusals(stack: Stack) -> List[str]:
    """The options of an encoder or decoder that cannot be exported, with their values."""
    found = []
    for layer in stack.layers:
        config, cross = layer.mixer.config, layer.cross_attention
        if not isinstance(config, GatedAttentionConfig):
            return [f"{_option(stack, 'token_mixer')} other than mega"]
        found += [config.name("truncation")] * bool(config.causal and config.truncation)
        found += [config.name("token_shift")] * (config.token_shift or layer.shifts_feed_forward)
        if layer.feed_forward is not None and layer.feed_forward.config.two_hop:
            found.append(layer.feed_forward.config.name("two_hop"))
        if cross is not None and cross.config.takes_segments and isinstance(cross.position_bias, RotaryEmbedding):
            found.append("--rel-pos-bias rope with --cross-attention-positions sentence or --cross-attention-window")
    found += ["--adaptive-input"] * isinstance(stack.embed_tokens, AdaptiveInput)
    if isinstance(stack, MegaDecoder):
        found += ["--adaptive-softmax-cutoff"] * (stack.adaptive_softmax is not None)
    return list(dict.fromkeys(found))


def check(*stacks: Stack) -> None:
    """Raises ValueError if a graph would not be the model."""
    found = [name for stack in stacks for name in refusals(stack)]
    if found:
        names = ", ".join(dict.fromkeys(found))
        raise ValueError(f"a model with {names} cannot be exported; generate with fairseq, or train without")


def _option(stack: Stack, name: str) -> str:
    own = name if hasattr(stack.cfg, name) else f"{stack.side}_{name}"
    return f"--{own.replace('_', '-')}"
