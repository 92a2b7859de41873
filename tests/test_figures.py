"""The tables of the documents hold what the raw files beside them hold: whoever measures again changes both."""

import json
import re

import pytest

from tests.commands import ROOT

DOCS = ROOT / "docs"


def raw(name):
    return json.loads((DOCS / f"{name}.json").read_text())


def missing(rows, document):
    """Those that no row of a table in the document ends with: what stands before may be words."""
    lines = re.sub("[*`]", "", (DOCS / document).read_text()).splitlines()
    shown = ["|".join(cell.strip() for cell in line.split("|")) for line in lines]
    return [row for row in rows if not any(line.endswith(f"|{'|'.join(row)}|") for line in shown)]


def times(shown, value, yardstick):
    return f"{shown} ({value / yardstick:.2f}x)"


# ------------------------------------------------------------------------------------------------- performance.md


def layer_speed():
    for row in raw("layer")["layer"]:
        speeds = {name: row["tokens"] / seconds for name, seconds in row["seconds"].items()}
        torch = speeds.pop("torch", None)
        cells = [times(f"{speed:,.0f}", speed, torch) if torch else f"{speed:,.0f}" for speed in speeds.values()]
        missed = [""] * (4 - len(cells))  # forms that are not timed at such lengths
        yield (f"{row['length']:,}", f"{torch:,.0f}" if torch else "", *cells, *missed)


def layer_memory():
    for row in raw("layer")["memory"]:
        torch, *ours = row["mib"].values()
        yield (f"{row['length']:,}", f"{torch:,.0f}", *(times(f"{mib:,.0f}", mib, torch) for mib in ours))


def flat():
    for row in raw("layer")["flat"]:
        yield (f"{row['length']:,}", *(f"{row['tokens'] / seconds:,.0f}" for seconds in row["seconds"].values()))


def averages():
    for row in raw("layer")["ema"]["rows"]:
        seconds, mib = row["seconds"], row["mib"]
        speed = [f"{1000 * seconds[name]:,.0f} ms" for name in ("textbook", "ours")]
        memory = [f"{mib[name]:,.0f} MiB" for name in ("textbook", "ours")]
        faster, smaller = seconds["textbook"] / seconds["ours"], mib["textbook"] / mib["ours"]
        yield (f"{row['length']:,}", *speed, f"{faster:.1f}x", *memory, f"1/{smaller:.1f}")


def forms():
    for row in raw("layer")["forms"]:
        yield (f"{row['length']:,}", *(f"{1000 * seconds:.0f}" for seconds in row["seconds"].values()))


def decoding():
    for row in raw("decode")["decode"]:
        transformer, *ours = row["ms_per_token"].values()
        yield (f"{row['length']:,}", f"{transformer:.1f}", *(times(f"{ms:.1f}", transformer, ms) for ms in ours))


def training():
    for name in ("small", "base", "language"):
        found = raw("train")[name]
        speeds = {row["length"]: row["tokens_per_second"] for row in found["rows"]}
        for model in ("Transformer", "Mega"):
            number = found["parameters"][model.lower()] / 1e6
            cells = []
            for length in (34, 128, 512, 2048):
                speed = speeds.get(length, {}).get(model.lower())
                shown = f"{speed:,.0f}" if speed else ""
                mega = speed and model == "Mega"
                cells.append(times(shown, speed, speeds[length]["transformer"]) if mega else shown)
            yield (f"{name}, {model}", f"{number:.2f}M" if number < 10 else f"{number:.1f}M", *cells)


def evaluation():
    for row in raw("eval_lm")["evaluation"]:
        row.pop("shape")
        for model, found in row.items():
            speed, yardstick = found["tokens_per_second"], row["transformer"]["tokens_per_second"]
            shown = f"{speed:.1f}" if model == "transformer" else times(f"{speed:.1f}", speed, yardstick)
            yield f"{found['parameters'] / 1e6:.1f}M", shown, f"{found['mib']:,.0f} MiB"


def head():
    found = raw("eval_lm")["head"]
    for name, seconds in found["seconds"].items():
        ms, stock = (1000 * time / found["tokens"] for time in (seconds, found["seconds"]["stock"]))
        first, *others = (f"{mib[name]:,.0f}" for mib in found["mib_by_types"].values())
        yield f"{ms:.2f}" if name == "stock" else times(f"{ms:.2f}", stock, ms), f"{first} MiB", *others


# ----------------------------------------------------------------------------------------------------- results.md


def translation():
    names = {"transformer": "fairseq transformer", "mega-scaled": "Mega, --init scaled"}
    names["mega"] = "Mega, released initialisation"
    for run, found in raw("quality").items():
        model, _, seed = run.rpartition("-")
        yield names[model], seed, f"{found['valid_bits_per_token'][-1][1]:.3f}", *bleu_and_chrf(run)


def bleu_and_chrf(run):
    return [re.search(r" = ([\d.]+)", score).group(1) for score in raw("quality")[run]["scores"]]


def language():
    for run, found in raw("quality_lm").items():
        valid, test = found["bits_per_byte"]["valid"], found["bits_per_byte"]["test"]
        if re.match(r"mega-\d", run):
            cells = [valid["chunk 256"], *(test[f"chunk {chunk}"] for chunk in (64, 128, 256, 512, 1024, 2048))]
        elif run.startswith("transformer"):
            cells = [valid["window 384"], *(test[f"window {window}"] for window in (0, 256, 384))]
        else:
            continue  # other biases have tables of their own
        yield tuple(f"{bits:.4f}" for bits in cells)


def extrapolation():
    for file in sorted((DOCS / "sweeps").glob("*.json")):
        points = sorted(json.loads(file.read_text())["points"], key=lambda point: (point["chunk"], point["context"]))
        longest = max(point["context"] for point in points)
        for kept in ({"context": longest}, {"chunk": 256}):
            bits = [point["bits"] for point in points if kept.items() <= point.items()]
            yield (file.stem.partition("-")[2], *(f"{found:.4f}" if found else "refused" for found in bits))


# ----------------------------------------------------------------------------------------------------- README.md


def headlines():
    """What the README's own table of results says in its cells."""
    for model, between in (("mega-scaled", "{} BLEU; {} chrF"), ("transformer", "{}; {}")):
        found = zip(*(bleu_and_chrf(f"{model}-{seed}") for seed in (1, 2)))
        yield between.format(*map(", ".join, found))
    bits = {run: found["bits_per_byte"]["test"] for run, found in raw("quality_lm").items()}
    yield ", ".join(f"{bits[f'mega-1e-2-{seed}']['chunk 1024']:.2f}" for seed in (1, 2)) + " (chunks of 1,024)"
    yield ", ".join(f"{bits[f'transformer-8e-3-{seed}']['window 384']:.2f}" for seed in (1, 2))

    layer = [row["seconds"] for row in raw("layer")["layer"] if row["length"] in (4096, 8192)]
    yield ratios(row["torch"] / row["chunk128_causal_rotary"] for row in layer) + " the speed"
    rows = [row["ms_per_token"] for row in raw("decode")["decode"] if row["length"] in (64, 512, 2048)]
    yield ratios(row["transformer"] / row["mega"] for row in rows)
    pairs = [(row["chunk 1024"], row["transformer"]) for row in raw("eval_lm")["evaluation"]]
    memory = " / ".join(f"{ours['mib'] / stock['mib']:.1f}" for ours, stock in pairs)
    speed = ratios(ours["tokens_per_second"] / stock["tokens_per_second"] for ours, stock in pairs)
    yield f"{speed} the speed, {memory} of the memory"
    speeds = [row["tokens_per_second"] for row in raw("train")["base"]["rows"]]
    yield ratios(row["mega"] / row["transformer"] for row in speeds) + " the speed"


def ratios(values):
    return " / ".join(f"{value:.1f}x" for value in values)


# ---------------------------------------------------------------------------------------------------------- tests

PERFORMANCE = [layer_speed, layer_memory, flat, averages, forms, decoding, training, evaluation, head]
TABLES = [("performance.md", rows) for rows in PERFORMANCE]
TABLES += [("results.md", rows) for rows in (translation, language, extrapolation)]


@pytest.mark.parametrize(("document", "rows"), TABLES, ids=lambda value: getattr(value, "__name__", None))
def test_the_tables_of_the_documents_are_those_of_the_raw_files(document, rows):
    wanted = list(rows())
    assert wanted
    assert missing(wanted, document) == []


@pytest.mark.parametrize(("document", "rows"), TABLES, ids=lambda value: getattr(value, "__name__", None))
def test_a_figure_that_has_changed_is_noticed(document, rows):
    *cells, last = next(iter(rows()))
    changed = (*cells, re.sub(r"\d", lambda digit: str(9 - int(digit.group())), last, count=1) or "1")
    assert missing([changed], document) == [changed]


def test_the_results_of_the_readme_are_those_of_the_raw_files():
    _, _, results = (ROOT / "README.md").read_text().partition("\n## Results\n")
    cells = [cell.strip() for cell in results.split("|")]
    assert [headline for headline in headlines() if headline not in cells] == []
