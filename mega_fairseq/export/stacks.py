"""The graphs of a model: encoder, a step of the decoder, a piece of a text, a classifier."""

import math
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from torch import nn

from mega_fairseq.export.attention import (
    Tree,
    attend_both_directions,
    attend_past,
    attend_tree,
    count,
    queries_and_keys,
)
from mega_fairseq.export.cross_attention import Limits, Source, cross_attend, source_keys_values
from mega_fairseq.export.ema import ema_both_directions, ema_of_past, ema_token, poles
from mega_fairseq.export.graph import Graph, Value
from mega_fairseq.export.layers import ACTIVATIONS, feed_forward, float32, gate, norm, project
from mega_fairseq.models.decoder import MegaDecoder
from mega_fairseq.models.embedding import NarrowEmbedding
from mega_fairseq.models.encoder import MegaEncoder
from mega_fairseq.models.mega_encoder import HeadedEncoder
from mega_fairseq.models.stack import Stack
from mega_fairseq.modules.classification import ClassificationHead, ValueEmbedding
from mega_fairseq.modules.mixers.mega import MovingAverageGatedAttention


def embed(g: Graph, tokens: Value, stack: Stack) -> Value:
    """Tokens (...), or real numbers, -> embeddings (..., D)."""
    module, dim = stack.embed_tokens, getattr(stack.cfg, f"{stack.side}_embed_dim")
    # Models without a decoder do not have the option, and never scale.
    scale = 1.0 if getattr(stack.cfg, "no_scale_embedding", True) else math.sqrt(dim)
    if isinstance(module, ValueEmbedding):
        x = tokens.unsqueeze(-1) * float32(module.weight) + float32(module.bias)
    elif isinstance(module, NarrowEmbedding):
        x = g.rows(float32(module.weight), tokens) @ (float32(module.project.weight).T * np.float32(scale))
    else:
        x = g.rows(float32(module.weight), tokens, scale)
    if stack.embed_types is not None:
        x = x + float32(stack.embed_types.weight[0])
    return norm(g, x, stack.embed_norm)


# ------------------------------------------------------------------------------------------- a layer, without attention


def _inputs(g: Graph, x: Value, mixer: MovingAverageGatedAttention) -> Tuple[Value, Value]:
    """The input of the EMA, and V (eq. 10)."""
    c = mixer.config
    normed = norm(g, x, mixer.norm) if c.prenorm else x
    return normed, ACTIVATIONS[c.activation](g, project(g, normed, mixer.values))


def _projections(g: Graph, averaged: Value, mixer: MovingAverageGatedAttention) -> Tuple[Value, Value, List[Value]]:
    """X' -> Q, K (eq. 7-9) and the projections of the gates u, r and H (eq. 12-14), in one product."""
    c = mixer.config
    shared, *gates = project(g, averaged, mixer.shared, mixer.gates).split(c.shared_dim, c.dim, c.value_dim, c.dim)
    q, k = queries_and_keys(g, shared, mixer)
    return q, k, gates


def _output(g: Graph, x: Value, attended: Value, gates: List[Value], mixer: MovingAverageGatedAttention) -> Value:
    y = gate(g, gates, attended, x, mixer.hidden, mixer.config.activation)
    return y if mixer.config.prenorm else norm(g, y, mixer.norm)


# ------------------------------------------------------------------------------------------- encoder


def encode(g: Graph, tokens: Value, real: Value, encoder: MegaEncoder, longest: int) -> Value:
    """tokens (S, m), real (S, m), 1 or 0 with real tokens first -> (S, m, D), zeros at pads."""
    inside = real.unsqueeze(2)
    x = embed(g, tokens, encoder) * inside
    for layer in encoder.layers:
        mixer = layer.mixer
        normed, values = _inputs(g, x, mixer)
        averaged = ema_both_directions(
            g, normed * inside, *poles(mixer.ema), mixer.ema.omega, _taps(mixer.config.truncation, longest)
        )
        q, k, gates = _projections(g, averaged, mixer)
        attended = attend_both_directions(g, q, k, values, mixer, real, longest)
        x = feed_forward(g, _output(g, x, attended, gates, mixer), layer.feed_forward)
    return norm(g, x, encoder.final_norm) * inside


def _taps(truncation: Optional[int], longest: int) -> Optional[int]:
    """The number of taps, if any input is longer."""
    return truncation if truncation and truncation < longest else None


def encoder_graph(g: Graph, encoder: MegaEncoder, decoder: MegaDecoder, limits: Limits) -> None:
    """tokens, real -> source_keys{l} and source_values{l} of each decoder layer."""
    tokens, real = g.input("tokens", np.int64, "S", "m"), g.input("real", np.float32, "S", "m")
    x = encode(g, tokens, real, encoder, limits.source)
    places = count(g, tokens.sizes(1, 2))
    for number, layer in enumerate(decoder.layers):
        cross = layer.cross_attention
        keys, values = source_keys_values(g, x, cross, places, limits)
        g.output(f"source_keys{number}", keys, np.float32, "S", cross.config.shared_dim, "m")
        g.output(f"source_values{number}", values, np.float32, "S", "m", cross.config.dim)


# ------------------------------------------------------------------------------------------- decoder


def step_graph(g: Graph, decoder: MegaDecoder, limits: Limits, special: List[int], by_line: bool) -> None:
    """The next token of R = S b rows -> its likeliest successors and the state after it.

    S sentences with b rows each, a tree of n places, a source of m tokens. Row r continues row order[r] of the states.
    `looks` are the weights of cross attention in the last layer, whose alignment of words is the clearest.
    """
    tokens, order = g.input("tokens", np.int64, "R"), g.input("order", np.int64, "R")
    mask = g.input("mask", np.float32, "S", "b", "n")
    tree = Tree(mask, g.input("distance", np.int64, "S", "n"), g.input("place", np.int64, 1))
    k, translates = g.input("k", np.int64, 1), decoder.layers[0].cross_attention is not None
    if translates:
        places = g.input("source_places", np.int64, "S", "b", "m") if by_line else None
        source_mask = None if by_line else g.input("source_mask", np.float32, "S", 1, "m")
        source = Source(source_mask, None if by_line else g.input("position", np.int64, 1), places)
    x = embed(g, tokens, decoder)  # (R, D)
    outputs: Dict[str, Tuple[Value, Tuple[Any, ...]]] = {}
    for number, layer in enumerate(decoder.layers):
        mixer, c = layer.mixer, layer.mixer.config
        normed, values = _inputs(g, x, mixer)
        (kernel,) = poles(mixer.ema)
        before = g.input(f"ema{number}", np.float32, "R", kernel.states, c.dim)
        averaged, after = ema_token(g, normed, before, order, kernel, mixer.ema.omega)
        q, key, gates = _projections(g, averaged, mixer)
        keys = g.input(f"keys{number}", np.float32, "S", "n", c.shared_dim)
        past = g.input(f"values{number}", np.float32, "S", "n", c.value_dim)
        attended, key = attend_tree(g, q, key, values, keys, past, mixer, tree, limits.target)
        x = _output(g, x, attended, gates, mixer)
        if translates:
            cross = layer.cross_attention
            of_source = (
                g.input(f"source_keys{number}", np.float32, "S", cross.config.shared_dim, "m"),
                g.input(f"source_values{number}", np.float32, "S", "m", cross.config.dim),
            )
            x, looks = cross_attend(g, x, *of_source, cross, source, limits)
            outputs["looks"] = looks, ("S", "b", "m")  # of the last layer in the end
        x = feed_forward(g, x, layer.feed_forward)
        outputs[f"new_ema{number}"] = after, ("R", kernel.states, c.dim)
        outputs[f"new_key{number}"] = key, ("R", c.shared_dim)
        outputs[f"new_value{number}"] = values, ("R", c.value_dim)
    log_probs = g.op("LogSoftmax", output_scores(g, norm(g, x, decoder.final_norm), decoder), axis=-1)
    top, types = g.op("TopK", log_probs, k, outputs=2, axis=-1)
    g.output("top", top, np.float32, "R", "k")
    g.output("top_types", types, np.int64, "R", "k")
    g.output("special", g.op("Gather", log_probs, np.array(special), axis=1), np.float32, "R", len(special))
    g.output("log_probs", log_probs, np.float32, "R", len(decoder.dictionary))
    for name, (value, shape) in outputs.items():
        g.output(name, value, np.float32, *shape)


def output_scores(g: Graph, x: Value, decoder: MegaDecoder) -> Value:
    """Features (..., D) -> scores (..., V)."""
    if decoder.output_dense is not None:
        x = g.op("Tanh", project(g, x, decoder.output_dense))
    if decoder.output_projection is not None:
        return project(g, x, decoder.output_projection)
    bias = None if decoder.output_bias is None else float32(decoder.output_bias)
    return g.scores(x, float32(decoder.embed_tokens.weight), bias)


def text_graph(g: Graph, decoder: MegaDecoder, limits: Limits) -> None:
    """A piece of a text and the state before it -> log-probabilities of next tokens, and the state after it.

    `wanted` (w,) are the places in the piece behind which `targets` (w,) are asked for.
    """
    tokens = g.input("tokens", np.int64, 1, "n")
    wanted, targets = g.input("wanted", np.int64, "w"), g.input("targets", np.int64, "w")
    x = embed(g, tokens, decoder)
    state: Dict[str, Tuple[Value, Tuple[Any, ...]]] = {}
    for number, layer in enumerate(decoder.layers):
        mixer, c = layer.mixer, layer.mixer.config
        normed, values = _inputs(g, x, mixer)
        (kernel,) = poles(mixer.ema)
        before = g.input(f"ema{number}", np.float32, kernel.states, c.dim)
        averaged, after = ema_of_past(g, normed, before, kernel, mixer.ema.omega)
        q, k, gates = _projections(g, averaged, mixer)
        keys = g.input(f"keys{number}", np.float32, 1, "m", c.shared_dim)
        past = g.input(f"values{number}", np.float32, 1, "m", c.value_dim)
        attended, keys, past = attend_past(g, q, k, values, keys, past, mixer, limits.target)
        x = feed_forward(g, _output(g, x, attended, gates, mixer), layer.feed_forward)
        state[f"new_ema{number}"] = after, (kernel.states, c.dim)
        state[f"new_keys{number}"] = keys, (1, "o", c.shared_dim)
        state[f"new_values{number}"] = past, (1, "o", c.value_dim)
    features = g.op("Gather", norm(g, x, decoder.final_norm).reshape(-1, decoder.cfg.decoder_embed_dim), wanted, axis=0)
    log_probs = g.op("LogSoftmax", output_scores(g, features, decoder), axis=-1)
    of_targets = g.op("GatherElements", log_probs, targets.unsqueeze(1), axis=1).reshape(-1)
    g.output("target_log_probs", of_targets, np.float32, "w")
    g.output("log_probs", log_probs, np.float32, "w", len(decoder.dictionary))
    for name, (value, shape) in state.items():
        g.output(name, value, np.float32, *shape)


# ------------------------------------------------------------------------------------------- classifiers


def classifier_graph(g: Graph, model: HeadedEncoder, head: nn.Module, longest: int) -> None:
    """inputs, real -> scores (S, classes). Of pairs, the first S rows are the first inputs, the others the second."""
    values = isinstance(model.encoder.embed_tokens, ValueEmbedding)
    inputs = g.input("inputs", np.float32 if values else np.int64, "S", "m")
    real = g.input("real", np.float32, "S", "m")
    x, dim = encode(g, inputs, real, model.encoder, longest), model.cfg.encoder_embed_dim
    if str(model.cfg.pooling) == "first":
        features = g.op("Gather", x, 0, axis=1)
    else:
        features = x.sum(1) / g.op("Max", real.sum(1, keep=True), np.float32(1.0))
    if model.pairs:
        first, second = g.op("Split", features.reshape(2, -1, dim), outputs=2, axis=0)
        features = g.concat(second, first).reshape(-1, 2 * dim)  # the released order
    if isinstance(head, ClassificationHead):
        for layer in head.hidden:
            features = ACTIVATIONS["gelu"](g, project(g, features, layer))
        scores = project(g, features, head.out)
    else:
        scores = project(g, g.op("Tanh", project(g, features, head.dense)), head.out_proj)
    g.output("scores", scores, np.float32, "S", "classes")
