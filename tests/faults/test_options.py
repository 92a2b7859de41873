"""Numbers out of range and options that conflict are refused before any data is read.

The commands get a folder that contains only dictionaries, so a command that looks for data reports that there is
none.
"""

import dataclasses
import json
import math
import re
import typing

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq.tasks import setup_task

from mega_fairseq.criterions.mega_lm_cross_entropy import MegaLMCrossEntropyConfig
from mega_fairseq.models import MegaLanguageModel, MegaLMConfig, MegaTransformerConfig, MegaTransformerModel
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.helpers.commands import LM, LM_HEADS, LM_TRAINING, MEGA, MEGA_LM, PLUGIN, ROOT, TRAINING, Running, failure
from tests.helpers.golden_models import dictionary, task

# ------------------------------------------------------------------------------------------------ ranges


def whole(least, most, *holes, taken=None):
    """Whole numbers: refused values, and accepted values."""
    return [least - 1, -(10**30), most + 1, 10**30, *holes], taken or [least, most]


PROBABILITY = [math.nan, math.inf, -math.inf, -0.1, 1.0], [0.0, 0.99]
FACTOR = [math.nan, math.inf, -math.inf, 0.9, -1.0], [1.0, 1.5]
WIDTH, LENGTH = whole(1, 10**6), whole(1, 10**9)

SIDE = {
    **dict.fromkeys(["embed_dim", "hidden_dim", "n_dim", "z_dim"], WIDTH),
    "ffn_embed_dim": whole(0, 10**6),  # 0 omits the layer
    "layers": whole(1, 10**4, taken=[1, 3]),
    "chunk_size": whole(-1, 10**9, 0),  # -1 means no chunks
    "truncation_length": whole(-1, 10**9),  # -1 follows the option of both sides
    "layerdrop": PROBABILITY,
}
OPTIONS = {
    **{f"decoder_{name}": values for name, values in SIDE.items()},
    **dict.fromkeys(["dropout", "attention_dropout", "hidden_dropout", "activation_dropout"], PROBABILITY),
    "truncation_length": whole(0, 10**9),
    "adaptive_softmax_dropout": PROBABILITY,
    "adaptive_softmax_factor": FACTOR,
    "max_target_positions": LENGTH,
}
RANGES = {
    MegaLMConfig: {
        **OPTIONS,
        "decoder_input_dim": whole(0, 10**6),  # 0 means the decoder's width
        "adaptive_input_factor": FACTOR,
        "piece_tokens": ([0, -1], [1, 10**30]),  # a piece ends with its stream
    },
    MegaTransformerConfig: {
        **OPTIONS,
        **{f"encoder_{name}": values for name, values in SIDE.items()},
        "max_source_positions": LENGTH,
    },
    MegaLanguageModelingConfig: {
        "tokens_per_sample": whole(0, 10**9),  # 0 means the model's chunk
        "variant_block_multiple_min": ([0, -1, 2, 10**30], [1]),  # at most the maximum
        "variant_block_multiple_max": whole(1, 10**9),
        "sequence_parallel_size": ([0, -1], [1, 2]),  # at most the number of processes
    },
    MegaLMCrossEntropyConfig: {},
}
# Options of other mixers than Mega: the mixer, its other options, and values.
OF_MIXERS = {
    "attention_heads": ("attention", {}, ([0, -1, 3, 10**30], [1, 8])),
    "rotary_dims": ("attention", {}, ([-1, 1, 66, 10**30], [0, 64])),
    "gmlp_expansion": ("gmlp", {"chunk_size": 16}, ([0, -1, 10**30], [1, 3])),
    "aft_reach": ("aft", {"aft_form": "local"}, ([0, -1, 10**30], [1, 32])),
    "sparse_stride": ("sparse", {}, ([0, -1, 7, 10**30], [8, 10**6])),
    "sparse_summary": ("sparse", {}, ([0, -1, 129, 10**30], [1, 128])),
    "sparse_subblocks": ("sparse", {}, ([0, -1, 9, 10**30], [1, 8])),  # of 8 heads
    "chunk_size": ("gmlp", {}, ([0, -1, 10**6 + 1, 10**30], [1, 512])),
}
OF_FAIRSEQ = {"seed"}  # checked by fairseq-train itself
SMALL = {"decoder_layers": 1, "max_source_positions": 50, "max_target_positions": 50}


def numbers(config):
    """Names of the options that are numbers."""
    types = typing.get_type_hints(config)
    return {field.name for field in dataclasses.fields(config) if types[field.name] in (int, float)}


def build(config, **options):
    """A task or a model on the meta device, as fairseq-train builds it."""
    if config is MegaLanguageModelingConfig:
        return MegaLanguageModelingTask(config(data="unused", **options), dictionary(40))
    model = {MegaLMConfig: MegaLanguageModel, MegaTransformerConfig: MegaTransformerModel}[config]
    small = {name: size for name, size in SMALL.items() if name in numbers(config)}
    with torch.device("meta"):
        return model.build_model(config(**{**small, **options}), task(40))


@pytest.mark.parametrize("config", RANGES)
def test_every_option_that_is_a_number_has_a_range(config):
    of_mixers = {f"{side}_{name}" for side in ("encoder", "decoder") for name in OF_MIXERS.keys() - SIDE.keys()}
    assert numbers(config) - OF_FAIRSEQ - of_mixers == set(RANGES[config])


@pytest.mark.parametrize("name", OF_MIXERS)
def test_a_number_of_a_mixer_is_accepted_within_its_range_and_refused_by_name_outside_it(name):
    mixer, others, (refused, taken) = OF_MIXERS[name]
    own = {"token_mixer": mixer, **{f"decoder_{other}": value for other, value in others.items()}}
    for value in taken:
        build(MegaLMConfig, **own, **{f"decoder_{name}": value})
    for value in refused:
        with pytest.raises(ValueError, match=f"--decoder-{name.replace('_', '-')} .*{re.escape(str(value))}\\b"):
            build(MegaLMConfig, **own, **{f"decoder_{name}": value})


@pytest.mark.parametrize(("config", "option"), [(config, option) for config in RANGES for option in RANGES[config]])
def test_a_number_is_accepted_within_its_range_and_refused_by_name_outside_it(config, option):
    refused, taken = RANGES[config][option]
    for value in taken:
        build(config, **{option: value})
    for value in refused:
        with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} .*{re.escape(str(value))}\\b") as caught:
            build(config, **{option: value})
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ before any data

ADAPTIVE = LM_HEADS["adaptive"]  # clusters end at types 10 and 18
LANGUAGE_MODEL = [*LM, *MEGA_LM, *LM_TRAINING]
TRANSLATION = [*PLUGIN, *MEGA, *TRAINING, "-s", "de", "-t", "en"]
OTHER_CRITERION = [word for word in TRANSLATION if "smoothing" not in str(word)]


@pytest.fixture(scope="module")
def no_data(tmp_path_factory):
    """A folder with equal dictionaries for both tasks and with files of embeddings."""
    folder = tmp_path_factory.mktemp("no_data")
    for name in ("dict.txt", "dict.de.txt", "dict.en.txt"):
        (folder / name).write_text("".join(f"w{number} 1\n" for number in range(36)))
    rows = {
        "narrow": ("w7", "0.5", 8),
        "scalar": ("w7", "0.5", 1),
        "foreign": ("x", "0.5", 32),
        "nan": ("w7", "nan", 32),
    }
    for name, (word, number, width) in rows.items():
        (folder / name).write_text(f"1 {width}\n{word} {' '.join([number] * width)}\n")
    (folder / "empty").write_text("")
    return folder


def set_up(words):
    """Build the task and the model as fairseq-train does before it looks for data."""
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), list(map(str, words)))
    task = setup_task(args)
    with torch.device("meta"):
        task.build_model(args)


def assert_refused(words, no_data, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        set_up([no_data, *(str(word).format(no_data) for word in words)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--decoder-z-dim=15"], "--decoder-z-dim is 15; make --decoder-z-dim even"),
        (["--tokens-per-sample=-1"], "--tokens-per-sample minus --context-window is -1; leave out --context-window"),
        (["--variant-block-multiple-min=5"], "--variant-block-multiple-min is 5 and --variant-block-multiple-max 4"),
        (["--decoder-chunk-size=-1"], "--decoder-chunk-size is -1, or no model was built; give --tokens-per-sample"),
        (
            [*ADAPTIVE, "--adaptive-softmax-cutoff=18,10"],
            "--adaptive-softmax-cutoff is '18,10'; give increasing numbers",
        ),
        (
            ["--adaptive-softmax-cutoff=9,18", "--adaptive-softmax-factor=9"],
            "-factor is 9.0, which leaves less than 1 of",
        ),
        ([*ADAPTIVE, "--adaptive-input-cutoff=12,18"], "needs bands and clusters of the same shape; make"),
        ([*ADAPTIVE, "--share-decoder-input-output-embed"], "ties one table of one width; leave out --adaptive-input"),
        (["--tie-adaptive-weights"], "give --adaptive-input and --adaptive-softmax-cutoff with them"),
        (["--decoder-embed-path={}/gone"], "/gone, which does not exist; give a file of pre-trained embeddings"),
        (["--decoder-embed-path={}/empty"], "/empty, which lacks a header followed by lines of a word and its"),
        (
            ["--decoder-embed-path={}/foreign"],
            "/foreign, which has none of the words in the dictionary; give a file of the",
        ),
        (["--decoder-embed-path={}/nan"], "/nan, which has a number that is not finite for 'w7'; give another file"),
        (["--decoder-embed-path={}/narrow"], "/narrow, which has 8 numbers for 'w7', and embeddings are 32 wide; set"),
        (["--decoder-embed-path={}/scalar"], "/scalar, which has 1 numbers for 'w7', and embeddings are 32 wide; set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_an_invalid_language_model_are_refused(no_data, words, said):
    assert_refused([*LANGUAGE_MODEL, *words], no_data, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--truncation-length=-1", "--encoder-truncation-length=2"], "--truncation-length is -1; give the"),
        (["--encoder-embed-dim=64"], "--encoder-embed-dim is 64, --decoder-embed-dim 32; make them equal, or leave"),
        (["--decoder-embed-path={}/narrow"], "--decoder-embed-path is a second file; give only --encoder-embed-path"),
        (["--encoder-embed-path={}/narrow"], "/narrow, which has 8 numbers for 'w7', and embeddings are 32 wide; set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_an_invalid_translation_model_are_refused(no_data, words, said):
    assert_refused([*TRANSLATION, *words], no_data, said)


HEADS, NO_DIVISOR = "--{}-attention-heads=5", "--{}-attention-heads is 5 and does not divide"
TABLES, NO_CHUNK = (
    "--{}-chunk-size=8",
    "--{}-chunk-size is -1 and this mixer learns tables over the places of a chunk; giv",
)


@pytest.mark.parametrize("model", ["encoder", "decoder", "language model"])
@pytest.mark.parametrize(
    ("mixer", "options", "said"),
    [
        ("attention", [HEADS], NO_DIVISOR),
        ("sparse", [HEADS], NO_DIVISOR),
        ("gmlp", [HEADS, TABLES], NO_DIVISOR),
        ("aft", [HEADS, TABLES], NO_DIVISOR),
        ("attention", ["--{}-rotary-dims=3"], "--{}-rotary-dims is 3; give an even number up to the width of a head"),
        ("sparse", ["--{}-rotary-dims=3"], "--{}-rotary-dims is 3; give an even number up to the width of a head"),
        ("gau", ["--{}-z-dim=15", "--rel-pos-bias=rope"], "--{}-z-dim is 15; make --{}-z-dim even"),
        ("sparse", ["--{}-sparse-summary=129"], "--{}-sparse-summary is 129 and --{}-sparse-stride 128, and summaries"),
        (
            "sparse",
            ["--{}-sparse-pattern=strided", "--{}-sparse-summary=4"],
            "no effect with --{}-sparse-pattern strid",
        ),
        ("gmlp", [], NO_CHUNK),
        ("aft", [], NO_CHUNK),
        ("attention", ["--{}-time-weight=after"], NO_CHUNK),
        ("flash", [], "--{}-chunk-size is -1 and FLASH attends in chunks; give a number of tokens"),
        (
            "aft",
            ["--{}-aft-form=local"],
            "--{}-aft-reach is -1 and --{}-aft-form local learns a weight for each of the",
        ),
        (
            "aft",
            ["--{}-aft-form=local", "--{}-aft-reach=9", TABLES],
            "no effect with --{}-aft-form local; set it to -1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_a_mixer_are_refused_by_name_on_each_side(no_data, model, mixer, options, said):
    base = [*PLUGIN, *TRAINING, "-s=de", "-t=en", "--arch=mega_transformer", f"--{model}-token-mixer={mixer}"]
    if model == "language model":
        base = [*LM, *LM_TRAINING, "--arch=mega_lm", "--tokens-per-sample=8", f"--token-mixer={mixer}"]
    side = "encoder" if model == "encoder" else "decoder"
    assert_refused([*base, *(word.replace("{}", side) for word in options)], no_data, said.replace("{}", side))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--arch=aft_lm_small", "--decoder-aft-form=window"],
            "--decoder-aft-reach is 32 and has no effect with --deco",
        ),
        (["--arch=sparse_lm_enwik8", "--decoder-sparse-pattern=strided"], "strided; set it to 8, or choose fixed"),
        (["--arch=attention_lm_small", "--token-mixer=gmlp", "--decoder-chunk-size=-1"], NO_CHUNK.format("decoder")),
        (
            ["--arch=flash_lm_small", "--ffn-activation-fn=geglu"],
            "--ffn-activation-fn is geglu and has no effect with --decoder-ffn-embed-dim 0; leave it out",
        ),
        (
            ["--arch=flash_lm_small", "--activation-dropout=0.1"],
            "--activation-dropout is 0.1 and has no effect with --decoder-ffn-embed-dim 0; leave it out",
        ),
        (
            ["--arch=attention_lm_small", "--ffn-activation-fn=gelu", "--activation-fn=relu"],
            "--activation-fn is relu and has no effect with --ffn-activation-fn gelu; leave it out",
        ),
        (
            ["--arch=sparse_lm_small", "--decoder-sparse-combine=interleaved", "--decoder-layers-to-keep=0,2"],
            "layers of this token mixer alternate between 2 patterns; keep layers that still alternate, as in 0,1,4,5",
        ),
        (["--arch=mega_transformer_small"], "--arch mega_transformer reads a source, and this --task has none; choose"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_a_preset_are_refused(no_data, words, said):
    assert_refused([*LM, *LM_TRAINING, "--tokens-per-sample=8", *words], no_data, said)


def test_interleaved_layers_may_be_pruned_in_turn(no_data):
    words = ["--arch=sparse_lm_small", "--decoder-sparse-combine=interleaved", "--decoder-layers-to-keep=0,3"]
    set_up([no_data, *LM, *LM_TRAINING, "--tokens-per-sample=8", *words])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LANGUAGE_MODEL, "FileNotFoundError: there is no {}/valid.bin"),
        ([*LANGUAGE_MODEL, "--valid-block=size:0"], "ValueError: --valid-block is 'size:0'"),  # by the task
        ([*LANGUAGE_MODEL, "--decoder-layers=0"], "ValueError: --decoder-layers is 0"),  # by the model
        ([*LANGUAGE_MODEL, *ADAPTIVE, "--criterion=cross_entropy"], "ValueError: --criterion cross_entropy needs"),
        (
            [*LANGUAGE_MODEL, "--criterion=adaptive_loss", "--ddp-backend=legacy_ddp"],
            "ValueError: --criterion adaptive_loss needs an adaptive",
        ),
        pytest.param(
            [*LANGUAGE_MODEL, "--fp16"],
            "ValueError: --fp16 needs a GPU; give --bf16",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        (TRANSLATION, "FileNotFoundError: Dataset not found: valid ({})"),
        ([*TRANSLATION, "--encoder-n-dim=0"], "ValueError: --encoder-n-dim is 0"),
        (
            [*TRANSLATION, "--generation-weights=int8"],
            "ValueError: --generation-weights is int8, and a training needs float32; leave it out, and give",
        ),
        (
            [*OTHER_CRITERION, "--criterion=mega_lm_cross_entropy"],
            "ValueError: --criterion mega_lm_cross_entropy is for language models, not for --task",
        ),
        (
            [*PLUGIN, "--task=translation", "-s", "de", "-t", "en", "--arch=mega_lm", *TRAINING],
            "ValueError: --arch mega_lm has no encoder for the source of --task translation; choose an --arch that",
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_options_are_checked_before_data_is_read(no_data, words, said, tmp_path):
    """Valid options end in an error about data."""
    assert failure("train", no_data, *words, "--save-dir", tmp_path).startswith(said.format(no_data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "said"), [(0, "--decoder-layers is 0; it must be"), (2.5, "could not be converted to Integer")]
)
def test_hydra_refuses_numbers_out_of_range(no_data, layers, said, tmp_path):
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {"_name": "mega_language_modeling", "data": str(no_data)},
        "model": {"_name": "mega_lm_small", "decoder_layers": layers},
        "criterion": {"_name": "mega_lm_cross_entropy"},
        "optimizer": {"_name": "adam"},
        "dataset": {"max_tokens": 256},
        "checkpoint": {"save_dir": str(tmp_path)},
    }
    (tmp_path / "mega.yaml").write_text(json.dumps(config))  # JSON is YAML
    words = ["--config-dir", tmp_path, "--config-name=mega", f"hydra.run.dir={tmp_path}"]
    code, output = Running("hydra-train", *words, cwd=tmp_path).wait()
    assert code, output
    assert said in output
