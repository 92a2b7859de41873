"""The mixers other than Mega equal their reference: outputs, pieces with carried states, every gradient, masks.

The reference is in double precision. Differences in single precision are those of the reference itself.
"""

import pytest
import torch

from mega_fairseq.ops.sparse import visible_places
from tests.helpers import golden_cases as golden
from tests.helpers import golden_checks as checks
from tests.helpers.golden_checks import assert_outputs, each

EXACT = 1e-10
SINGLE, SINGLE_GRADIENT, LARGE_GRADIENT = 3e-5, 2e-4, 2e-3
PRECISIONS = pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["double", "single"])


def built(case, precision):
    return golden.build(case).to(precision), case.inputs["x"].to(precision, copy=True)


def gradient_tolerance(case, precision):
    if precision == torch.float64:
        return EXACT
    return LARGE_GRADIENT if "hugekeys" in case.name or case.config["mixer"] == "megalodon" else SINGLE_GRADIENT


@PRECISIONS
@each("mixer", "block")
def test_a_mixer_gives_the_outputs_and_zeros_at_pads(case, precision):
    module, x = built(case, precision)
    y = checks.run(module, x, case.padding)
    assert_outputs(y.double(), case.outputs["y"], "y", EXACT if precision == torch.float64 else SINGLE)
    assert not y[~case.real].any()


@each("mixer", "block", where=lambda case: case.causal)
def test_the_recorded_pieces_give_the_outputs_and_states(case):
    module, x = built(case, torch.float64)
    y, states = checks.in_pieces(module, x, case.padding, case.segments)
    assert_outputs(y, case.outputs["y_incremental"], "y", EXACT)
    last = states[-1].mixer if case.kind == "block" or case.config.get("token_shift") else states[-1]
    if "state_memory" in case.outputs:
        assert_outputs(last.memory, case.outputs["state_memory"], "memory", EXACT)
        assert last.finished.tolist() == case.outputs["state_finished"].tolist()
    if "state_cema" in case.outputs:
        pieces = {"state1": states[0], "state2": states[1]} if case.config["segments"] else {}
        for name, state in {**pieces, "state": last}.items():
            parts = {"cema": state.ema, "count": state.norm.count, "mean": state.norm.mean, "var": state.norm.var}
            for part, ours in {**parts, "open": torch.as_tensor(state.cache.place).flatten()}.items():
                expected = case.outputs[f"{name}_{part}"].double()
                assert_outputs(ours.double().expand_as(expected), expected, f"{name}_{part}", EXACT)


@PRECISIONS
@each("mixer", "block")
def test_a_mixer_gives_every_gradient(case, precision):
    module, x = built(case, precision)
    x.requires_grad_()
    (checks.run(module, x, case.padding) * case.inputs["cotangent"].to(precision)).sum().backward()
    ours = {**{name: p.grad for name, p in module.named_parameters()}, "x": x.grad}
    for name, expected in {**golden.released_gradients(case), **case.input_gradients}.items():
        assert_outputs(ours[name].double(), expected, f"gradient of {name}", gradient_tolerance(case, precision))


@each("mixer", where=lambda case: "mask" in case.outputs)
def test_sparse_attention_sees_the_places_of_the_reference(case):
    sparsity, mask = golden.build(case).config.sparsity, case.outputs["mask"]
    assert torch.equal(visible_places(sparsity, *mask.shape[:2]), mask)
