"""The recipe in examples/encoder, on a few passages."""

import pytest

from tests.helpers.recipes import EXAMPLES, Recipe, configuration

pytestmark = pytest.mark.slow
YEARS, PASSAGES = 8, 5  # of each year


def test_the_recipe_joins_passages_of_a_year_and_fine_tunes_what_it_pre_trained(tmp_path):
    recipe = Recipe(EXAMPLES / "encoder", tmp_path, PASSAGES="2", ARCH="mega_encoder_small")
    raw = recipe.data / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        years = [year for _ in range(PASSAGES) for year in range(YEARS)]
        (raw / f"{split}.year").write_text("".join(f"{1800 + year}\n" for year in years))
        (raw / f"{split}.label").write_text("".join(f"{year % 4}\n" for year in years))
        (raw / f"{split}.txt").write_text("".join(f"passage {i} of {year}\n" for i, year in enumerate(years)))
    recipe.run("prepare.sh")
    assert not (recipe.data / "2.tmp.text").exists()
    assert "run pretrain.sh first" in recipe.refusal("finetune.sh")
    assert "START is 'weights'" in recipe.refusal("finetune.sh", START="weights")
    small = {"UPDATES": "2", "WARMUP": "1", "LENGTH": "24", "BATCH": "8"}
    recipe.run("pretrain.sh", **small)
    recipe.run("finetune.sh", **small)
    accuracy = (recipe.checkpoints / "from-pretrained.txt").read_text()
    assert accuracy.startswith("accuracy, percent: ")
    stock = configuration(recipe, tmp_path, "pretrain.sh", ARCH="roberta")
    assert (stock.model._name, stock.task._name, stock.dataset.num_workers) == ("roberta", "masked_lm", 0)
    scratch = {"START": "scratch", "PYTHON": tmp_path / "python"}  # which only writes the words of fairseq-train
    assert "fairseq-validate failed" in recipe.refusal("finetune.sh", **scratch)
    words = (tmp_path / "words").read_text()
    assert "sentence_prediction" in words
    assert "--finetune-from-model" not in words
