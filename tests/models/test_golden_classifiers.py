"""Released classifiers give their recorded states, features, logits, gradients and batch statistics.

Rows alone and without pads were recorded as well: they are the truth for a padded batch.
"""

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mega_fairseq.cli.convert.names import HEAD
from mega_fairseq.models import MegaClassifier
from tests.helpers.golden_cases import Case, state_dict
from tests.helpers.golden_checks import OUTPUT_TOLERANCE, assert_all_gradients, assert_outputs, each
from tests.helpers.golden_models import model as golden_model

HEAD_NAME = HEAD.rpartition(".")[2]
INPUTS = ("src_tokens", "src_lengths", "src_tokens1", "src_lengths1")

classifiers = each("classifier")
of_training = each("classifier", where=lambda case: "logits_train" in case.outputs)


def inputs(case: Case, row: Optional[int] = None) -> Dict[str, Tensor]:
    """Arguments of forward: the whole batch, or one row without its pads."""
    given = {name: case.inputs[name] for name in INPUTS if name in case.inputs}
    if row is None:
        return given
    lengths = {name: int(given[name.replace("tokens", "lengths")][row]) for name in given}
    return {name: t[row : row + 1, : lengths[name]] if t.dim() == 2 else t[row : row + 1] for name, t in given.items()}


def run(model: MegaClassifier, given: Dict[str, Tensor]) -> Tuple[Tensor, Tensor]:
    """Logits and features."""
    logits, extra = model(**given, features_only=True, classification_head_name=HEAD_NAME)
    return logits, extra["features"]


def assert_near(ours: Tensor, released: Tensor, what: str, tolerance: float) -> None:
    """Also to 1e-5 of the largest entry: states and gradients reach some tens, and were recorded in float32."""
    assert_outputs(ours, released, what, max(tolerance, 1e-5 * float(released.abs().max())))


@classifiers
@torch.no_grad()
def test_states_features_and_logits_equal_the_released_ones(case):
    model = golden_model(case)
    logits, features = run(model, inputs(case))
    assert_outputs(logits, case.outputs["logits"], "logits")
    documents = [name for name in ("sentence_rep1", "sentence_rep") if name in case.outputs]
    assert_outputs(features, torch.cat([case.outputs[name] for name in documents], 1), "features")
    for number in ("", "1")[: len(documents)]:
        tokens = case.inputs[f"src_tokens{number}"]
        encoded = model.encoder.encode(tokens, model._padding(tokens, case.inputs[f"src_lengths{number}"]))
        y = encoded.with_pads(encoded.x)
        assert_near(y, case.outputs[f"y{number}"][:, : y.size(1)], "states", OUTPUT_TOLERANCE)


@classifiers
@torch.no_grad()
def test_every_row_of_a_batch_has_the_logits_that_it_has_alone(case):
    """Deviation: rows shorter than a chunk raise an error in the release, alone or as a batch."""
    model = golden_model(case)
    batch, _ = run(model, inputs(case))
    for row in range(len(batch)):
        alone, _ = run(model, inputs(case, row))
        assert_outputs(alone, case.outputs.get(f"logits_alone_{row}", batch[row : row + 1]), f"row {row} alone")
        assert_outputs(batch[row : row + 1], alone, f"row {row}")


@classifiers
def test_the_loss_and_all_gradients_equal_the_released_ones(case):
    training = case.config["grads_in"] == "train"
    model, given = golden_model(case).train(training), inputs(case)
    for name in case.input_gradients:
        given[name] = given[name].clone().requires_grad_()
    logits, _ = run(model, given)
    loss = cross_entropy(logits, case.inputs["target"], reduction="sum")
    assert_outputs(loss, case.outputs["loss_train" if training else "loss"], "loss")
    loss.backward()
    assert_all_gradients(case, model, assert_near, **{name: given[name] for name in case.input_gradients})


@of_training
@torch.no_grad()
def test_a_training_pass_gives_the_released_logits_and_batch_statistics(case):
    model = golden_model(case).train()
    assert_outputs(run(model, inputs(case))[0], case.outputs["logits_train"], "logits")
    after = {name.partition("/")[2]: t for name, t in case.outputs.items() if name.startswith("after/")}
    buffers = dict(model.named_buffers())
    expected = state_dict(Case(**{**vars(case), "parameters": {**case.parameters, **after}}))
    for name, buffer in buffers.items():
        assert_outputs(buffer.float(), expected[name].float(), name)
