"""Exported translation models give the log-probabilities of the model, with each option of its layers."""

import functools

import numpy as np
import onnx
import pytest
import torch

from mega_fairseq.export.folder import write_translation
from mega_fairseq.export.stacks import encode
from mega_runtime import Translator
from tests.helpers.exported import CHUNK, CHUNKS, assert_near, new_folder, run, sources
from tests.helpers.small_models import EOS, net_input, translation_model

OPTIONS = {
    "whole": {},
    "chunks": CHUNKS,
    "sixteen states": {"encoder_n_dim": 16, "decoder_n_dim": 16},
    "truncated encoder": {"encoder_truncation_length": 5},
    "prenorm": {"normalize_before": True},
    "prenorm, no last norm": {"normalize_before": True, "no_final_norm": True},
    "prenorm, feed-forward layers with postnorm": {"normalize_before": True, "opposite_ffn_norm": True},
    "scalenorm": {"normalization_type": "scalenorm"},
    "rmsnorm": {"normalization_type": "rmsnorm", **CHUNKS},
    "hf_rmsnorm": {"normalization_type": "hf_rmsnorm", "normalize_before": True},
    "no affine norms": {"no_affine_norm": True, "encoder_ffn_rescale": True},
    "relu2": {"attention_activation_fn": "relu2", **CHUNKS},
    "relu2, rope": {"attention_activation_fn": "relu2", "rel_pos_bias": "rope"},
    "laplace": {"attention_activation_fn": "laplace"},
    "laplace in chunks": {"attention_activation_fn": "laplace", **CHUNKS, "rel_pos_bias": "alibi"},
    "chunks of one token": {"encoder_chunk_size": 1, "decoder_chunk_size": 1, "rel_pos_bias": "t5"},
    "gelu": {"activation_fn": "gelu", "ffn_activation_fn": "swiglu"},
    "no feed-forward layers": {"encoder_ffn_embed_dim": 0, "decoder_ffn_embed_dim": 0},
    "rope": {"rel_pos_bias": "rope"},
    "rope in chunks": {**CHUNKS, "rel_pos_bias": "rope"},
    "alibi": {"rel_pos_bias": "alibi"},
    "t5": {"rel_pos_bias": "t5", "decoder_chunk_size": CHUNK},
    "no bias": {"rel_pos_bias": "none"},
    "normed embeddings": {"normalize_embedding": True, "no_scale_embedding": True},
    "one table": {"share_all_embeddings": True, "output_bias": True},
    "dense output": {"output_dense": True, "output_bias": True},
    "other widths": {"decoder_embed_dim": 12, "decoder_hidden_dim": 20, "encoder_z_dim": 4, "encoder_layers": 1},
}
each = pytest.mark.parametrize("name", OPTIONS)
SOURCES = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 31, 32, 33]


@functools.lru_cache(maxsize=None)
def exported(name, number_format="float32"):
    model, folder = translation_model(**OPTIONS[name]), new_folder()
    write_translation(folder, model, number_format)
    return model, Translator(folder)


@each
def test_encoders_of_padded_sources(name):
    encoder, rows = exported(name)[0].encoder, sources(31, 9, 1, 32)
    given = net_input(rows, left=False)
    with torch.no_grad():
        expected = encoder(**given)["encoder_out"][0].transpose(0, 1)
    real = given["src_tokens"].ne(1).float().numpy()
    (y,) = run(lambda g, tokens, real: encode(g, tokens, real, encoder, 400), given["src_tokens"], real)
    assert_near(y, expected)


def of_targets(model, source, target):
    """The log-probability of each token of a target."""
    before = torch.tensor([[EOS, *target[:-1]]])
    with torch.no_grad():
        scores = model(**net_input([source]), prev_output_tokens=before)
        return model.get_normalized_probs(scores, log_probs=True)[0, range(len(target)), target].numpy()


@each
def test_log_probabilities_of_targets(name):
    model, translator = exported(name)
    for number, length in enumerate(SOURCES):
        (source,), (target,) = sources(length, seed=number), sources(SOURCES[-1 - number], seed=9)
        found = translator.score_tokens(source, target)
        np.testing.assert_allclose(found, of_targets(model, source, target), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["whole", "chunks", "relu2", "one table"])
def test_log_probabilities_in_8_bits_are_near_those_of_the_model(name):
    model, translator = exported(name, "int8")
    (source,), (target,) = sources(31), sources(20, seed=9)
    gaps = translator.score_tokens(source, target) - of_targets(model, source, target)
    assert 1e-5 < np.sqrt(np.mean(gaps**2)) < 0.1


def test_equal_weights_are_stored_once():
    sizes = {}
    for name in ("one table", "whole"):
        translator = exported(name)[1]
        sizes[name] = (translator.folder.path / "weights.bin").stat().st_size
    assert sizes["one table"] < sizes["whole"]


def inputs_of(graph):
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from inputs_of(attribute.g)


@pytest.mark.parametrize("graph", ["encoder.onnx", "step.onnx"])
@each
def test_a_graph_reads_all_of_its_constants(name, graph):
    """ONNX Runtime warns of others."""
    stored = onnx.load(exported(name)[1].folder.path / graph, load_external_data=False).graph
    assert {tensor.name for tensor in stored.initializer} <= set(inputs_of(stored))
