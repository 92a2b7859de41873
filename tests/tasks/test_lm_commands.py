"""Language modelling through fairseq's own command lines: training, resuming, validation, perplexity."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.helpers.commands import (
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_MULTIPLES,
    LM_SIZES,
    LM_TRAINING,
    MEGA_LM,
    PLUGIN,
    ROOT,
    checkpoint,
    failure,
    fairseq,
    losses,
    preprocess_text,
    records,
)

pytestmark = pytest.mark.slow

UPDATES, HALF_WAY = 60, 30  # an epoch has 19


# ------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return preprocess_text(tmp_path_factory.mktemp("text"))


def train(text, head, *options, updates, **named):
    where = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()] or ["--no-save"]
    words = [*LM, *MEGA_LM, *LM_HEADS[head], *LM_TRAINING, *where, *options]
    return fairseq("train", text, *words, "--max-update", updates)


@pytest.fixture(scope="session")
def models(text, tmp_path_factory):
    """Trains a model with a head once; returns its output and checkpoints, half-way and at the end of each epoch."""

    @functools.lru_cache(maxsize=None)
    def trained(head):
        folder = tmp_path_factory.mktemp(head)
        said = train(text, head, updates=UPDATES, save_dir=folder, save_interval_updates=HALF_WAY)
        return SimpleNamespace(head=head, folder=folder, last=folder / "checkpoint_last.pt", said=said)

    return trained


@pytest.fixture(params=LM_HEADS)
def trained(request, models):
    return models(request.param)


@pytest.fixture
def softmax(models):
    return models("softmax")


def evaluate(text, path, *options, task=LM, subset="valid"):
    """Tokens, loss in bits and perplexity as fairseq-eval-lm prints them."""
    said = fairseq("eval-lm", text, *task, "--path", path, f"--gen-subset={subset}", *options)
    tokens = re.search(r"Evaluated ([\d,]+) tokens", said).group(1)
    loss, ppl = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", said).groups()
    return int(tokens.replace(",", "")), float(loss), float(ppl)


@pytest.fixture(scope="session")
def whole(text, models):
    """Tokens, loss and perplexity of the validation set as one stream, by a model with a softmax."""
    return evaluate(text, models("softmax").last)


# ------------------------------------------------------------------------------------------------ fairseq-train


def test_training_lowers_the_loss_and_reads_every_token_once_per_epoch(text, trained):
    curve, inner = losses(trained.said), records(trained.said, "train_inner")
    assert len(curve) == UPDATES
    assert curve[-1] < 0.6 * curve[0]
    size = (text / "train.bin").stat().st_size // 2  # two bytes per token
    for epoch in (1, 2, 3):
        assert sum(record["wpb"] for record in inner if record["epoch"] == epoch) == size


def test_a_training_split_is_cut_into_segments_whatever_its_name(text):
    said = train(text, "softmax", "--train-subset=valid", updates=4)
    size = (text / "valid.bin").stat().st_size // 2
    tokens = [record["wpb"] for record in records(said, "train_inner")]
    assert max(tokens) <= 256 < size  # --max-tokens
    assert sum(tokens) >= size  # at least an epoch


@pytest.mark.parametrize(
    ("head", "start"),
    [("adaptive", "checkpoint_2_30"), ("softmax", "checkpoint2")],
    ids=["within an epoch", "between epochs"],
)
def test_a_resumed_training_ends_with_exactly_the_same_model(text, models, head, start, tmp_path):
    trained = models(head)
    path = trained.folder / f"{start}.pt"
    at = checkpoint(path)["optimizer_history"][-1]["num_updates"]
    said = train(text, trained.head, "--restore-file", path, updates=UPDATES, save_dir=tmp_path)
    assert losses(said) == losses(trained.said)[at:]
    first, resumed = checkpoint(trained.last), checkpoint(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(resumed["model"], first["model"], rtol=0, atol=0)
    torch.testing.assert_close(resumed["last_optimizer_state"], first["last_optimizer_state"], rtol=0, atol=0)
    assert records(said, "valid")[-1]["valid_loss"] == records(trained.said, "valid")[-1]["valid_loss"]


def test_data_loading_workers_change_nothing(text, softmax):
    said = train(text, "softmax", "--num-workers=2", "--validate-interval-updates=3", updates=9)
    assert losses(said) == losses(softmax.said)[:9]
    assert len({record["valid_loss"] for record in records(said, "valid")}) == 3


@pytest.mark.parametrize(
    ("head", "options", "criterion"),
    [
        ("softmax", [], ["--criterion=cross_entropy"]),
        # fairseq's criterion ignores the second type of each cluster, whose index there is that of padding. With these
        # cutoffs that type does not occur.
        (
            "adaptive",
            ["--adaptive-softmax-dropout=0", "--adaptive-softmax-cutoff=17,18"],
            ["--criterion=adaptive_loss", "--ddp-backend=legacy_ddp"],
        ),
    ],
    ids=LM_HEADS,
)
def test_fairseqs_own_criterion_trains_to_the_same_losses(text, head, options, criterion):
    """fairseq's criterion logs three decimals."""
    ours, stock = (train(text, head, *options, *given, updates=4) for given in ([], criterion))
    assert losses(stock) == pytest.approx(losses(ours), abs=6e-4)


@pytest.mark.parametrize("metric", ["ppl", "bits_per_token"])
def test_the_best_checkpoint_is_that_of_the_lowest_metric(text, metric, tmp_path):
    words = ["--lr=0.3", "--save-interval-updates=2", f"--best-checkpoint-metric={metric}"]  # up and down
    said = train(text, "softmax", *words, updates=6, save_dir=tmp_path)
    found = [record[f"valid_{metric}"] for record in records(said, "valid")]
    assert len(found) == 3
    assert checkpoint(tmp_path / "checkpoint_best.pt")["extra_state"]["best"] == min(found)


def test_the_loss_is_logged_as_bits_per_token_and_perplexity(softmax):
    for source, prefix in (("train_inner", ""), ("valid", "valid_")):
        for record in records(softmax.said, source):
            assert record[f"{prefix}loss"] == record[f"{prefix}bits_per_token"]
            assert record[f"{prefix}ppl"] == pytest.approx(2 ** record[f"{prefix}bits_per_token"], rel=2e-3)


@pytest.mark.parametrize(
    "options", [["--bf16"], ["--memory-efficient-bf16"], ["--memory-efficient-fp16"], ["--amp"]], ids=" ".join
)
def test_models_train_in_all_precisions_that_fairseq_supports_on_the_cpu(text, models, options):
    """These do not include `--fp16`, which fairseq refuses without a GPU."""
    said = train(text, "adaptive", *options, updates=5)
    assert losses(said) == pytest.approx(losses(models("adaptive").said)[:5], rel=0.02)


def test_a_preset_keeps_its_defaults_under_hydra_in_training_resuming_and_evaluation(text, tmp_path):
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {
            "_name": "mega_language_modeling", "data": str(text),
            "variant_block_multiple_min": LM_MULTIPLES[0], "variant_block_multiple_max": LM_MULTIPLES[1],
        },
        "model": {"_name": "mega_lm_small", **LM_SIZES},
        "criterion": {"_name": "mega_lm_cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.01], "max_update": 8},
        "dataset": {"max_tokens": 256, "num_workers": 0},
        "checkpoint": {"no_epoch_checkpoints": True, "save_dir": str(tmp_path)},
    }  # fmt: skip
    (tmp_path / "mega.yaml").write_text(json.dumps(config))  # JSON is YAML
    words = ["--config-dir", tmp_path, "--config-name=mega", f"hydra.run.dir={tmp_path}"]
    fairseq("hydra-train", *words, cwd=tmp_path)
    state = checkpoint(tmp_path / "checkpoint_last.pt")
    names = ("_name", "dropout", "rel_pos_bias", "normalize_before", "no_affine_final_norm", "decoder_chunk_size")
    assert [state["cfg"]["model"][name] for name in names] == ["mega_lm_small", 0.0, "rotary", True, True, LM_CHUNK]
    fairseq("hydra-train", *words, "optimization.max_update=12", cwd=tmp_path)
    log = (tmp_path / "hydra_train.log").read_text()
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 1 @ 8 updates\)", log)
    loss = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1])
    assert evaluate(text, tmp_path / "checkpoint_last.pt")[1] == pytest.approx(loss, abs=1e-4)


# ------------------------------------------------------------------------------------------------ evaluation


def test_validation_in_training_fairseq_validate_and_fairseq_eval_lm_give_one_loss(text, trained):
    tokens, loss, ppl = evaluate(text, trained.last)
    assert tokens == (text / "valid.bin").stat().st_size // 2
    assert ppl == pytest.approx(2**loss, abs=6e-3)
    last = records(trained.said, "valid")[-1]
    assert last["valid_loss"] == pytest.approx(loss, abs=1e-4)
    words = [*LM, "--log-format=json", "--log-interval=1", "--max-tokens=100", "--path", trained.last]
    validated = records(fairseq("validate", text, *words), "valid")[-1]
    assert validated["valid_loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ["--max-tokens=50", "--num-workers=2", "--model-overrides={'piece_tokens':37}"],
        ["--batch-size=1", "--softmax-batch=11", f"--model-overrides={{'piece_tokens':{LM_CHUNK}}}"],
    ],
    ids=" ".join,
)
def test_a_perplexity_does_not_depend_on_batches_or_pieces(text, softmax, whole, options):
    assert evaluate(text, softmax.last, *options) == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("block", [["--valid-block=splits:5"], ["--valid-block=documents", "--documents=blank"]])
def test_streams_have_the_same_loss_in_any_batch(text, softmax, whole, block):
    alone = evaluate(text, softmax.last, *block, "--batch-size=1")
    assert alone[0] == whole[0]
    assert alone[1] != whole[1]  # each starts without context
    for options in (["--batch-size=3"], ["--max-tokens=130", "--model-overrides={'piece_tokens':50}"]):
        assert evaluate(text, softmax.last, *block, *options) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("documents", "block", "warned"),
    [("line", "splits:2", True), ("blank", "size:7", True), ("line", "documents", False), ("stream", "size:7", False)],
)
def test_streams_that_cross_document_boundaries_are_logged(text, documents, block, warned, caplog):
    options = {"data": str(text), "documents": documents, "valid_block": block}
    MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(**options)).load_dataset("test")
    over = [message for message in caplog.messages if "cross document boundaries" in message]
    assert over == [message for message in caplog.messages if "--valid-block" in message]
    assert len(over) == warned


def test_a_rotary_bias_takes_smaller_and_larger_chunks(text, softmax, whole):
    for chunk in (LM_CHUNK // 2, 2 * LM_CHUNK, -1):
        tokens, loss, _ = evaluate(text, softmax.last, f"--model-overrides={{'decoder_chunk_size':{chunk}}}")
        assert tokens == whole[0]
        assert loss != whole[1]
        assert loss == pytest.approx(whole[1], abs=0.2)


def test_a_simple_bias_takes_smaller_chunks_and_refuses_larger_ones(text, tmp_path):
    train(text, "softmax", "--rel-pos-bias=simple", updates=8, save_dir=tmp_path)
    path = tmp_path / "checkpoint_last.pt"
    (_, smaller, _), (_, own, _) = (
        evaluate(text, path, f"--model-overrides={{'decoder_chunk_size':{n}}}") for n in (5, 16)
    )
    assert smaller == pytest.approx(own, abs=0.5)
    assert smaller != own
    words = [*LM, "--path", path, "--model-overrides={'decoder_chunk_size':17}"]
    line = failure("eval-lm", text, *words)
    assert "--decoder-chunk-size is 17" in line
    assert "16 tokens" in line


def test_fairseqs_own_task_evaluates_the_model(text, softmax, whole):
    stock = [*PLUGIN, "--cpu", "--task=language_modeling", "--sample-break-mode=none"]
    one = evaluate(text, softmax.last, "--tokens-per-sample=5000", "--softmax-batch=100", task=stock)
    assert one == pytest.approx(whole, abs=1e-4)
    blocks = evaluate(text, softmax.last, "--tokens-per-sample=100", "--batch-size=3", task=stock)
    assert blocks[0] == whole[0]
    assert blocks[1] > whole[1]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context-window=10"], "--context-window"),
        (["--context-window=10", "--tokens-per-sample=64"], "--context-window"),
        (["--gen-subset=empty"], "empty.bin contains no tokens"),
        (["--valid-block=splits:100000"], "--valid-block is 'splits:100000'"),
        (["--model-overrides={'decoder_chunk_size':0}"], "--decoder-chunk-size is 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_evaluated_are_refused(text, softmax, options, said):
    if not (text / "empty.bin").exists():
        (text.parent / "empty").write_text("")
        words = ["--only-source", "--srcdict", text / "dict.txt", "--trainpref", text.parent / "empty"]
        fairseq("preprocess", *words, "--destdir", text.parent / "nothing")
        for kind in ("bin", "idx"):
            (text.parent / "nothing" / f"train.{kind}").rename(text / f"empty.{kind}")
    assert said in failure("eval-lm", text, *LM, "--path", softmax.last, *options)
