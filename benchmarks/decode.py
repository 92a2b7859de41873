"""Beam search with mega_transformer_base against fairseq's own Transformer base, in one process.

    python benchmarks/decode.py                     everything (about 40 minutes): tables, and with --json a file
    python benchmarks/decode.py --lengths 64,512    some lengths
    python benchmarks/decode.py --tables flat       some tables
    python benchmarks/decode.py --quick             a minute, at small lengths, to check that everything runs

Beam 5, random weights, as many target tokens as source tokens, a joined vocabulary of 33,000. CPU time of one thread,
encoder and fairseq's own search included. Before timing, step-by-step decoding is compared with the whole target at
once. decode: one sentence of various lengths. batches: 1, 16 and 64 sentences of 30 tokens, also with weights in int8,
on CPUs with exact products of them. flat: time per token of a long translation in chunks, between short ones.
"""

import argparse
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_REGISTRY, BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator

from benchmarks.measure import chosen_names, machine, seconds, write_json
from benchmarks.models import preset, task
from mega_fairseq.ops.linear import INT8_WORKS

VOCABULARY, BEAM = 33_000, 5
LENGTHS = [64, 256, 512, 2048]
CHUNK = 128
BATCHES, SHORT = (1, 16, 64), 30
TABLES = ("decode", "batches", "flat")


def mega(task: Namespace, longest: int, **options: Any) -> BaseFairseqModel:
    options.update(share_all_embeddings=True, max_source_positions=longest, max_target_positions=longest)
    return preset("mega_transformer_base", task, **options)


def transformer(task: Namespace, longest: int) -> BaseFairseqModel:
    args = Namespace(share_all_embeddings=True, max_source_positions=longest, max_target_positions=longest)
    ARCH_CONFIG_REGISTRY["transformer_wmt_en_de"](args)
    return MODEL_REGISTRY["transformer"].build_model(args, task).eval()


def contenders(task: Namespace, longest: int) -> Dict[str, BaseFairseqModel]:
    torch.manual_seed(0)
    return {
        "transformer": transformer(task, longest),
        "mega": mega(task, longest),
        f"mega_chunk{CHUNK}": mega(task, longest, encoder_chunk_size=CHUNK, decoder_chunk_size=CHUNK),
    }


def generation(model: BaseFairseqModel, length: int, batch: int = 1) -> Callable[[], None]:
    """Translates sentences of `length` tokens into exactly as many."""
    torch.manual_seed(1)
    words = model.decoder.dictionary
    source = torch.randint(4, len(words), (batch, length))
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((batch,), length)}}
    model.make_generation_fast_(need_attn=False)  # as fairseq-generate does
    options = {"min_len": length - 1, "max_len_a": 0, "max_len_b": length - 1}
    search = SequenceGenerator([model], words, beam_size=BEAM, **options)

    def run() -> None:
        found = search.generate([model], sample)
        assert len(found) == batch
        assert all(h["tokens"].numel() == length for each in found for h in each)

    return run


@torch.no_grad()
def gate(models: Dict[str, BaseFairseqModel]) -> None:
    """Raises unless decoding step by step equals decoding all at once."""
    for name, model in models.items():
        words = model.decoder.dictionary
        source, target = (torch.randint(4, len(words), (2, 40)) for _ in range(2))
        out, state = model.encoder(source, torch.tensor([40, 40])), {}
        whole, _ = model.decoder(target, encoder_out=out)
        for step in range(1, 41):
            last, _ = model.decoder(target[:, :step], encoder_out=out, incremental_state=state)
            torch.testing.assert_close(last[:, -1], whole[:, step - 1], atol=1e-4, rtol=1e-4, msg=name)
    print("correct: step by step = all at once")


def table(lengths: List[int], vocabulary: int, repeats: int) -> List[Dict]:
    """CPU milliseconds per target token, and the speedup over the Transformer."""
    models = contenders(task(vocabulary), max(lengths) + 8)
    gate(models)
    rows = []
    for length in lengths:
        steps = {name: generation(model, length) for name, model in models.items()}
        times = seconds(steps, repeats) if length <= 512 else seconds(steps, 1, warm_up=0)  # minutes each
        rows.append({"length": length, "ms_per_token": {n: 1000 * t / length for n, t in times.items()}})
        ratios = "  ".join(
            f"{n} {1000 * t / length:7.2f} ms ({times['transformer'] / t:4.2f}x)" for n, t in times.items()
        )
        print(f"{length:6d} tokens  {ratios}", flush=True)
    return rows


def batches(sizes: Iterable[int], length: int, vocabulary: int, repeats: int) -> List[Dict]:
    """Sentences per CPU second, by the number of sentences in a batch."""
    torch.manual_seed(0)
    types, longest = task(vocabulary), length + 8
    models = {"transformer": transformer(types, longest), "mega": mega(types, longest)}
    if INT8_WORKS:
        models["mega_int8"] = mega(types, longest, generation_weights="int8")
    rows = []
    for batch in sizes:
        times = seconds({name: generation(model, length, batch) for name, model in models.items()}, repeats)
        speeds = {name: batch / time for name, time in times.items()}
        rows.append({"batch": batch, "length": length, "sentences_per_second": speeds})
        ratios = "  ".join(f"{n} {speed:.2f}/s ({speed / speeds['transformer']:4.2f}x)" for n, speed in speeds.items())
        print(f"{batch:6d} sentences  {ratios}", flush=True)
    return rows


def flat(short: int, long: int, vocabulary: int) -> Dict:
    """CPU milliseconds per token of a long translation in chunks, timed between short ones."""
    model = mega(task(vocabulary), long + 8, encoder_chunk_size=CHUNK, decoder_chunk_size=CHUNK)
    runs = {length: generation(model, length) for length in (short, long)}
    around = [seconds({"run": runs[short]}, 3)["run"] / short]
    middle = seconds({"run": runs[long]}, 1, warm_up=0)["run"] / long
    around.append(seconds({"run": runs[short]}, 3, warm_up=0)["run"] / short)
    found = {"short": 1000 * sum(around) / 2, "long": 1000 * middle}
    print(
        f"{short} tokens {found['short']:.2f} ms, {long} tokens {found['long']:.2f} ms: {middle * 2 / sum(around):.2f}"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", help="comma-separated target lengths instead of 64, 256, 512, 2048")
    parser.add_argument("--repeats", type=int, default=3, help="rounds up to 512 tokens, of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="16 and 32 tokens, a vocabulary of 1000, one round")
    parser.add_argument("--tables", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE; other tables in it are kept")
    args = parser.parse_args()
    chosen = chosen_names(parser, "tables", args.tables, TABLES)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(" ".join(f"{k}={v}" for k, v in machine().items()), flush=True)
    lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else LENGTHS
    quick, results = args.quick, {}
    if "decode" in chosen:
        results["decode"] = table([16, 32], 1000, 1) if quick else table(lengths, VOCABULARY, args.repeats)
    if "batches" in chosen:
        results["batches"] = batches(*(((2,), 8, 1000, 1) if quick else (BATCHES, SHORT, VOCABULARY, args.repeats)))
    if "flat" in chosen:
        results["flat"] = flat(*((16, 64, 1000) if quick else (256, 2048, VOCABULARY)))
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
