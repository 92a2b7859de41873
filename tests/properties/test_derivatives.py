"""Second derivatives are right, or refused: they are never wrong in silence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.profiles import examples
from tests.properties.layers import BIDIRECTIONAL, CAUSAL, DIM, recipes, seeds

PADS = torch.tensor([[True, False, False, True, False]])


@pytest.mark.parametrize("kind", [*CAUSAL, *BIDIRECTIONAL])
@examples(10)
@given(data=st.data(), seed=seeds, mask=st.sampled_from((None, PADS)))
def test_second_derivatives_are_right_or_refused(kind, data, seed, mask):
    layer = data.draw(recipes(kind)).layer()
    torch.manual_seed(seed)
    x, direction = torch.randn(2, 1, 5, DIM, dtype=torch.float64).unbind()

    def slope(x, **options):
        x = x.detach().requires_grad_()
        loss = layer.step(x, layer.start(), mask)[0].square().sum()
        return x, *torch.autograd.grad(loss, x, **options)

    found = refused = None
    try:
        x, first = slope(x, create_graph=True)
        (found,) = torch.autograd.grad(first, x, direction)
    except RuntimeError as error:
        refused = str(error)
    if found is None:  # by our own backward passes, or by torch's fused attention
        assert (
            "no autograd formula" in refused
            or "has no second derivatives" in refused
            or "is not implemented" in refused
        )
        return
    small = 1e-5 * direction
    expected = (slope(x + small)[1] - slope(x - small)[1]) / 2e-5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
