"""Full passes of every module equal the released ones: outputs to 1e-5, every gradient to 1e-4, absolute.

EMA cases are in test_golden_ema.py, streams (carried states) in test_golden_streams.py. Where the release is wrong,
test_golden_deviations.py asserts the right values (docs/paper-deviations.md).
"""

import re
import warnings

import pytest
import torch

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import attention, bias_matrix, laplace, relu2
from mega_fairseq.ops.gating import activated_linear
from tests import golden_cases as golden
from tests import golden_checks as checks
from tests.golden_checks import assert_batch_statistics, assert_outputs, assert_released_gradients, each

# Outputs that tests compare, by kind of case (* = a number) ...
TRAINED = {"y_train", "running_mean_after", "running_var_after"}
TRAINED |= {"running_mean_after_train_step", "running_var_after_train_step"}
PREVIOUS = {"final_prev_key", "final_prev_value"}
COMPARED = {
    "cross": {"y", "y_incremental", "attn_weights", "attn_weights_incremental"} | PREVIOUS,
    "ema": {"y", "y_full", "y_incremental", "kernel", "p", "q", "state_*", "step_raw", "step_raw_final_state"}
    | {"step_ema", "step_h", "onestep_ema", "onestep_h"},
    "mega": {"y", "y_full", "y_incremental", "attn_weights", "rel_pos_bias", "ema_out"}
    | {"ema_state_*", "final_ema_state"}
    | PREVIOUS
    | TRAINED,
    "nffn": {"y"} | TRAINED,
    "relbias": {"len*"},
    "seqnorm": {"y"} | TRAINED,
    # in test_golden_language.py
    "language model": {"logits_or_features", "target_lprobs", "target_lprobs_row*_alone", "whole_chunk*"}
    | {"seq_chunk*_nums*", "seq_chunk*_nums*_row*_alone"}
    | {f"seq_chunk*_nums*_row*_alone_final.layer*.{what}" for what in ("ema_state", "prev_key", "prev_value")},
    # in test_golden_models.py
    "translation model": {"encoder_out", "encoder_padding_mask", "attn_last_layer", "lprobs"}
    | {"logits", "logits_alone_*", "logits_full_T", "logits_incremental"}
    | {f"beam{beam}_{what}" for beam in (1, 5) for what in ("tokens", "scores", "positional_scores")},
}
# ... and those derived from them: sums of outputs, and differences within the release.
DERIVED = {"loss", "max_abs_diff", "max_abs_diff_full_vs_incremental"}
DERIVED |= {"maxdiff_alone_vs_batch_*", "maxdiff_incremental", "seq_chunk*_nums*_maxdiff_vs_whole"}


def test_the_golden_folders_contain_cases():
    assert golden.paths(), f"no .npz file in tests/golden or in the folders that {golden.VARIABLE} names"


@pytest.mark.parametrize("path", golden.paths(), ids=lambda path: path.stem)
def test_every_case_is_of_a_known_kind(path):
    kind = golden.kind_of(path)
    assert kind is not None, f"no loader for golden case {path}: no prefix of {', '.join(golden.KINDS)} fits"
    outputs = golden.load(path).outputs
    names = {re.sub(r"(?<!beam)\d+", "*", name) for name in outputs}
    unknown = names - DERIVED - COMPARED.get(kind, names)
    if unknown:
        warnings.warn(f"{path.stem}: no test compares {', '.join(sorted(unknown))}", stacklevel=1)


@pytest.mark.parametrize("name", ["megalodon_full", "gau_softmax", "emas", "activation"])
def test_a_file_with_an_unknown_prefix_has_no_kind(name, tmp_path):
    assert golden.kind_of(tmp_path / f"{name}.npz") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mega_lm_ce", "language model"), ("mega_model_pre", "translation model"), ("mega_softmax", "mega")],
)
def test_the_longest_matching_prefix_gives_the_kind(name, kind, tmp_path):
    assert golden.kind_of(tmp_path / f"{name}.npz") == kind


# -------------------------------------------------------------------------------------- small modules


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
        assert_outputs(bias_matrix(module(1 - size, size, released.device), size, size), released, name)


@each("seqnorm", "nffn")
def test_norms_and_feed_forward_give_the_released_outputs(case):
    assert_outputs(golden.build(case)(case.inputs["x"]), case.outputs["y"], "y")


@each("seqnorm", "nffn", where=lambda case: "y_train" in case.outputs)
def test_norms_and_feed_forward_give_the_released_training_outputs_and_statistics(case):
    module = golden.build(case).train()
    assert_outputs(module(case.inputs["x"]), case.outputs["y_train"], "y_train")
    assert_batch_statistics(case, module)


@each("seqnorm", "nffn", where=lambda case: "cotangent" in case.inputs)
def test_norms_and_feed_forward_give_every_released_gradient(case):
    assert_released_gradients(
        case, lambda module, x: (module.train(case.gradients_of_training)(x) * case.inputs["cotangent"]).sum()
    )


# -------------------------------------------------------------------------------------- gated attention


@each("mega", where=lambda case: "y" in case.outputs)
def test_gated_attention_gives_the_released_outputs_at_real_tokens_and_zeros_at_pads(case):
    y, right = checks.run(golden.build(case), case.inputs["x"], case.padding), checks.right(case)
    assert_outputs(y[right], case.outputs["y"][right], "y")
    assert y.isfinite().all()
    assert not y[~case.real].any()


@each("mega", where=lambda case: "y_train" in case.outputs and not checks.pads_in_batch_statistics(case))
def test_batch_norm_gives_the_released_training_outputs_and_statistics(case):
    module = golden.build(case).train()
    assert_outputs(checks.run(module, case.inputs["x"], case.padding), case.outputs["y_train"], "y_train")
    assert_batch_statistics(case, module)


@each("mega", where=checks.released_gradients_are_right)
def test_gated_attention_gives_every_released_gradient(case):
    def loss(module, x):
        y = checks.run(module.train(case.gradients_of_training), x, case.padding)
        return (y * case.inputs["cotangent"]).sum()

    assert_released_gradients(case, loss)


@each("mega", where=lambda case: "ema_out" in case.outputs)
def test_the_ema_inside_gated_attention_gives_the_released_outputs(case):
    module, x = golden.build(case), case.inputs["x"]
    y = checks.run(module.ema, module.norm(x) if module.config.prenorm else x, case.padding)
    assert_outputs(y[case.real], case.outputs["ema_out"][case.real], "ema_out")


@each("mega", where=lambda case: "rel_pos_bias" in case.outputs)
def test_the_position_bias_inside_gated_attention_equals_the_released_matrix(case):
    released = case.outputs["rel_pos_bias"]
    size = released.size(-1)
    bias = golden.build(case).position_bias(1 - size, size, released.device)
    assert_outputs(bias_matrix(bias, size, size), released, "rel_pos_bias")


@each("mega", where=lambda case: "attn_weights" in case.outputs and not checks.wrong_rows(case).any())
def test_attention_weights_equal_the_released_ones(case):
    released = case.outputs["attn_weights"]  # (B, K, c, c)
    size = released.size(-1)
    module, x = golden.build(case), case.inputs["x"]
    x = checks.run(module.ema, module.norm(x) if module.config.prenorm else x, case.padding)
    shared = activated_linear(x, module.shared.weight, module.shared.bias)
    q, k = ((shared * module.kappa[i] + module.mu[i]).reshape(-1, size, shared.size(-1)) for i in (0, 1))
    bias = module.position_bias(1 - size, size, x.device)
    pads = None if case.padding is None else case.padding.reshape(-1, size)
    identity = torch.eye(size).expand(q.size(0), -1, -1)  # as values, so that the output is the weights
    weights = attention(q, k, identity, module.config.attention, case.causal, bias, key_padding=pads)
    real = case.real.reshape(-1, size)
    assert_outputs(weights[real], released.flatten(0, 1)[real], "attn_weights")


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


@each("cross", where=lambda case: "attn_weights" in case.outputs)
def test_cross_attention_weights_equal_the_released_ones(case):
    module, rows = golden.build(case), ~checks.wrong_rows(case)
    state = module.project_source(case.inputs["key"], case.padding)
    weights = checks.cross_weights(module, case.inputs["query"], state.keys, state.padding)[rows]
    for name in ("attn_weights", "attn_weights_incremental"):
        if name in case.outputs:
            assert_outputs(weights, case.outputs[name][rows], name)
