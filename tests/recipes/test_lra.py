"""The recipes of the Long Range Arena and raw speech, from data to scores, with models of a few parameters."""

import functools
import json
import re
import tarfile
from collections import Counter
from typing import NamedTuple, Tuple

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task

from mega_fairseq.tasks.mega_classification import HEAD
from tests.helpers.recipes import EXAMPLES, Recipe, configuration, half, text, write

pytestmark = pytest.mark.slow

SPLITS = ("train", "valid", "test")
SPEECH = "speech_commands"
# The small size of each recipe: arguments of prepare.sh, and how many test examples there are.
SMALL = {
    "lra/listops": (["--train=200", "--valid=5", "--test=7"], 7),
    "lra/text": ([], 600),
    "lra/retrieval": ([], 600),
    "lra/image": ([], 1100),
    "lra/pathfinder": (["--images=20"], 2),
    "lra/pathx": (["--images=10"], 1),
    SPEECH: ([], 320),
}
# The recipe's architecture, reduced so that an update takes a fraction of a second. Inputs are cut.
SIZES = {"layers": 1, "embed-dim": 8, "hidden-dim": 16, "ffn-embed-dim": 16, "z-dim": 4, "chunk-size": 16}
NARROW = [f"--encoder-{name}={size}" for name, size in SIZES.items()]
CUT = ["--max-positions=48", "--shorten-method=truncate"]


@pytest.fixture
def recipe(tmp_path):
    # The space in the path detects missing quotes.
    return lambda name, **variables: Recipe(EXAMPLES / name, tmp_path / "a place", **variables)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares the small size of a recipe once."""

    @functools.lru_cache(maxsize=None)
    def prepare(name):
        recipe = Recipe(EXAMPLES / name, tmp_path_factory.mktemp("a place"))
        recipe.run("prepare.sh", *SMALL[name][0])
        return recipe

    return prepare


# ----------------------------------------------------------------------------------------------- settings


class Published(NamedTuple):
    """Table 8 of the paper, with the batches and updates of the released commands."""

    arch: str
    batch: Tuple[int, int]  # examples, and batches in an update
    rate: float
    dropout: float
    decay: float
    schedule: Tuple[int, int]  # updates of warm-up and in all
    scaling: Tuple[float, float] = (0.0, 1.0)


PUBLISHED = {
    "lra/listops": Published("mega_lra_listops", (64, 1), 1e-3, 0.1, 0.01, (3000, 90000)),
    "lra/text": Published("mega_lra_text", (25, 2), 4e-3, 0.1, 0.01, (10000, 25000)),
    "lra/retrieval": Published("mega_lra_retrieval", (8, 8), 3e-3, 0.1, 0.04, (10000, 91960)),
    "lra/image": Published("mega_lra_image", (50, 1), 1e-2, 0.0, 0.02, (9000, 180000), (0.48, 0.24)),
    "lra/pathfinder": Published("mega_lra_pathfinder", (128, 1), 1e-2, 0.0, 0.01, (50000, 250000), (0.5, 0.5)),
    "lra/pathx": Published("mega_lra_pathx", (2, 64), 1e-2, 0.0, 0.01, (25000, 125000), (0.5, 0.5)),
    SPEECH: Published("mega_sc_raw", (20, 1), 1e-2, 0.0, 0.01, (10000, 250000), (0.25, 0.125)),
}


def settings(cfg):
    task = cfg.task
    return Published(
        cfg.model._name,
        (cfg.dataset.batch_size, cfg.optimization.update_freq[0]),
        cfg.optimization.lr[0],
        cfg.model.dropout,
        cfg.optimizer.weight_decay,
        (cfg.lr_scheduler.warmup_updates, int(cfg.lr_scheduler.total_num_update)),
        (task.values_mean, task.values_deviation),
    )


@pytest.fixture
def command_of(tmp_path):
    """What the full size of a recipe is trained with."""

    def parsed(name, **variables):
        recipe = Recipe(EXAMPLES / name, tmp_path, SIZE="full", **variables)
        write(recipe.data / "full/bin/scaling", ["0.25 0.125"])
        return configuration(recipe, tmp_path)

    return parsed


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_size_is_trained_as_published(name, command_of):
    cfg = command_of(name)
    assert settings(cfg) == PUBLISHED[name]
    assert (cfg.optimizer._name, cfg.optimizer.adam_betas, cfg.optimizer.adam_eps) == ("adam", "(0.9, 0.98)", 1e-8)
    assert (cfg.lr_scheduler._name, cfg.optimization.clip_norm) == ("polynomial_decay", 1.0)
    assert (cfg.task._name, cfg.criterion._name) == ("mega_classification", "sentence_prediction")
    assert cfg.criterion.classification_head_name == HEAD
    assert (cfg.dataset.required_batch_size_multiple, cfg.checkpoint.best_checkpoint_metric) == (1, "accuracy")


def test_other_architectures_of_the_paper_have_their_own_settings(command_of):
    chunks = command_of("lra/text", ARCH="mega_lra_text_chunk")
    assert settings(chunks) == PUBLISHED["lra/text"]._replace(arch="mega_lra_text_chunk")
    assert (chunks.model.encoder_chunk_size, chunks.model.max_positions) == (128, 4002)
    big = command_of(SPEECH, ARCH="mega_sc_raw_big")
    assert settings(big) == PUBLISHED[SPEECH]._replace(arch="mega_sc_raw_big", rate=8e-3)


def test_several_gpus_share_a_batch(command_of):
    cfg = command_of("lra/image", GPUS=4)
    assert (cfg.dataset.batch_size, list(cfg.optimization.update_freq)) == (13, [1])
    assert cfg.distributed_training.distributed_world_size == 4


# --------------------------------------------------------------------------------------- from data to scores


@pytest.mark.parametrize("name", SMALL)
def test_the_small_size_is_what_its_training_reads(name, prepared, tmp_path):
    """None of its inputs is too long for the model."""
    cfg = configuration(prepared(name), tmp_path)
    task = setup_task(cfg.task)
    with torch.device("meta"):
        task.build_model(cfg.model)
    for split in SPLITS:
        task.load_dataset(split)
    assert len(task.dataset("test")) == SMALL[name][1]


@pytest.mark.parametrize("name", ["lra/listops", SPEECH])
def test_a_small_size_goes_from_data_to_scores(name, prepared):
    recipe, (arguments, count) = prepared(name), SMALL[name]
    recipe.run("train.sh", *NARROW, *CUT, "--batch-size-valid=100", UPDATES=1, WARMUP=1, BATCH=2)
    if name == "lra/listops":
        assert "--seed=2" in recipe.refusal("prepare.sh", *arguments, "--seed=2")
        assert "making" not in recipe.run("prepare.sh", *arguments)

    printed = recipe.run("evaluate.sh")
    scores = (recipe.results / "test.txt").read_text()
    assert scores in printed
    found = {key: float(value) for key, value in re.findall(r"(.+): +([\d.]+)", scores)}
    numbers = json.loads((recipe.results / "test.json").read_text())
    assert numbers["examples"] == len(text(recipe.results / "test.tsv")) == count
    assert found["accuracy, percent"] == pytest.approx(100 * numbers["accuracy"], abs=0.1)
    assert found["loss, bits"] == pytest.approx(numbers["bits"], rel=1e-2)
    assert {path.name for path in recipe.results.iterdir()} == {
        *(f"test.{ending}" for ending in ("txt", "log", "tsv", "json", "png")),
        "curves.png",
    }


def test_pairs_are_of_one_year_or_of_two_years_of_an_era(prepared):
    recipe = prepared("lra/retrieval")
    raw, made = recipe.data / "small/raw", recipe.data / "small/bin"
    for split, size in zip(SPLITS, (3200, 400, 600)):
        columns = [text(raw / f"{split}.{name}") for name in ("txt", "label", "year")]
        known = {passage: row for passage, *row in zip(*columns)}
        pairs = list(zip(*(text(made / f"{split}.{name}") for name in ("input", "input1", "label"))))
        assert [first for first, _, _ in pairs] == columns[0]
        for first, second, label in pairs:
            (era, year), (other_era, other_year) = known[first], known[second]
            assert first != second
            assert label == str(int(year == other_year))
            assert era == other_era
        assert abs(Counter(label for *_, label in pairs)["1"] - size / 2) < 0.01 * size


def test_clips_are_scaled_by_their_training_split(prepared):
    made = prepared(SPEECH).data / "small/bin"
    clips = np.load(made / "train.npy") / 32768
    scaling = list(map(float, (made / "scaling").read_text().split()))
    assert scaling == pytest.approx([clips.mean(), clips.std()], abs=1e-6)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", SMALL)
def test_the_full_size_reads_published_data_from_source(name, recipe, tmp_path):
    """In an empty folder, which its program refuses."""
    (tmp_path / "source").mkdir()
    assert f"{tmp_path / 'source'}" in recipe(name, SOURCE=tmp_path / "source").refusal("prepare.sh")


def test_an_archive_of_published_data_is_read_like_its_folder(recipe, tmp_path):
    write(tmp_path / "aclImdb/train/neg/0_3.txt", ["bad"])
    archive = tmp_path / "reviews.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "aclImdb", "aclImdb")
    recipe = recipe("lra/text", SOURCE=archive)
    assert "train/neg has 1 reviews" in recipe.refusal("prepare.sh")
    archive.write_bytes(half(archive))
    assert "is truncated" in recipe.refusal("prepare.sh", DATA=tmp_path / "other")
