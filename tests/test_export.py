"""torch.export takes whole models as they are: one graph per shape, pads and all, with the same numbers."""

import pytest
import torch
from torch import nn

from tests.golden_cases import cases
from tests.golden_checks import each
from tests.golden_models import inputs, translation_model

pytestmark = pytest.mark.slow


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src_tokens, prev_output_tokens):
        return self.model(src_tokens, None, prev_output_tokens)[0]


@each("translation model", where=lambda case: case.name in {c.name for c in cases("translation model")[-2:]})
@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_translation_model_gives_its_logits(case, strict):
    model, given = Logits(translation_model(case)), inputs(case)
    arguments = given["src_tokens"], given["prev_output_tokens"]
    exported = torch.export.export(model, arguments, strict=strict).module()
    torch.testing.assert_close(exported(*arguments), model(*arguments), atol=1e-5, rtol=1e-5)
