"""Training, validation and search on a device that is not the CPU: numbers, how often the host waits, and autocast.

fairseq's Transformer takes the same steps beside ours. While the host waits for a GPU, it prepares no more work for it.
Apple's GPUs have no float64.
"""

from argparse import Namespace
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple, Type

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor, nn

from mega_fairseq.criterions import MegaLabelSmoothedCrossEntropy, MegaLMCrossEntropy, MegaMaskedLM
from mega_fairseq.models.embedding import NarrowEmbedding
from mega_fairseq.modules import POSITION_BIASES, Block, SequenceNorm
from mega_fairseq.ops import precision
from mega_fairseq.tasks import (
    MegaClassificationConfig,
    MegaClassificationTask,
    MegaLanguageModelingConfig,
    MegaLanguageModelingTask,
)
from tests.helpers import small_models
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.pretended_device import DEVICE, PretendedDevice, moved
from tests.helpers.small_models import HEADS, SIZES, TIED, TYPES, padded, texts

WORDS = dictionary(TYPES)


class Case(NamedTuple):
    """A task, a model in float64, its criterion and a padded batch."""

    task: FairseqTask
    model: nn.Module
    criterion: nn.Module
    sample: Dict[str, Any]


def pairs_of_sentences() -> Dict[str, Any]:
    source, (before, target) = padded(texts(9, 5, 7)[1], left=True), (padded(rows, False) for rows in texts(6, 8, 3))
    net_input = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1), "prev_output_tokens": before}
    return {"net_input": net_input, "target": target, "ntokens": 17, "nsentences": 3}


def translation(model: nn.Module, criterion: Type[nn.Module] = LabelSmoothedCrossEntropyCriterion) -> Case:
    task = TranslationTask(TranslationConfig(), WORDS, WORDS)
    return Case(task, model.double(), criterion(task, False, 0.1), pairs_of_sentences())


def mega(**options: Any) -> Case:
    return translation(small_models.translation_model(dropout=0.0, **options))


def language_modelling(**options: Any) -> Case:
    task = MegaLanguageModelingTask(MegaLanguageModelingConfig(tokens_per_sample=5), WORDS)
    model = small_models.language_model(**options)
    tokens, target = (padded(rows, False) for rows in texts(13, 7, 11))
    net_input = {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}
    sample = {"net_input": net_input, "target": target, "ntokens": 31, "nsentences": 3}
    return Case(task, model.double(), MegaLMCrossEntropy(task, False), sample)


def classification(types: Optional[int] = TYPES, **options: Any) -> Case:
    model = small_models.classifier(types, **options)
    task = MegaClassificationTask(MegaClassificationConfig(), None if types is None else WORDS, ["a", "b", "c"])
    model.classification_heads["sentence_classification_head"] = model.classification_heads.pop("head")
    tokens = padded(texts(9, 5, 7)[1], False)
    lengths = tokens.ne(PAD).sum(1)
    if types is None:
        tokens = torch.randn(3, 9, dtype=torch.float64)
    net_input = {"src_tokens": tokens, "src_lengths": lengths}
    if options.get("pairs"):
        net_input.update(src_tokens1=padded(texts(4, 6, 2)[1], False), src_lengths1=torch.tensor([4, 6, 2]))
    sample = {"net_input": net_input, "target": torch.tensor([0, 2, 1]), "ntokens": 21, "nsentences": 3}
    return Case(task, model.double(), SentencePredictionCriterion(SentencePredictionConfig(), task), sample)


def masked_language_modelling() -> Case:
    task = MaskedLMTask(MaskedLMConfig(data="unused"), dictionary(TYPES - 1))  # without <mask>
    tokens = padded(texts(9, 5, 7)[1], False)
    target = tokens.masked_fill(torch.arange(tokens.numel()).view_as(tokens) % 3 > 0, PAD)
    net_input = {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}
    sample = {"net_input": net_input, "target": target, "ntokens": 21, "nsentences": 3}
    return Case(task, small_models.encoder().double(), MegaMaskedLM(Namespace(tpu=False), task), sample)


CASES: Dict[str, Callable[[], Case]] = {
    "translation": lambda: mega(),
    "translation, our loss": lambda: translation(
        small_models.translation_model(dropout=0.0), MegaLabelSmoothedCrossEntropy
    ),
    "translation in chunks": lambda: mega(decoder_chunk_size=3, rel_pos_bias="rotary", normalize_before=True),
    "translation by line": lambda: mega(**small_models.IN_LINES, rel_pos_bias="rotary"),
    "fairseq's Transformer": lambda: translation(small_models.stock_transformer()),
    "language model, softmax": lambda: language_modelling(**HEADS["softmax"]),
    "language model, adaptive": lambda: language_modelling(**HEADS["adaptive"], decoder_input_dim=12),
    "language model, tied": lambda: language_modelling(**TIED),
    "language model in pieces": lambda: language_modelling(**HEADS["softmax"], piece_tokens=15),
    "masked language model": masked_language_modelling,
    "classifier": lambda: classification(),
    "classifier of pairs": lambda: classification(pairs=True),
    "classifier of numbers": lambda: classification(None, normalization_type="batchnorm"),
}


def train(case: Case) -> List[Tensor]:
    case.model.train()
    optimizer = Namespace(backward=lambda loss: loss.backward())
    loss, *_ = case.task.train_step(case.sample, case.model, case.criterion, optimizer, 1)
    gradients = [parameter.grad for parameter in case.model.parameters()]
    return [loss.detach(), *(g for g in gradients if g is not None)]  # fairseq 0.12.2 has parameters without use


def validate(case: Case) -> List[Tensor]:
    return [case.task.valid_step(case.sample, case.model.eval(), case.criterion)[0]]


STEPS = 12
OPTIONS = {"beam": 2, "max_len_a": 0, "max_len_b": STEPS - 1, "min_len": STEPS - 1}


def search(case: Case) -> List[Tensor]:
    prefix = None if "prev_output_tokens" in case.sample["net_input"] else case.sample["target"][:, :3]
    generator = case.task.build_generator([case.model.eval()], GenerationConfig(**OPTIONS))
    found = case.task.inference_step(generator, [case.model], case.sample, prefix_tokens=prefix)
    return [hypothesis[name] for texts in found for hypothesis in texts for name in ("tokens", "positional_scores")]


def there(step: Callable[[Case], List[Tensor]], case: Case, float64: bool = True) -> Tuple[List[Tensor], int]:
    """The results of a step on another device, copied to the CPU, and how often the host waited."""
    with PretendedDevice(float64) as device:
        case = case._replace(model=moved(case.model), sample=moved(case.sample))
        device.waits.clear()
        found = step(case)
        waits = len(device.waits)
        return [t.cpu() for t in found], waits


def checked_there(step: Callable[[Case], List[Tensor]], name: str) -> int:
    """Checks that the results are those of the CPU, and returns how often the host waited."""
    found, waits = there(step, CASES[name]())
    for ours, truth in zip(found, step(CASES[name]())):
        torch.testing.assert_close(ours, truth)
    return waits


# How often the host waits in training and validation: once for the pads of each side, once per cluster of an adaptive
# softmax, once for masked tokens, once per batch norm in training. In validation of translation with fairseq's loss,
# numbers that are not finite are refused.
WAITS = {
    "translation": (2, 3),
    "translation, our loss": (2, 2),
    "translation by line": (2, 3),
    "translation in chunks": (2, 3),
    "language model, softmax": (1, 1),
    "language model, adaptive": (3, 3),
    "language model, tied": (3, 3),
    "language model in pieces": (1, 1),
    "masked language model": (2, 2),
    "classifier": (1, 1),
    "classifier of pairs": (1, 1),
    "classifier of numbers": (5, 1),
}


@pytest.mark.parametrize("name", WAITS)
def test_training_and_validation_give_the_same_numbers_and_wait_rarely(name):
    assert (checked_there(train, name), checked_there(validate, name)) == WAITS[name]


def test_training_and_validation_wait_no_more_often_than_with_fairseqs_transformer():
    assert {*WAITS, "fairseq's Transformer"} == set(CASES)
    for step, ours in zip((train, validate), WAITS["translation"]):
        assert ours <= checked_there(step, "fairseq's Transformer")


def test_beam_search_of_translations_gives_the_same_numbers_and_waits_about_as_often_as_with_fairseqs_transformer():
    """Two more waits per step: for the order of beams, to copy little, and for probabilities that are not finite."""
    theirs = checked_there(search, "fairseq's Transformer")
    for name in ("translation", "translation in chunks"):
        assert checked_there(search, name) <= theirs + 2 * STEPS


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("language")])
def test_continuations_of_a_language_model_are_the_same_and_wait_at_most_four_times_more_per_step(name):
    assert checked_there(search, name) <= checked_there(search, "fairseq's Transformer") + 4 * STEPS


def test_a_tensor_on_the_cpu_would_be_detected():
    case = CASES["classifier of numbers"]()
    case.model.encoder.embed_tokens.register_forward_hook(lambda *_: torch.ones(3, 9, SIZES["embed_dim"]))
    with pytest.raises(AssertionError, match="tensors of the CPU and of another device"):
        there(train, case)


# ------------------------------------------------------------------------------------------- without float64

IN_SINGLE: Dict[str, Callable[[], Case]] = {
    **{name: make for name, make in CASES.items() if name != "fairseq's Transformer"},
    "language model, megalodon": lambda: language_modelling(token_mixer="megalodon"),
    "translation, megalodon": lambda: mega(decoder_token_mixer="megalodon"),
    **{f"translation, {bias}": partial(mega, rel_pos_bias=bias) for bias in POSITION_BIASES},
}


def in_single(case: Case) -> Case:
    sample = {**case.sample, "net_input": _in_float32(case.sample["net_input"])}
    return case._replace(model=case.model.float(), sample=sample)


@pytest.mark.parametrize("name", IN_SINGLE)
def test_models_need_no_float64(name, monkeypatch):
    steps, make = [train, validate], IN_SINGLE[name]
    if hasattr(make().model, "decoder"):
        steps.append(search)
    expected = [step(in_single(make())) for step in steps]
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", (DEVICE.type,))
    for step, truth in zip(steps, expected):
        found, _ = there(step, in_single(make()), float64=False)
        for ours, on_cpu in zip(found, truth):
            torch.testing.assert_close(ours, on_cpu, atol=1e-4, rtol=1e-3)


def test_a_tensor_in_float64_would_be_detected():
    with pytest.raises(TypeError, match="float64"):
        there(train, in_single(IN_SINGLE["language model, megalodon"]()), float64=False)


# ------------------------------------------------------------------------------------------- autocast


def precisions_of_residuals(case: Case) -> Set[torch.dtype]:
    """Of what blocks get and return in a forward pass under autocast, and of the final norm."""
    found: Set[torch.dtype] = set()

    def look(module: nn.Module, given: Tuple[Tensor, ...], result: Any) -> None:
        found.update(t.dtype for t in (given[0], result[0] if isinstance(result, tuple) else result))

    for module in case.model.float().modules():
        if isinstance(module, (Block, SequenceNorm)):
            module.register_forward_hook(look)
    with torch.autocast("cpu", torch.bfloat16):
        case.criterion(case.model, {**case.sample, "net_input": _in_float32(case.sample["net_input"])})
    return found


def _in_float32(inputs: Dict[str, Tensor]) -> Dict[str, Tensor]:
    return {name: t.float() if t.is_floating_point() else t for name, t in inputs.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "fairseq's Transformer"])
def test_residuals_are_in_float32_under_autocast(name):
    assert precisions_of_residuals(CASES[name]()) == {torch.float32}


def test_residuals_in_half_precision_would_be_detected(monkeypatch):
    monkeypatch.setattr(NarrowEmbedding, "forward", lambda self, tokens: self.project(self.weight[tokens]))
    assert torch.bfloat16 in precisions_of_residuals(CASES["language model, adaptive"]())
