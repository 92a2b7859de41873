"""Numbers out of range and options that conflict are refused before any data is read.

The commands get a folder that contains only dictionaries, so a command that looks for data reports that there is
none.
"""

import math
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq.data import TruncatedDictionary
from fairseq.tasks import setup_task

import mega_fairseq.criterions  # noqa: F401 - registers ours
from mega_fairseq.models import (
    MegaClassifier,
    MegaClassifierConfig,
    MegaEncoderConfig,
    MegaEncoderModel,
    MegaLanguageModel,
    MegaLMConfig,
    MegaTransformerConfig,
    MegaTransformerModel,
)
from mega_fairseq.modules import MIXERS
from mega_fairseq.tasks import (
    MegaClassificationConfig,
    MegaClassificationTask,
    MegaLanguageModelingConfig,
    MegaLanguageModelingTask,
)
from tests.helpers.commands import LM, LM_HEADS, LM_TRAINING, MEGA, MEGA_LM, PLUGIN, TRAINING, failure
from tests.helpers.golden_models import classification, dictionary, task
from tests.helpers.small_models import ADAPTIVE as SOFTMAX
from tests.helpers.small_models import TIED
from tests.helpers.small_models import language_model as model

# ------------------------------------------------------------------------------------------------ ranges

SMALL = {"encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 50, "max_target_positions": 50}
MODELS = {
    MegaLMConfig: (MegaLanguageModel, task),
    MegaTransformerConfig: (MegaTransformerModel, task),
    MegaClassifierConfig: (MegaClassifier, classification),
    MegaEncoderConfig: (MegaEncoderModel, classification),
}
# Options whose range is stated beside their default.
STATED = [
    (config, f.name)
    for config in (*MODELS, MegaLanguageModelingConfig)
    for f in fields(config)
    if f.metadata.get("least") is not None
]
# Options whose range a token mixer checks (tests of modules refuse the others): other options, refused values,
# accepted values.
ATTENTION, SPARSE = {"token_mixer": "attention"}, {"token_mixer": "sparse"}
GMLP, AFT = {"token_mixer": "gmlp", "decoder_chunk_size": 16}, {"token_mixer": "aft", "decoder_aft_form": "local"}
RANGES = {
    "decoder_attention_heads": (ATTENTION, [0, -1, 3], [1, 8]),
    "decoder_rotary_dims": (ATTENTION, [-1, 1, 66], [0, 64]),
    "decoder_gmlp_expansion": (GMLP, [0, -1], [1, 3]),
    "decoder_aft_reach": (AFT, [0, -1], [1, 32]),
    "decoder_sparse_stride": (SPARSE, [0, -1, 7], [8, 1000]),
    "decoder_sparse_summary": (SPARSE, [0, -1, 129], [1, 128]),
    "decoder_sparse_subblocks": (SPARSE, [0, -1, 9], [1, 8]),  # of 8 heads
}


def build(config, **options):
    """A task or a model on the meta device, as fairseq-train builds it."""
    if config is MegaLanguageModelingConfig:
        return MegaLanguageModelingTask(config(data="unused", **options), dictionary(40))
    kind, for_task = MODELS[config]
    small = {name: size for name, size in SMALL.items() if hasattr(config, name)}
    with torch.device("meta"):
        return kind.build_model(config(**{**small, **options}), for_task(40))


def assert_refused_by_name(config, name, value, **others):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*{re.escape(str(value))}\\b"):
        build(config, **{**others, name: value})


@pytest.mark.parametrize(("config", "name"), STATED)
def test_a_number_is_refused_outside_the_range_stated_beside_its_default(config, name):
    (option,) = (f for f in fields(config) if f.name == name)
    assert_refused_by_name(config, name, option.metadata["least"] - 1)
    for value in (math.nan, option.metadata["below"]) if option.type is float else ():
        assert_refused_by_name(config, name, value)


@pytest.mark.parametrize("name", RANGES)
def test_a_number_is_refused_outside_the_range_of_its_module(name):
    others, refused, accepted = RANGES[name]
    for value in accepted:
        build(MegaLMConfig, **{**others, name: value})
    for value in refused:
        assert_refused_by_name(MegaLMConfig, name, value, **others)


# ------------------------------------------------------------------------------------------------ conflicts

BANDS = {"adaptive_input": True, "adaptive_input_cutoff": "10,20"}
TIES = "--share-decoder-input-output-embed"


@pytest.mark.parametrize("config", [config for config in MODELS if hasattr(config, "encoder_token_mixer")])
@pytest.mark.parametrize("mixer", [name for name, config in MIXERS.items() if config.causal_only])
def test_a_mixer_of_the_past_alone_is_refused_in_an_encoder(config, mixer):
    with pytest.raises(ValueError, match="only uses the past.* choose another --encoder-token-mixer"):
        build(config, encoder_token_mixer=mixer)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"decoder_z_dim": 7}, "--decoder-z-dim"),
        *(({"adaptive_softmax_cutoff": text}, f"--adaptive-softmax-cutoff is '{text}'") for text in ("x", "9,5", "40")),
        ({**BANDS, "adaptive_input_cutoff": "3"}, "--adaptive-input-cutoff starts with 3, "),
        ({**SOFTMAX, "adaptive_softmax_factor": 9.0}, "--adaptive-softmax-factor is 9.0"),
        ({"adaptive_input": True}, "--adaptive-input-cutoff"),
        ({"tie_adaptive_weights": True}, "--tie-adaptive-weights"),
        ({"tie_adaptive_proj": True, **SOFTMAX, **BANDS}, "--tie-adaptive-weights"),
        ({**TIED, "adaptive_input_factor": 4.0}, "--adaptive-input-factor"),
        ({**TIED, "decoder_input_dim": 8}, "--decoder-input-dim"),
        *(({"share_decoder_input_output_embed": True, **other}, TIES) for other in (SOFTMAX, BANDS)),
        *(({option: True, **SOFTMAX}, "--output-bias") for option in ("output_bias", "output_dense")),
    ],
    ids=str,
)
def test_options_in_conflict_are_refused_by_their_names(options, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        model(**options)


@pytest.mark.parametrize(
    ("option", "without"),
    [
        ({"adaptive_softmax_dropout": 0.3}, "--adaptive-softmax-cutoff"),
        ({"adaptive_input_cutoff": "10"}, "--adaptive-input"),
        ({"no_affine_final_norm": True}, "--normalize-before"),
    ],
    ids=str,
)
def test_an_option_without_effect_gives_a_warning(option, without, caplog):
    model(**{"normalize_before": False, **option})
    (name,) = option
    assert caplog.messages[0].startswith(f"--{name.replace('_', '-')} has no effect without {without}")


def test_models_and_tasks_that_do_not_fit_are_refused():
    types = dictionary(40)
    words = SimpleNamespace(source_dictionary=types, target_dictionary=TruncatedDictionary(types, 30))
    classes, numbers = classification(40), classification(None)
    for kind, config, where, said in (
        (MegaLanguageModel, MegaLMConfig(), words, "--output-dictionary-size"),
        (MegaLanguageModel, MegaLMConfig(), classes, "--arch mega_lm"),
        (MegaClassifier, MegaClassifierConfig(), task(40), "--arch mega_classifier"),
        (MegaClassifier, MegaClassifierConfig(encoder_embed_path="file"), numbers, "--encoder-embed-path"),
        (MegaEncoderModel, MegaEncoderConfig(), numbers, "--arch mega_classifier"),
    ):
        with pytest.raises(ValueError, match=said):
            kind.build_model(config, where)
    with pytest.raises(ValueError, match="--arch mega_classifier"):
        MegaClassificationTask(MegaClassificationConfig(), dictionary(40), ["a", "b"]).build_model(MegaLMConfig())


# ------------------------------------------------------------------------------------------------ command lines

ADAPTIVE = LM_HEADS["adaptive"]  # clusters end at types 10 and 18
LANGUAGE_MODEL = [*LM, *MEGA_LM, *LM_TRAINING]
TRANSLATION = [*PLUGIN, *MEGA, *TRAINING, "-s", "de", "-t", "en"]
OTHER_CRITERION = [word for word in TRANSLATION if "smoothing" not in str(word)]


@pytest.fixture(scope="module")
def no_data(tmp_path_factory):
    """A folder with equal dictionaries for both tasks and with files of embeddings."""
    folder = tmp_path_factory.mktemp("no_data")
    for name in ("dict.txt", "dict.de.txt", "dict.en.txt"):
        dictionary(40).save(str(folder / name))
    rows = {"narrow": ("w7", "0.5", 8), "foreign": ("x", "0.5", 32), "nan": ("w7", "nan", 32)}
    for name, (word, number, width) in rows.items():
        (folder / name).write_text(f"1 {width}\n{word} {' '.join([number] * width)}\n")
    (folder / "empty").write_text("")
    return folder


def set_up(words):
    """Builds the task and the model as fairseq-train does before it looks for data."""
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), list(map(str, words)))
    with torch.device("meta"):
        setup_task(args).build_model(args)


def assert_refused(words, no_data, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        set_up([no_data, *(str(word).format(no_data) for word in words)])


OF_LANGUAGE_MODEL = [
    (["--decoder-chunk-size=-1"], "--decoder-chunk-size is -1"),
    ([*ADAPTIVE, "--adaptive-input-cutoff=12,18"], "--adaptive-input-cutoff"),
    *((["--decoder-embed-path={}/" + name], f"/{name}, ") for name in ("gone", "empty", "foreign", "nan", "narrow")),
]
OF_TRANSLATION = [
    (["--encoder-embed-dim=64"], "--encoder-embed-dim"),
    (["--decoder-embed-path={}/narrow"], "--encoder-embed-path"),
    (["--encoder-token-mixer=megalodon"], "another --encoder-token-mixer"),
]


@pytest.mark.parametrize(("words", "said"), OF_LANGUAGE_MODEL + OF_TRANSLATION, ids=str)
def test_options_of_an_invalid_model_are_refused(no_data, words, said):
    base = TRANSLATION if (words, said) in OF_TRANSLATION else LANGUAGE_MODEL
    assert_refused([*base, *words], no_data, said)


@pytest.mark.parametrize(
    ("base", "word", "said"),
    [
        (LANGUAGE_MODEL, "--token-shift=1", "--token-shift: give --decoder-token-shift\n"),
        (TRANSLATION, "--chunk-size=8", "--chunk-size: give --encoder-chunk-size or --decoder-chunk-size\n"),
        (TRANSLATION, "--token-mixer=gau", "--token-mixer: give --encoder-token-mixer or --decoder-token-mixer\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_without_a_side_names_those_of_each_side(no_data, base, word, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        set_up([no_data, *base, word])
    assert capsys.readouterr().err.endswith(said)


HEADS, TABLES, NO_CHUNK = "--{}-attention-heads=5", "--{}-chunk-size=8", "--{}-chunk-size is -1"


@pytest.mark.parametrize(
    ("mixer", "options", "said"),
    [
        *((mixer, [HEADS], "--{}-attention-heads is 5") for mixer in ("attention", "sparse")),
        *((mixer, [HEADS, TABLES], "--{}-attention-heads is 5") for mixer in ("gmlp", "aft")),
        ("gau", ["--{}-z-dim=15", "--rel-pos-bias=rope"], "--{}-z-dim is 15"),
        ("sparse", ["--{}-sparse-pattern=strided", "--{}-sparse-summary=4"], "--{}-sparse-pattern strided"),
        *((mixer, [], NO_CHUNK) for mixer in ("gmlp", "aft", "flash")),
        ("attention", ["--{}-time-weight=after"], NO_CHUNK),
        ("attention", ["--{}-attention-heads=1", "--{}-talking-heads"], "--{}-talking-heads mixes heads"),
        ("aft", ["--{}-aft-form=local"], "--{}-aft-reach is -1"),
        ("aft", ["--{}-aft-form=local", "--{}-aft-reach=9", TABLES], "--{}-aft-form local"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_a_mixer_are_refused_by_name(no_data, mixer, options, said):
    for side in ("encoder", "decoder"):
        base = [*PLUGIN, *TRAINING, "-s=de", "-t=en", "--arch=mega_transformer", f"--{side}-token-mixer={mixer}"]
        assert_refused([*base, *(word.replace("{}", side) for word in options)], no_data, said.replace("{}", side))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch=aft_lm_small", "--decoder-aft-form=window"], "--decoder-aft-reach is 32"),
        (["--arch=flash_lm_small", "--ffn-activation-fn=geglu"], "--ffn-activation-fn is geglu"),
        (["--arch=attention_lm_small", "--ffn-activation-fn=gelu", "--activation-fn=relu"], "--activation-fn is relu"),
        (["--arch=mega_transformer_small"], "--task mega_language_modeling has no --max-source-positions"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_a_preset_are_refused(no_data, words, said):
    assert_refused([*LM, *LM_TRAINING, "--tokens-per-sample=8", *words], no_data, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LANGUAGE_MODEL, "FileNotFoundError: there is no {}/valid.bin"),
        ([*LANGUAGE_MODEL, "--decoder-layers=0"], "ValueError: --decoder-layers is 0"),  # by the model
        ([*OTHER_CRITERION, "--criterion=mega_lm_cross_entropy"], "ValueError: --criterion mega_lm_cross_entropy"),
        (
            [*PLUGIN, "--task=translation", "-s", "de", "-t", "en", "--arch=mega_lm", *TRAINING],
            "ValueError: --arch mega_lm has no encoder",
        ),
        (
            [*PLUGIN, "--task=translation", "-s", "de", "-t", "en", "--arch=mega_encoder", *TRAINING],
            "ValueError: --arch mega_encoder has no decoder",
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_options_are_checked_before_data_is_read(no_data, words, said, tmp_path):
    """Valid options end in an error about data."""
    assert failure("train", no_data, *words, "--save-dir", tmp_path).startswith(said.format(no_data))
