"""Language modelling through fairseq's own command lines: training, validation, perplexity."""

import functools

import pytest

from tests.helpers import commands
from tests.helpers.commands import (
    LANGUAGE_MODELS,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_TRAINING,
    PLUGIN,
    SMALL,
    as_words,
    assert_same_translations,
    fairseq,
    lines,
    losses,
    perplexity,
    records,
    translations,
)
from tests.helpers.small_models import mixer_options

pytestmark = pytest.mark.slow


@pytest.fixture(params=LANGUAGE_MODELS)
def trained(request):
    return commands.trained(request.param)


@pytest.fixture
def softmax():
    return commands.trained("softmax")


def train(text, head, *options, updates):
    words = [*LANGUAGE_MODELS[head], "--no-epoch-checkpoints", *options]
    return fairseq("train", text, *words, "--max-update", updates)


@functools.lru_cache(maxsize=None)
def evaluate(text, path, *options, task=tuple(LM)):
    """Tokens, loss in bits and perplexity of the validation set as fairseq-eval-lm prints them."""
    return perplexity(fairseq("eval-lm", text, *task, "--path", path, "--gen-subset=valid", *options))


# ------------------------------------------------------------------------------------------------ fairseq-train


def test_training_lowers_the_loss_and_reads_every_token_once_per_epoch(trained):
    inner, curve = records(trained.said, "train_inner"), losses(trained.said)
    assert curve[-1] < 0.7 * curve[0]
    size = (trained.data / "train.bin").stat().st_size // 2  # two bytes per token
    for epoch in (1, 2):
        assert sum(record["wpb"] for record in inner if record["epoch"] == epoch) == size
    for record in inner:
        assert record["loss"] == record["bits_per_token"]
        assert record["ppl"] == pytest.approx(2 ** record["loss"], rel=2e-3)


def test_a_training_split_is_cut_into_segments_whatever_its_name(softmax):
    said = train(softmax.data, "softmax", "--train-subset=valid", "--no-save", updates=4)
    size = (softmax.data / "valid.bin").stat().st_size // 2
    tokens = [record["wpb"] for record in records(said, "train_inner")]
    assert max(tokens) <= 256 < size  # --max-tokens
    assert sum(tokens) >= size  # at least an epoch


def test_data_loading_workers_change_nothing(softmax):
    options = ["--num-workers=2", "--validate-interval-updates=3", "--no-save"]
    said = train(softmax.data, "softmax", *options, updates=9)
    assert losses(said) == losses(softmax.said)[:9]
    assert len({record["valid_loss"] for record in records(said, "valid")}) == 3


def test_fairseqs_own_criterion_trains_to_the_same_losses(softmax):
    """fairseq's criterion logs three decimals."""
    said = train(softmax.data, "softmax", "--criterion=cross_entropy", "--no-save", updates=4)
    assert losses(said) == pytest.approx(losses(softmax.said)[:4], abs=6e-4)


@pytest.mark.parametrize("precision", ["--bf16", "--memory-efficient-fp16", "--amp"])
def test_models_train_in_all_precisions_that_fairseq_supports_on_the_cpu(precision):
    """These do not include `--fp16`, which fairseq refuses without a GPU."""
    adaptive = commands.trained("adaptive")
    said = train(adaptive.data, "adaptive", precision, "--no-save", updates=5)
    assert losses(said) == pytest.approx(losses(adaptive.said)[:5], rel=0.02)


# ------------------------------------------------------------------------------------------------ evaluation


def test_validation_in_training_fairseq_validate_and_fairseq_eval_lm_give_one_loss(trained):
    tokens, loss, ppl = evaluate(trained.data, trained.last)
    assert tokens == (trained.data / "valid.bin").stat().st_size // 2
    assert ppl == pytest.approx(2**loss, abs=6e-3)
    last = records(trained.said, "valid")[-1]
    assert last["valid_loss"] == pytest.approx(loss, abs=1e-4)
    words = [*LM, "--log-format=json", "--log-interval=1", "--max-tokens=100", "--path", trained.last]
    validated = records(fairseq("validate", trained.data, *words), "valid")[-1]
    assert validated["valid_loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("block", [[], ["--valid-block=documents", "--documents=blank"]], ids=" ".join)
def test_a_perplexity_does_not_depend_on_batches_or_pieces(softmax, block):
    whole, alone = (evaluate(softmax.data, softmax.last, *each) for each in ((), (*block, "--batch-size=1")))
    assert alone[0] == whole[0]
    assert (alone[1] != whole[1]) == bool(block)  # each document starts without context
    options = ["--max-tokens=130", "--num-workers=2", "--model-overrides={'piece_tokens':37}"]
    assert evaluate(softmax.data, softmax.last, *block, *options) == pytest.approx(alone, abs=1e-4)


def test_fairseqs_own_task_evaluates_the_model(softmax):
    stock = (*PLUGIN, "--cpu", "--task=language_modeling", "--sample-break-mode=none")
    whole = evaluate(softmax.data, softmax.last)
    one = evaluate(softmax.data, softmax.last, "--tokens-per-sample=5000", "--softmax-batch=100", task=stock)
    assert one == pytest.approx(whole, abs=1e-4)
    blocks = evaluate(softmax.data, softmax.last, "--tokens-per-sample=100", "--batch-size=3", task=stock)
    assert blocks[0] == whole[0]
    assert blocks[1] > whole[1]


# ------------------------------------------------------------------------------------------------ token mixers


def test_a_model_with_another_mixer_is_evaluated_in_any_pieces_and_continues_texts_in_any_batch(text, tmp_path):
    """With a state that grows; sweeps evaluate those with sums, and with norms that carry a state."""
    sizes = {f"decoder_{size}": number for size, number in SMALL.items()}
    options = {"token_mixer": "sparse", **sizes, **mixer_options("sparse", "decoder"), "normalize_before": True}
    words = [*LM, "--arch=mega_lm", *as_words(options), *LM_HEADS["softmax"], *LM_TRAINING]
    where, path = ["--no-epoch-checkpoints", "--save-dir", tmp_path], tmp_path / "checkpoint_last.pt"
    curve = losses(fairseq("train", text, *words, f"--tokens-per-sample={LM_CHUNK}", "--max-update=24", *where))
    assert curve[-1] < 0.9 * curve[0]

    def evaluated(*options):
        words = [*LM, "--path", path, "--gen-subset=valid", "--valid-block=splits:5", *options]
        return perplexity(fairseq("eval-lm", text, *words))

    pieces = ["--batch-size=3", "--model-overrides={'piece_tokens':37}"]
    assert evaluated(*pieces) == pytest.approx(evaluated(), abs=1e-4)

    words = ["--valid-block=documents", "--documents=line", "--gen-subset=test", "--prefix-size=3", "--beam=3"]
    words += [*LM, "--path", path, "--max-len-b=40"]
    said, other = (fairseq("generate", text, *words, f"--batch-size={size}") for size in (1, 7))
    assert max(len(found.split()) for _, found, _ in translations(said)) > 2 * LM_CHUNK
    assert_same_translations(said, other, count=len(list(lines(said, "S"))))
