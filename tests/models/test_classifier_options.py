"""Presets and options of the classifier as fairseq's parser and hydra read them, and what it refuses."""

import pytest
import torch
from fairseq.models import MODEL_REGISTRY, build_model

from mega_fairseq.models import MegaClassifier, MegaClassifierConfig, MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.classifier_presets import PRESETS
from mega_fairseq.modules import MIXERS
from tests.helpers.configurations import parsed, plain, under_hydra
from tests.helpers.golden_models import classification, task

# Preset -> types of its dictionary or None for real numbers, classes, and parameters with the released vocabularies.
PARAMETERS = {
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

NAME = "sentence_prediction"  # of fairseq's task and criterion


def words(preset, *more):
    return (f"--task={NAME}", f"--criterion={NAME}", "--num-classes=4", "--arch", preset, *more)


def count(cfg, types, classes):
    with torch.device("meta"):
        model = build_model(cfg, classification(types))
        assert type(model) is MegaClassifier
        model.register_classification_head("head", num_classes=classes)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_recipe_has_a_sister_in_chunks():
    recipes = {name for name in PARAMETERS if name != "mega_classifier_small"}
    assert set(PRESETS) == {*PARAMETERS, *(f"{name}_chunk" for name in recipes)}
    assert {name for name, model in MODEL_REGISTRY.items() if model is MegaClassifier} == {"mega_classifier", *PRESETS}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_a_preset_has_the_published_size_on_the_command_line_and_with_hydra(preset):
    types, classes, parameters = PARAMETERS[preset]
    command_line, hydra = parsed(*words(preset)), under_hydra(NAME, NAME, _name=preset)
    assert plain(command_line) == plain(hydra)
    assert count(command_line, types, classes) == parameters


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("_chunk")])
def test_a_sister_in_chunks_differs_only_in_its_chunks(preset):
    chunked, whole = (plain(parsed(*words(name))) for name in (preset, preset.replace("_chunk", "")))
    sizes = {"mega_lra_pathx_chunk": 4096, "mega_sc_raw_chunk": 1000, "mega_sc_raw_big_chunk": 1000}
    assert chunked["encoder_chunk_size"] == sizes.get(preset, 128)
    for cfg in (chunked, whole):
        del cfg["_name"], cfg["encoder_chunk_size"]
    assert chunked == whole


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("_chunk")])
def test_a_preset_in_chunks_takes_every_mixer(preset, mixer):
    types, classes, parameters = PARAMETERS[preset.replace("_chunk", "")]
    cfg = parsed(*words(preset, f"--encoder-token-mixer={mixer}"))
    assert parameters / 3 < count(cfg, types, classes) < 3 * parameters


def test_the_longest_input_of_a_preset_is_also_that_of_the_task():
    cfg = parsed(*words("mega_lra_listops"))
    assert cfg.max_positions == cfg._get_parent().task.max_positions == 2002


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"classifier_layers": -1}, "--classifier-layers is -1; give a whole number of at least 0"),
        ({"classifier_dim": 10**9}, "--classifier-dim is 1000000000; give at most 1,000,000"),
        ({"classifier_layers": 0, "classifier_dim": 8}, "--classifier-dim is 8 and there is no hidden layer; leave it"),
        ({"pooling": "max"}, "--pooling is 'max'; choose one of mean, first"),
        ({"max_positions": 0}, "--max-positions is 0; it must be a whole number of at least 1"),
        ({"encoder_attention_heads": 2}, "--encoder-attention-heads is 2 and has no effect with --encoder-token-mixer"),
        ({"encoder_token_mixer": "nothing"}, "--encoder-token-mixer is 'nothing'; choose one of mega"),
    ],
)
def test_options_out_of_range_are_refused_in_one_sentence(options, said):
    with pytest.raises(ValueError, match=".") as caught:
        MegaClassifier.build_model(MegaClassifierConfig(**options), classification(40))
    assert str(caught.value).startswith(said)


def test_embeddings_for_numbers_and_models_that_do_not_fit_the_task_are_refused():
    with pytest.raises(ValueError, match="^--encoder-embed-path has embeddings of tokens, and the inputs are numbers"):
        MegaClassifier.build_model(MegaClassifierConfig(encoder_embed_path="file"), classification(None))
    with pytest.raises(ValueError, match="^--arch mega_classifier predicts one of several classes, and this --task"):
        MegaClassifier.build_model(MegaClassifierConfig(), task(40))
    with pytest.raises(ValueError, match="^--arch mega_lm predicts tokens, and this --task has classes; choose"):
        MegaLanguageModel.build_model(MegaLMConfig(), classification(40))
