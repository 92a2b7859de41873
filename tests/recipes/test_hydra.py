"""The YAML files of examples/hydra train as the presets and options that they name, and one resumes."""

import re

import pytest

from mega_fairseq.cli.main import main
from tests.helpers.commands import (
    LM,
    LM_SIZES,
    MEGA_SIZES,
    ROOT,
    checkpoint,
    fairseq,
    perplexity,
    preprocess_pairs,
    preprocess_text,
)

pytestmark = pytest.mark.slow


def prepare(kind, folder):
    """Data for one of the files, and options for a small model."""
    if kind == "translation":
        return preprocess_pairs(folder), ["task.source_lang=de", "task.target_lang=en"], MEGA_SIZES
    if kind == "language_modeling":
        return preprocess_text(folder), [], LM_SIZES
    assert main(["prepare", "digits", str(folder / "digits")]) == 0
    return folder / "digits", [], {"encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16}


@pytest.mark.parametrize("path", sorted((ROOT / "examples/hydra").iterdir()), ids=lambda path: path.stem)
def test_a_yaml_file_trains_its_preset(path, tmp_path):
    data, overrides, sizes = prepare(path.stem, tmp_path)
    added = [f"++model.{name}={size}" for name, size in sizes.items()]
    words = [
        f"common.user_dir={ROOT / 'mega_fairseq'}",
        "common.cpu=true",
        "dataset.max_valid_steps=2",
    ]
    where = [f"task.data={data}", f"checkpoint.save_dir={tmp_path}"]
    runs = (2, 3) if path.stem == "translation" else (3,)
    for updates in runs:
        said = fairseq(
            "hydra-train", "--config-dir", path.parent, "--config-name", path.stem, *words, *where, *overrides, *added,
            f"optimization.max_update={updates}", cwd=tmp_path,
        )  # fmt: skip
    assert bool(re.search(r"Loaded checkpoint .*checkpoint_last.pt", said)) == (len(runs) > 1)
    last = tmp_path / "checkpoint_last.pt"
    state = checkpoint(last)
    assert state["optimizer_history"][-1]["num_updates"] == 3
    presets = {"translation": "transformer_tiny", "language_modeling": "lm_small", "classification": "classifier_small"}
    assert state["cfg"]["model"]["_name"] == f"mega_{presets[path.stem]}"
    assert state["cfg"]["optimizer"]["adam_betas"] == "(0.9, 0.98)"
    if path.stem == "language_modeling":
        _, loss, _ = perplexity(fairseq("eval-lm", data, *LM, "--path", last, "--gen-subset=valid"))
        validated = re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", said)[-1]
        assert loss == pytest.approx(float(validated), abs=1e-4)
