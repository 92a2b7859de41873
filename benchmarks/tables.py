"""Updates the tables of README.md, docs/performance.md and docs/results.md from the numbers that benchmarks wrote.

    python benchmarks/tables.py      after a benchmark has written its --json

A table is below a line `<!-- table: NAME -->`, where NAME is a function of this file.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import classify, contenders, quality_classify, quality_lm

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", DOCS / "performance.md", DOCS / "results.md"]
Rows = Iterable[Iterable[str]]  # the first one is the header


def numbers(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text())


def times(shown: str, value: float, baseline: float) -> str:
    return f"{shown} ({value / baseline:.2f}x)"


def ratios(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}x" for value in values)


# ------------------------------------------------------------------------------------------- performance.md


def layer() -> Rows:
    return _speed("layer")


def sublayer() -> Rows:
    return _speed("sublayer")


def _speed(name: str) -> Rows:
    found = numbers("layer")[name]
    sizes = found["parameters"]
    yield ("tokens per sequence", *(f"{contenders.LABELS[layer]} ({sizes[layer] / 1e6:.2f}M)" for layer in sizes))
    for row in found["rows"]:
        yield (f"{row['length']:,}", *_compared(_speeds(row["tokens"], row["seconds"]), sizes))


def layer_memory() -> Rows:
    rows = numbers("layer")["memory"]
    layers = list(rows[0]["mib"])
    yield ("tokens per sequence", *(contenders.LABELS[layer] for layer in layers))
    for row in rows:
        yield (f"{row['length']:,}", *_compared(row["mib"], layers))


def _speeds(count: int, seconds: Dict[str, float]) -> Dict[str, float]:
    return {name: count / time for name, time in seconds.items()}


def _compared(values: Dict[str, float], layers: Iterable[str]) -> Iterator[str]:
    """Values with their ratio to torch's; empty for layers that were not measured."""
    torch = values.get("torch")
    for layer in layers:
        value = values.get(layer)
        shown = "" if value is None else f"{value:,.0f}"
        yield times(shown, value, torch) if shown and torch and layer != "torch" else shown


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
    yield ("tokens per sequence", *(name.replace("scan_", "blocks of ") for name in rows[0]["seconds"]))
    for row in rows:
        yield (f"{row['length']:,}", *(f"{1000 * seconds:.0f}" for seconds in row["seconds"].values()))


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
    yield "processes", "peak memory of each", "sent by each to all others"
    for row in numbers("sequence_parallel")["processes"]["rows"]:
        yield str(row["processes"]), f"{row['mib']:,.0f} MiB", f"{row['bytes'] / 1024:,.0f} KiB"


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


# ------------------------------------------------------------------------------------------- results.md


def translation() -> Rows:
    names = {"transformer": "fairseq `transformer`", "mega-scaled": "Mega, `--init scaled`"}
    names["mega"] = "Mega, released initialisation"
    yield "model", "seed", "validation, bits per piece", "sacreBLEU", "chrF2"
    for model, label in names.items():
        for run, found in sorted(numbers("quality").items()):
            name, _, seed = run.rpartition("-")
            if name == model:
                yield label, seed, f"{found['valid_bits_per_token'][-1][1]:.3f}", *_bleu_and_chrf(run)


def _bleu_and_chrf(run: str) -> List[str]:
    return [re.search(r" = ([\d.]+)", score).group(1) for score in numbers("quality")[run]["scores"]]


RELEASED_RUN = ("the released code, 5e-3", "1", "2.092 (update 1339)", "", "2.1137", "2.0905", "2.0788", "2.0746", "")


def bytes_mega() -> Rows:
    """With a row for the released code, which was measured elsewhere."""
    chunks = (64, 128, 256, 512, 1024, 2048)
    yield ("learning rate", "seed", "valid, chunk 256", *(f"test, chunk {chunk:,}" for chunk in chunks))
    yield RELEASED_RUN
    yield from _bytes("mega", "valid", "chunk 256", [f"chunk {chunk}" for chunk in chunks])


def bytes_transformer() -> Rows:
    windows = (0, 256, 384)
    yield ("learning rate", "seed", "valid, 384", *(f"test, {window}" for window in windows))
    yield from _bytes("transformer", "valid", "window 384", [f"window {window}" for window in windows])


def _bytes(model: str, *first: str) -> Rows:
    subset, setting, settings = first
    for run, found in sorted(numbers("quality_lm").items(), key=lambda run: _rate_and_seed(run[0])):
        if re.match(rf"{model}-\d", run):
            rate, seed = run[len(model) + 1 :].rsplit("-", 1)
            bits = found["bits_per_byte"]
            cells = [bits[subset][setting], *(bits["test"][name] for name in settings)]
            yield rate, seed, *(f"{value:.4f}" for value in cells)


def bytes_mixers() -> Rows:
    """All token mixers: valid at each learning rate, test with each seed at the best one."""
    found, cost = numbers("quality_lm"), numbers("mixers")["models"]["models"]
    columns = ("valid, by learning rate", "test, by seed", "training, tokens/s", "evaluation, tokens/s")
    yield ("model", "parameters", *columns, "peak memory of training")
    runs = quality_lm.by_model(found)
    for model in quality_lm.LABELS:
        rates = runs.get(model, {})
        if not rates:
            continue
        best, *_ = rates.values()
        valid = (f"{rate} {_first(found[names[0]], 'valid'):.4f}" for rate, names in sorted(rates.items(), key=_rate))
        speeds = (f"{cost[model][part]['tokens_per_second']:,.0f}" for part in ("training", "evaluation"))
        yield (
            *(quality_lm.LABELS[model], f"{found[best[0]]['parameters']:,}", "; ".join(valid)),
            "; ".join(f"{_first(found[name], 'test'):.4f}" for name in best),
            *(*speeds, f"{cost[model]['training']['mib']:,.0f} MiB"),
        )


def _rate(item: Tuple[str, Any]) -> float:
    return float(item[0])


def _first(run: Dict, subset: str) -> float:
    """The score in the setting of training, which is the only one on valid."""
    (setting,) = run["bits_per_byte"]["valid"]
    return run["bits_per_byte"][subset][setting]


def _rate_and_seed(run: str) -> List[float]:
    *_, rate, power, seed = re.split("-|e-", run)
    return [float(f"{rate}e-{power}"), int(seed)]


def _sweeps(corpus: str, x: str, kept: Callable[[List[Dict]], Dict[str, int]]) -> Rows:
    header = None
    for bias in ("rotary", "rope", "alibi", "simple"):
        points = numbers(f"sweeps/{corpus}-{bias}")["points"]
        wanted = kept(points)
        points = sorted((p for p in points if wanted.items() <= p.items()), key=lambda point: point[x])
        if header is None:
            header = (f"test {x} of", *(f"{point[x]:,}" for point in points))
            yield header
        yield (f"`{bias}`", *(f"{p['bits']:.4f}" if p["bits"] else "refused" for p in points))


def _longest(points: List[Dict]) -> Dict[str, int]:
    return {"context": max(point["context"] for point in points)}


def wikipedia_chunks() -> Rows:
    return _sweeps("wikipedia", "chunk", _longest)


def wikipedia_contexts() -> Rows:
    return _sweeps("wikipedia", "context", lambda points: {"chunk": 256})


def addresses_chunks() -> Rows:
    return _sweeps("addresses", "chunk", _longest)


def addresses_contexts() -> Rows:
    return _sweeps("addresses", "context", lambda points: {"chunk": 256})


# ------------------------------------------------------------------------------------------- mixers
# One row for each mixer, one column for each length.


def mixers_layer() -> Rows:
    rows = numbers("mixers")["layer"]["rows"]
    return _by_mixer({row["length"]: _speeds(row["tokens"], row["seconds"]) for row in rows})


def mixers_memory() -> Rows:
    return _by_mixer({row["length"]: row["mib"] for row in numbers("mixers")["memory"]})


def _by_mixer(columns: Dict[int, Dict[str, float]]) -> Rows:
    """Numbers by length and mixer, with their ratios to torch's."""
    yield ("layer", *(f"{length:,}" for length in columns))
    for name in next(iter(columns.values())):
        cells = (next(_compared(values, [name])) for values in columns.values())
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
    return _classified("training", "positions per second", lambda row: _speeds(row["positions"], row["seconds"]))


def classify_inference() -> Rows:
    return _classified("inference", "positions per second", lambda row: _speeds(row["positions"], row["seconds"]))


def classify_memory() -> Rows:
    return _classified("memory", "peak MiB of a training step", lambda row: row["mib"])


def _classified(table: str, title: str, values: Callable[[Dict], Dict[str, float]]) -> Rows:
    yield (title, *classify.LABELS.values())
    for row in numbers("classify")[table]:
        kind = classify.RECIPES[row["recipe"]].kind
        yield (f"{row['length']:,} {kind}", *_compared(values(row), classify.LABELS))


def classify_limit() -> Rows:
    found = numbers("classify")["limit"]
    yield f"{found['rows']} inputs of {found['length']:,} values", "peak memory of the process"
    for part, mib in found["mib"].items():
        yield part, f"{mib:,.0f} MiB"


def classifiers() -> Rows:
    """Accuracy on test at the learning rate that is best on valid, by seed."""

    def cell(rates: Dict[str, List[str]], found: Dict) -> str:
        best, *_ = rates.values()
        return "; ".join(f"{found[name]['test_accuracy']:.1f}" for name in best)

    return _by_task("accuracy on test, percent", cell)


def classifiers_rates() -> Rows:
    """Accuracy on valid of the first seed, by learning rate."""

    def cell(rates: Dict[str, List[str]], found: Dict) -> str:
        ordered = sorted(rates.items(), key=_rate)
        return "; ".join(f"{rate} {found[names[0]]['best_valid']:.1f}" for rate, names in ordered)

    return _by_task("accuracy on valid, percent", cell)


def _by_task(title: str, cell: Callable[[Dict[str, List[str]], Dict], str]) -> Rows:
    found = numbers("quality_classify")
    runs = quality_classify.by_model(found)
    tasks = [task for task in quality_classify.TASKS if task in runs]
    yield (title, *tasks)
    for model, label in quality_classify.LABELS.items():
        if any(model in runs[task] for task in tasks):
            yield (label, *(cell(runs[task][model], found) if model in runs[task] else "" for task in tasks))


def classifiers_cost() -> Rows:
    found = numbers("classify")["models"]
    yield ("training examples per second, peak MiB", *found)
    for model, label in quality_classify.LABELS.items():
        costs = [of.get(model) for of in found.values()]
        if any(costs):
            yield (label, *(f"{of['examples_per_second']:.1f}, {of['mib']:,.0f}" if of else "" for of in costs))


# ------------------------------------------------------------------------------------------- README.md


def summary() -> Rows:
    yield "on one CPU thread", "Mega", "fairseq's Transformer"
    scores = []
    for model in ("mega-scaled", "transformer"):
        bleu, chrf = zip(*(_bleu_and_chrf(f"{model}-{seed}") for seed in (1, 2)))
        scores.append(f"{', '.join(bleu)} BLEU; {', '.join(chrf)} chrF")
    what = "English to German, 27,017 Bible verses, 2.0M parameters, two seeds"
    yield f"{what} ([more](docs/results.md#bible-english-to-german))", *scores
    bits = {run: found["bits_per_byte"]["test"] for run, found in numbers("quality_lm").items()}
    ours = ", ".join(f"{bits[f'mega-1e-2-{seed}']['chunk 1024']:.2f}" for seed in (1, 2))
    theirs = ", ".join(f"{bits[f'transformer-8e-3-{seed}']['window 384']:.2f}" for seed in (1, 2))
    what = "bits per byte of Wikipedia text, 0.9M parameters, two seeds"
    yield f"{what} ([more](docs/results.md#bytes-of-wikipedia))", ours, theirs
    speeds = [row["tokens_per_second"] for row in numbers("train")["base"]["rows"]]
    shown = ratios(row["mega"] / row["transformer"] for row in speeds)
    what = "speed of training `mega_transformer_base`, 34 / 128 / 512 tokens"
    yield f"{what} ([more](docs/performance.md#training-steps))", shown, "1"
    rows = [row["ms_per_token"] for row in numbers("decode")["decode"] if row["length"] in (64, 512, 2048)]
    shown = ratios(row["transformer"] / row["mega"] for row in rows)
    what = "speed of translating, beam 5, 64 / 512 / 2,048 tokens"
    yield f"{what} ([more](docs/performance.md#decoding))", shown, "1"
    pairs = [(row["chunk 1024"], row["transformer"]) for row in numbers("eval_lm")["evaluation"]]
    shown = ratios(ours["tokens_per_second"] / stock["tokens_per_second"] for ours, stock in pairs)
    what = "speed of evaluating `mega_lm_wt103` / `mega_lm_enwik8`, chunks of 1,024"
    yield f"{what} ([more](docs/performance.md#evaluating-and-sampling-language-models))", shown, "1, sliding window"


# ------------------------------------------------------------------------------------------- writing

TABLES = {
    table.__name__: table
    for table in (
        *(layer, sublayer, layer_memory, flat, projections, ema, forms, token, decode, train, evaluation, head),
        *(translation, bytes_mixers, bytes_mega, bytes_transformer, wikipedia_chunks, wikipedia_contexts),
        *(addresses_chunks, addresses_contexts, summary, shared_segment, shared_segment_on_paper),
        *(mixers_layer, mixers_memory, mixers_decode, mixers_products),
        *(classify_training, classify_inference, classify_memory, classify_limit),
        *(classifiers, classifiers_rates, classifiers_cost),
    )
}
PLACE = re.compile(r"<!-- table: (.*) -->\n(?:\|.*\n)*")


def refreshed(text: str) -> str:
    """The text of a document with all of its tables regenerated."""
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n" + markdown(TABLES[place[1]]()), text)


def markdown(rows: Rows) -> str:
    header, *rest = (list(row) for row in rows)
    lines = [header, ["---"] * len(header), *(row + [""] * (len(header) - len(row)) for row in rest)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(refreshed(document.read_text()))
