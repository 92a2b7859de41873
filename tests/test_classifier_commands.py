"""Classifiers through fairseq's own command lines, with its task and criterion `sentence_prediction`."""

import functools
import json
import random
import re
from types import SimpleNamespace

import pytest
import torch

from tests.commands import CPU, PLUGIN, ROOT, SMALL, SYLLABLES, as_words, failure, fairseq, records

pytestmark = pytest.mark.slow

EXAMPLES = {"train": 203, "valid": 37}  # primes, so that no batch size divides them
UPDATES, WITHIN_EPOCH = 40, 20  # an epoch has 26
NAME = "sentence_prediction"
STOCK = [f"--task={NAME}", f"--criterion={NAME}"]
SIZES = {f"encoder_{name}": size for name, size in SMALL.items()}
MIXERS = {  # documents are several chunks long
    "mega": {"encoder_hidden_dim": 48, "encoder_z_dim": 16, "encoder_n_dim": 4, "encoder_chunk_size": 5},
    "aft": {"encoder_token_mixer": "aft", "encoder_aft_form": "local", "encoder_aft_reach": 4},
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Documents of syllables, three of them frequent: the label says which is the most frequent one."""
    folder = tmp_path_factory.mktemp("documents")
    for split, size in EXAMPLES.items():
        chance, documents, labels = random.Random(split), [], []
        for _ in range(size):
            label = chance.randrange(3)
            weights = [99 if i == label else 1 for i in range(len(SYLLABLES))]
            documents.append(" ".join(chance.choices(SYLLABLES, weights, k=chance.randint(1, 19))))
            labels.append(str(label))
        for kind, lines in (("input0", documents), ("label", labels)):
            (folder / f"{split}.{kind}").write_text("\n".join(lines) + "\n")
    for kind in ("input0", "label"):
        files = [f"--{split}pref={folder}/{split}.{kind}" for split in EXAMPLES]
        fairseq("preprocess", "--only-source", *files, f"--destdir={folder}/bin/{kind}")
    return folder / "bin"


def words_of(mixer, **more):
    model = {"arch": "mega_classifier", "normalization_type": "batchnorm", "normalize_before": True, "dropout": 0.1}
    training = {"optimizer": "adam", "lr": 0.01, "clip_norm": 1, "batch_size": 8, "num_classes": 3, "max_positions": 20}
    logging = {"log_format": "json", "log_interval": 1, "num_workers": 0}
    given = {**model, **SIZES, **MIXERS[mixer], **training, **logging, **more}
    return [*PLUGIN, *STOCK, *CPU, *as_words(given)]


@pytest.fixture(scope="session")
def models(data, tmp_path_factory):
    """Trains a classifier with a mixer once."""

    @functools.lru_cache(maxsize=None)
    def trained(mixer):
        folder = tmp_path_factory.mktemp(mixer)
        saving = {"save_dir": folder, "save_interval_updates": WITHIN_EPOCH, "max_update": UPDATES}
        said = fairseq("train", data, *words_of(mixer, **saving))
        return SimpleNamespace(mixer=mixer, folder=folder, last=folder / "checkpoint_last.pt", said=said)

    return trained


@pytest.fixture(params=MIXERS)
def trained(request, models):
    return models(request.param)


def checkpoint(path):
    return torch.load(path, weights_only=True)


def losses(said):
    return [record["loss"] for record in records(said, "train_inner")]


def test_training_finds_the_frequent_syllable(trained):
    curve = losses(trained.said)
    assert len(curve) == UPDATES
    assert sum(curve[-5:]) < 0.6 * sum(curve[:5])
    assert records(trained.said, "valid")[-1]["valid_accuracy"] > 80


def test_a_training_resumed_within_an_epoch_ends_with_exactly_the_same_model(data, trained, tmp_path):
    start = {"restore_file": trained.folder / f"checkpoint_1_{WITHIN_EPOCH}.pt", "save_dir": tmp_path}
    said = fairseq("train", data, *words_of(trained.mixer, **start, max_update=UPDATES))
    assert losses(said) == losses(trained.said)[WITHIN_EPOCH:]
    first, resumed = checkpoint(trained.last), checkpoint(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(resumed["model"], first["model"], rtol=0, atol=0)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_fairseq_validate_gives_the_loss_and_accuracy_of_the_training_in_any_batches(data, trained, batch_size):
    words = [*PLUGIN, *STOCK, *CPU, "--num-classes=3", f"--batch-size={batch_size}", "--log-format=json"]
    found = records(fairseq("validate", data, *words, "--path", trained.last), "valid")[-1]
    expected = records(trained.said, "valid")[-1]
    for name in ("valid_loss", "valid_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-3)


def test_a_training_with_other_options_is_refused_in_one_sentence(data, trained, tmp_path):
    words = words_of(trained.mixer, restore_file=trained.last, save_dir=tmp_path, pooling="first")
    assert "--pooling is first and was mean; give the values of the checkpoint" in failure("train", data, *words)


def test_pairs_are_refused_where_the_task_has_none(data, tmp_path):
    said = failure("train", data, *words_of("mega", pairs=True, save_dir=tmp_path, max_update=1))
    assert said.endswith("--pairs needs two inputs for each label and the task gives one; choose an --arch without it")


def test_a_preset_keeps_its_defaults_under_hydra_in_training_and_resuming(data, tmp_path):
    config = {
        "common": {"user_dir": str(ROOT / "mega_fairseq"), "cpu": True},
        "task": {"_name": NAME, "data": str(data), "num_classes": 3, "max_positions": 20},
        "model": {"_name": "mega_lra_text_chunk", **SIZES, **MIXERS["mega"]},
        "criterion": {"_name": NAME},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.01], "max_update": 3},
        "dataset": {"batch_size": 8, "num_workers": 0, "required_batch_size_multiple": 1},
        "checkpoint": {"no_epoch_checkpoints": True, "save_dir": str(tmp_path)},
    }
    (tmp_path / "text.yaml").write_text(json.dumps(config))  # JSON is YAML
    words = ["--config-dir", tmp_path, "--config-name=text", f"hydra.run.dir={tmp_path}"]
    fairseq("hydra-train", *words, cwd=tmp_path)
    fairseq("hydra-train", *words, "optimization.max_update=5", cwd=tmp_path)
    log = (tmp_path / "hydra_train.log").read_text()
    assert re.search(r"Loaded checkpoint .*checkpoint_last.pt \(epoch 1 @ 3 updates\)", log)
    saved = checkpoint(tmp_path / "checkpoint_last.pt")["cfg"]["model"]
    names = ("normalization_type", "truncation_length", "max_positions", "encoder_chunk_size")
    assert [saved[name] for name in names] == ["scalenorm", 1024, 20, 5]
