"""Classifiers on long inputs against a Transformer of torch of the same size: training steps, inference and memory.

    python benchmarks/classify.py                       all tables (about an hour); with --json a file
    python benchmarks/classify.py --tables training     some of: training, inference, memory, limit, models
    python benchmarks/classify.py --recipes text        or pathx
    python benchmarks/classify.py --quick               a minute, at small lengths, to check that everything runs

The models are the Text recipe of the Long Range Arena on bytes (presets mega_lra_text, mega_lra_text_chunk), and that
of Path-X on 16,384 values (mega_lra_pathx_chunk). The Transformer has their depth and width, 4 heads, sinusoidal
positions, and the same embedding, pooling and head. The width of its feed-forward layers is chosen so that parameters
agree within 2%. It is nn.TransformerEncoder on torch's fused attention: without dropout of attention weights, and in
inference without torch's fast path, because both are slower. For Text it is also trained with this dropout, which
nn.TransformerEncoderLayer has by default.

training: forward, cross entropy, backward and Adam; inference: forward without gradients; 8,192 positions each, or one
input if it is longer. memory: peak of such a training step in a separate process. limit: the whole process in a
training step and in inference with 8 inputs of Path-X. models: training steps of the models of quality_classify.py,
with batches as there, of inputs of the greatest length. CPU time of one thread.
"""

import argparse
import logging
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding

from benchmarks import quality_classify
from benchmarks.measure import chosen_names, in_fresh_process, machine, peak_mib, resident_mib, seconds, write_json
from benchmarks.models import classifier, used_size
from mega_fairseq.data.classification.inputs import byte_dictionary
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.modules.classification import ClassificationHead, ValueEmbedding, pool

POSITIONS = 8192  # of a step
HEAD = "sentence_classification_head"
HEADS = 4
Step = Callable[[], None]


class Recipe(NamedTuple):
    kind: str
    lengths: List[int]
    presets: Dict[str, str]
    dropout: float  # of layer outputs


RECIPES = {
    "text": Recipe("bytes", [1024, 2048, 4096], {"mega": "mega_lra_text", "mega_chunk": "mega_lra_text_chunk"}, 0.1),
    "pathx": Recipe("values", [16384], {"mega_chunk": "mega_lra_pathx_chunk"}, 0.0),
}
LABELS = {
    "torch": "Transformer of torch",
    "torch_dropout": "with dropout of attention weights",
    "mega": "Mega",
    "mega_chunk": "Mega in chunks",
}
CLASSES = ["0", "1"]
QUICK = 256  # length
LIMIT_ROWS = 8


# ------------------------------------------------------------------------------------------- contenders


class TorchClassifier(nn.Module):
    """Inputs (B, L) of one length -> scores (B, classes), with torch's Transformer."""

    def __init__(
        self,
        dictionary: Dictionary,
        dim: int,
        layers: int,
        hidden: int,
        head: int,
        dropout: float,
        dropped_weights: bool = False,
    ):
        super().__init__()
        self.embed = token_embedding(dictionary, dim) if dictionary else ValueEmbedding(dim)
        self.positions = SinusoidalPositionalEmbedding(dim, None)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, HEADS, hidden, dropout, batch_first=True)
        layer.dropout.p = 0.0  # of the feed-forward layer's hidden units
        if not dropped_weights:
            layer.self_attn.dropout = 0.0
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
    given = {"arch": RECIPES[recipe].presets[name], "max_positions": max(RECIPES[recipe].lengths), **options}
    words = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
    return classifier(words, RECIPES[recipe].kind, dictionary(recipe), CLASSES)


def dictionary(recipe: str) -> Any:
    return byte_dictionary() if RECIPES[recipe].kind == "bytes" else None


def transformer(recipe: str, dropped_weights: bool) -> TorchClassifier:
    """As many parameters as the mean of the smallest and the largest Mega of the recipe."""
    megas = [mega(recipe, name) for name in RECIPES[recipe].presets]
    sizes, cfg = [used_size(model) for model in megas], megas[0].cfg
    shape = (dictionary(recipe), cfg.encoder_embed_dim, cfg.encoder_layers)
    rest = (cfg.classifier_dim or 2 * cfg.encoder_embed_dim, RECIPES[recipe].dropout)
    least = used_size(TorchClassifier(*shape, 1, *rest))
    each = used_size(TorchClassifier(*shape, 2, *rest)) - least
    return TorchClassifier(*shape, 1 + round(((min(sizes) + max(sizes)) / 2 - least) / each), *rest, dropped_weights)


def build(recipe: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in RECIPES[recipe].presets:
        return MegaScores(mega(recipe, name))
    return transformer(recipe, dropped_weights=name == "torch_dropout")


def names_of(recipe: str, part: str = "training") -> List[str]:
    more = part == "training" and RECIPES[recipe].dropout
    return ["torch", *["torch_dropout"] * bool(more), *RECIPES[recipe].presets]


def inputs_of(recipe: str, rows: int, length: int) -> Tuple[Tensor, Tensor]:
    """Random inputs (rows, length) without pads, and their classes."""
    torch.manual_seed(1)
    shape = (rows, length)
    words = dictionary(recipe)
    inputs = torch.randn(shape) if words is None else torch.randint(words.nspecial, words.nspecial + 256, shape)
    return inputs, torch.randint(len(CLASSES), (rows,))


# ------------------------------------------------------------------------------------------- correctness


@torch.no_grad()
def gate() -> None:
    """Raises unless one chunk equals full attention, fused attention the fast path, and parameters agree within 2%."""
    for recipe in RECIPES:
        models = {name: build(recipe, name).double().eval() for name in names_of(recipe)}
        sizes = {name: used_size(model) for name, model in models.items()}
        assert all(abs(size / sizes["torch"] - 1) < 0.02 for size in sizes.values()), sizes
        print(f"{recipe}: " + ", ".join(f"{name} {size:,} parameters" for name, size in sizes.items()))
        inputs = inputs_of(recipe, 3, 48)[0]
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        check_one_chunk(recipe, inputs)
        with fast_path(True):
            fast = models["torch"](inputs)
        torch.testing.assert_close(models["torch"](inputs), fast, rtol=0, atol=1e-10)
    print("correct: one chunk = full attention, fused attention = fast path, equal parameters")


def check_one_chunk(recipe: str, inputs: Tensor) -> None:
    *_, name = RECIPES[recipe].presets
    length = inputs.size(1)
    full, chunked = (
        MegaScores(mega(recipe, name, max_positions=length, encoder_chunk_size=chunk)).double().eval()
        for chunk in (-1, length)
    )
    chunked.load_state_dict(full.state_dict())
    torch.testing.assert_close(chunked(inputs), full(inputs), rtol=0, atol=1e-10)


@contextmanager
def fast_path(on: bool) -> Iterator[None]:
    """Switches torch's fast path of Transformers, which computes all attention weights."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# ------------------------------------------------------------------------------------------- tables


def training(recipe: str, name: str, rows: int, length: int) -> Step:
    model, (inputs, classes) = build(recipe, name).train(), inputs_of(recipe, rows, length)
    return updates(model, lambda: model(inputs), classes)


def training_of_task(task: str, name: str, rows: int, length: int) -> Step:
    """The same for a model of quality_classify.py."""
    torch.manual_seed(0)
    of, model = (
        quality_classify.TASKS[task],
        quality_classify.build(task, quality_classify.fitted(task, name)[0]).train(),
    )
    words, shape = model.encoder.dictionary, (rows, length)
    names = ("src_tokens", "src_tokens1")[: 1 + of.pairs]
    given = {name: torch.rand(shape) if words is None else torch.randint(4, len(words), shape) for name in names}
    scores = partial(model, **given, features_only=True, classification_head_name=HEAD)
    return updates(model, lambda: scores()[0], torch.randint(of.classes, (rows,)))


def updates(model: nn.Module, scores: Callable[[], Tensor], classes: Tensor) -> Step:
    adam = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        F.cross_entropy(scores(), classes).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def inference(recipe: str, name: str, rows: int, length: int) -> Step:
    model, (inputs, _) = build(recipe, name).eval(), inputs_of(recipe, rows, length)

    @torch.no_grad()
    def step() -> None:
        model(inputs)

    return step


STEPS = {"training": training, "inference": inference}
ALONE = {**STEPS, "models": training_of_task}


def shapes(lengths: Dict[str, List[int]]) -> List[Tuple[str, int]]:
    return [(recipe, length) for recipe, of in lengths.items() for length in of]


def speed_table(part: str, lengths: Dict[str, List[int]], positions: int, repeats: int) -> List[Dict]:
    """Positions per CPU second, and the speed relative to the Transformer."""
    rows = []
    for recipe, length in shapes(lengths):
        count = max(1, positions // length)
        times = seconds({name: STEPS[part](recipe, name, count, length) for name in names_of(recipe, part)}, repeats)
        rows.append({"recipe": recipe, "length": length, "positions": count * length, "seconds": times})
        cells = (f"{name} {count * length / time:,.0f} ({times['torch'] / time:.2f}x)" for name, time in times.items())
        print(f"{recipe}, {length:6,} positions/CPU-s: " + ", ".join(cells), flush=True)
    return rows


def memory_table(lengths: Dict[str, List[int]], positions: int) -> List[Dict]:
    """Peak MiB of a training step above the memory before it, in a separate process each."""
    rows = []
    for recipe, length in shapes(lengths):
        count = max(1, positions // length)
        mib = {name: alone("training", recipe, name, count, length)[0] for name in names_of(recipe)}
        rows.append({"recipe": recipe, "length": length, "positions": count * length, "mib": mib})
        cells = (f"{name} {found:,.0f} ({found / mib['torch']:.2f}x)" for name, found in mib.items())
        print(f"{recipe}, {length:6,} peak MiB: " + ", ".join(cells), flush=True)
    return rows


def limit_table(length: int) -> Dict:
    """Peak MiB of the whole process, with 8 inputs of Path-X in chunks."""
    mib = {part: sum(alone(part, "pathx", "mega_chunk", LIMIT_ROWS, length)) for part in STEPS}
    print(f"{LIMIT_ROWS} inputs of {length:,}: " + ", ".join(f"{part} {found:,.0f} MiB" for part, found in mib.items()))
    return {"rows": LIMIT_ROWS, "length": length, "mib": mib}


def models_table(tasks: List[str], names: List[str], repeats: int, rows: Optional[int] = None) -> Dict:
    """Examples per CPU second and peak MiB of training steps, for each task and token mixer."""
    found: Dict[str, Dict] = {}
    for task in tasks:
        of = quality_classify.TASKS[task]
        shape = (rows or of.batch, of.length)
        chosen = [name for name in quality_classify.models_of(task) if name in names]
        times = seconds({name: training_of_task(task, name, *shape) for name in chosen}, repeats)
        found[task] = {
            name: {"examples_per_second": shape[0] / time, "mib": alone("models", task, name, *shape)[0]}
            for name, time in times.items()
        }
        cells = (f"{name} {of['examples_per_second']:.1f}, {of['mib']:.0f} MiB" for name, of in found[task].items())
        print(f"{task}: " + "; ".join(cells), flush=True)
    return found


def alone(part: str, recipe: str, name: str, rows: int, length: int) -> List[float]:
    """Peak MiB of a step above the memory before it, and that memory."""
    return in_fresh_process(__file__, part, recipe, name, rows, length)


def one(part: str, recipe: str, name: str, rows: int, length: int) -> Tuple[float, float]:
    ALONE[part](recipe, name, 2, min(QUICK // 4, length))()  # makes the libraries allocate what they keep
    step, before = ALONE[part](recipe, name, rows, length), resident_mib()
    return peak_mib(step), before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = "training,inference,memory,limit,models"
    parser.add_argument("--tables", default=tables, help=f"which to run, of {tables}")
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"which to measure, of {', '.join(RECIPES)}")
    tasks, mixers = ",".join(quality_classify.TASKS), ",".join(quality_classify.MODELS)
    parser.add_argument("--tasks", default=tasks, help=f"of the table of models, some of {tasks}")
    parser.add_argument("--models", default=mixers, help=f"of the table of models, some of {mixers}")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the median is taken")
    parser.add_argument("--quick", action="store_true", help=f"inputs of {QUICK} positions and one round")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # part, recipe, name, rows, length
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    if args.one:
        part, recipe, name, rows, length = args.one
        print(*one(part, recipe, name, int(rows), int(length)))
        return
    lengths = {name: RECIPES[name].lengths for name in chosen_names(parser, "recipes", args.recipes, RECIPES)}
    tasks = chosen_names(parser, "tasks", args.tasks, quality_classify.TASKS)
    mixers = chosen_names(parser, "models", args.models, quality_classify.MODELS)
    positions, repeats, limit, rows = POSITIONS, args.repeats, max(RECIPES["pathx"].lengths), None
    if args.quick:
        lengths, positions, repeats, limit, rows = {name: [QUICK] for name in lengths}, QUICK, 1, QUICK, 2
    known: Dict[str, Callable[[], Any]] = {
        **{part: partial(speed_table, part, lengths, positions, repeats) for part in STEPS},
        "memory": partial(memory_table, lengths, positions),
        "limit": partial(limit_table, limit),
        "models": partial(models_table, tasks, mixers, repeats, rows),
    }
    chosen = chosen_names(parser, "tables", args.tables, known)
    gate()
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    for name in chosen:
        print(f"\n{name}: {known[name].func.__doc__}")
        result = known[name]()
        if args.json:
            write_json(args.json, {name: result})


if __name__ == "__main__":
    main()
