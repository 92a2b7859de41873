"""Released language models give their recorded scores, carried states, losses and gradients.

The release truncates the EMA in a full pass, but not when evaluating in pieces. Both are recorded: ours gives the first
with that truncation and the second without.
"""

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch import Tensor

from mega_fairseq.criterions.mega_lm_cross_entropy import MegaLMCrossEntropy
from mega_fairseq.models import MegaLanguageModel
from mega_fairseq.models.decoder import STATE, DecoderState
from tests.helpers.golden_cases import Case, cases
from tests.helpers.golden_checks import assert_all_gradients, assert_outputs, each
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.golden_models import model as golden_model

language = each("language model")
# Every pair of a chunk size and a number of chunks per piece that a case was evaluated with.
each_evaluation = pytest.mark.parametrize(
    ("case", "chunk", "chunks"),
    [
        pytest.param(case, *sizes, id=f"{case.name}-chunk{sizes[0]}-nums{sizes[1]}")
        for case in cases("language model")
        for sizes in case.config["evals"]
    ],
)


def real(case: Case) -> Tensor:
    return case.inputs["target"] != PAD


def tolerance(case: Case) -> float:
    """The tolerance of the cases; log-probabilities of an adaptive softmax reach -46."""
    return 1e-4 if case.config["adaptive_softmax_cutoff"] else 1e-5


def assert_log_probs(case: Case, ours: Tensor, name: str) -> None:
    rows = slice(0, ours.size(0))
    of_targets = real(case)[rows]
    assert_outputs(ours[of_targets], case.outputs[name][rows][of_targets], name, tolerance(case))


def scores(model: MegaLanguageModel, case: Case, rows: slice = slice(None), tokens_of_a_row: int = 0) -> Tensor:
    """(B, L) log-probabilities of the targets, in pieces with this many tokens of each row, or in one piece."""
    tokens, target = case.inputs["src_tokens"][rows], case.inputs["target"][rows]
    model.decoder.cfg.piece_tokens = (tokens_of_a_row or tokens.size(1)) * tokens.size(0)
    with torch.no_grad():
        return model(tokens, target=target)[0].squeeze(-1)


def sample(case: Case) -> dict:
    net_input = {"src_tokens": case.inputs["src_tokens"]}
    return {"net_input": net_input, "target": case.inputs["target"], "ntokens": int(real(case).sum())}


class Task:
    target_dictionary = dictionary(4)


# -------------------------------------------------------------------------------------- whole sequences


@language
@torch.no_grad()
def test_a_batch_gives_the_released_scores_or_the_features_for_an_adaptive_softmax(case):
    y, _ = golden_model(case)(case.inputs["src_tokens"])
    tokens = case.inputs["src_tokens"] != PAD
    assert_outputs(y[tokens], case.outputs["logits_or_features"][tokens], "logits_or_features")


@language
def test_targets_of_a_batch_get_the_released_log_probabilities(case):
    assert_log_probs(case, scores(golden_model(case), case), "target_lprobs")


# -------------------------------------------------------------------------------------- piece by piece


@each_evaluation
def test_the_recorded_pieces_give_the_released_log_probabilities_and_the_whole_those_with_truncation(
    case, chunk, chunks
):
    """test_lm_model.py compares other pieces."""
    name = f"seq_chunk{chunk}_nums{chunks}"
    assert_log_probs(case, scores(golden_model(case, decoder_chunk_size=chunk), case), f"whole_chunk{chunk}")
    model = golden_model(case, decoder_chunk_size=chunk, truncated=False)
    assert_log_probs(case, scores(model, case, tokens_of_a_row=chunk * chunks), name)
    assert_log_probs(case, scores(model, case, slice(0, 1), tokens_of_a_row=chunk * chunks), f"{name}_row0_alone")


@each_evaluation
@torch.no_grad()
def test_final_states_equal_the_released_ones_except_for_decay_at_pads(case, chunk, chunks):
    """Deviation: the release pads a last piece longer than a chunk to whole chunks; the pads decay its state."""
    model, size = golden_model(case, decoder_chunk_size=chunk, truncated=False), chunk * chunks
    tokens = case.inputs["src_tokens"][:1]
    last = tokens.size(1) % size
    pads = -last % chunk if last > chunk else 0
    name = f"seq_chunk{chunk}_nums{chunks}_row0_alone_final"
    for number, (layer, block) in enumerate(zip(model.decoder.layers, carried(model, tokens, size).blocks)):
        decay = layer.mixer.ema.coefficients().log_decay[0].exp()
        released = {what: case.outputs.get(f"{name}.layer{number}.{what}") for what in ("prev_key", "prev_value")}
        assert_outputs(block.mixer.ema * decay**pads, case.outputs[f"{name}.layer{number}.ema_state"], "ema_state")
        if pads == 0:
            assert_outputs(block.mixer.cache.keys, released["prev_key"], "prev_key")
            assert_outputs(block.mixer.cache.values, released["prev_value"], "prev_value")
        else:
            assert released == {"prev_key": None, "prev_value": None}  # the release considers its chunk complete


def carried(model: MegaLanguageModel, tokens: Tensor, size: int) -> DecoderState:
    """State of the decoder after these tokens, in pieces of this size."""
    state = {}
    for stop in range(size, tokens.size(1) + size, size):
        model.decoder.extract_features(tokens[:, :stop], incremental_state=state)
    return model.decoder.get_incremental_state(state, STATE)


# -------------------------------------------------------------------------------------- training


def untrained(case: Case) -> Tensor:
    """Deviation: (B, L) bool, targets that fairseq's adaptive_loss ignores within their cluster.

    It ignores the index of the pad, 1, even in clusters, where targets are counted from the start of the cluster.
    """
    target, ends = case.inputs["target"], (case.config["adaptive_softmax_cutoff"] or "").split(",")
    return torch.isin(target, torch.tensor([int(end) + 1 for end in ends if end]))


@language
def test_the_loss_and_all_gradients_equal_the_released_ones(case):
    """In double precision, as in `assert_released_gradients`."""
    model = golden_model(case).double().train()  # dropout is 0
    criterion = AdaptiveLoss if case.config["adaptive_softmax_cutoff"] else MegaLMCrossEntropy
    loss, size, _ = criterion(Task, sentence_avg=False)(model, sample(case))
    assert size == int(real(case).sum())
    torch.testing.assert_close(loss.squeeze(), case.outputs["loss"].to(loss.dtype), atol=1e-4, rtol=1e-6)
    loss.backward()
    assert_all_gradients(case, model)


@language
def test_the_loss_counts_every_target(case):
    loss, _, _ = MegaLMCrossEntropy(Task, sentence_avg=False)(golden_model(case), sample(case))
    total = -case.outputs["target_lprobs"][real(case)].double().sum()
    torch.testing.assert_close(loss.double(), total, atol=1e-3, rtol=0)
    assert untrained(case).any() == bool(case.config["adaptive_softmax_cutoff"])
    assert (loss - case.outputs["loss"] > 1.0) == untrained(case).any()
