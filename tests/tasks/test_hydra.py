"""fairseq-hydra-train: a preset from a YAML file trains, resumes, and is evaluated with the defaults of the preset."""

import json
import re

import pytest

from tests.helpers.commands import (
    GENERATION,
    LM,
    LM_CHUNK,
    LM_MULTIPLES,
    LM_SIZES,
    MEGA_SIZES,
    ROOT,
    assert_same_translations,
    checkpoint,
    fairseq,
    perplexity,
    preprocess_pairs,
    preprocess_text,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def hydra(tmp_path):
    """Trains for 8 updates with fairseq-hydra-train, then for 4 more; returns the checkpoint and the log."""

    def call(task, model, criterion, max_tokens):
        config = {
            "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
            "task": task,
            "model": model,
            "criterion": criterion,
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "fixed"},
            "optimization": {"lr": [0.01]},
            "dataset": {"max_tokens": max_tokens, "num_workers": 0, "required_batch_size_multiple": 1},
            "checkpoint": {"no_epoch_checkpoints": True, "save_dir": str(tmp_path)},
        }
        (tmp_path / "mega.yaml").write_text(json.dumps(config))  # JSON is YAML
        words = ["--config-dir", tmp_path, "--config-name=mega", f"hydra.run.dir={tmp_path}"]
        for updates in (8, 12):
            fairseq("hydra-train", *words, f"optimization.max_update={updates}", cwd=tmp_path)
        log = (tmp_path / "hydra_train.log").read_text()
        assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 1 @ 8 updates\)", log)
        return tmp_path / "checkpoint_last.pt", log

    return call


def test_a_translation_preset_trains_resumes_and_translates(hydra, tmp_path):
    data = preprocess_pairs(tmp_path)
    path, _ = hydra(
        {"_name": "translation", "data": str(data), "source_lang": "de", "target_lang": "en"},
        {"_name": "mega_transformer_base", "share_all_embeddings": True, **MEGA_SIZES},
        {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
        max_tokens=300,
    )
    model = checkpoint(path)["cfg"]["model"]
    names = ("_name", "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "encoder_n_dim")
    assert [model[name] for name in names] == ["mega_transformer_base", 0.15, 0.1, 0.1, 0.1, 4]
    search = ["generate", data, *GENERATION, f"--path={path}"]
    assert_same_translations(fairseq(*search, "--batch-size=64"), fairseq(*search, "--batch-size=7"))


def test_a_language_model_preset_trains_resumes_and_is_evaluated(hydra, tmp_path):
    data, (least, most) = preprocess_text(tmp_path), LM_MULTIPLES
    task = {"variant_block_multiple_min": least, "variant_block_multiple_max": most}
    path, log = hydra(
        {"_name": "mega_language_modeling", "data": str(data), **task},
        {"_name": "mega_lm_small", **LM_SIZES},
        {"_name": "mega_lm_cross_entropy"},
        max_tokens=256,
    )
    model = checkpoint(path)["cfg"]["model"]
    names = ("_name", "dropout", "rel_pos_bias", "normalize_before", "no_affine_final_norm", "decoder_chunk_size")
    assert [model[name] for name in names] == ["mega_lm_small", 0.0, "rotary", True, True, LM_CHUNK]
    _, loss, _ = perplexity(fairseq("eval-lm", data, *LM, "--path", path, "--gen-subset=valid"))
    assert loss == pytest.approx(float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1]), abs=1e-4)
