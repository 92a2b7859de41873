"""Norms and activations in graphs are those of the modules, for large numbers and zeros too; models show the rest."""

import numpy as np
import pytest
import torch

from mega_fairseq.export.layers import ACTIVATIONS, norm
from mega_fairseq.modules import SequenceNorm
from mega_fairseq.modules.normalization import NORMS
from mega_fairseq.ops.activations import ACTIVATIONS as OURS
from tests.helpers.exported import assert_near, random, randomised, run

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
