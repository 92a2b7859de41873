"""Presets and options of the translation model as fairseq's parser and hydra read them."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.models import MODEL_REGISTRY, build_model
from omegaconf import OmegaConf

from mega_fairseq.models import MegaClassifier, MegaLanguageModel, MegaTransformerModel
from mega_fairseq.models.lm_presets import MegaLMWt103Config
from mega_fairseq.models.mega_transformer import MegaTransformerSmallConfig
from tests.helpers.commands import ROOT, as_words
from tests.helpers.configurations import parsed, plain, released_options, under_hydra
from tests.helpers.golden_models import task

PARAMETERS = {
    "mega_transformer": 63_255_534,
    "mega_transformer_base": 63_255_534,
    "mega_transformer_laplace": 63_255_534,
    "mega_transformer_big": 217_700_334,
    "mega_transformer_small": 14_345_463,
    "mega_transformer_tiny": 5_756_535,
}  # with one table of embeddings for 33,000 types


def test_the_table_of_parameters_lists_every_preset():
    assert {name for name in MODEL_REGISTRY if name.startswith("mega_transformer")} == set(PARAMETERS)


@pytest.mark.parametrize("preset", PARAMETERS)
def test_a_preset_is_the_same_model_on_the_command_line_and_with_hydra(preset):
    command_line = parsed("--arch", preset, "--share-all-embeddings")
    hydra = under_hydra("translation", _name=preset, share_all_embeddings=True)
    assert plain(command_line) == plain(hydra)
    for cfg in (command_line, hydra):
        with torch.device("meta"):
            made = build_model(cfg, task(33_000))
        assert type(made) is MODEL_REGISTRY[preset]
        assert sum(parameter.numel() for parameter in made.parameters()) == PARAMETERS[preset]


@pytest.mark.slow
def test_the_options_of_a_preset_can_be_pickled():
    """Processes that fairseq starts for other GPUs unpickle them."""
    code = "import pickle, sys, mega_fairseq.models; print(pickle.loads(sys.stdin.buffer.read()))"
    presets = [MegaTransformerSmallConfig(dropout=0.7), MegaLMWt103Config(dropout=0.7)]
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(presets), capture_output=True, cwd=ROOT)
    assert done.stdout.decode().strip() == repr(presets), done.stderr


def test_fairseq_train_accepts_every_option_of_the_released_models():
    wanted = released_options("released_options_mega.json")
    cfg = parsed("--arch=mega_transformer", *as_words(wanted))
    assert {name: cfg[name] for name in wanted} == wanted


def test_a_norm_over_the_batch_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--arch=mega_transformer", "--normalization-type=batchnorm")
    assert "--normalization-type: invalid choice" in capsys.readouterr().err


def test_half_precision_that_needs_a_gpu_is_refused_without_one(monkeypatch):
    cfg = under_hydra("translation", _name="mega_transformer")
    OmegaConf.update(cfg._get_parent(), "common.fp16", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        build_model(cfg, task(40))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ValueError, match="^--fp16 needs a GPU; give --bf16, --memory-efficient-fp16 or --amp"):
            build_model(cfg, task(40))


@pytest.mark.parametrize("task_name", ["multilingual_translation", "semisupervised_translation"])
def test_a_task_that_needs_a_model_for_each_pair_of_languages_is_refused(task_name):
    with pytest.raises(ValueError, match=f"^--task {task_name} needs .*; give --task translation_multi_simple_epoch"):
        parsed("--arch=mega_transformer", "--task", task_name)


@pytest.mark.parametrize("model", [MegaTransformerModel, MegaClassifier])
def test_from_pretrained_of_another_model_is_refused(model, sweep_folder):
    said = f"rotary.pt contains a MegaLanguageModel, not a {model.__name__}; call MegaLanguageModel.from_pretrained"
    with pytest.raises(ValueError, match=said):
        model.from_pretrained(str(sweep_folder), "rotary.pt", str(sweep_folder / "data"))


@pytest.mark.parametrize("model", [MegaTransformerModel, MegaLanguageModel])
def test_from_pretrained_reports_a_path_that_does_not_exist(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/best.pt").touch()
    for given, error, said in (
        (("nothing", "best.pt"), FileNotFoundError, "model_name_or_path is 'nothing', which does not exist; give"),
        (("folder/best.pt",), ValueError, "is the file 'folder/best.pt'; give 'folder' and checkpoint_file='best.pt'"),
        (
            ("folder", "best.pt:last.pt"),
            FileNotFoundError,
            "checkpoint_file is 'last.pt' and 'folder/last.pt' does not",
        ),
        (("folder", "best.pt", "data"), FileNotFoundError, "data_name_or_path is 'data' and 'data' does not exist; "),
        (("folder", "best.pt", "./data"), FileNotFoundError, "'folder/./data' does not exist; give the folder of the"),
    ):
        with pytest.raises(error, match=".") as caught:
            model.from_pretrained(*given)
        assert said in str(caught.value)
