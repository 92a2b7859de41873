"""Norms, activations, feed-forward layers, embeddings and outputs in graphs are those of the modules."""

import numpy as np
import pytest
import torch

from mega_fairseq.export.layers import ACTIVATIONS, feed_forward, norm
from mega_fairseq.export.stacks import embed, output_scores
from mega_fairseq.modules import FeedForwardConfig, NormalizedFeedForward, SequenceNorm
from mega_fairseq.modules.feed_forward import FEED_FORWARD_ACTIVATIONS
from mega_fairseq.modules.normalization import NORMS
from mega_fairseq.ops.activations import ACTIVATIONS as OURS
from tests.helpers.exported import assert_near, random, randomised, run
from tests.helpers.small_models import TYPES, classifier, language_model, translation_model

DIM = 12
X = np.concatenate([random(2, 5, DIM), np.zeros((2, 1, DIM), np.float32), random(2, 2, DIM, scale=1e3)], 1)


def of_modules(call, *inputs):
    with torch.no_grad():
        return call(*map(torch.from_numpy, inputs))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_random_large_and_zero_rows(kind, affine):
    module = randomised(SequenceNorm(kind, DIM, affine=affine))
    (y,) = run(lambda g, x: norm(g, x, module), X)
    assert_near(y, of_modules(module, X))


@pytest.mark.parametrize("name", OURS)
def test_activations_near_zero_and_far_from_it(name):
    for far in (12, 1e4):
        x = np.linspace(-far, far, 601).astype(np.float32)
        (y,) = run(lambda g, x: ACTIVATIONS[name](g, x), x)
        assert_near(y, of_modules(OURS[name].forward, x), 1e-6)


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("activation", FEED_FORWARD_ACTIVATIONS)
def test_feed_forward_layers(activation, prenorm):
    module = randomised(NormalizedFeedForward(FeedForwardConfig(DIM, activation=activation, prenorm=prenorm)))
    x = X[:, :6]
    (y,) = run(lambda g, x: feed_forward(g, x, module), x)
    assert_near(y, of_modules(module, x))


TOKENS = np.arange(2 * TYPES).reshape(2, TYPES) % TYPES


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_embeddings_of_translation_models(scaled, normed):
    stack = translation_model(no_scale_embedding=not scaled, normalize_embedding=normed).encoder
    (x,) = run(lambda g, tokens: embed(g, tokens, stack), TOKENS)
    assert_near(x, of_modules(stack.embed, TOKENS))


@pytest.mark.parametrize(
    "options", [{}, {"decoder_input_dim": 6}, {"decoder_input_dim": 6, "no_scale_embedding": True}]
)
def test_embeddings_of_language_models(options):
    stack = language_model(**options).decoder
    (x,) = run(lambda g, tokens: embed(g, tokens, stack), TOKENS)
    assert_near(x, of_modules(stack.embed, TOKENS))


def test_embeddings_of_values():
    stack = classifier(None).encoder
    (x,) = run(lambda g, values: embed(g, values, stack), X[..., 0])
    assert_near(x, of_modules(lambda x: stack.embed_tokens(x), X[..., 0]))


OUTPUTS = {
    "tied": {"share_decoder_input_output_embed": True},
    "tied, with a bias": {"share_decoder_input_output_embed": True, "output_bias": True},
    "tied, dense": {"share_decoder_input_output_embed": True, "output_dense": True},
    "own": {},
    "own, dense, with a bias": {"output_bias": True, "output_dense": True},
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name):
    decoder = language_model(**OUTPUTS[name]).decoder
    features = random(7, 16)
    (y,) = run(lambda g, x: output_scores(g, x, decoder), features)
    assert_near(y, of_modules(decoder.output_layer, features))
