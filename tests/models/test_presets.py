"""Presets and options of models as fairseq's parser and hydra read them."""

import pickle
import subprocess
import sys
from dataclasses import fields
from enum import Enum
from typing import get_type_hints

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, build_model

from mega_fairseq.models import (
    MegaClassifier,
    MegaClassifierConfig,
    MegaEncoderConfig,
    MegaLMConfig,
    MegaTransformerConfig,
)
from mega_fairseq.models.presets import CLASSIFIERS, ENCODERS, LANGUAGE_MODELS, TRANSLATION
from mega_fairseq.modules import MIXERS, FeedForwardConfig, GatedCrossAttentionConfig
from mega_fairseq.modules.normalization import BATCH_NORMS
from tests.helpers.commands import ROOT, as_words
from tests.helpers.configurations import parsed, plain, under_hydra
from tests.helpers.golden_models import classification, task

WORDS, BYTES, BPE, PIECES, CHARACTERS = 267_744, 208, 33_000, 32_000, 5_744
CANCELLING = 8 * 128  # the experiment counts a table alpha, which cancels in normalised forms
PARAMETERS = {  # size of the vocabulary, and parameters with it
    "mega_transformer": (BPE, 63_255_534),  # with one table of embeddings
    "mega_transformer_base": (BPE, 63_255_534),
    "mega_transformer_laplace": (BPE, 63_255_534),
    "mega_transformer_big": (BPE, 217_700_334),
    "mega_transformer_small": (BPE, 14_345_463),
    "mega_transformer_tiny": (BPE, 5_756_535),
    "mega_lm": (BPE, 53_330_682),
    "mega_lm_wt103": (WORDS, 252_237_824),  # 252M in the paper
    "mega_lm_enwik8": (BYTES, 39_137_792),  # 39M in the paper
    "mega_lm_base": (WORDS, 149_591_552),
    "mega_lm_big": (BPE, 240_635_904),
    "mega_lm_small": (BYTES, 888_064),
    # Other token mixers; the small ones have as many parameters as mega_lm_small, within 2%.
    "flash_quad_lm_base": (PIECES, 112_015_872),  # 110M in the paper
    "flash_quad_lm_small": (BYTES, 888_576),
    "flash_lm_base": (PIECES, 112_028_160),  # 110M in the paper
    "flash_lm_small": (BYTES, 890_624),
    "attention_lm_base": (PIECES, 109_632_000),
    "attention_lm_small": (BYTES, 885_760),
    "time_weighted_lm_base": (PIECES, 109_785_600),
    "time_weighted_lm_small": (BYTES, 894_976),
    "time_weighted_lm_seed": (CHARACTERS, 9_301_696 - CANCELLING),  # 9.3M
    "gmlp_lm_base": (PIECES, 109_853_184),
    "gmlp_lm_small": (BYTES, 889_824),
    "gmlp_lm_seed": (CHARACTERS, 9_826_432),  # 9.8M
    "aft_lm_enwik8": (BYTES, 19_014_144),
    "aft_lm_enwik8_wide": (BYTES, 37_939_200),
    "aft_lm_small": (BYTES, 886_272),
    "aft_lm_seed": (CHARACTERS, 9_301_632 - CANCELLING),  # 9.3M
    "sparse_lm_enwik8": (BYTES, 94_679_040),  # 95M in the paper
    "sparse_lm_small": (BYTES, 885_760),
    "megalodon_lm_enwik8": (BYTES, 39_138_816),
    "megalodon_lm_200m": (PIECES, 220_670_976),  # 220,627,968 without biases in feed-forward layers, as in the release
    "megalodon_lm_small": (BYTES, 888_064),
}
CLASSIFICATION = {  # types of the dictionary or None for numbers, classes, and parameters with released vocabularies
    "mega_lra_listops": (21, 10, 602_338),
    "mega_lra_text": (181, 2, 980_372),
    "mega_lra_retrieval": (101, 2, 1_464_734),
    "mega_lra_image": (None, 10, 2_839_096),
    "mega_lra_pathfinder": (None, 2, 1_386_874),
    "mega_lra_pathx": (None, 2, 381_948),
    "mega_sc_raw": (None, 10, 343_134),
    "mega_sc_raw_big": (None, 10, 475_890),
    "mega_classifier_small": (261, 4, 147_070),
}
ENCODING = {"mega_encoder_base": (50_265, 124_329_561), "mega_encoder_small": (BYTES, 938_064)}  # RoBERTa 124,697,433
NAME = "sentence_prediction"  # of fairseq's task and criterion
PARSED = [  # the model and a preset of each kind
    "mega_transformer",
    "mega_transformer_tiny",
    "mega_lm",
    "mega_lm_wt103",
    "gmlp_lm_small",
    "mega_lra_image",
    "mega_encoder_base",
]


def cases():
    """Preset, fairseq's task and criterion, options, types of the dictionary, classes, and parameters."""
    for preset, (types, parameters) in PARAMETERS.items():
        if preset == "mega_transformer" or preset in TRANSLATION:
            yield preset, "translation", "cross_entropy", {"share_all_embeddings": True}, types, None, parameters
        else:
            yield preset, "mega_language_modeling", "cross_entropy", {}, types, None, parameters
    for preset, (types, classes, parameters) in CLASSIFICATION.items():
        yield preset, NAME, NAME, {}, types, classes, parameters
    for preset, (types, parameters) in ENCODING.items():
        yield preset, "masked_lm", "masked_lm", {}, types, None, parameters


def test_the_tables_list_every_preset():
    assert set(PARAMETERS) == {"mega_lm", "mega_transformer", *LANGUAGE_MODELS, *TRANSLATION}
    assert set(CLASSIFICATION) == {name for name in CLASSIFIERS if not name.endswith("_chunk")}
    classifiers = {name for name, model in MODEL_REGISTRY.items() if model is MegaClassifier}
    assert classifiers == {"mega_classifier", *CLASSIFIERS}
    assert set(ENCODING) == set(ENCODERS)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_a_preset_has_its_parameters(case, caplog):
    preset, name, criterion, options, types, classes, parameters = case
    cfg = under_hydra(name, criterion, _name=preset, **options)
    with torch.device("meta"):
        model = build_model(cfg, task(types) if criterion == "cross_entropy" else classification(types))
        if classes:
            model.register_classification_head("head", num_classes=classes)
    assert type(model) is MODEL_REGISTRY[cfg._name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not [record for record in caplog.records if record.name.startswith("mega_fairseq")]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case[0] in PARSED], ids=lambda case: case[0])
def test_a_preset_is_the_same_on_the_command_line_and_with_hydra(case):
    preset, name, criterion, options, _, classes, _ = case
    given = {"arch": preset, "task": name, "criterion": criterion, **options}
    cfg = parsed(*as_words({**given, "num_classes": classes} if classes else given))
    assert plain(cfg) == plain(under_hydra(name, criterion, _name=preset, **options))
    assert not classes or cfg.max_positions == cfg._get_parent().task.max_positions


@pytest.mark.parametrize("preset", [name for name in CLASSIFIERS if name.endswith("_chunk")])
def test_a_classifier_in_chunks_takes_every_mixer(preset):
    types, *_ = CLASSIFICATION[preset.replace("_chunk", "")]
    for mixer, config in MIXERS.items():
        if config.causal_only:
            continue
        cfg = under_hydra(NAME, NAME, _name=preset, encoder_token_mixer=mixer)
        with torch.device("meta"):
            layers = build_model(cfg, classification(types)).encoder.layers
        assert {type(layer.mixer.config) for layer in layers} == {config}


@pytest.mark.parametrize("preset", ["mega_lm_small", "flash_lm_base"])
def test_a_flag_that_a_preset_has_set_changes_nothing(preset):
    flags = as_words({name: value for name, value in LANGUAGE_MODELS[preset].items() if value is True})
    assert flags
    assert plain(parsed("--arch", preset, *flags)) == plain(parsed("--arch", preset))


@pytest.mark.slow
def test_options_of_a_preset_can_be_pickled():
    """Processes that fairseq starts for other GPUs unpickle them."""
    code = "import pickle, sys, mega_fairseq.models; print(pickle.loads(sys.stdin.buffer.read()))"
    presets = [MODEL_DATACLASS_REGISTRY[name](dropout=0.7) for name in ("mega_transformer_small", "mega_lm_wt103")]
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(presets), capture_output=True, cwd=ROOT)
    assert done.stdout.decode().strip() == repr(presets), done.stderr


@pytest.mark.parametrize(
    ("config", "sides"),
    [
        (MegaTransformerConfig, ["encoder", "decoder"]),
        (MegaLMConfig, ["decoder"]),
        (MegaClassifierConfig, ["encoder"]),
        (MegaEncoderConfig, ["encoder"]),
    ],
)
def test_options_have_the_types_defaults_and_choices_of_the_fields_they_set(config, sides):
    options, kinds = {f.name: f for f in fields(config)}, get_type_hints(config)
    checked, cross_attention = 0, [GatedCrossAttentionConfig] * (config is MegaTransformerConfig)
    for part in (*MIXERS.values(), FeedForwardConfig, *cross_attention):
        hints = get_type_hints(part)
        for f in fields(part):
            for side in sides if f.metadata.get("option") else ():
                if side == "encoder" and getattr(part, "causal_only", False):
                    continue
                name = f.metadata["option"].format(side=side)
                option = options[name]
                if isinstance(kinds[name], type) and issubclass(kinds[name], Enum):
                    choices = list(f.metadata["choices"])
                    causal = [choice for choice in choices if choice not in BATCH_NORMS]  # where a decoder shares it
                    assert [choice.value for choice in kinds[name]] in (choices, causal), name
                elif hints[f.name] in (int, bool, float):
                    assert kinds[name] is hints[f.name], name
                if f.name != "dim" and "{side}" in f.metadata["option"] and f.default:  # None and 0 depend on others
                    assert option.default == f.default, name
                checked += 1
    assert checked > 20 * len(sides)


def test_a_norm_over_the_batch_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--arch=mega_transformer", "--normalization-type=batchnorm")
    assert "--normalization-type: invalid choice" in capsys.readouterr().err
