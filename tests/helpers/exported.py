"""Small models as exported folders, parts of them as graphs of their own, and the hypotheses of both searches."""

import tempfile
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import onnxruntime
import torch
from fairseq.sequence_generator import SequenceGenerator
from onnx import TensorProto, helper
from torch import Tensor, nn

from mega_fairseq.export.folder import write_classifier, write_language_model, write_translation
from mega_fairseq.export.graph import Graph, Weights
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask, MegaDocumentTranslationTask
from mega_fairseq.tasks.prediction import Classifier
from mega_runtime import LanguageModel, Translator
from tests.helpers.golden_models import dictionary
from tests.helpers.hypotheses import Found, plain
from tests.helpers.small_models import (
    EOS,
    SEPARATOR,
    TYPES,
    classifier,
    documents_task,
    language_model,
    net_input,
    translation_model,
)

NUMBERS = count()


@lru_cache(maxsize=None)
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


def new_folder() -> Path:
    """A path at which nothing is yet."""
    return Path(_scratch().name) / str(next(NUMBERS))


# ------------------------------------------------------------------------------------------------ parts


def run(build: Callable[..., Any], *inputs: Any, number_format: str = "float32") -> List[np.ndarray]:
    """The values that `build(graph, *inputs)` returns, one or several, in a graph with these inputs."""
    folder = new_folder()
    folder.mkdir()
    arrays = {f"x{n}": np.asarray(x) for n, x in enumerate(inputs)}
    graph = Graph(Weights(folder / "weights.bin"), number_format)
    shapes = {name: [f"{name}.{axis}" for axis in range(array.ndim)] for name, array in arrays.items()}
    built = build(graph, *(graph.input(name, array.dtype, *shapes[name]) for name, array in arrays.items()))
    values = built if isinstance(built, (list, tuple)) else [built]
    for number, value in enumerate(values):
        graph.output(f"y{number}", graph.op("Identity", value), np.float32)
        graph.outputs[-1] = helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None)  # of any shape
    graph.save(folder / "part.onnx")
    graph.weights.close()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(folder / "part.onnx"), options, providers=["CPUExecutionProvider"])
    return session.run(None, arrays)


def randomised(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """The module in eval mode, with parameters and statistics that differ from their first values."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                noise = scale * torch.randn_like(tensor)
                tensor.mul_(noise.exp()) if name.endswith("running_var") else tensor.add_(noise)
    return module.eval()


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def assert_near(found: np.ndarray, expected: Any, tolerance: float = 1e-5) -> None:
    """Up to a tolerance, relative to the largest expected number."""
    expected = expected.detach().double().numpy() if isinstance(expected, Tensor) else np.asarray(expected)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    gap = float(np.abs(found - expected).max(initial=0.0))
    assert gap <= tolerance * float(np.abs(expected).max(initial=0.1)), gap


# ------------------------------------------------------------------------------------------------ models

CHUNK = 8
CHUNKS = {"encoder_chunk_size": CHUNK, "decoder_chunk_size": CHUNK, "rel_pos_bias": "rotary", "normalize_before": True}
LINES = {"cross_attention_positions": "sentence", "cross_attention_window": 1}
SEARCHED = {  # models whose hypotheses have many lengths, but for the last one, whose hypotheses end where they must
    "whole": {"factor": 1.0, "ends": 0.7, "normalize_before": True, "encoder_n_dim": 16, "decoder_n_dim": 16},
    "one table": {"factor": 3.0, "ends": 5.0, "normalize_before": True, "share_all_embeddings": True},
    "laplace": {"factor": 3.0, "ends": 4.0, "attention_activation_fn": "laplace"},
    "chunks": CHUNKS,
    "no ends": {"ends": -50.0, **CHUNKS},
}


def sharpened(model: nn.Module, factor: float, ends: float) -> nn.Module:
    """The model with larger differences between scores, and `ends` added to that of the end."""
    decoder = model.decoder
    with torch.no_grad():
        (decoder.output_projection or decoder.embed_tokens).weight.mul_(factor)
        (decoder.output_bias if decoder.output_projection is None else decoder.output_projection.bias)[EOS] += ends
    return model


@lru_cache(maxsize=None)
def translation(
    number_format: str = "float32", factor: float = 2.0, ends: float = 1.0, **options: Any
) -> Tuple[nn.Module, Translator]:
    """A model ready for fairseq's search, and the same one exported."""
    model, folder = sharpened(translation_model(output_bias=True, **options), factor, ends), new_folder()
    write_translation(folder, model, number_format)
    model.make_generation_fast_()
    return model, Translator(folder)


@lru_cache(maxsize=None)
def documents(
    number_format: str = "float32", ends: float = 0.0, window: int = 60, a: float = 0.5, b: float = 3.0, **options: Any
) -> Tuple[MegaDocumentTranslationTask, nn.Module, Translator]:
    """A model for windows of several lines, with its task; `ends` is added to the scores of separator and end."""
    task = documents_task(line_length_a=a, line_length_b=b, window_tokens=window)
    model, folder = sharpened(translation_model(output_bias=True, **options), 2.0, ends), new_folder()
    with torch.no_grad():
        model.decoder.output_projection.bias[SEPARATOR] += ends
    if model.decoder.separators is not None:
        model.decoder.separators = task.separators
    words = {"separator": task.cfg.separator, "line_length_a": a, "line_length_b": b}
    words.update(window_tokens=window, source_separator=SEPARATOR)
    model.encoder.dictionary, model.decoder.dictionary = task.source_dictionary, task.target_dictionary
    write_translation(folder, model, number_format, documents=words, separators=task.separators)
    model.make_generation_fast_()
    return task, model, Translator(folder)


@lru_cache(maxsize=None)
def language(number_format: str = "float32", **options: Any) -> Tuple[nn.Module, LanguageModel]:
    model, folder = language_model(**options), new_folder()
    write_language_model(folder, model, number_format)
    return model, LanguageModel(folder)


def project_classifier(kind: str = "tokens", number_type: Optional[str] = None, **options: Any) -> Classifier:
    """The project's classifier of tokens or of values of this type."""
    words = None if kind == "values" else dictionary(TYPES)
    task = MegaClassificationTask(MegaClassificationConfig(input_kind=kind), words, ["a", "b", "c"])
    task.number_type = number_type
    return Classifier(task, [classifier(None if words is None else TYPES, **options)])


def exported_classifier(*kind: str, number_format: str = "float32", **options: Any) -> Path:
    folder = new_folder()
    write_classifier(folder, project_classifier(*kind, **options), number_format)
    return folder


def sources(*lengths: int, seed: int = 0) -> List[List[int]]:
    """Random sources of these lengths, with eos."""
    draw = np.random.default_rng(seed)
    return [[*draw.integers(4, TYPES, length - 1).tolist(), EOS] for length in lengths]


# ------------------------------------------------------------------------------------------------ hypotheses

FAIRSEQ_NAMES = {"beam": "beam_size", "lenpen": "len_penalty", "unkpen": "unk_penalty"}


def theirs(model: nn.Module, rows: Sequence[Sequence[int]], **options: Any) -> Found:
    """Tokens and scores that fairseq's search finds for a batch; options by the runtime's names."""
    options = {"beam": 5, "max_len_a": 0, "max_len_b": 200, "min_len": 1, **options}
    words = {FAIRSEQ_NAMES.get(name, name): value for name, value in options.items()}
    generator = SequenceGenerator([model], model.decoder.dictionary, **words)
    return plain(generator.generate([model], {"net_input": net_input(rows)}))


def ours(translator: Translator, rows: Sequence[Sequence[int]], **options: Any) -> Found:
    return [[(h.tokens, h.score) for h in each] for each in translator.search(rows, **options)]
