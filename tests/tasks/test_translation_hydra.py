"""Translation with fairseq-hydra-train: a preset from a YAML file."""

import json
import re

import pytest
import torch

from tests.helpers.commands import (
    CPU,
    MEGA_SIZES,
    PLUGIN,
    ROOT,
    SEARCH,
    assert_same_translations,
    fairseq,
    preprocess_pairs,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return preprocess_pairs(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def hydra(corpus):
    """Trains a preset with fairseq-hydra-train from a YAML file in a separate folder; returns the checkpoint."""
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {"_name": "translation", "data": str(corpus), "source_lang": "de", "target_lang": "en"},
        "model": {"_name": "mega_transformer_base", "share_all_embeddings": True, **MEGA_SIZES},
        "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.02], "max_update": 8},
        "dataset": {"max_tokens": 300, "required_batch_size_multiple": 1},
        "checkpoint": {"no_epoch_checkpoints": True},
    }

    def call(folder, *overrides):
        (folder / "mega.yaml").write_text(json.dumps(config))  # JSON is YAML
        # hydra writes the output to a file
        words = ["--config-dir", folder, "--config-name=mega", f"hydra.run.dir={folder}", *overrides]
        fairseq("hydra-train", *words, f"checkpoint.save_dir={folder}", cwd=folder)
        return folder / "checkpoint_last.pt"

    return call


def test_a_preset_with_hydra_has_its_defaults_trains_resumes_and_translates(hydra, corpus, tmp_path):
    state = torch.load(hydra(tmp_path), weights_only=True)
    names = ("_name", "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "encoder_n_dim")
    assert [state["cfg"]["model"][name] for name in names] == ["mega_transformer_base", 0.15, 0.1, 0.1, 0.1, 4]
    path = hydra(tmp_path, "optimization.max_update=12")
    log = (tmp_path / "hydra_train.log").read_text()
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 1 @ 8 updates\)", log)
    assert torch.load(path, weights_only=True)["optimizer_history"][-1]["num_updates"] == 12
    search = ["generate", corpus, *PLUGIN, *CPU, *SEARCH, f"--path={path}"]
    assert_same_translations(fairseq(*search, "--batch-size=64"), fairseq(*search, "--batch-size=7"))


def test_hydra_trains_in_bfloat16_on_the_cpu(hydra, tmp_path):
    state = torch.load(hydra(tmp_path, "common.bf16=true"), weights_only=True)
    assert state["cfg"]["common"]["bf16"]
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
