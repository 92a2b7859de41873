"""Training steps of whole models against fairseq's Transformers of the same size, in one process.

    python benchmarks/train.py                      everything (about 20 minutes): tables, and with --json a file
    python benchmarks/train.py --tables small       some of: small, base, language
    python benchmarks/train.py --quick              a minute, at small lengths, to check that everything runs

A step is forward, cross entropy, backward and Adam, on random tokens in sequences of one length, with dropout 0.1 of
layer outputs only. small and base are translation models, with sources and targets of the same length: the models whose
quality quality.py compares, and mega_transformer_base over 33,000 types. language is mega_lm_enwik8, in chunks of 2048.
CPU time of one thread.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import BaseFairseqModel

from benchmarks import contenders_lm, decode, quality
from benchmarks.measure import chosen_names, machine, seconds, write_json
from benchmarks.models import from_args, used_size

DROPOUT = ["--dropout", "0.1", "--attention-dropout", "0", "--activation-dropout", "0"]
TRANSLATION = ["--task", "translation", "--share-all-embeddings", *DROPOUT]
MEGA = ["--hidden-dropout", "0"]  # an option that fairseq's models lack


class Table(NamedTuple):
    types: int
    tokens: int  # per step
    lengths: List[int]
    models: Dict[str, List[str]]  # arguments of fairseq-train


TABLES = {
    "small": Table(
        *(3908, 4096, [34, 128, 512]),
        {
            "transformer": [*quality.MODELS["transformer"], *TRANSLATION],
            "mega": [*quality.MODELS["mega-scaled"], *TRANSLATION, *MEGA],
        },
    ),
    "base": Table(
        *(decode.VOCABULARY, 2048, [34, 128, 512]),
        {
            "transformer": ["--arch", "transformer_wmt_en_de", *TRANSLATION],
            "mega": ["--arch", "mega_transformer_base", *TRANSLATION, *MEGA],
        },
    ),
    "language": Table(
        *(contenders_lm.TYPES["enwik8"], 2048, [512, 2048]),
        {
            "transformer": [*contenders_lm.as_words("enwik8"), "--task", "language_modeling", *DROPOUT],
            "mega": ["--arch", "mega_lm_enwik8", "--task", "mega_language_modeling", *DROPOUT, *MEGA],
        },
    ),
}


def training(model: BaseFairseqModel, length: int, tokens: int) -> Callable[[], None]:
    """A training step on as many sequences of `length` as fit into `tokens`."""
    types, shape = len(model.decoder.dictionary), (tokens // length, length)
    torch.manual_seed(1)
    source, before, targets = (torch.randint(4, types, shape) for _ in range(3))
    given: Dict[str, Any] = {"src_tokens": source}
    if hasattr(model, "encoder"):
        given.update(src_lengths=torch.full(shape[:1], length), prev_output_tokens=before)
    adam = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        scores = model(**given)[0]  # (B, L, V)
        F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def compare(name: str, quick: bool) -> Dict:
    """Tokens of one side per CPU second, and the speed relative to the Transformer."""
    types, tokens, lengths, arguments = TABLES[name]
    if quick:
        types, tokens, lengths = min(types, 1000), lengths[0], lengths[:1]
    torch.manual_seed(0)
    models = {contender: from_args(words, types).train() for contender, words in arguments.items()}
    sizes = {contender: used_size(model) for contender, model in models.items()}
    print(name + ": " + ", ".join(f"{contender} {size:,} parameters" for contender, size in sizes.items()), flush=True)
    rows = []
    for length in lengths:
        steps = {contender: training(model, length, tokens) for contender, model in models.items()}
        read = tokens // length * length
        speeds = {contender: read / time for contender, time in seconds(steps, 1 if quick else 5).items()}
        shown = (f"{n} {speed:6,.0f} ({speed / speeds['transformer']:4.2f}x)" for n, speed in speeds.items())
        print(f"{length:6d} tokens  " + "  ".join(shown), flush=True)
        rows.append({"length": length, "tokens_per_second": speeds})
    return {"parameters": sizes, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="one step of one sequence per model")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tables = chosen_names(parser, "tables", args.tables, TABLES)
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    for table in tables:
        result = compare(table, args.quick)
        if args.json:
            write_json(args.json, {table: result})


if __name__ == "__main__":
    main()
