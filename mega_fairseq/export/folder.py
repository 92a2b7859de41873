"""Writes the folder of an exported model, which `runtime/` reads without PyTorch and fairseq.

config.json              what it is: sizes, special types, limits, defaults, the half-lives of its EMAs as `mega-fairseq
                         inspect` shows them, the hash of each other file, and its own without that hash
encoder.onnx, step.onnx  the graphs of a translation model; a language model has step.onnx and text.onnx, a
                         classifier only encoder.onnx
probe.onnx               of int8: a product of the largest numbers, which shows whether a CPU computes it exactly
weights.bin              the weights of all graphs, equal ones once
source.txt, target.txt   a type per line, by number
pieces.model             the SentencePiece model, if there is one
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel

import mega_fairseq
from mega_fairseq.export import refusals
from mega_fairseq.export.cross_attention import Limits, place_distances
from mega_fairseq.export.graph import Graph, Weights
from mega_fairseq.export.stacks import classifier_graph, encoder_graph, step_graph, text_graph
from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel, half_lives
from mega_fairseq.ops.attention.segments import NEAR
from mega_fairseq.tasks.prediction import Classifier

FORMAT = 1  # of the folder
UNLIMITED = 8192  # tokens, for models that can process any length: graphs have tables of this length
PROBE_WIDTH = 64
# All files, config.json first.
NAMES = (
    *("config.json", "encoder.onnx", "step.onnx", "text.onnx", "probe.onnx", "weights.bin"),
    *("source.txt", "target.txt", "pieces.model"),
)


class Writer:
    """A folder under construction."""

    def __init__(self, folder: Path, number_format: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.number_format = folder, number_format
        self.weights = Weights(folder / "weights.bin")

    def graph(self, name: str, build: Callable[..., None], *arguments: Any) -> None:
        graph = Graph(self.weights, self.number_format)
        build(graph, *arguments)
        graph.save(self.folder / name)

    def types(self, name: str, dictionary: Dictionary) -> None:
        (self.folder / name).write_text("".join(f"{symbol}\n" for symbol in dictionary.symbols), encoding="utf-8")

    def finish(self, config: Dict[str, Any], model: BaseFairseqModel, pieces: Optional[Path]) -> None:
        """Writes the rest; without config.json, a folder is not complete."""
        if self.number_format == "int8":
            self.graph("probe.onnx", probe_graph)
        self.weights.close()
        if pieces is not None:
            shutil.copyfile(pieces, self.folder / "pieces.model")
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(self.folder.iterdir())}
        head = {"format": FORMAT, "exporter": mega_fairseq.__version__, "number_format": self.number_format}
        lives = half_lives.of_states(model)["half_lives"]
        write_config(self.folder, {**head, **config, "half_lives": lives, "files": files})


def write_config(folder: Path, config: Dict[str, Any]) -> None:
    """Writes config.json with the hash of its own text, from which that hash is left out."""
    text = json.dumps({**config, "checksum": ""}, indent=1, ensure_ascii=False) + "\n"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    text = text.replace('"checksum": ""', f'"checksum": "{checksum}"')
    (folder / "config.json").write_text(text, encoding="utf-8")


def probe_graph(g: Graph) -> None:
    """x (1, n) times weights of the largest numbers in 8 bits."""
    x = g.input("x", np.float32, 1, PROBE_WIDTH)
    g.output("y", g.linear(x, np.ones((PROBE_WIDTH, PROBE_WIDTH), np.float32)), np.float32, 1, PROBE_WIDTH)


def special_types(dictionary: Dictionary) -> Dict[str, int]:
    return {"pad": dictionary.pad(), "eos": dictionary.eos(), "unk": dictionary.unk()}


def write_translation(
    folder: Path,
    model: MegaTransformerModel,
    number_format: str = "float32",
    pieces: Optional[Path] = None,
    documents: Optional[Dict[str, Any]] = None,
    separators: Optional[tuple] = None,
    languages: Optional[Sequence[str]] = None,
) -> None:
    """`documents` are options of --task mega_document_translation, for models of windows of several lines.

    Windows are no longer than what the graphs read. `languages` are those of the source and the target.
    """
    encoder, decoder = model.encoder, model.decoder
    refusals.check(encoder, decoder)
    limits = limits_of(model)
    if documents is not None:
        documents = {**documents, "window_tokens": min(documents["window_tokens"], limits.source)}
    writer = Writer(folder, number_format)
    special = special_types(decoder.dictionary)
    if separators is not None:
        special["separator"] = separators[1]
    asked = [special["eos"], special["unk"], *([special["separator"]] if separators else [])]
    by_line = decoder.separators is not None
    writer.graph("encoder.onnx", encoder_graph, encoder, decoder, limits)
    writer.graph("step.onnx", step_graph, decoder, limits, asked, by_line)
    writer.types("source.txt", encoder.dictionary)
    writer.types("target.txt", decoder.dictionary)
    places = None
    if by_line:
        cross = decoder.layers[0].cross_attention
        first, width = place_distances(cross, limits)
        places = {
            "source_separator": separators[0],
            "target_separator": separators[1],
            "within_lines": cross.config.positions == "sentence",
            "window": cross.config.window,
            "near": NEAR,
            "first": first,
            "width": width,
        }
    config = {
        "kind": "translation model",
        "languages": languages,
        "special": special,
        "text": {"source": "source.txt", "target": "target.txt", "kind": "words" if pieces is None else "pieces"},
        "decoder_chunk": decoder.layers[0].mixer.config.chunk_size,
        "limits": limits._asdict(),
        "search": {
            "beam": min(5, len(decoder.dictionary) - 4),
            "lenpen": 1.0,
            "max_len_a": 0.0,
            "max_len_b": 200,
            "min_len": 1,
        },
        "places": places,
        "documents": documents,
    }
    writer.finish(config, model, pieces)


def limits_of(model: BaseFairseqModel) -> Limits:
    """The longest source and target; tables of models without a limit end at UNLIMITED."""
    longest = model.max_positions()
    source, target = longest if isinstance(longest, tuple) else (0, longest)
    return Limits(min(source, UNLIMITED), min(target, UNLIMITED))


def write_language_model(
    folder: Path,
    model: MegaLanguageModel,
    number_format: str = "float32",
    pieces: Optional[Path] = None,
    of_bytes: bool = False,
) -> None:
    decoder = model.decoder
    refusals.check(decoder)
    limits, special = limits_of(model), special_types(decoder.dictionary)
    writer = Writer(folder, number_format)
    writer.graph("step.onnx", step_graph, decoder, limits, [special["eos"], special["unk"]], False)
    writer.graph("text.onnx", text_graph, decoder, limits)
    writer.types("target.txt", decoder.dictionary)
    config = {
        "kind": "language model",
        "special": special,
        "text": {"target": "target.txt", "kind": "bytes" if of_bytes else "words" if pieces is None else "pieces"},
        "decoder_chunk": decoder.layers[0].mixer.config.chunk_size,
        "limits": limits._asdict(),
    }
    writer.finish(config, model, pieces)


def write_classifier(folder: Path, classifier: Classifier, number_format: str = "float32") -> None:
    """A single model with one head; the runtime does what `Classifier.predict` does."""
    (model,), task = classifier.models, classifier.task
    refusals.check(model.encoder)
    (head,) = model.classification_heads.values()
    writer = Writer(folder, number_format)
    writer.graph("encoder.onnx", classifier_graph, model, head, task.longest)
    kind, dictionary = str(getattr(task.cfg.input_kind, "value", task.cfg.input_kind)), task.dictionary
    if kind == "values" and task.number_type is None:
        raise ValueError("the checkpoint does not say whether it was trained on uint8, int16 or floats; train it anew")
    if dictionary is not None:
        writer.types("source.txt", dictionary)
    inputs = {
        "kind": kind,
        "pairs": model.pairs,
        "longest": task.longest,
        "cut": task.cfg.shorten_method != "none",
        "first": task.cfg.init_token,
        "number_type": task.number_type,
        "length": task.length,
        "mean": task.cfg.values_mean,
        "deviation": task.cfg.values_deviation,
    }
    special = None if dictionary is None else special_types(dictionary)
    config = {"kind": "classifier", "special": special, "classes": classifier.labels, "inputs": inputs}
    writer.finish(config, model, None)
