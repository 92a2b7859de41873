"""Classifiers: batch independence, any length, pairs, real numbers, chunks, precision."""

from functools import partial

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA

from mega_fairseq.models import mega_classifier
from mega_fairseq.modules.classification import pool
from mega_fairseq.modules.normalization import SequenceNorm
from tests.helpers.small_models import LENGTHS, batch, classifier, documents, of_example

build = partial(of_example, classifier)


def scores(model, *inputs):
    names = ("src_tokens", "src_tokens1")
    return model(**dict(zip(names, inputs)), classification_head_name="head")[0]


def assert_rows_are_independent(model):
    together = scores(model, batch(documents()))
    for row, document in zip(together, documents()):
        torch.testing.assert_close(row, scores(model, document[None])[0])


@pytest.mark.parametrize(("mixer", "pooling"), [("mega", "mean"), ("mega", "first"), ("flash", "mean")])
def test_a_document_of_any_length_has_the_same_scores_alone_and_in_any_padded_batch(mixer, pooling):
    assert_rows_are_independent(build(mixer, pooling=pooling))


def test_a_mean_over_pads_would_be_noticed(monkeypatch):
    monkeypatch.setattr(mega_classifier, "pool", lambda x, lengths, pooling: pool(x, None, pooling))
    with pytest.raises(AssertionError):
        assert_rows_are_independent(build("mega"))


def assert_documents_of_pairs_are_independent(model):
    left, right = documents(1), documents(2)[::-1]
    both = model(batch(left), src_tokens1=batch(right, width=21))[0]
    for features, first, second in zip(both, left, right):
        one, _ = model(first[None], src_tokens1=second[None])
        torch.testing.assert_close(features, one[0])
        swapped, _ = model(second[None], src_tokens1=first[None])
        torch.testing.assert_close(swapped[0], one[0].roll(one.size(1) // 2))  # second, first


def test_both_documents_of_a_pair_are_encoded_alone():
    assert_documents_of_pairs_are_independent(build("mega", pairs=True))


def test_pads_of_the_shorter_documents_of_pairs_would_be_noticed(monkeypatch):
    together = mega_classifier._in_one_batch

    def without_its_pads(x, padding, other, other_padding):
        return together(x, padding, other, torch.zeros_like(other_padding))

    monkeypatch.setattr(mega_classifier, "_in_one_batch", without_its_pads)
    with pytest.raises(AssertionError):
        assert_documents_of_pairs_are_independent(build("mega", pairs=True))


def test_pairs_are_refused_without_the_option_and_needed_with_it():
    with pytest.raises(ValueError, match="add --pairs"):
        scores(build("mega"), batch(documents()), batch(documents()))
    with pytest.raises(ValueError, match="^--pairs"):
        scores(build("mega", pairs=True), batch(documents()))


def test_numbers_behind_the_length_of_a_real_valued_input_change_nothing():
    model = build("mega", types=None, normalization_type="batchnorm", normalize_before=True)
    values = torch.randn(len(LENGTHS), 16, dtype=torch.float64)
    together, _ = model(values, torch.tensor(LENGTHS), classification_head_name="head")
    for row, length, whole in zip(values, LENGTHS, together):
        alone = row[None, :length]
        torch.testing.assert_close(scores(model, alone)[0], whole)
        assert not torch.allclose(scores(model, alone + 0.5)[0], whole)


def test_an_empty_document_has_finite_scores_and_gradients():
    model = build("mega")
    scores(model, batch([torch.tensor([], dtype=torch.long), *documents()])).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batch_norm_in_half_precision_has_the_statistics_of_float32(dtype):
    exact, half = SequenceNorm("batchnorm", 3), SequenceNorm("batchnorm", 3).to(dtype)
    assert half.norm.weight.dtype == dtype
    for seed in range(100):  # values near 20, and so large that their squares overflow
        x = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(seed)).mul(torch.tensor([1.0, 1.0, 300.0]))
        x = (x + torch.tensor([20.0, 0.0, 0.0])).to(dtype)
        assert half(x).dtype == dtype
        exact(x.float())
    torch.testing.assert_close(half.norm.running_mean, exact.norm.running_mean)
    torch.testing.assert_close(half.norm.running_var, exact.norm.running_var)
    assert (half.eval()(x).float() - exact.eval()(x.float())).abs().max() < 0.02
    exact.load_state_dict(half.half().state_dict())  # a checkpoint keeps them too
    torch.testing.assert_close(half.norm.running_var, exact.norm.running_var, rtol=0, atol=0)


def test_weights_of_a_model_with_batch_norm_are_averaged():
    """As with --store-ema."""
    model = classifier(normalization_type="batchnorm").train()
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.75), torch.device("cpu"))
    before = model.state_dict()["encoder.layers.0.mixer.norm.norm.running_mean"].clone()
    scores(model, batch(documents()))
    ema.step(model)
    after = model.state_dict()["encoder.layers.0.mixer.norm.norm.running_mean"]
    found = ema.get_model().state_dict()["encoder.layers.0.mixer.norm.norm.running_mean"]
    assert not torch.equal(before, after)
    torch.testing.assert_close(found, 0.75 * before + 0.25 * after)


def test_batch_norm_without_momentum_has_the_statistics_of_all_batches():
    """torch's own function sets the momentum to None."""
    norm, batches = SequenceNorm("batchnorm", 3), [torch.randn(2, 9, 3) for _ in range(4)]
    torch.optim.swa_utils.update_bn(batches, norm)
    torch.testing.assert_close(norm.norm.running_mean, torch.stack(batches).mean((0, 1, 2)))


def test_batch_norm_over_a_single_position_is_refused_in_training():
    norm, x = SequenceNorm("batchnorm", 3), torch.ones(1, 2, 3)
    padding = torch.tensor([[False, True]])
    with pytest.raises(ValueError, match="batch norm has a single position to compute its statistics from"):
        norm(x, padding)
    assert norm.eval()(x, padding).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_mean_over_many_large_features_does_not_overflow(dtype):
    x = torch.full((1, 20_000, 1), 5.0, dtype=dtype)
    assert pool(x, torch.tensor([20_000]), "mean").item() == pool(x, None, "mean").item() == 5.0
