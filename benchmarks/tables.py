"""Updates the tables of README.md, docs/performance.md and docs/results.md from the numbers that benchmarks wrote.

    python benchmarks/tables.py      after a benchmark has written its --json

A table is below a line `<!-- table: NAME -->`, where NAME is a function of this file, of tables_performance.py or of
tables_results.py.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import tables_performance, tables_results
from benchmarks.quality_classify import by_model
from benchmarks.tables_cells import DOCS, ROOT, Rows, numbers, ratios

TRAINED_CHUNKS = {"wt103": 1024, "enwik8": 2048}
DOCUMENTS = [ROOT / "README.md", DOCS / "performance.md", DOCS / "results.md"]


def summary() -> Rows:
    yield "on one CPU thread", "Mega", "fairseq's Transformer"
    for corpus, pairs in (("bible", "27,017 Bible verses"), ("docs", "185,983 sentences of software documentation")):
        scores = []
        for model in ("mega", "transformer"):
            bleu, chrf = zip(*tables_results.translation_scores(corpus, model))
            scores.append(f"{', '.join(bleu)} BLEU; {', '.join(chrf)} chrF")
        what = f"English to German, {pairs}, 2.0M parameters, two seeds"
        yield f"{what} ([more](docs/results.md#english-to-german))", *scores
    bits = {run: found["bits_per_byte"]["test"] for run, found in numbers("quality_lm").items()}
    ours = ", ".join(f"{bits[f'mega-scaled-1e-2-{seed}']['chunk 256']:.2f}" for seed in (1, 2))
    theirs = ", ".join(f"{bits[f'transformer-8e-3-{seed}']['window 384']:.2f}" for seed in (1, 2))
    rotary = ", ".join(f"{bits[f'attention-8e-3-{seed}']['chunk 256']:.2f}" for seed in (1, 2))
    what = "bits per byte of Wikipedia text, 0.9M parameters, two seeds, with the chunks of training"
    theirs = f"{theirs} (our code's, with RoPE: {rotary})"
    yield f"{what} ([more](docs/results.md#all-token-mixers))", ours, theirs
    images = numbers("quality_classify")
    best = {model: images[next(iter(runs.values()))[0]] for model, runs in by_model(images)["fashion"].items()}
    right = {model: f"{run['test_accuracy']:.1f}" for model, run in best.items()}
    what = "accuracy on Fashion-MNIST read pixel by pixel, in percent, 0.15M parameters, one seed"
    ours = f"{right['mega']}; in chunks {right['mega-chunk']}"
    yield f"{what} ([more](docs/results.md#classifiers))", ours, right["transformer"]
    speeds = [row["tokens_per_second"] for row in numbers("train")["base"]["rows"]]
    shown = ratios(row["mega"] / row["transformer"] for row in speeds)
    what = "speed of training `mega_transformer_base`, without chunks, 34 / 128 / 512 tokens"
    yield f"{what} ([more](docs/performance.md#training-steps))", shown, "1"
    rows = [row["ms_per_token"] for row in numbers("decode")["decode"] if row["length"] in (64, 512, 2048)]
    shown = ratios(row["transformer"] / row["mega"] for row in rows)
    *_, batch = (row["sentences_per_second"] for row in numbers("decode")["batches"])
    shown = f"{shown}; {ratios([batch['mega'] / batch['transformer']])}"
    what = "speed of translating, beam 5: one sentence of 64 / 512 / 2,048 tokens; 64 sentences of 30 tokens at a time"
    yield f"{what} ([more](docs/performance.md#decoding))", shown, "1"
    rows = {row["shape"]: row for row in numbers("eval_lm")["evaluation"]}
    pairs = [(rows[shape][f"chunk {chunk}"], rows[shape]["transformer"]) for shape, chunk in TRAINED_CHUNKS.items()]
    shown = ratios(ours["tokens_per_second"] / stock["tokens_per_second"] for ours, stock in pairs)
    what = "speed of evaluating `mega_lm_wt103` / `mega_lm_enwik8`, with the chunks of training"
    yield (
        f"{what} ([more](docs/performance.md#evaluating-and-sampling-language-models))",
        shown,
        "1, sliding window that reads each token 4.6 times",
    )


TABLES = {**vars(tables_performance), **vars(tables_results), "summary": summary}
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
