"""Every token mixer through fairseq's own command lines: training, resuming, perplexity, generation, hydra, DDP."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.modules import EXAMPLES
from tests.helpers.commands import (
    CPU,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_MULTIPLES,
    LM_TRAINING,
    PLUGIN,
    ROOT,
    SEARCH,
    SMALL,
    TRAINING,
    as_words,
    checkpoint,
    fairseq,
    lines,
    losses,
    on_each_side,
    preprocess_pairs,
    preprocess_text,
    train_in_processes,
    translations,
)
from tests.helpers.small_models import mixer_of, mixer_options

pytestmark = pytest.mark.slow

UPDATES, WITHIN_EPOCH = 24, 12  # an epoch has 19
# One of EXAMPLES for each mixer but Mega, which other files test. Not all commands need all of them.
FIRST = {mixer_of(name): name for name in reversed(list(EXAMPLES))}
NAMES = [name for mixer, name in FIRST.items() if mixer != "mega"]
SOME = ["flash", "sparse"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return preprocess_text(tmp_path_factory.mktemp("text"))


def model_of(name):
    sizes = {f"decoder_{size}": number for size, number in SMALL.items()}
    return {"token_mixer": mixer_of(name), **sizes, **mixer_options(name, "decoder"), "normalize_before": True}


def words_of(name):
    model = as_words({"arch": "mega_lm", **model_of(name)})
    return [*LM, *model, *LM_HEADS["softmax"], *LM_TRAINING, f"--tokens-per-sample={LM_CHUNK}"]


@pytest.fixture(scope="session")
def models(text, tmp_path_factory):
    """Trains a language model with a mixer once."""

    @functools.lru_cache(maxsize=None)
    def trained(name):
        folder = tmp_path_factory.mktemp("model")
        saving = ["--save-dir", folder, f"--save-interval-updates={WITHIN_EPOCH}", f"--max-update={UPDATES}"]
        said = fairseq("train", text, *words_of(name), *saving)
        return SimpleNamespace(folder=folder, last=folder / "checkpoint_last.pt", said=said)

    return trained


def evaluate(text, path, *options):
    said = fairseq("eval-lm", text, *LM, "--path", path, "--gen-subset=valid", *options)
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1))


# ------------------------------------------------------------------------------------------- language models


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_and_evaluation_does_not_depend_on_pieces(text, models, name):
    curve, last = losses(models(name).said), models(name).last
    assert curve[-1] < 0.9 * curve[0]
    pieces = ["--batch-size=3", "--model-overrides={'piece_tokens':37}"]
    streams = evaluate(text, last, "--valid-block=splits:5")
    assert evaluate(text, last, "--valid-block=splits:5", *pieces) == pytest.approx(streams, abs=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_a_resumed_training_ends_with_exactly_the_same_model(text, models, name, tmp_path):
    run = models(name)
    start = run.folder / f"checkpoint_1_{WITHIN_EPOCH}.pt"
    words = ["--restore-file", start, "--save-dir", tmp_path, f"--max-update={UPDATES}"]
    said = fairseq("train", text, *words_of(name), *words)
    assert losses(said) == losses(run.said)[WITHIN_EPOCH:]
    first, resumed = checkpoint(run.last), checkpoint(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(resumed["model"], first["model"], rtol=0, atol=0)


@pytest.mark.parametrize("name", SOME)
def test_texts_are_continued_alike_in_any_batch(text, models, name):
    words = ["--valid-block=documents", "--documents=line", "--gen-subset=test", "--prefix-size=3", "--beam=3"]
    said = [
        fairseq("generate", text, *LM, "--path", models(name).last, *words, "--max-len-b=40", f"--batch-size={size}")
        for size in (1, 7)
    ]
    (numbers, texts, scores), (_, others, other_scores) = (zip(*translations(each)) for each in said)
    assert len(numbers) == len(list(lines(said[0], "S")))
    assert max(len(each.split()) for each in texts) > 2 * LM_CHUNK
    assert texts == others
    assert scores == pytest.approx(other_scores, abs=1e-4)


def test_hydra_trains_the_same_model(text, models, tmp_path):
    name = "attention"
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {
            "_name": "mega_language_modeling", "data": str(text), "tokens_per_sample": LM_CHUNK,
            "variant_block_multiple_min": LM_MULTIPLES[0], "variant_block_multiple_max": LM_MULTIPLES[1],
        },
        "model": {"_name": "mega_lm", **model_of(name), "share_decoder_input_output_embed": True},
        "criterion": {"_name": "mega_lm_cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.01], "max_update": 2, "clip_norm": 1.0},
        "dataset": {"max_tokens": 256, "num_workers": 0},
        "checkpoint": {"no_save": True, "save_dir": str(tmp_path)},
    }  # fmt: skip
    (tmp_path / "mixer.yaml").write_text(json.dumps(config))  # JSON is YAML
    fairseq("hydra-train", "--config-dir", tmp_path, "--config-name=mixer", f"hydra.run.dir={tmp_path}", cwd=tmp_path)
    log = (tmp_path / "hydra_train.log").read_text()
    loss = float(re.search(r"\[train\].* \| loss ([\d.]+)", log).group(1))
    assert loss == pytest.approx(sum(losses(models(name).said)[:2]) / 2, rel=1e-3)


def test_two_processes_train_like_one_with_batches_twice_as_large(text):
    words = [text, *words_of("flash"), "--dropout=0", "--no-save", "--max-update=6", "--valid-block=splits:2"]
    two = losses(train_in_processes(*words))
    one = losses(fairseq("train", *words, "--update-freq=2"))
    assert two == pytest.approx(one, abs=1e-3)  # losses are logged with three decimals


# ------------------------------------------------------------------------------------------- translation


@pytest.mark.parametrize("mixers", [("aft, local", "attention, before"), ("sparse", "flash")])
def test_translation_with_different_mixers_in_encoder_and_decoder(mixers, tmp_path):
    options = {**on_each_side(**SMALL), "normalize_before": True, "share_all_embeddings": True}
    for side, name in zip(("encoder", "decoder"), mixers):
        options.update({**mixer_options(name, side), f"{side}_token_mixer": mixer_of(name)})
    words = [preprocess_pairs(tmp_path), *PLUGIN, "--arch=mega_transformer", *as_words(options), *TRAINING]
    curve = losses(fairseq("train", *words, "--save-dir", tmp_path, "--max-update=40"))
    assert curve[-1] < 0.85 * curve[0]
    words = [tmp_path / "bin", *PLUGIN, *CPU, "--path", tmp_path / "checkpoint_last.pt", *SEARCH]
    outputs = [fairseq("generate", *words, f"--batch-size={size}") for size in (1, 7)]
    (_, texts, scores), (_, others, other_scores) = (zip(*translations(said)) for said in outputs)
    assert texts == others
    assert scores == pytest.approx(other_scores, abs=1e-4)


# ------------------------------------------------------------------------------------------- errors
