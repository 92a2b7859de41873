"""The EMA sub-layer equals the released one in kernels, coefficients, final states and every gradient.

The release also computes outputs at pads, and its losses contain them. `released_ema` builds this from our operators,
so that complete gradients can be compared. Our sub-layer has zeros at pads.
"""

import torch
import torch.nn.functional as F

from mega_fairseq.ops.ema import ema
from mega_fairseq.ops.ema.windows import ema_kernel
from tests.helpers import golden_cases as golden
from tests.helpers import golden_checks as checks
from tests.helpers.golden_checks import assert_outputs, assert_released_gradients, each


def is_extreme(case):
    """Whether released outputs are not finite because a decay underflows."""
    return "y" in case.outputs and case.causal and not case.outputs["y"].isfinite().all()


def released_ema(case, module, x):
    """silu(EMA(x without its pads) + omega x), also at pads."""
    entering = x.masked_fill(~case.real.unsqueeze(-1), 0.0)
    y, _ = ema(entering, module.coefficients(), truncation=module.truncation)
    return F.silu(y + module.omega * x)


@each("ema", where=checks.released_gradients_are_right)
def test_ema_gives_every_released_gradient(case):
    def loss(module, x):
        with torch.no_grad():  # the release caches its kernel here, without gradients
            module(x, padding_mask=case.padding)
        return (released_ema(case, module, x) * case.inputs["cotangent"]).sum()

    assert_released_gradients(case, loss)


@each("ema", where=lambda case: "kernel" in case.outputs)
def test_kernels_of_both_directions_equal_the_released_taps(case):
    module, released = golden.build(case), case.outputs["kernel"]
    ours = ema_kernel(module.coefficients(), released.size(1)).flatten(0, 1)
    known = released.isfinite()
    assert_outputs(ours[known], released[known], "kernel")
    assert ours.isfinite().all()


@each("ema", where=lambda case: {"p", "q"} <= set(case.outputs))
def test_coefficients_equal_the_released_input_weights_and_decays(case):
    module = golden.build(case)
    c = module.coefficients()
    assert_outputs(c.log_decay.exp().flatten(0, 1), case.outputs["q"].squeeze(-1), "q")
    assert_outputs(c.expand.flatten(0, 1), (case.outputs["p"] * case.parameters["beta"]).squeeze(-1), "p beta")


@each("ema", where=lambda case: "step_raw" in case.outputs)
def test_the_ema_before_skip_and_activation_equals_the_released_one_with_its_final_state(case):
    module, x = (
        golden.build(case, truncation=None),
        case.inputs["x"].masked_fill(~case.real.unsqueeze(-1), 0.0),
    )
    y, state = ema(x, module.coefficients())
    assert_outputs(y, case.outputs["step_raw"], "step_raw")
    assert_outputs(state, case.outputs["step_raw_final_state"], "step_raw_final_state")


@each("ema", where=is_extreme)
def test_extreme_coefficients_give_the_released_recurrence_where_the_released_kernel_is_nan(case):
    """Deviation: from alpha = delta = 17 on the released kernel is NaN; its one-step form is finite."""
    module, x = golden.build(case, truncation=None), case.inputs["x"]
    y, state = ema(x, module.coefficients())
    for name, ours in {"onestep_ema": y, "step_ema": y, "onestep_h": state, "step_h": state}.items():
        if name in case.outputs:
            known = case.outputs[name].isfinite()
            assert_outputs(ours[known], case.outputs[name][known], name)
            assert ours.isfinite().all()
