"""Full passes of every module equal the released ones: outputs to 1e-5, every gradient to 1e-4, absolute.

Kernels and gradients of EMA cases are in test_golden_ema.py, streams (carried states) in test_golden_streams.py. Where
the release is wrong (docs/paper-deviations.md), its outputs without pads are right, and tests/properties shows that
pads change nothing.
"""

from mega_fairseq.modules import CrossAttentionState
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention.scores import laplace, relu2
from mega_fairseq.ops.diagonals import toeplitz_matrix
from tests.helpers import golden_cases as golden
from tests.helpers import golden_checks as checks
from tests.helpers.golden_checks import assert_batch_statistics, assert_outputs, assert_released_gradients, each


def test_there_are_golden_cases_all_of_known_kinds():
    assert golden.paths(), f"no .npz file in tests/golden or in the folders that {golden.VARIABLE} names"
    unknown = [path for path in golden.paths() if golden.kind_of(path) is None]
    assert not unknown, f"no prefix of {', '.join(golden.KINDS)} fits {unknown}"


# -------------------------------------------------------------------------------------- functions


@each("activations")
def test_activations_give_the_released_values(case):
    functions = {"laplace": laplace, "relu2": relu2, **{name: a.forward for name, a in ACTIVATIONS.items()}}
    for name, released in case.outputs.items():
        assert_outputs(functions[name](case.inputs["x"]), released, name)


@each("relbias")
def test_position_biases_give_the_released_tables_at_every_length(case):
    module = golden.build(case)
    for name, released in case.outputs.items():
        size = int(name[len("len") :])
        assert_outputs(toeplitz_matrix(module(1 - size, size, released.device), size, size), released, name)


# -------------------------------------------------------------------------------------- one input


def trained(case):
    return "y_train" in case.outputs and not checks.pads_in_batch_statistics(case)


@each("ema", "mega", "nffn", "seqnorm", where=lambda case: "y" in case.outputs)
def test_every_module_gives_the_released_outputs_at_real_tokens_and_zeros_at_pads(case):
    module = golden.build(case)
    y, released = checks.run(module, case.inputs["x"], case.padding), checks.released_outputs(case, module)
    known = checks.right(case).unsqueeze(-1) & released.isfinite()
    assert_outputs(y[known], released[known], "y")
    assert y.isfinite().all()
    assert not y[~case.real].any()


@each("mega", "nffn", "seqnorm", where=trained)
def test_batch_norm_gives_the_released_training_outputs_and_statistics(case):
    module = golden.build(case).train()
    assert_outputs(checks.run(module, case.inputs["x"], case.padding), case.outputs["y_train"], "y_train")
    assert_batch_statistics(case, module)


@each("mega", "nffn", "seqnorm", where=checks.released_gradients_are_right)
def test_every_module_gives_every_released_gradient(case):
    def loss(module, x):
        y = checks.run(module.train(case.gradients_of_training), x, case.padding)
        return (y * case.inputs["cotangent"]).sum()

    assert_released_gradients(case, loss)


# -------------------------------------------------------------------------------------- cross attention


@each("cross", where=lambda case: "y" in case.outputs)
def test_cross_attention_gives_the_released_outputs(case):
    y, _ = golden.build(case)(case.inputs["query"], case.inputs["key"], source_padding_mask=case.padding)
    rows = ~checks.wrong_rows(case)
    assert_outputs(y[rows], case.outputs["y"][rows], "y")
    assert y.isfinite().all()


@each("cross", where=checks.released_gradients_are_right)
def test_cross_attention_gives_every_released_gradient(case):
    def loss(module, query, key):
        y, _ = module(query, key, source_padding_mask=case.padding)
        return (y * case.inputs["cotangent"]).sum()

    assert_released_gradients(case, loss)


@each("cross", where=lambda case: case.padding is not None)
def test_cross_attention_that_counts_pads_as_positions_equals_the_released_one(case):
    """Deviation: this is the only reason why released left-padded cases differ, in values and gradients."""

    def output(module, query, key, **options):
        projected = module.project_source(key)
        state = CrossAttentionState(projected.keys, projected.values, case.padding, 0)
        return module(query, None, state, **options)

    def loss(module, query, key):
        return (output(module, query, key)[0] * case.inputs["cotangent"]).sum()

    y, _, weights = output(golden.build(case), case.inputs["query"], case.inputs["key"], need_weights=True)
    assert_outputs(y, case.outputs["y"], "y")
    assert_outputs(weights, case.outputs["attn_weights"], "attn_weights")
    assert_released_gradients(case, loss)


@each("cross", where=lambda case: "attn_weights" in case.outputs)
def test_cross_attention_weights_equal_the_released_ones(case):
    module, rows = golden.build(case), ~checks.wrong_rows(case)
    state = module.project_source(case.inputs["key"], case.padding)
    weights = module(case.inputs["query"], None, state, need_weights=True)[2][rows]
    for name in ("attn_weights", "attn_weights_incremental"):
        if name in case.outputs:
            assert_outputs(weights, case.outputs[name][rows], name)
