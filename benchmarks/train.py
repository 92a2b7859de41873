"""Training steps of whole models against fairseq's Transformers of the same size, on one CPU thread.

    python benchmarks/train.py --json docs/train.json      all tables, about an hour

A step is an update of fairseq's trainer, on random tokens in sequences of one length, with dropout 0.1 of layer outputs
only. small: the models whose quality quality_translation.py compares; base: mega_transformer_base over
33,000 types, both with sources and targets of the same length; language: mega_lm_enwik8, in chunks of 2,048; mixers:
the language models that quality_lm.py compares, with the memory of a step; small updates, base updates: the
translation models with each criterion, optimizer, number format and setting of memory; base memory: an update of 4,096
tokens, also with eight times the types.
"""

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq import utils
from fairseq.trainer import Trainer

from benchmarks import decode, quality_lm, quality_translation
from benchmarks.measure import Meter, Row, Step, parser, peak_mib, prepare_process, run
from benchmarks.models import BYTES, NO_DROPOUT, configured, from_args, random_batch, used_size

DROPOUT = [*NO_DROPOUT, "--dropout=0.1"]
MEGA = [*DROPOUT, "--hidden-dropout=0"]  # an option that fairseq's models lack
TRANSLATION = ["--task=translation", "--share-all-embeddings", "--criterion=label_smoothed_cross_entropy"]
LANGUAGE = quality_lm.OURS
RECIPE = ["--optimizer=adam", "--adam-betas=(0.9, 0.98)", "--lr=1e-5", "--clip-norm=1.0", "--distributed-world-size=1"]


class Table(NamedTuple):
    types: int
    tokens: int  # per step
    lengths: List[int]
    models: Dict[str, List[str]]  # arguments of fairseq-train; the Transformer comes first


def translation(transformer: List[str], mega: List[str]) -> Dict[str, List[str]]:
    return {"Transformer": [*transformer, *TRANSLATION, *DROPOUT], "Mega": [*mega, *TRANSLATION, *MEGA]}


SMALL = translation(quality_translation.MODELS["transformer"], quality_translation.MODELS["mega"])
BASE = translation(decode.MODELS["Transformer"], decode.MODELS["Mega"])
OF_BYTES = {
    "Transformer": [
        *["--task=language_modeling", "--arch=transformer_lm", "--decoder-layers=12", "--decoder-ffn-embed-dim=2048"],
        *["--decoder-attention-heads=8", "--decoder-normalize-before", "--share-decoder-input-output-embed", *DROPOUT],
    ],
    "Mega": [*LANGUAGE, "--arch=mega_lm_enwik8", *MEGA],
}
TABLES = {
    "small": Table(3908, 4096, [34, 128, 512], SMALL),
    "base": Table(decode.TYPES, 2048, [34, 128, 512], BASE),
    "language": Table(BYTES, 2048, [512, 2048], OF_BYTES),
    "small updates": Table(3908, 4096, [128], SMALL),
    "base updates": Table(decode.TYPES, 2048, [128], BASE),
    "base memory": Table(decode.TYPES, 4096, [128], BASE),
    "mixers": Table(BYTES, 4096, [512], {name: quality_lm.MODELS[name] for name in quality_lm.COMPARED}),
}


class Kind(NamedTuple):
    """Of updates: what all models get, and whether the process keeps freed memory."""

    words: List[str]
    keep: bool = True


OUR_LOSS, BF16 = ["--criterion=mega_label_smoothed_cross_entropy"], ["--bf16"]
UPDATES = {
    "fairseq's criterion, memory returned": Kind([], keep=False),
    "fairseq's criterion": Kind([]),
    "our criterion": Kind(OUR_LOSS),
    "our criterion and optimizer": Kind([*OUR_LOSS, "--optimizer=mega_adam"]),
    "fairseq's criterion, bf16": Kind(BF16),
    "our criterion, bf16": Kind([*OUR_LOSS, *BF16]),
}


def build(words: List[str], types: int) -> Trainer:
    torch.manual_seed(0)
    cfg, task, model = configured([*RECIPE, *words], types)
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def sample(trainer: Trainer, rows: int, length: int) -> Dict[str, Any]:
    """Sequences of this length, on the trainer's device."""
    batch = {"id": torch.arange(rows), "nsentences": rows, "ntokens": rows * length}
    batch["net_input"] = random_batch(trainer.get_model(), rows, length)
    batch["target"] = torch.randint(4, len(trainer.task.target_dictionary), (rows, length))
    return utils.move_to_cuda(batch) if trainer.cuda else batch


def update(trainer: Trainer, length: int, tokens: int) -> Step:
    """An update with as many sequences of `length` as fit into `tokens`."""
    batch = sample(trainer, tokens // length, length)
    return lambda: trainer.train_step([batch], raise_oom=True)


def on_cpu(words: List[str], types: int, length: int, tokens: int) -> Step:
    return update(build([*words, "--cpu"], types), length, tokens)


def speed(table: Table, meter: Meter) -> Iterator[Row]:
    """Training steps: tokens of one side per second, by tokens per sequence"""
    for length in table.lengths:
        steps = {n: on_cpu(words, table.types, length, table.tokens) for n, words in table.models.items()}
        tokens = table.tokens // length * length
        yield length, {name: tokens / time for name, time in meter.seconds(steps).items()}


def cost(table: Table, meter: Meter) -> Iterator[Row]:
    """Training steps of language models with each mixer: tokens per second and peak MiB"""
    ((length, speeds),) = speed(table, meter)
    yield "tokens per second", speeds
    step, warm_up = ((table.types, length, count) for count in (table.tokens, length))
    yield "peak MiB", {n: meter.mib(on_cpu, (w, *step), (w, *warm_up)) for n, w in table.models.items()}


def updates(table: Table, meter: Meter) -> Iterator[Row]:
    """Training steps: tokens of one side per second, and peak MiB, by criterion, number format and memory"""
    (length,) = table.lengths
    found: Dict[str, Dict[str, List[Tuple[float, float]]]] = {name: {m: [] for m in table.models} for name in UPDATES}
    for _ in range(1 if meter.quick else meter.repeats):
        for name, kind in UPDATES.items():
            for model, words in table.models.items():
                found[name][model].append(meter.apart(whole, [*words, *kind.words], table, length, keep=kind.keep))
    for name, of_models in found.items():
        yield name, {model: statistics.median(speed for speed, _ in each) for model, each in of_models.items()}
        yield f"{name}: peak MiB", {model: max(mib for _, mib in each) for model, each in of_models.items()}


def whole(words: List[str], table: Table, length: int) -> Tuple[float, float]:
    """Tokens per second of later updates, and peak MiB of the first above those before it."""
    on_cpu(words, table.types, length, length)()
    step = on_cpu(words, table.types, length, table.tokens)
    peak, seconds = peak_mib(step), Meter(repeats=2).seconds({"": step}, warm_up=0)[""]
    return table.tokens // length * length / seconds, peak


def memory(table: Table, meter: Meter) -> Iterator[Row]:
    """An update: peak MiB above the model's, by types and criterion"""
    (length,), ours = table.lengths, "our criterion and optimizer"
    for types, name in ((table.types, "fairseq's criterion"), (table.types, ours), (8 * table.types, ours)):
        step, warm_up = ((types, length, tokens) for tokens in (table.tokens, length))
        models = {model: [*words, *UPDATES[name].words] for model, words in table.models.items()}
        yield f"{types:,} types, {name}", {n: meter.mib(on_cpu, (w, *step), (w, *warm_up)) for n, w in models.items()}


def check(names: List[str]) -> None:
    """Raises unless the models of a table have equal sizes."""
    for name in names:
        sizes = {each: used_size(from_args(w, TABLES[name].types)) for each, w in TABLES[name].models.items()}
        assert max(sizes.values()) < 1.05 * min(sizes.values()), sizes
        print(f"{name}: " + ", ".join(f"{model} {size:,} parameters" for model, size in sizes.items()), flush=True)


MEASURES: Dict[str, Callable[[Table, Meter], Iterator[Row]]] = {
    "mixers": cost,
    "small updates": updates,
    "base updates": updates,
    "base memory": memory,
}


def main() -> None:
    args = parser(__doc__, TABLES).parse_args()
    prepare_process()
    check(args.tables)
    few = {n: t._replace(lengths=t.lengths[:1], tokens=t.lengths[0]) for n, t in TABLES.items()}
    chosen = few if args.quick else TABLES
    run({name: partial(MEASURES.get(name, speed), table) for name, table in chosen.items()}, args)


if __name__ == "__main__":
    main()
