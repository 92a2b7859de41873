"""The tables of docs/results.md."""

import re
from typing import Any, Callable, Dict, Iterator, List, Tuple

from benchmarks import quality_classify, quality_lm, quality_seed, quality_translation
from benchmarks.tables_cells import Rows, numbers


def translation() -> Rows:
    names = {"transformer": "fairseq `transformer`", "mega-scaled": "Mega, `--init scaled`"}
    names["mega"] = "Mega, released initialisation"
    yield "model", "seed", "validation, bits per piece", "sacreBLEU", "chrF2"
    for model, label in names.items():
        for run, found in sorted(numbers("quality").items()):
            name, _, seed = run.rpartition("-")
            if name == model:
                yield label, seed, f"{found['valid_bits_per_token'][-1][1]:.3f}", *bleu_and_chrf(run)


def bleu_and_chrf(run: str, benchmark: str = "quality") -> List[str]:
    return [re.search(r" = ([\d.]+)", score).group(1) for score in numbers(benchmark)[run]["scores"]]


def translation_long() -> Rows:
    """The runs of quality_translation.py that have scores."""
    yield "corpus", "model", "learning rate", "seed", "lowest validation loss, bits per piece", "sacreBLEU", "chrF2"
    for run, (*labels, rate, seed), found in _long_runs():
        if found["scores"]:
            update, bits = min(found["valid_bits_per_token"], key=lambda point: point[1])
            yield *labels, rate, seed, f"{bits:.3f} (update {update:,})", *bleu_and_chrf(run, "quality_translation")


def translation_scores(corpus: str, model: str) -> List[List[str]]:
    """BLEU and chrF of each seed that was trained to the end."""
    scored = (run for run, _, found in _long_runs() if run.startswith(f"{corpus}-{model}-") and found["scores"])
    return [bleu_and_chrf(run, "quality_translation") for run in scored]


def translation_rates() -> Rows:
    """What the learning rates were chosen by: the loss of seed 1 after CHOSEN_AT updates, a column for each rate."""
    losses: Dict[Tuple[str, str], Dict[str, str]] = {}
    for _, (corpus, model, rate, seed), found in _long_runs():
        if seed == "1":
            bits = dict(map(tuple, found["valid_bits_per_token"])).get(quality_translation.CHOSEN_AT)
            losses.setdefault((corpus, model), {})[rate] = f"{bits:.3f}" if bits else ""
    rates = sorted({rate for of_model in losses.values() for rate in of_model}, key=float)
    yield "corpus", "model", *(f"learning rate {rate}" for rate in rates)
    for labels, of_model in losses.items():
        yield *labels, *(of_model.get(rate, "") for rate in rates)


def translation_speeds() -> Rows:
    batches = map(str, quality_translation.BATCHES)
    what = {"training": "training, tokens/s", **{n: f"translating, sentences/s, batch {n}" for n in batches}}
    yield "corpus", "model", *what.values()
    for _, (*labels, _, _), found in _long_runs():
        if found["speeds"]:
            yield *labels, *(f"{found['speeds'][name]:,.{0 if name == 'training' else 1}f}" for name in what)


def _long_runs() -> Iterator[Tuple[str, Tuple[str, ...], Dict]]:
    """Name, what the name says (corpus, model, learning rate, seed) and numbers of each run."""
    for run, found in sorted(numbers("quality_translation").items()):
        corpus, model, rate, seed = quality_translation.NAME.fullmatch(run).groups()
        labels = quality_translation.CORPORA[corpus].name, quality_translation.LABELS[model]
        yield run, (*labels, rate, seed), found


RELEASED_RUN = ("the released code, 5e-3", "1", "2.092 (update 1339)", "", "2.1137", "2.0905", "2.0788", "2.0746", "")


def bytes_mega() -> Rows:
    """With a row for the released code, which was measured elsewhere."""
    chunks = sorted(quality_lm.CHUNKS)
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
    found, costs = numbers("quality_lm"), numbers("mixers")["models"]["models"]
    columns = ("valid, by learning rate", "test, by seed", "training, tokens/s", "evaluation, tokens/s")
    yield ("model", "parameters", *columns, "peak memory of training")
    runs = quality_lm.by_model(found)
    for model in quality_lm.LABELS:
        rates = runs.get(model, {})
        if not rates:
            continue
        best, *_ = rates.values()
        valid = (f"{rate} {_first(found[names[0]], 'valid'):.4f}" for rate, names in sorted(rates.items(), key=_rate))
        cost = costs[model.replace("-scaled", "")]
        speeds = (f"{cost[part]['tokens_per_second']:,.0f}" for part in ("training", "evaluation"))
        yield (
            *(quality_lm.LABELS[model], f"{found[best[0]]['parameters']:,}", "; ".join(valid)),
            "; ".join(f"{_first(found[name], 'test'):.4f}" for name in best),
            *(*speeds, f"{cost['training']['mib']:,.0f} MiB"),
        )


def mixers_chunks() -> Rows:
    """The models that accept other chunks than in training, each at its best learning rate."""
    chunks = sorted(quality_lm.CHUNKS)
    yield ("test chunk of", *(f"{chunk:,}" for chunk in chunks))
    found = numbers("quality_lm")
    for model, rates in quality_lm.by_model(found).items():
        (first, *_), *_ = rates.values()
        bits = found[first]["bits_per_byte"]["test"]
        if model in quality_lm.LABELS and "chunk 512" in bits:
            yield (
                quality_lm.LABELS[model],
                *(f"{bits[c]:.4f}" if c in bits else "" for c in map("chunk {}".format, chunks)),
            )


def characters() -> Rows:
    """The time weighting experiment."""
    yield "model", "seed", "parameters", "valid, bits", "perplexity", "test, bits", "perplexity"
    found = numbers("quality_seed")
    for model, label in quality_seed.LABELS.items():
        for run in sorted(name for name in found if name.rpartition("-")[0] == model):
            bits = (_first(found[run], subset) for subset in ("valid", "test"))
            cells = (cell for score in bits for cell in (f"{score:.4f}", f"{2**score:.3f}"))
            yield (label, run.rpartition("-")[2], f"{found[run]['parameters']:,}", *cells)


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


# ------------------------------------------------------------------------------------------- classifiers


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
    measured = numbers("classify")["models"]
    found = {task: measured[task] for task in quality_classify.TASKS if task in measured}  # in their order elsewhere
    yield ("training examples per second, peak MiB", *found)
    for model, label in quality_classify.LABELS.items():
        costs = [of.get(model) for of in found.values()]
        if any(costs):
            yield (label, *(f"{of['examples_per_second']:.1f}, {of['mib']:,.0f}" if of else "" for of in costs))
