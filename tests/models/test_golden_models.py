"""Released translation models give their recorded logits, log-probabilities, gradients and hypotheses.

For left-padded sources the release is wrong, since its cross attention counts pads; its outputs for each sentence alone
are right. The release truncates the EMA of a decoder in a full pass, but not in generation; both are recorded.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.helpers.golden_cases import Case
from tests.helpers.golden_checks import assert_all_gradients, each
from tests.helpers.golden_models import PAD, inputs, search
from tests.helpers.golden_models import model as golden_model

translation = each("translation model")
right_padded = each("translation model", where=lambda case: not case.config["src_left_pad"])
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def real(case: Case) -> torch.Tensor:
    return case.inputs["prev_output_tokens"] != PAD


def rows(case: Case) -> range:
    return range(case.inputs["src_tokens"].size(0))


@translation
def test_the_encoder_gives_the_released_output(case):
    out = golden_model(case).encoder(case.inputs["src_tokens"])
    padding = case.inputs["src_tokens"] == PAD
    assert bool(out["encoder_padding_mask"]) == bool(padding.any())
    released = case.outputs["encoder_out"].transpose(0, 1)
    torch.testing.assert_close(out["encoder_out"][0].transpose(0, 1)[~padding], released[~padding], **TOLERANCE)
    assert not out["encoder_out"][0].transpose(0, 1)[padding].any()


@right_padded
@torch.no_grad()
def test_a_right_padded_batch_gives_the_released_logits_and_log_probabilities(case):
    model = golden_model(case)
    logits, extra = model(**inputs(case))
    torch.testing.assert_close(logits[real(case)], case.outputs["logits"][real(case)], **TOLERANCE)
    first = case.outputs["logits_full_T"]
    torch.testing.assert_close(logits[:, : first.size(1)], first, **TOLERANCE)
    lprobs = model.get_normalized_probs((logits, extra), log_probs=True)
    torch.testing.assert_close(lprobs[real(case)], case.outputs["lprobs"][real(case)], **TOLERANCE)


@translation
@torch.no_grad()
def test_every_sentence_of_a_batch_has_the_logits_that_the_release_gives_it_alone(case):
    model = golden_model(case)
    batch, _ = model(**inputs(case))
    for row in rows(case):
        expected = case.outputs[f"logits_alone_{row}"]
        alone, _ = model(**inputs(case, row))
        torch.testing.assert_close(alone[0], expected, **TOLERANCE)
        torch.testing.assert_close(batch[row][real(case)[row]], expected, **TOLERANCE)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src_tokens, prev_output_tokens):
        return self.model(src_tokens, None, prev_output_tokens)[0]


@pytest.mark.slow
@each("translation model", where=lambda case: "chunk" in case.name)
@torch.no_grad()
def test_a_model_that_torch_exports_gives_its_logits(case):
    model, given = Logits(golden_model(case)), inputs(case)
    arguments = given["src_tokens"], given["prev_output_tokens"]
    exported = torch.export.export(model, arguments, strict=False).module()
    torch.testing.assert_close(exported(*arguments), model(*arguments), **TOLERANCE)


@right_padded
@torch.no_grad()
def test_attention_of_the_last_layer_to_the_source_equals_the_released_one(case):
    model = golden_model(case)
    model.decoder.make_generation_fast_()
    _, extra = model(**inputs(case))
    torch.testing.assert_close(extra["attn"][0][real(case)], case.outputs["attn_last_layer"][real(case)], **TOLERANCE)


@right_padded
def test_the_loss_and_all_gradients_equal_the_released_ones(case):
    model = golden_model(case)
    logits, _ = model(**inputs(case))
    loss = cross_entropy(logits.transpose(1, 2), case.inputs["target"], ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(loss, case.outputs["loss"], atol=1e-4, rtol=1e-6)
    loss.backward()
    assert_all_gradients(case, model)


@right_padded
@torch.no_grad()
def test_decoding_without_the_decoders_truncation_gives_the_released_steps(case):
    """The released decoder does not truncate in generation, and neither does a converted model."""
    model = golden_model(case, truncated=False)
    expected = case.outputs["logits_incremental"]
    out, state = model.encoder(case.inputs["src_tokens"]), {}
    for step in range(1, expected.size(1) + 1):
        tokens = case.inputs["prev_output_tokens"][:, :step]
        logits, _ = model.decoder(tokens, encoder_out=out, incremental_state=state)
        torch.testing.assert_close(logits[:, -1], expected[:, step - 1], **TOLERANCE)


@right_padded
@pytest.mark.parametrize("beam", [1, 5])
def test_beam_search_finds_the_released_hypotheses_with_their_scores(case, beam):
    model = golden_model(case, truncated=False)
    for row, found in enumerate(search(model, inputs(case), beam)):
        for rank, hypothesis in enumerate(found):
            tokens = case.outputs[f"beam{beam}_tokens"][row, rank]
            positional = case.outputs[f"beam{beam}_positional_scores"][row, rank]
            length = int((tokens >= 0).sum())  # padded with -1
            assert hypothesis["tokens"].tolist() == tokens[:length].tolist()
            torch.testing.assert_close(hypothesis["score"], case.outputs[f"beam{beam}_scores"][row, rank], **TOLERANCE)
            torch.testing.assert_close(hypothesis["positional_scores"], positional[:length], **TOLERANCE)
