"""The language model gives the same scores in pieces and steps, and computes only the scores it needs."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.sequence_scorer import SequenceScorer

from mega_fairseq.criterions import MegaLMCrossEntropy
from mega_fairseq.models.adaptive import adaptive_log_probs
from mega_fairseq.ops import log_probs as ops
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.small_models import ADAPTIVE, CHUNK, HEADS, TIED, TYPES, padded, texts
from tests.helpers.small_models import language_model as model
from tests.ops.helpers import Recorder, assert_close, assert_same, noise, with_gradients

CLOSE = {"atol": 1e-5, "rtol": 0}
MEGALODON = {"token_mixer": "megalodon"}  # its norms carry a state, also that after the last layer


def pieces(made, tokens):
    made.decoder.cfg.piece_tokens = tokens
    return made


# ------------------------------------------------------------------------------------------------ pieces


@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        *((options, CHUNK) for options in ({}, ADAPTIVE, MEGALODON)),
        *(({"rel_pos_bias": bias}, -1) for bias in ("simple", "rope")),
    ],
    ids=str,
)
@torch.no_grad()
def test_log_probs_are_batch_independent_and_equal_in_pieces_of_any_length(options, chunk):
    made, (sources, targets) = model(decoder_chunk_size=chunk, **options), texts(13, 7, 1)
    whole = pieces(made, 10**6)
    expected = [whole(s[None], target=t[None])[0].flatten() for s, t in zip(sources, targets)]
    for length in (1, 3, 7, CHUNK - 1, CHUNK, CHUNK + 1, 1000):
        for left in (False, True):
            source, target = padded(sources, left), padded(targets, left)
            pieces(made, length * len(sources))
            found = made(source, target=target)[0].squeeze(-1)
            for row, real, alone in zip(found, target != PAD, expected):
                torch.testing.assert_close(row[real], alone, **CLOSE)


def test_pieces_are_whole_chunks_if_at_least_one_fits():
    decoder = pieces(model(), 64).decoder
    assert [decoder.piece_length(batch) for batch in (1, 4, 12, 13, 64, 100)] == [60, 15, 5, 4, 1, 1]
    assert pieces(model(decoder_chunk_size=-1), 64).decoder.piece_length(4) == 16


@pytest.mark.parametrize("head", HEADS)
def test_training_and_evaluation_give_the_same_log_probs(head):
    made, (sources, targets) = model(**HEADS[head]), texts(23, 9, 14)
    source, target = padded(sources, False), padded(targets, False)
    with torch.no_grad():
        evaluated = pieces(made, 12)(source, target=target)[0]
    trained = made.train()(source, target=target)[0]
    torch.testing.assert_close(trained, evaluated, **CLOSE)
    scores = made.eval().get_normalized_probs((made(source)[0], None), log_probs=True)  # fairseq allows None there
    gathered = scores.gather(-1, target.unsqueeze(-1))
    torch.testing.assert_close(gathered[target != PAD], trained[target != PAD], **CLOSE)


@pytest.mark.parametrize("head", HEADS)
def test_losses_and_gradients_are_batch_independent(head):
    made, (sources, targets) = model(**HEADS[head]).train(), texts(23, 9, 14)
    criterion = MegaLMCrossEntropy(Namespace(target_dictionary=dictionary(TYPES)), sentence_avg=False)

    def run(batches):
        made.zero_grad()
        total = 0.0
        for source, target in batches:
            batch = {"net_input": {"src_tokens": source}, "target": target, "ntokens": int((target != PAD).sum())}
            loss, size, logged = criterion(made, batch)
            loss.backward()
            total += loss.item()
            assert size == logged["ntokens"] == batch["ntokens"]
            assert logged["loss"] == loss
        return total, {name: parameter.grad.clone() for name, parameter in made.named_parameters()}

    loss, alone = run([(s[None], t[None]) for s, t in zip(sources, targets)])
    for left in (False, True):
        same, together = run([(padded(sources, left), padded(targets, left))])
        assert same == pytest.approx(loss, rel=1e-6)
        for name, gradient in together.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(gradient, alone[name], atol=2e-4, rtol=1e-3)


# ------------------------------------------------------------------------------------------------ log-probabilities


def naive_adaptive(softmax, x):
    """Features (T, D) -> log-probabilities of all types (T, V), by the definition."""
    head, first = F.log_softmax(softmax.head(x), -1), softmax.cutoff[0]
    tails = [head[:, first + i, None] + F.log_softmax(tail(x), -1) for i, tail in enumerate(softmax.tail)]
    return torch.cat([head[:, :first], *tails], 1)


@pytest.mark.parametrize("options", [ADAPTIVE, TIED, {**TIED, "tie_adaptive_proj": True}])
@pytest.mark.parametrize("types", [(0, 40), (0, 10), (20, 40), (9, 11)], ids=str)
def test_an_adaptive_softmax_gives_the_log_probs_of_its_definition(options, types):
    """Also if one cluster has no targets or all of them."""
    softmax, targets = model(**options).double().decoder.adaptive_softmax, torch.randint(*types, (31,))
    given = {"x": noise(31, 16, grad=True), **dict(softmax.named_parameters())}
    torch.testing.assert_close(naive_adaptive(softmax, given["x"]).exp().sum(1), torch.ones(31).double())
    truth = with_gradients(lambda x, **_: naive_adaptive(softmax, x).gather(1, targets[:, None])[:, 0], given)
    assert_same(with_gradients(lambda x, **_: adaptive_log_probs(softmax, x, targets), given), truth)
    with torch.no_grad():
        assert_close(adaptive_log_probs(softmax, given["x"], targets), truth["output 0"])


def test_dropout_in_slices_is_the_same_in_the_backward_pass(monkeypatch):
    monkeypatch.setattr(ops, "SCORES", 1)
    softmax = model(**ADAPTIVE, adaptive_softmax_dropout=0.5).decoder.adaptive_softmax.double().train()
    x, targets = torch.randn(3, 16, dtype=torch.double, requires_grad=True), torch.tensor([4, 15, 30])

    def log_probs(x):
        torch.manual_seed(3)
        return adaptive_log_probs(softmax, x, targets)

    assert not torch.equal(log_probs(x), adaptive_log_probs(softmax, x, targets))
    assert torch.autograd.gradcheck(log_probs, x)


@pytest.mark.parametrize(
    "options", [*HEADS.values(), TIED, {**TIED, "tie_adaptive_proj": True}, {"decoder_input_dim": 8}]
)
def test_every_parameter_has_a_gradient_in_a_batch_of_only_frequent_types(options):
    made = model(**options).train()
    tokens = torch.randint(4, 10, (2, 11))
    made(tokens, target=tokens)[0].sum().backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("options", [ADAPTIVE, TIED])
def test_a_new_model_has_no_uninitialised_buffer(options, monkeypatch):
    """fairseq leaves a buffer of its tied head uninitialised, and a checkpoint could hold NaN."""
    monkeypatch.setattr(torch, "FloatTensor", lambda *shape: torch.full(shape, torch.nan))
    state = model(**options).state_dict()
    assert [name for name, tensor in state.items() if not tensor.isfinite().all()] == []


# ------------------------------------------------------------------------------------------------ fairseq's scorers


def sample(lengths, for_scoring, types=TYPES):
    """A batch as tasks make it; for scoring, our task passes the targets to the model, other tasks do not."""
    sources, targets = (padded(rows, False) for rows in texts(*lengths, types=types))
    net_input = {"src_tokens": sources, "src_lengths": torch.tensor(lengths)}
    if for_scoring:
        net_input["target"] = targets
    return {"net_input": net_input, "target": targets, "ntokens": sum(lengths)}


def log_probs_of_a_scorer(made, batch, softmax_batch, models=1):
    found = SequenceScorer(made.decoder.dictionary, softmax_batch).generate([made] * models, batch)
    return [hypotheses[0]["positional_scores"] for hypotheses in found]


@pytest.mark.parametrize("options", [*HEADS.values(), TIED])
@pytest.mark.parametrize("for_scoring", [True, False])
@pytest.mark.parametrize("softmax_batch", [None, 7])
@torch.no_grad()
def test_fairseqs_scorer_gets_the_log_probs_that_fairseqs_modules_compute_for_targets(
    options, for_scoring, softmax_batch
):
    made, lengths = model(**options), (23, 9, 14)
    batch = sample(lengths, for_scoring)
    features, _ = made.decoder.extract_features(batch["net_input"]["src_tokens"])
    softmax = made.decoder.adaptive_softmax
    if softmax is not None:
        every = softmax.get_log_prob(features, None)
    else:
        every = F.log_softmax(made.decoder.output_layer(features), -1)
    at_targets = every.gather(-1, batch["target"].unsqueeze(-1)).squeeze(-1)
    for models in (1, 2):  # an ensemble averages probabilities, one model returns log-probabilities
        found = log_probs_of_a_scorer(made, batch, softmax_batch, models)
        for row, length, scores in zip(at_targets, lengths, found):
            torch.testing.assert_close(scores, row[:length], **CLOSE)


BIG, LENGTHS = 30_000, (300, 200)


@pytest.fixture(scope="module", params=["softmax", "adaptive"])
def big(request):
    adaptive = {"adaptive_softmax_cutoff": "1000,5000", "adaptive_softmax_factor": 2.0}
    return model(types=BIG, **{"softmax": HEADS["softmax"], "adaptive": adaptive}[request.param])


@pytest.mark.parametrize("softmax_batch", [None, 100])
@torch.no_grad()
def test_scoring_does_not_allocate_scores_for_all_tokens_and_types(big, softmax_batch):
    """With an adaptive softmax also in fairseq's own task, which does not pass the targets to the model."""
    for for_scoring in [True] if big.decoder.adaptive_softmax is None else [True, False]:
        with Recorder() as recorder:
            log_probs_of_a_scorer(big, sample(LENGTHS, for_scoring, BIG), softmax_batch)
        assert recorder.largest <= ops.SCORES < sum(LENGTHS) * BIG


def test_training_does_not_allocate_scores_for_all_tokens_and_types(big):
    criterion = MegaLMCrossEntropy(Namespace(target_dictionary=big.decoder.dictionary), sentence_avg=False)
    with Recorder() as recorder:
        criterion(big.train(), sample(LENGTHS, True, BIG))[0].backward()
    assert recorder.largest <= ops.SCORES < sum(LENGTHS) * BIG


def test_scores_for_all_tokens_and_types_would_be_detected(big):
    with Recorder() as recorder, torch.no_grad():
        tokens = sample(LENGTHS, True, BIG)["net_input"]["src_tokens"]
        big.eval().get_normalized_probs(big(tokens), log_probs=True)
    assert recorder.largest >= tokens.numel() * BIG


# ------------------------------------------------------------------------------------------------ token by token


ORDERS = [[0, 1, 2, 3], [0, 0, 1, 3], [3, 2, 1, 0], [1, 1, 1, 2]] * 3
ORDERS += [[0, 2, 3], [2, 0, 1], [2, 0], [1, 0], [1]]  # without rows that are finished


@pytest.mark.parametrize(
    ("options", "chunk"),
    [*((options, CHUNK) for options in (*HEADS.values(), TIED, MEGALODON)), (HEADS["softmax"], -1), (MEGALODON, -1)],
    ids=str,
)
@torch.no_grad()
def test_log_probs_token_by_token_equal_those_of_a_full_pass_in_any_order_of_rows(options, chunk):
    tokens = torch.randint(4, TYPES, (4, len(ORDERS)), generator=torch.Generator().manual_seed(4))
    made, state, history = model(decoder_chunk_size=chunk, **options), {}, tokens[:, :0]
    for step, order in enumerate(ORDERS):
        history = torch.cat([history, tokens[: history.size(0), step : step + 1]], 1)
        token = made.get_normalized_probs(made.decoder(history, incremental_state=state), log_probs=True)
        whole = made.get_normalized_probs(made.decoder(history), log_probs=True)
        torch.testing.assert_close(token[:, -1], whole[:, -1], **CLOSE)
        made.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
        history = history[order]


# ------------------------------------------------------------------------------------------------ other chunks


@pytest.mark.parametrize("chunk", [CHUNK + 1, -1, 0])
def test_a_simple_bias_refuses_chunks_longer_than_in_training(chunk):
    with pytest.raises(ValueError, match=f"--decoder-chunk-size is {chunk} .* reaches 5 tokens") as caught:
        model(rel_pos_bias="simple").decoder.set_chunk_size(chunk)
    assert "\n" not in str(caught.value)


def test_a_simple_bias_without_chunks_takes_any_chunk_and_none_again():
    made, tokens = model(rel_pos_bias="simple", decoder_chunk_size=-1, max_target_positions=9), texts(9)[0][0][None]
    before = made(tokens)[0]
    for chunk in (4, -1):
        made.decoder.set_chunk_size(chunk)
    torch.testing.assert_close(made(tokens)[0], before, rtol=0, atol=0)


def test_a_decoder_may_have_another_truncation_than_all_stacks():
    """As with --model-overrides, when the checkpoint has the other one."""
    whole, shorter = (model(truncation_length=2, decoder_truncation_length=taps) for taps in (0, 1))
    assert whole.decoder.layers[0].mixer.ema.truncation is None
    assert shorter.decoder.layers[0].mixer.ema.truncation == 1


def test_only_a_simple_bias_without_chunks_limits_the_length_of_a_text():
    assert model(rel_pos_bias="simple", decoder_chunk_size=-1).max_positions() == 64
    for options in ({"rel_pos_bias": "simple"}, {"decoder_chunk_size": -1}):
        assert model(**options).max_positions() >= 10**9
    with pytest.raises(ValueError, match="--decoder-chunk-size is 0"):
        model().decoder.set_chunk_size(0)
