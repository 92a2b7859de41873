"""Classifiers trained by the released command line give the released numbers after conversion.

tests/golden/fork_cls contains four of them with their data, the released evaluation of every example, and two recorded
trainings (tests/golden/README.md). The tests run `mega-fairseq convert` and fairseq-train.
"""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
from fairseq.data import Dictionary
from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)

from mega_fairseq.cli.convert.names import HEAD, translate
from mega_fairseq.models import MegaClassifier
from tests.helpers import golden_cases as golden
from tests.helpers.binarised import write_indexed
from tests.helpers.commands import CPU, PLUGIN, Running, as_words, records
from tests.helpers.released import NEEDS_TORCH, READS_SAFELY, convert

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not READS_SAFELY, reason=NEEDS_TORCH)]
FORK = golden.FOLDER / "fork_cls"
SPLITS = ("valid", "test")
MODELS = ("listops", "pair", "image", "speech")
TASK = [*PLUGIN, "--task=mega_classification", "--criterion=sentence_prediction", "--log-format=json"]


def read(path):
    """A checkpoint of the released code, which the project recorded itself."""
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A function that converts a file of fork_cls, once."""

    @functools.lru_cache(maxsize=None)
    def path_of(name, *options):
        return convert(read(FORK / name), tmp_path_factory.mktemp("fork"), options=options)

    return path_of


def recorded(name):
    return np.load(FORK / name / "log_probs.npz")


def evaluated(path, data):
    """Log-probabilities and classes of each example of both splits, in the order of the files.

    They are computed in double precision, which does not depend on the order of additions, and so not on the processor.
    """
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data)})
    found = {}
    for split in SPLITS:
        task.load_dataset(split)
        examples = task.datasets[split]
        batch = examples.collater([examples[i] for i in range(len(examples))])
        given = {n: t.double() if t.is_floating_point() else t for n, t in batch["net_input"].items()}
        with torch.no_grad():
            logits, _ = models[0].double().eval()(**given, classification_head_name=HEAD.rpartition(".")[2])
        found[f"{split}/lprobs"], found[f"{split}/target"] = logits.log_softmax(1).numpy(), batch["target"].numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_example_has_the_released_log_probabilities(name, ours):
    found, released = evaluated(ours(f"{name}/checkpoint_last.pt"), FORK / name / "data"), recorded(name)
    for key, numbers in found.items():
        np.testing.assert_allclose(numbers, released[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.fixture
def other_order(tmp_path):
    """The data of listops, with its labels binarised anew by a dictionary in another order."""
    data = shutil.copytree(FORK / "listops/data", tmp_path / "data")
    labels, names = data / "label-bin", np.roll(_classes(data), 3)
    (labels / "dict.txt").write_text("".join(f"{name} 1\n" for name in names))
    dictionary, classes = Dictionary.load(str(labels / "dict.txt")), _classes(FORK / "listops/data")
    for split in SPLITS:
        numbers = recorded("listops")[f"{split}/target"]
        write_indexed(labels / split, (dictionary.encode_line(classes[number]) for number in numbers))
    return data


def _classes(data):
    words = [line.split()[0] for line in (data / "label-bin/dict.txt").read_text().splitlines()]
    return [word for word in words if not word.startswith("madeupword")]


def test_with_labels_the_order_of_classes_does_not_matter(ours, other_order):
    released, dictionary = recorded("listops"), FORK / "listops/data/label-bin/dict.txt"
    for options, same in ((["--labels", dictionary], True), ([], False)):
        found = evaluated(ours("listops/checkpoint_last.pt", *options), other_order)
        assert [np.array_equal(found[f"{split}/target"], released[f"{split}/target"]) for split in SPLITS] == [same] * 2


def test_a_classifier_of_text_needs_its_dictionary_to_predict(ours):
    path = ours("pair/checkpoint_last.pt")
    with pytest.raises(ValueError, match="no dictionary"):
        MegaClassifier.from_pretrained(str(path.parent), path.name)
    classifier = MegaClassifier.from_pretrained(str(path.parent), path.name, data_name_or_path=str(FORK / "pair/data"))
    larger, smaller = "[MAX 3 9 X", "[MIN 1 4 X"  # is the value of the first expression larger?
    assert [found.label for found in classifier.predict([(larger, smaller), (smaller, larger)])] == ["1", "0"]


# ------------------------------------------------------------------------------------------ training


FIRST_RATE = 1e-7
SIZES = {"layers": 2, "embed_dim": 16, "hidden_dim": 24, "ffn_embed_dim": 24, "z_dim": 8, "n_dim": 4}
MODEL = ["--arch=mega_classifier", *as_words({f"encoder_{name}": size for name, size in SIZES.items()})]
TRACES = {
    "listops": ["--shorten-method=truncate", "--truncation-length=1024", "--classifier-dim=160"],
    "image": [
        "--input-kind=values", "--values-mean=0.3", "--values-deviation=0.37", "--attention-activation-fn=laplace",
        "--normalization-type=batchnorm", "--normalize-before", "--encoder-chunk-size=16", "--truncation-length=64",
        "--classifier-dim=320",
    ],
}  # fmt: skip
TRAINING = [
    "--max-positions=64", "--dropout=0", "--seed=3", "--batch-size=16", "--clip-norm=1", "--optimizer=adam",
    "--adam-betas=(0.9, 0.98)", "--weight-decay=0.01", "--lr=0.005", "--lr-scheduler=linear_decay",
    "--warmup-updates=10", "--total-num-update=40", "--disable-validation", "--num-workers=0",
    "--log-interval=1",
]  # fmt: skip


def register(log: Path) -> None:
    """Registers the released schedule, and writes examples and loss of each batch to `log`."""

    @register_lr_scheduler("linear_decay", dataclass=PolynomialDecayLRScheduleConfig)
    class _LinearDecay(PolynomialDecayLRSchedule):
        def step_update(self, num_updates):
            rate = super().step_update(num_updates)
            self.optimizer.set_lr(rate + FIRST_RATE * max(0, 1 - num_updates / self.cfg.warmup_updates))
            return self.optimizer.get_lr()

    def recorded(self, model, sample, reduce=True, forward=SentencePredictionCriterion.forward):
        loss, size, logging = forward(self, model, sample, reduce)
        with open(log, "a") as file:
            file.write(json.dumps({"ids": sample["id"].tolist(), "loss_bits": float(loss) / size / np.log(2)}) + "\n")
        return loss, size, logging

    SentencePredictionCriterion.forward = recorded


@pytest.mark.parametrize(("name", "updates"), [("listops", 40), ("image", 12)])
def test_training_takes_the_released_course_update_by_update(name, updates, ours, tmp_path):
    start, log = ours(f"trace_{name}/init.pt"), tmp_path / "batches.json"
    words = [*TASK, *CPU, *MODEL, *TRACES[name], *TRAINING, "--finetune-from-model", start, "--save-dir", tmp_path]
    fault = functools.partial(register, log)
    code, said = Running("train", FORK / name / "data", *words, f"--max-update={updates}", fault=fault).wait()
    assert code == 0, said
    released = json.loads((FORK / f"trace_{name}/trace.json").read_text())[:updates]
    batches = [json.loads(line) for line in log.read_text().splitlines()]
    assert [batch["ids"] for batch in batches] == [update["ids"] for update in released]
    losses = [batch["loss_bits"] for batch in batches]
    np.testing.assert_allclose(losses, [update["loss_bits"] for update in released], rtol=0, atol=1e-5)
    norms = [update["gnorm"] for update in records(said, "train_inner")]
    np.testing.assert_allclose(norms, [update["gradient_norm"] for update in released], rtol=0, atol=1e-3)
    if name == "listops":  # under batch norm, weights without gradient wander
        last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["model"]
        for key, tensor in translate(read(FORK / f"trace_{name}/final.pt")["model"]).items():
            torch.testing.assert_close(last[key], tensor, rtol=0, atol=1e-6)
