"""Activation checkpointing and layer drop, as in fairseq's Transformer."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.small_models import SENTENCES, TYPES, classifier, encoder, language_model, translation_model
from tests.ops.helpers import kept_for_backward

LENGTH = 60  # several chunks of the language model
MODELS = {"translation": translation_model, "language model": language_model, "masked language model": encoder}
DROPOUTS = {f"{kind}dropout": 0.2 for kind in ("", "attention_", "hidden_", "activation_")}
every_model = pytest.mark.parametrize("kind", MODELS)


def scores(model):
    tokens = torch.randint(4, TYPES, (SENTENCES, LENGTH), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(4)
    return model(*inputs(model, tokens))[0]


def inputs(model, tokens):
    return (tokens, None, tokens) if len(model.STACKS) == 2 else (tokens,)


def sides(model):
    return {side: getattr(model, side) for side in model.STACKS}


# ------------------------------------------------------------------------------------------------ recomputed


def step(kind, **options):
    """The loss and gradients of a training step, and how many numbers its forward pass keeps for the backward pass."""
    model = MODELS[kind](**DROPOUTS, **options).train()
    kept = sum(kept_for_backward(lambda: scores(model)))
    loss = scores(model).logsumexp(-1).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return SimpleNamespace(loss=loss, gradients=gradients, kept=kept)


@every_model
@pytest.mark.parametrize("option", ["checkpoint_activations", "offload_activations"])
def test_recomputed_activations_take_less_memory_and_do_not_change_loss_or_gradients(kind, option):
    plain, recomputed = step(kind), step(kind, **{option: True})
    assert recomputed.loss.item() == plain.loss.item()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(recomputed.gradients[name], gradient, msg=lambda m, n=name: f"{n}: {m}")
    assert recomputed.kept < plain.kept / 3


def test_recomputed_layers_count_a_batch_once_in_batch_norm():
    counted = []
    for recomputes in (False, True):
        model = classifier(normalization_type="batchnorm", checkpoint_activations=recomputes).train()
        tokens = torch.randint(4, TYPES, (3, 9), generator=torch.Generator().manual_seed(3))
        torch.manual_seed(4)
        model(tokens, classification_head_name="head")[0].sum().backward()
        counted.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert any(name.endswith("running_mean") for name in counted[0])
    for name, buffer in counted[0].items():
        torch.testing.assert_close(counted[1][name], buffer, atol=0, rtol=0, msg=name)


# ------------------------------------------------------------------------------------------------ dropped


LAYERS = 4


def layers(kind, **options):
    sizes = {f"{side}_{name}": value for side in MODELS[kind]().STACKS for name, value in options.items()}
    return MODELS[kind](dropout=0.0, **sizes)


def counted(model):
    """Counters of how often each layer runs, by side."""
    runs = {}
    for side, part in sides(model).items():
        runs[side] = [0] * len(part.layers)
        for number, layer in enumerate(part.layers):

            def count(*_, runs=runs[side], number=number):
                runs[number] += 1

            layer.register_forward_pre_hook(count)
    return runs


@every_model
@torch.no_grad()
def test_training_drops_each_layer_at_the_given_rate_and_evaluation_drops_none(kind):
    model = layers(kind, layers=LAYERS, layerdrop=0.25)
    runs, steps = counted(model.eval()), 200
    scores(model)
    assert all(count == [1] * LAYERS for count in runs.values())
    model.train()
    tokens = torch.full((1, 2), 5)
    torch.manual_seed(0)
    for _ in range(steps):
        model(*inputs(model, tokens))
    for count in runs.values():
        assert [(each - 1) / steps for each in count] == pytest.approx([0.75] * LAYERS, abs=0.1)
        assert len(set(count)) > 1  # layers are dropped independently


@every_model
def test_a_step_with_dropped_layers_equals_one_of_a_model_without_them(kind, monkeypatch):
    model = layers(kind, layers=LAYERS, layerdrop=0.5)
    monkeypatch.setattr(torch, "rand", lambda count: torch.tensor([0.1, 0.9, 0.2, 0.8]))
    dropped = scores(model.train())
    dropped.logsumexp(-1).sum().backward()
    assert all(p.grad is None for stack in sides(model).values() for p in stack.layers[0].parameters())
    for each in sides(model).values():
        each.layers = torch.nn.ModuleList([each.layers[1], each.layers[3]])
    torch.testing.assert_close(scores(model.eval()), dropped)


def test_a_single_layer_in_evaluation_returns_to_training_with_the_model():
    model = language_model().train()
    model.decoder.layers[0].eval()
    assert all(module.training for module in model.train().modules())
    assert not any(module.training for module in model.eval().modules())
