"""Modules in pieces, with carried state, give the released streams. Properties show that any pieces do."""

from tests.helpers import golden_cases as golden
from tests.helpers import golden_checks as checks
from tests.helpers.golden_checks import assert_outputs, each


def is_stream(case):
    return "y_incremental" in case.outputs


def assert_right_outputs(case, y, released):
    """Only real tokens at which the released outputs are correct are compared."""
    known = checks.right(case).unsqueeze(-1) & released.isfinite()
    assert_outputs(y[known], released[known], "y")


@each("ema", "mega", where=lambda case: "y_full" in case.outputs)
def test_a_full_pass_gives_that_of_the_stream_with_or_without_truncation(case):
    """Deviation: the release ignores truncation in streams, so its pieces differ from its full pass."""
    assert_right_outputs(case, checks.run(golden.build(case), case.inputs["x"], case.padding), case.outputs["y_full"])


@each("ema", "mega", where=is_stream)
def test_a_stream_gives_the_released_outputs_and_states_except_for_decay_at_trailing_pads(case):
    """Deviation: pads decay the released state; ours is unchanged by pads, alone and in a batch."""
    module, x, padding = golden.build(case, truncation=None), case.inputs["x"], case.padding
    within = case.kind == "mega"
    decay = (module.ema if within else module).coefficients().log_decay[0].detach().exp()
    bounds = checks.pieces(x.size(1), case.segments)
    y, states = checks.in_pieces(module, x, padding, case.segments)
    assert_right_outputs(case, y, case.outputs["y_incremental"])
    numbers = {f"ema_state_{i}" if within else f"state_{i}": i for i in range(len(bounds))}
    for name, i in {**numbers, "final_ema_state": len(bounds) - 1}.items():
        if name in case.outputs:
            pads = checks.trailing_pads(None if padding is None else padding[:, : bounds[i][1]], x)
            assert_outputs((states[i].ema if within else states[i]) * decay**pads, case.outputs[name], name)
    if padding is None and "final_prev_key" in case.outputs:
        assert_outputs(states[-1].cache.keys, case.outputs["final_prev_key"], "final_prev_key")
        assert_outputs(states[-1].cache.values, case.outputs["final_prev_value"], "final_prev_value")


# -------------------------------------------------------------------------------------- cross attention


@each("cross", where=is_stream)
def test_single_tokens_of_a_target_give_the_released_cross_attention(case):
    module, query, rows = golden.build(case), case.inputs["query"], ~checks.wrong_rows(case)
    state = module.project_source(case.inputs["key"], case.padding)
    y, _ = checks.in_pieces(lambda x, state, _: module(x, state=state), query, None, case.segments, state)
    assert_outputs(y[rows], case.outputs["y_incremental"][rows], "y")


@each("cross", where=lambda case: "final_prev_key" in case.outputs)
def test_the_projected_source_equals_the_released_one_at_real_tokens(case):
    state = golden.build(case).project_source(case.inputs["key"], case.padding)
    ours = case.real if state.padding is None else ~state.padding  # ours moves real tokens to the front
    released = case.outputs["final_prev_key"], case.outputs["final_prev_value"]
    assert_outputs(state.keys[ours], released[0][case.real], "final_prev_key")
    assert_outputs(state.values[ours], released[1][case.real], "final_prev_value")
