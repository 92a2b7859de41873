"""The optimizer computes what fairseq's Adam does, in a number of operations that does not grow with the weights."""

import shutil
from functools import partial

import pytest
import torch
from fairseq import optim
from fairseq.logging import metrics
from fairseq.optim.composite import FairseqCompositeOptimizer
from omegaconf import OmegaConf
from torch import nn

from benchmarks import train
from mega_fairseq.acceleration import train_graph
from mega_fairseq.optim.mega_adam import FusedAdam
from tests.helpers.commands import LANGUAGE_MODELS, checkpoint, fairseq, losses, preprocess_text
from tests.helpers.configurations import training
from tests.helpers.recorder import Operations

OPTIONS = ["data", "--task=mega_language_modeling", "--arch=mega_lm_small", "--lr=0.01", "--weight-decay=0.1"]
HALF = {"float32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = [(4, 5), (7,), (3, 2, 1), ()]


class Training:
    """Weights and their optimizer, as fairseq's trainer builds it; gradients are random."""

    def __init__(self, name, precision="float32", efficient=False, shapes=SHAPES, words=(), groups=()):
        if precision != "float32":
            words = [f"--{'memory-efficient-' * efficient}{precision}", "--fp16-no-flatten-grads", *words]
        self.cfg = training(*OPTIONS, f"--optimizer={name}", "--adam-eps=1e-3", *words)
        # Without its float32 copies, fairseq does not change a weight that has no gradient, as with layerdrop.
        self.dense = efficient
        self.random = torch.Generator().manual_seed(0)
        weights = [*map(self._random, shapes), self._random((3, 5)).t()]
        self.weights = [nn.Parameter(weight.to(HALF[precision])) for weight in weights]
        half = (optim.FP16Optimizer, optim.MemoryEfficientFP16Optimizer)
        if groups:
            self._in_groups(groups)
        if self.cfg.common.amp:
            self.optimizer = optim.AMPOptimizer.build_optimizer(self.cfg, self.weights)
        elif precision == "float32":
            self.optimizer = optim.build_optimizer(self.cfg.optimizer, self.weights)
        else:
            self.optimizer = half[efficient].build_optimizer(self.cfg, self.weights)

    def _in_groups(self, rates):
        """Every second weight has another learning rate, as hydra configures it."""
        FairseqCompositeOptimizer.optimizers, FairseqCompositeOptimizer.lr_schedulers = {}, {}  # of the class
        for i, weight in enumerate(self.weights):
            weight.param_group = f"group{i % len(rates)}"
        parts = {"optimizer": dict(self.cfg.optimizer), "lr_scheduler": {"_name": "fixed"}}
        groups = {f"group{i}": {**parts, "lr_float": rate} for i, rate in enumerate(rates)}
        self.cfg.optimizer = OmegaConf.create({"_name": "composite", "groups": groups})

    def _random(self, shape):
        return torch.randn(shape, generator=self.random)

    def update(self, number, clip=0.5):
        """As in fairseq's trainer."""
        self.optimizer.zero_grad()
        gradients = [self._random(p.shape).to(p.dtype) for p in self.weights]
        used = self.weights if number % 3 or self.dense else self.weights[1:]
        self.optimizer.backward(sum((p * gradient).sum() for p, gradient in zip(used, gradients[-len(used) :])))
        self.optimizer.multiply_grads(1 / 3)
        norm = self.optimizer.clip_grad_norm(clip)
        self.optimizer.step()
        return norm

    def masters(self):
        """The weights in float32."""
        parts = [
            each.optimizer for each in getattr(self.optimizer.optimizer, "optimizers", {"": self.optimizer}).values()
        ]
        states = {p: state for part in parts for p, state in part.state.items()}
        masters = [states.get(p, {}).get("master", p) for p in self.weights]
        return [p.detach() for p in getattr(self.optimizer, "fp32_params", masters)]


MODES = [("float32", False), ("fp16", False), ("bf16", False), ("fp16", True), ("bf16", True)]


def assert_updates_equal_those_of_fairseq(precision, efficient, **options):
    found = []
    for name, halves in (("adam", False), ("mega_adam", efficient)):
        each = Training(name, precision, halves, **options)
        each.dense = efficient
        for number in range(20):
            found.append((each.update(number, clip=0.5 * (number % 2)), [t.clone() for t in each.masters()]))
            assert all(torch.equal(p, master.to(p.dtype)) for p, master in zip(each.weights, found[-1][1]))
    for (expected_norm, expected), (norm, masters) in zip(found[:20], found[20:]):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(masters, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(("precision", "efficient"), MODES)
def test_updates_equal_those_of_adam_in_fairseq(precision, efficient):
    assert_updates_equal_those_of_fairseq(precision, efficient)


@pytest.mark.parametrize("precision", HALF)
def test_updates_of_several_parameter_groups_equal_those_of_fairseq(precision):
    assert_updates_equal_those_of_fairseq(precision, False, groups=[0.01, 0.1])


@pytest.mark.parametrize("precision", HALF)
def test_clipping_without_gradients_returns_what_fairseq_returns(precision):
    found, weights = [], [nn.Parameter(torch.ones(3, dtype=HALF[precision]))]
    for name in ("adam", "mega_adam"):
        optimizer = optim.build_optimizer(training(*OPTIONS, f"--optimizer={name}").optimizer, weights)
        optimizer.multiply_grads(0.5)
        found.append(optimizer.clip_grad_norm(0.5))
        optimizer.step()
    assert found[0] == found[1] == 0
    assert (found[0].dtype, found[0].device) == (found[1].dtype, found[1].device)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_groups_that_fairseq_cannot_resume_are_refused(precision):
    with pytest.raises(ValueError, match="composite .* --memory-efficient"):
        Training("mega_adam", precision, True, groups=[0.01, 0.1])


def test_updates_with_amp_equal_those_of_fairseq(monkeypatch):
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", partial(torch.amp.GradScaler, "cpu"))
    assert_updates_equal_those_of_fairseq("float32", False, words=["--amp"])


def test_an_optimizer_that_forgets_digits_of_the_weights_is_detected(monkeypatch):
    original = FusedAdam._state

    def rounded(self, p):
        state = original(self, p)
        state["master"] = p.detach().float()
        return state

    monkeypatch.setattr(FusedAdam, "_state", rounded)
    with pytest.raises(AssertionError):
        assert_updates_equal_those_of_fairseq("bf16", True)


@pytest.mark.parametrize(("precision", "most"), [("float32", 13), ("fp16", 16), ("bf16", 23)])
def test_operations_do_not_grow_with_the_weights(precision, most):
    counts = []
    for weights in (3, 30):
        each = Training("mega_adam", precision, precision != "float32", [(2,)] * weights)
        each.update(0)  # leaves gradients
        with Operations() as operations:
            each.optimizer.multiply_grads(1 / 3)
            each.optimizer.clip_grad_norm(0.5)
            each.optimizer.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] <= most


@pytest.mark.slow
def test_an_update_takes_few_operations_outside_of_graphs(monkeypatch):
    """In all of fairseq's trainer, of which 77 launch kernels; fairseq's Adam adds two for each weight."""
    words = [*train.LANGUAGE, "--arch=mega_lm_small", *train.MEGA, "--cpu", "--memory-efficient-fp16"]
    counts = []
    metrics.reset()  # sums of other tests may have other types
    for layers in (1, 3):
        trainer = train.build(
            [*words, "--optimizer=mega_adam", "--fp16-init-scale=4", f"--decoder-layers={layers}"], 20
        )
        step = train.update(trainer, 16, 32)
        with Operations() as operations:
            monkeypatch.setattr(train_graph, "capture_on", lambda device, used=operations: used.capture)
            for _ in range(3):
                before = operations.count
                step()
        counts.append(operations.count - before)
    assert counts[0] == counts[1] <= 93


@pytest.mark.slow
def test_a_training_resumes_in_every_bit_and_from_either_optimizer(tmp_path):
    options = ["--memory-efficient-fp16", "--update-freq=2", "--disable-validation", "--no-epoch-checkpoints"]
    words = [preprocess_text(tmp_path), *LANGUAGE_MODELS["softmax"], *options]

    def trained(run, updates, optimizer="mega_adam"):
        where = ["--save-dir", tmp_path / run, f"--max-update={updates}", f"--optimizer={optimizer}"]
        said = losses(fairseq("train", *words, *where))
        return said, checkpoint(tmp_path / run / "checkpoint_last.pt")

    expected, whole = trained("whole", 6)
    first, _ = trained("parts", 3)
    shutil.copytree(tmp_path / "parts", tmp_path / "stock")
    rest, parts = trained("parts", 6)
    assert first + rest == expected
    for name in ("model", "last_optimizer_state"):
        torch.testing.assert_close(whole[name], parts[name], rtol=0, atol=0)
    for updates, optimizer in ((5, "adam"), (6, "mega_adam")):
        said, _ = trained("stock", updates, optimizer)
        first += said
    torch.testing.assert_close(first, expected, rtol=0, atol=0.02)


def test_weights_changed_in_a_checkpoint_are_trained():
    """As after averaging checkpoints, which keeps the optimizer's state of one of them."""
    first, second = (Training("mega_adam", "bf16", True) for _ in range(2))
    first.update(0)
    with torch.no_grad():
        changed = [p.mul_(2.0).clone() for p in second.weights]
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.update(1)
    torch.testing.assert_close([p.detach() for p in second.weights], changed, rtol=0.01, atol=0.02)
