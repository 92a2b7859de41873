"""Every token mixer through fairseq's own command lines: training, resuming, perplexity, generation, hydra, DDP."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.modules import MIXERS
from tests.helpers.commands import (
    CPU,
    LM,
    LM_CHUNK,
    LM_HEADS,
    LM_MULTIPLES,
    LM_SIZES,
    LM_TRAINING,
    PLUGIN,
    ROOT,
    SEARCH,
    TRAINING,
    as_words,
    checkpoint,
    failure,
    fairseq,
    lines,
    losses,
    preprocess_pairs,
    preprocess_text,
    train_in_processes,
    translations,
)

pytestmark = pytest.mark.slow

UPDATES, WITHIN_EPOCH = 24, 12  # an epoch has 19
OWN = {"hidden_dim", "z_dim", "n_dim"}  # Mega's
SIZES = {name: size for name, size in LM_SIZES.items() if name.replace("decoder_", "") not in OWN}
GATED = {"decoder_hidden_dim": 48, "decoder_z_dim": 16, "rel_pos_bias": "rotary"}
OPTIONS = {
    "gau": {**GATED, "decoder_token_shift": True},
    "flash": {**GATED, "rel_pos_bias": "rope"},
    "attention": {
        "decoder_attention_heads": 2,
        "decoder_rotary_dims": 8,
        "decoder_talking_heads": True,
        "decoder_time_weight": "before",
        "decoder_time_beta": True,
        "decoder_time_gamma": True,
    },
    "gmlp": {"decoder_attention_heads": 4, "decoder_token_shift": True},
    "aft": {"decoder_aft_form": "local", "decoder_aft_reach": 8, "decoder_chunk_size": -1},
    "sparse": {"decoder_attention_heads": 2, "decoder_sparse_stride": 4, "decoder_sparse_summary": 1},
}


def test_every_mixer_is_tested():
    assert {"mega", *OPTIONS} == set(MIXERS)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return preprocess_text(tmp_path_factory.mktemp("text"))


def words_of(name):
    model = {"arch": "mega_lm", "token_mixer": name, **SIZES, **OPTIONS[name], "normalize_before": True}
    return [*LM, *as_words(model), *LM_HEADS["softmax"], *LM_TRAINING, f"--tokens-per-sample={LM_CHUNK}"]


@pytest.fixture(scope="session")
def models(text, tmp_path_factory):
    """Trains a language model with a mixer once."""

    @functools.lru_cache(maxsize=None)
    def trained(name):
        folder = tmp_path_factory.mktemp(name)
        saving = ["--save-dir", folder, f"--save-interval-updates={WITHIN_EPOCH}", f"--max-update={UPDATES}"]
        said = fairseq("train", text, *words_of(name), *saving)
        return SimpleNamespace(folder=folder, last=folder / "checkpoint_last.pt", said=said)

    return trained


@pytest.fixture(params=OPTIONS)
def trained(request, models):
    return models(request.param)


def evaluate(text, path, *options):
    said = fairseq("eval-lm", text, *LM, "--path", path, "--gen-subset=valid", *options)
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1))


# ------------------------------------------------------------------------------------------- language models


@pytest.mark.parametrize("name", OPTIONS)
def test_training_lowers_the_loss_and_resumes_within_an_epoch_with_exactly_the_same_model(text, models, name, tmp_path):
    run = models(name)
    curve = losses(run.said)
    assert curve[-1] < 0.85 * curve[0]
    start = run.folder / f"checkpoint_1_{WITHIN_EPOCH}.pt"
    words = ["--restore-file", start, "--save-dir", tmp_path, f"--max-update={UPDATES}"]
    said = fairseq("train", text, *words_of(name), *words)
    assert losses(said) == curve[WITHIN_EPOCH:]
    first, resumed = checkpoint(run.last), checkpoint(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(resumed["model"], first["model"], rtol=0, atol=0)


def test_a_perplexity_does_not_depend_on_batches_or_pieces(text, trained):
    whole = evaluate(text, trained.last)
    for options in (["--model-overrides={'piece_tokens':37}"], ["--model-overrides={'piece_tokens':1}"]):
        assert evaluate(text, trained.last, *options) == pytest.approx(whole, abs=1e-4)
    streams = evaluate(text, trained.last, "--valid-block=splits:5")
    pieces = ["--batch-size=3", "--model-overrides={'piece_tokens':50}"]
    assert evaluate(text, trained.last, "--valid-block=splits:5", *pieces) == pytest.approx(streams, abs=1e-4)


def test_texts_are_continued_alike_in_any_batch(text, trained):
    words = ["--valid-block=documents", "--documents=line", "--gen-subset=test", "--prefix-size=3", "--beam=3"]
    said = [
        fairseq("generate", text, *LM, "--path", trained.last, *words, "--max-len-b=40", f"--batch-size={size}")
        for size in (1, 7)
    ]
    (numbers, texts, scores), (_, others, other_scores) = (zip(*translations(each)) for each in said)
    assert len(numbers) == len(list(lines(said[0], "S")))
    assert max(len(found.split()) for found in texts) > 2 * LM_CHUNK
    assert texts == others
    assert scores == pytest.approx(other_scores, abs=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_hydra_trains_the_same_model(text, models, name, tmp_path):
    flags = {"share_decoder_input_output_embed": True, "normalize_before": True}
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {
            "_name": "mega_language_modeling", "data": str(text), "tokens_per_sample": LM_CHUNK,
            "variant_block_multiple_min": LM_MULTIPLES[0], "variant_block_multiple_max": LM_MULTIPLES[1],
        },
        "model": {"_name": "mega_lm", "token_mixer": name, **SIZES, **OPTIONS[name], **flags},
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


# ------------------------------------------------------------------------------------------- two processes


@pytest.mark.parametrize("name", sorted({"flash", "aft"} & set(OPTIONS)))
def test_two_processes_train_like_one_with_batches_twice_as_large(text, name):
    words = [text, *words_of(name), "--dropout=0", "--no-save", "--max-update=6", "--valid-block=splits:2"]
    two = losses(train_in_processes(*words))
    one = losses(fairseq("train", *words, "--update-freq=2"))
    assert two == pytest.approx(one, abs=1e-3)  # losses are logged with three decimals


# ------------------------------------------------------------------------------------------- translation

COMMON = {"layers": 1, "embed_dim": 32, "ffn_embed_dim": 64, "chunk_size": 5}  # sentences are several chunks long
PAIRS = [("attention", "gau"), ("sparse", "flash"), ("flash", "attention"), ("gmlp", "aft")]


def side_options(side, mixer):
    own = {name.replace("decoder_", f"{side}_"): value for name, value in OPTIONS[mixer].items()}
    own.pop("rel_pos_bias", None)  # of both sides
    return {f"{side}_token_mixer": mixer, **{f"{side}_{name}": size for name, size in COMMON.items()}, **own}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return preprocess_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("mixers", PAIRS, ids="-".join)
def test_translation_with_different_mixers_in_encoder_and_decoder(pairs, mixers, tmp_path):
    options = {**side_options("encoder", mixers[0]), **side_options("decoder", mixers[1]), "rel_pos_bias": "rotary"}
    model = ["--arch=mega_transformer", *as_words(options), "--normalize-before", "--share-all-embeddings"]
    said = fairseq("train", pairs, *PLUGIN, *model, *TRAINING, "--save-dir", tmp_path, "--max-update=60")
    curve = losses(said)
    assert curve[-1] < 0.8 * curve[0]
    words = [pairs, *PLUGIN, *CPU, "--path", tmp_path / "checkpoint_last.pt", *SEARCH]
    outputs = [fairseq("generate", *words, f"--batch-size={size}") for size in (1, 7)]
    (_, texts, scores), (_, others, other_scores) = (zip(*translations(said)) for said in outputs)
    assert texts == others
    assert scores == pytest.approx(other_scores, abs=1e-4)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"token_mixer": "flash", "decoder_n_dim": 4},
            "--decoder-n-dim is 4 and has no effect with --token-mixer flash; leave it out",
        ),
        (
            {"token_mixer": "flash", "decoder_chunk_size": -1},
            "--decoder-chunk-size is -1 and FLASH attends in chunks; give a number of tokens, such as 256",
        ),
        (
            {"decoder_gau_scale": "inner"},
            "--decoder-gau-scale is inner and has no effect with --token-mixer mega; leave it out",
        ),
    ],
)
def test_options_that_do_not_fit_the_mixer_are_refused_in_one_sentence(text, options, said):
    words = as_words({"arch": "mega_lm", **SIZES, **options})
    assert failure("train", text, *LM, *words, *LM_TRAINING, "--no-save").endswith(said)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (
            "gmlp",
            {"decoder_chunk_size": 8},
            "over the 16 places of a chunk; evaluate at chunks of 16",
        ),
        ("aft", {"decoder_aft_reach": 4}, "must be as in the training of the weights; leave it out"),
        ("gmlp", {"token_mixer": "aft"}, "must be as in the training of the weights; leave it out"),
    ],
)
def test_overrides_that_need_other_weights_are_refused_in_one_sentence(text, models, name, overrides, said):
    words = ["--path", models(name).last, "--gen-subset=valid", f"--model-overrides={overrides}"]
    assert re.search(f"{said}$", failure("eval-lm", text, *LM, *words))
