"""The tables of docs/performance.md."""

from typing import Callable, Dict

from benchmarks import classify, contenders
from benchmarks.tables_cells import Rows, compared, numbers, speeds, times


def layer() -> Rows:
    return _speed("layer")


def _speed(name: str) -> Rows:
    found = numbers("layer")[name]
    sizes = found["parameters"]
    yield ("tokens per sequence", *(f"{contenders.LABELS[layer]} ({sizes[layer] / 1e6:.2f}M)" for layer in sizes))
    for row in found["rows"]:
        yield (f"{row['length']:,}", *compared(speeds(row["tokens"], row["seconds"]), sizes))


def layer_memory() -> Rows:
    rows = numbers("layer")["memory"]
    layers = list(rows[0]["mib"])
    yield ("tokens per sequence", *(contenders.LABELS[layer] for layer in layers))
    for row in rows:
        yield (f"{row['length']:,}", *compared(row["mib"], layers))


def flat() -> Rows:
    rows = numbers("layer")["flat"]
    yield ("tokens per sequence", *(contenders.LABELS[layer] for layer in rows[0]["seconds"]))
    for row in rows:
        yield (f"{row['length']:,}", *(f"{row['tokens'] / seconds:,.0f}" for seconds in row["seconds"].values()))


def projections() -> Rows:
    found = numbers("layer")["projections"]
    products = found["seconds"].pop("projections")
    yield f"{found['length']:,} tokens per sequence", "share of matrix products"
    for layer, seconds in found["seconds"].items():
        yield contenders.LABELS[layer], f"{products / seconds:.0%}"


def ema() -> Rows:
    yield "tokens per sequence", "textbook", "ours", "speed", "textbook, memory", "ours", "memory"
    for row in numbers("layer")["ema"]["rows"]:
        seconds, mib = row["seconds"], row["mib"]
        speed = [f"{1000 * seconds[name]:,.0f} ms" for name in ("textbook", "ours")]
        memory = [f"{mib[name]:,.0f} MiB" for name in ("textbook", "ours")]
        faster, smaller = seconds["textbook"] / seconds["ours"], mib["textbook"] / mib["ours"]
        yield (f"{row['length']:,}", *speed, f"{faster:.1f}x", *memory, f"1/{smaller:.1f}")


def forms() -> Rows:
    rows = numbers("layer")["forms"]
    yield ("EMA", "tokens per sequence", *(name.replace("scan_", "blocks of ") for name in rows[0]["seconds"]))
    for row in rows:
        times = (f"{1000 * seconds:.0f}" for seconds in row["seconds"].values())
        yield (row["direction"], f"{row['length']:,}", *times)


def token() -> Rows:
    found = numbers("layer")["token"]["seconds"]
    yield "", "ms per token"
    for name, seconds in found.items():
        yield name, f"{1000 * seconds:.2f}"


def decode() -> Rows:
    yield "tokens", "Transformer", "Mega", "Mega, chunks of 128"
    for row in numbers("decode")["decode"]:
        transformer, *ours = row["ms_per_token"].values()
        yield (f"{row['length']:,}", f"{transformer:.1f}", *(times(f"{ms:.1f}", transformer, ms) for ms in ours))


def batches() -> Rows:
    rows = numbers("decode")["batches"]
    yield ("sentences per second, in batches of", *(f"{row['batch']}" for row in rows))
    labels = {"transformer": "Transformer", "mega": "Mega", "mega_int8": "Mega, weights in int8"}
    for name in rows[0]["sentences_per_second"]:
        cells = []
        for row in rows:
            speed, baseline = row["sentences_per_second"][name], row["sentences_per_second"]["transformer"]
            cells.append(f"{speed:.2f}" if name == "transformer" else times(f"{speed:.2f}", speed, baseline))
        yield (labels[name], *cells)


def train() -> Rows:
    yield "models", "parameters", "34 tokens", "128", "512", "2,048"
    for name in ("small", "base", "language"):
        found = numbers("train")[name]
        speeds = {row["length"]: row["tokens_per_second"] for row in found["rows"]}
        for model in ("Transformer", "Mega"):
            size = found["parameters"][model.lower()] / 1e6
            cells = []
            for length in (34, 128, 512, 2048):
                speed = speeds.get(length, {}).get(model.lower())
                shown = "" if speed is None else f"{speed:,.0f}"
                mega = shown and model == "Mega"
                cells.append(times(shown, speed, speeds[length]["transformer"]) if mega else shown)
            yield (f"{name}, {model}", f"{size:.2f}M" if size < 10 else f"{size:.1f}M", *cells)


def shared_segment() -> Rows:
    yield "processes", "peak memory of each", "sent by each to all others", "CPU seconds of each, at most"
    for row in numbers("sequence_parallel")["processes"]["rows"]:
        cells = f"{row['mib']:,.0f} MiB", f"{row['bytes'] / 1024:,.0f} KiB", f"{row['seconds']:.1f}"
        yield (str(row["processes"]), *cells)


def shared_segment_on_paper() -> Rows:
    rows = numbers("sequence_parallel")["paper"]["rows"]
    yield ("GPUs", *rows[0]["tokens_per_second"])
    for row in rows:
        yield (f"{row['gpus']}, {row['link']}", *(f"{speed / 1e6:.2f}M" for speed in row["tokens_per_second"].values()))


def evaluation() -> Rows:
    shapes = {"wt103": "WikiText-103, 267,744 types", "enwik8": "enwik8, 208 types"}
    yield "shape", "model", "parameters", "tokens/s", "peak memory above the weights"
    for row in numbers("eval_lm")["evaluation"]:
        shape, baseline = shapes[row.pop("shape")], row["transformer"]["tokens_per_second"]
        for model, found in row.items():
            speed = found["tokens_per_second"]
            stock = model == "transformer"
            shown = f"{speed:.1f}" if stock else times(f"{speed:.1f}", speed, baseline)
            name = "Transformer, window 512" if stock else f"Mega, {model}"
            yield shape if stock else "", name, f"{found['parameters'] / 1e6:.1f}M", shown, f"{found['mib']:,.0f} MiB"


def head() -> Rows:
    found = numbers("eval_lm")["head"]
    names = {
        "stock": "fairseq's scorer, whole sample",
        "stock by 256": "fairseq's scorer, `--softmax-batch 256`",
        "ours": "ours",
    }
    first, *others = (f"{int(types):,}" for types in found["mib_by_types"])
    yield ("", "ms per token", f"peak memory at {first} types", *(f"at {types}" for types in others))
    for name, label in names.items():
        ms, stock = (1000 * found["seconds"][scorer] / found["tokens"] for scorer in (name, "stock"))
        first, *others = (f"{mib[name]:,.0f}" for mib in found["mib_by_types"].values())
        yield label, f"{ms:.2f}" if name == "stock" else times(f"{ms:.2f}", stock, ms), f"{first} MiB", *others


# ------------------------------------------------------------------------------------------- token mixers
# One row for each mixer, one column for each length.


def mixers_layer() -> Rows:
    rows = numbers("mixers")["layer"]["rows"]
    return _by_mixer({row["length"]: speeds(row["tokens"], row["seconds"]) for row in rows})


def mixers_flat() -> Rows:
    found = numbers("mixers")["flat"]
    first, *_, last = next(iter(found["seconds"].values()))
    yield "layer", f"{int(first):,} tokens per sequence", f"{int(last):,}", "ratio"
    for name, seconds in found["seconds"].items():
        cells = (f"{found['tokens'] / seconds[length]:,.0f}" for length in (first, last))
        yield (name, *cells, f"{seconds[first] / seconds[last]:.2f}")


def mixers_memory() -> Rows:
    return _by_mixer({row["length"]: row["mib"] for row in numbers("mixers")["memory"]})


def _by_mixer(columns: Dict[int, Dict[str, float]]) -> Rows:
    """Numbers by length and mixer, with their ratios to torch's."""
    yield ("layer", *(f"{length:,}" for length in columns))
    for name in next(iter(columns.values())):
        cells = (next(compared(values, [name])) for values in columns.values())
        yield (contenders.LABELS.get(name, name), *cells)


def mixers_decode() -> Rows:
    rows = numbers("mixers")["decode"]
    yield ("ms per token, after tokens", *(f"{row['tokens']:,}" for row in rows))
    for name in rows[0]["seconds"]:
        yield (name, *(f"{1000 * row['seconds'][name]:.2f}" for row in rows))


def mixers_products() -> Rows:
    yield "layer", "share of matrix products"
    for name, seconds in numbers("mixers")["products"]["seconds"].items():
        yield name, f"{seconds['products'] / seconds['layer']:.0%}"


# ------------------------------------------------------------------------------------------- classifiers


def classify_training() -> Rows:
    return _classified("training", "positions per second", lambda row: speeds(row["positions"], row["seconds"]))


def classify_inference() -> Rows:
    return _classified("inference", "positions per second", lambda row: speeds(row["positions"], row["seconds"]))


def classify_memory() -> Rows:
    return _classified("memory", "peak MiB of a training step", lambda row: row["mib"])


def _classified(table: str, title: str, values: Callable[[Dict], Dict[str, float]]) -> Rows:
    yield (title, *classify.LABELS.values())
    for row in numbers("classify")[table]:
        kind = classify.RECIPES[row["recipe"]].kind
        yield (f"{row['length']:,} {kind}", *compared(values(row), classify.LABELS))


def classify_limit() -> Rows:
    found = numbers("classify")["limit"]
    yield f"{found['rows']} inputs of {found['length']:,} values", "peak memory of the process"
    for part, mib in found["mib"].items():
        yield part, f"{mib:,.0f} MiB"
