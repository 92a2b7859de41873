"""Classifiers on long inputs against a Transformer of torch of the same size, on one CPU thread.

    python benchmarks/classify.py --json docs/classify.json      all tables, about an hour

text: the Text recipe of the Long Range Arena on bytes (presets mega_lra_text, mega_lra_text_chunk); pathx: that of
Path-X on 16,384 values (mega_lra_pathx_chunk). The Transformer has their depth, width and number of parameters, 4
heads, sinusoidal positions, and the same embedding, pooling and head. It is nn.TransformerEncoder on torch's fused
attention, without dropout of attention weights, which would be slower. For text it is also trained with this dropout,
which nn.TransformerEncoderLayer has by default. Steps have 8,192 positions, or one input if it is longer.
"""

import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding

from benchmarks import quality_classify
from benchmarks.measure import Meter, Row, Step, main
from benchmarks.models import classifier, used_size
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.modules.classification import ClassificationHead, ValueEmbedding, pool

POSITIONS, QUICK, HEADS = 8192, 256, 4
HEAD = "sentence_classification_head"
CLASSES = ["0", "1"]
TRANSFORMER, DROPPED = "Transformer", "Transformer, dropout of attention weights"


class Recipe(NamedTuple):
    kind: str
    lengths: List[int]
    presets: Dict[str, str]
    dropout: float  # of layer outputs
    hidden: int  # width of the Transformer's feed-forward layers, for equal numbers of parameters


RECIPES = {
    "text": Recipe("bytes", [1024, 2048, 4096], {"Mega": "text", "Mega in chunks": "text_chunk"}, 0.1, 624),
    "pathx": Recipe("values", [16384], {"Mega in chunks": "pathx_chunk"}, 0.0, 401),
}


class TorchClassifier(nn.Module):
    """Inputs (B, L) of one length -> scores (B, classes), with torch's Transformer."""

    def __init__(self, words: Dictionary, dim: int, layers: int, hidden: int, head: int, dropout: float):
        super().__init__()
        self.embed = token_embedding(words, dim) if words else ValueEmbedding(dim)
        self.positions = SinusoidalPositionalEmbedding(dim, None)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, HEADS, hidden, dropout, batch_first=True)
        layer.dropout.p = 0.0  # of the feed-forward layer's hidden units
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = ClassificationHead(dim, head, 1, len(CLASSES), dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        places = self.positions(torch.ones_like(inputs, dtype=torch.long))
        return self.head(pool(self.encoder(self.dropout(self.embed(inputs) + places)), None, "mean"))


class MegaScores(nn.Module):
    """The same interface for models of fairseq."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, features_only=True, classification_head_name=HEAD)[0]


def mega(recipe: str, name: str, **options: Any) -> nn.Module:
    chosen = RECIPES[recipe]
    given = {"arch": f"mega_lra_{chosen.presets[name]}", "max_positions": max(chosen.lengths), **options}
    words = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
    return classifier(words, chosen.kind, quality_classify.dictionary(chosen.kind), CLASSES)


def transformer(recipe: str) -> TorchClassifier:
    chosen = RECIPES[recipe]
    cfg = mega(recipe, "Mega in chunks").cfg
    head = cfg.classifier_dim or 2 * cfg.encoder_embed_dim
    shape = (quality_classify.dictionary(chosen.kind), cfg.encoder_embed_dim, cfg.encoder_layers)
    return TorchClassifier(*shape, chosen.hidden, head, chosen.dropout)


def build(recipe: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in RECIPES[recipe].presets:
        return MegaScores(mega(recipe, name))
    model = transformer(recipe)
    for layer in model.encoder.layers:
        layer.self_attn.dropout = RECIPES[recipe].dropout if name == DROPPED else 0.0
    return model


def random_inputs(recipe: str, rows: int, length: int) -> Tensor:
    torch.manual_seed(1)
    if RECIPES[recipe].kind == "values":
        return torch.randn(rows, length)
    first = quality_classify.dictionary("bytes").nspecial
    return torch.randint(first, first + 256, (rows, length))


@torch.no_grad()
def check() -> None:
    """Raises unless one chunk equals full attention and parameters agree within 2%."""
    for recipe, chosen in RECIPES.items():
        sizes = {name: used_size(build(recipe, name)) for name in (TRANSFORMER, *chosen.presets)}
        assert all(abs(size / sizes[TRANSFORMER] - 1) < 0.02 for size in sizes.values()), sizes
        print(f"{recipe}: " + ", ".join(f"{name} {size:,} parameters" for name, size in sizes.items()))
        inputs = random_inputs(recipe, 3, 48)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        options = {"max_positions": 48, "encoder_chunk_size": -1}, {"max_positions": 48, "encoder_chunk_size": 48}
        full, chunked = (MegaScores(mega(recipe, "Mega in chunks", **each)).double().eval() for each in options)
        chunked.load_state_dict(full.state_dict())
        torch.testing.assert_close(chunked(inputs), full(inputs), rtol=0, atol=1e-10)
    print("correct: one chunk = full attention, equal parameters")


# ------------------------------------------------------------------------------------------- tables


def training_step(recipe: str, name: str, rows: int, length: int) -> Step:
    model, inputs = build(recipe, name).train(), random_inputs(recipe, rows, length)
    adam, targets = torch.optim.Adam(model.parameters(), lr=1e-5), torch.randint(len(CLASSES), (rows,))

    def step() -> None:
        F.cross_entropy(model(inputs), targets).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def shapes(quick: bool) -> Iterator[Tuple[str, int, int]]:
    """Recipe, rows and length of each case."""
    for recipe, chosen in RECIPES.items():
        for length in [QUICK] if quick else chosen.lengths:
            yield recipe, 1 if quick else max(1, POSITIONS // length), length


def training(meter: Meter) -> Iterator[Row]:
    """Training steps: positions per second, by positions per input"""
    for recipe, rows, length in shapes(meter.quick):
        contenders = [TRANSFORMER, *RECIPES[recipe].presets, *[DROPPED] * bool(RECIPES[recipe].dropout)]
        steps = {name: training_step(recipe, name, rows, length) for name in contenders}
        speeds = {name: rows * length / time for name, time in meter.seconds(steps).items()}
        yield f"{recipe}, {length:,}", speeds


def memory(meter: Meter) -> Iterator[Row]:
    """Training steps: peak MiB above the memory before it, by positions per input"""
    for recipe, rows, length in shapes(meter.quick):
        contenders = [TRANSFORMER, *RECIPES[recipe].presets]
        sizes = (rows, length), (2, 64)
        mib = {n: meter.mib(training_step, *((recipe, n, *size) for size in sizes)) for n in contenders}
        yield f"{recipe}, {length:,}", mib


TABLES = {"training": training, "memory": memory}


if __name__ == "__main__":
    main(__doc__, TABLES, check)
