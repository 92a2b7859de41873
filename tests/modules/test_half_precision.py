"""Gradients of long batches in bfloat16 and float16 on the CPU, whose sums over tokens must not lose terms."""

import copy

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules.normalization import LayerNorm
from mega_fairseq.ops.lookup import lookup
from tests.helpers.small_models import HEADS, TIED, TYPES, language_model
from tests.ops.helpers import noise

TOKENS = 16_384
FORMS = {
    "embeddings": HEADS["softmax"],
    "adaptive embeddings": TIED,
    "narrow embeddings": {"decoder_input_dim": 8},
    "t5": {**HEADS["softmax"], "rel_pos_bias": "t5"},
    "norm of values": {**HEADS["softmax"], "token_mixer": "gmlp", "decoder_gmlp_value_norm": True},
}


def errors(model, dtype):
    """The relative error of each parameter's gradient, against the same model in float64."""
    half = model.train().to(dtype)
    exact = copy.deepcopy(half).double()
    tokens = torch.randint(4, TYPES, (8, TOKENS // 8 + 1), generator=torch.Generator().manual_seed(3))
    for each in (half, exact):
        each(tokens[:, :-1], target=tokens[:, 1:])[0].sum().neg().backward()
    pairs = zip(half.named_parameters(), exact.parameters())
    return {name: ((p.grad.double() - q.grad).norm() / q.grad.norm()).item() for (name, p), q in pairs}


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, torch.bfloat16) for form in FORMS), ("embeddings", torch.float16)], ids=str
)
def test_gradients_of_a_long_batch_are_complete(form, dtype):
    found = errors(language_model(**FORMS[form]), dtype)
    assert max(found.values()) < 0.05, found


def test_lost_terms_would_be_detected(monkeypatch):
    monkeypatch.setattr(LayerNorm, "forward", torch.nn.LayerNorm.forward)
    assert max(errors(language_model(**FORMS["embeddings"]), torch.bfloat16).values()) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_a_table_and_their_gradients_are_those_of_torchs_embedding_in_float64(dtype):
    table = noise(7, 5, dtype=dtype, grad=True)
    indices = torch.randint(0, 7, (40, 100), generator=torch.Generator().manual_seed(0))
    given = noise(40, 100, 5, dtype=dtype) + 1
    lookup(indices, table, 3).backward(given)
    exact = table.detach().double().requires_grad_()
    expected = F.embedding(indices, exact, 3)
    expected.backward(given.double())
    assert torch.equal(lookup(indices, table, 3), expected.to(dtype))
    torch.testing.assert_close(table.grad, exact.grad.to(dtype))
    assert not table.grad[3].any()
