"""torch.export supports whole models for one shape, with the same outputs."""

import pytest
import torch
from torch import nn

from tests.helpers.golden_checks import each
from tests.helpers.golden_models import inputs
from tests.helpers.golden_models import model as golden_model

pytestmark = pytest.mark.slow


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src_tokens, prev_output_tokens):
        return self.model(src_tokens, None, prev_output_tokens)[0]


@each("translation model", where=lambda case: "chunk" in case.name)
@torch.no_grad()
def test_an_exported_translation_model_gives_its_logits(case):
    model, given = Logits(golden_model(case)), inputs(case)
    arguments = given["src_tokens"], given["prev_output_tokens"]
    exported = torch.export.export(model, arguments, strict=True).module()
    torch.testing.assert_close(exported(*arguments), model(*arguments), atol=1e-5, rtol=1e-5)
