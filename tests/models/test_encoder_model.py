"""Encoders as masked language models: batch independence, heads, token types."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules.classification import LM_HEADS
from tests.helpers.golden_models import PAD
from tests.helpers.small_models import TYPES, batch, documents, encoder, of_example

HEADS = [kind for kind in LM_HEADS if kind != "none"]


build = partial(of_example, encoder)


def scores(model, tokens, **options):
    return model(tokens, **options)[0]


@pytest.mark.parametrize(("mixer", "pooling"), [("mega", "mean"), ("mega", "first"), ("flash", "mean")])
def test_a_document_has_the_same_scores_alone_and_in_any_padded_batch(mixer, pooling):
    model, rows = build(mixer, pooling=pooling), documents()
    tokens = batch(rows)
    together, classes = scores(model, tokens), scores(model, tokens, classification_head_name="head")
    features = scores(model, tokens, features_only=True)
    assert not features[tokens.eq(PAD)].any()
    if pooling == "mean":  # as RoBERTa's interface predicts
        torch.testing.assert_close(model.classification_heads["head"](features), classes)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i, tokens[i] != PAD], scores(model, row[None])[0])
        torch.testing.assert_close(classes[i], scores(model, row[None], classification_head_name="head")[0])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("untied", [False, True])
def test_only_masked_tokens_are_projected_and_give_the_same_gradients(kind, untied):
    model, tokens = build(lm_head=kind, untie_lm_head=untied), batch(documents())
    assert (model.encoder.lm_head.weight is model.encoder.embed_tokens.weight) != untied
    masked = tokens.ne(PAD) & (torch.arange(tokens.numel()).view_as(tokens) % 3).eq(0)
    gradients = []
    for found in (scores(model, tokens, masked_tokens=masked), scores(model, tokens)[masked]):
        model.zero_grad()
        F.cross_entropy(found, tokens[masked]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == {name for name, _ in model.named_parameters() if "classification" not in name}
    torch.testing.assert_close(*gradients)


def test_token_types_move_with_their_tokens_and_default_to_the_first():
    model, rows = build(token_types=3), documents()
    types = [torch.arange(len(row)) % 3 for row in rows]
    tokens, of_tokens = batch(rows), batch([each + 10 for each in types]).sub(10).clamp_min(0)
    together = scores(model, tokens, token_types=of_tokens)
    for i, row in enumerate(rows):
        alone = scores(model, row[None], token_types=types[i][None])[0]
        torch.testing.assert_close(together[i, tokens[i] != PAD], alone)
    zeros = scores(model, tokens, token_types=torch.zeros_like(tokens))
    torch.testing.assert_close(scores(model, tokens), zeros, rtol=0, atol=0)
    assert not torch.allclose(together, zeros)


def test_embeddings_may_replace_those_of_tokens():
    model, tokens = build(), batch(documents())
    embedded = model.encoder.embed_tokens(tokens)
    torch.testing.assert_close(scores(model, tokens, token_embeddings=embedded), scores(model, tokens))
    assert not torch.allclose(scores(model, tokens, token_embeddings=2 * embedded), scores(model, tokens))


def test_layers_normalise_as_their_options_say():
    for before in (True, False):
        for opposite in (True, False):
            layer = build(normalize_before=before, opposite_ffn_norm=opposite).encoder.layers[0]
            assert layer.mixer.config.prenorm == before
            assert layer.feed_forward.config.prenorm == (before != opposite)


def test_a_model_without_language_model_head_has_features_but_no_scores():
    model, tokens = build(lm_head="none"), batch(documents())
    assert scores(model, tokens, features_only=True).shape == (*tokens.shape, 16)
    with pytest.raises(ValueError, match="--lm-head none"):
        scores(model, tokens)


def test_log_probabilities_are_those_of_the_scores():
    model, tokens = build(), batch(documents())
    output = model(tokens)
    for log_probs, function in ((True, F.log_softmax), (False, F.softmax)):
        found = model.get_normalized_probs(output, log_probs)
        torch.testing.assert_close(found, function(output[0].float(), -1))


def test_a_checkpoint_gives_its_heads_to_a_model_and_must_have_those_of_the_model():
    model, other = build(), build()
    other.register_classification_head("other", num_classes=5, inner_dim=7)
    model.load_state_dict(other.state_dict())
    assert model.classification_heads["other"].out_proj.weight.shape == (5, 7)
    with pytest.raises(ValueError, match="classification_heads.other cannot be loaded: the checkpoint does not have"):
        model.load_state_dict(build().state_dict())
    with pytest.raises(ValueError, match="encoder.lm_head cannot be loaded: it has other sizes"):
        build(lm_head="tanh").load_state_dict(build(lm_head="gelu").state_dict())


def test_a_checkpoint_of_another_dictionary_is_refused():
    with pytest.raises(ValueError, match=f"{TYPES + 1} types and its dictionary here has {TYPES} types"):
        build().load_state_dict(build(types=TYPES + 1).state_dict())
