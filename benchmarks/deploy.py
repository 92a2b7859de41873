"""Exported models in mega_runtime beside fairseq's Transformer in CTranslate2, and Mega in PyTorch, on CPUs.

    pip install ctranslate2                                                             optional
    taskset -c 0 python benchmarks/deploy.py --json docs/deploy_speed.json              about an hour
    python benchmarks/deploy.py --tables threads --json docs/deploy_speed.json          needs two idle cores

Base models with random weights, beam 5, a joined vocabulary of 33,000, as many target as source tokens, encoder and
search included, PyTorch in float32 only. Random weights are the worst case for mega_runtime: their beams have little in
common, so it reads about three times as many places as with trained ones, for which there is `deploy_trained.py`.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import torch
from packaging.requirements import Requirement

from benchmarks import translators
from benchmarks.decode import CHUNKS, SMALL
from benchmarks.measure import Meter, Row, main
from benchmarks.translators import FORMATS, Sources, Translate
from mega_runtime import Translator

TYPES, LENGTHS, SHORT, BATCHES = 33_000, [30, 64, 256, 512, 2048], 30, [16, 64, 256]
WINDOWS, LINE = [512, 1024], 32  # tokens
MANY = 1000  # tokens, above which there are a third of the rounds
MEGA = ["--arch=mega_transformer_base", "--task=translation"]
ARCHITECTURES = {
    "Transformer": ["--arch=transformer_wmt_en_de", "--task=translation"],
    "Mega": MEGA,
    "Mega in chunks": [*MEGA, *CHUNKS],
    "Mega for documents": [
        *["--arch=mega_transformer_base", "--task=mega_document_translation", "--rel-pos-bias=rotary", *CHUNKS],
        *["--cross-attention-positions=sentence", "--line-length-a=1", "--line-length-b=0"],
    ],
}
BESIDE = importlib.util.find_spec("ctranslate2") is not None


class Models:
    """Random models in a temporary folder: each is made once, for all tables."""

    def __init__(self, quick: bool):
        self.folder, self.types = tempfile.TemporaryDirectory(), 1000 if quick else TYPES
        limits = [f"--max-{side}-positions={max(LENGTHS) + 8}" for side in ("source", "target")]
        self.words = ["--share-all-embeddings", *limits, *SMALL * quick]
        if not BESIDE:
            print("CTranslate2 is not measured, since it is not installed: pip install ctranslate2", flush=True)

    def checkpoint(self, name: str) -> Path:
        folder = Path(self.folder.name, name)
        if not folder.exists():
            translators.random_checkpoint(folder, [*ARCHITECTURES[name], *self.words], self.types)
        return folder / "checkpoint.pt"

    def exported(self, name: str, number_format: str) -> Path:
        """A folder for mega_runtime, or for CTranslate2 if it is the Transformer."""
        checkpoint = self.checkpoint(name)
        folder = checkpoint.with_name(number_format)
        if not folder.exists():
            export = translators.converted if name == "Transformer" else translators.exported
            export(checkpoint, folder, number_format, checkpoint.parent)
        return folder

    def in_ctranslate2(self, number_format: str, **options: int) -> Translate:
        return translators.in_ctranslate2(self.exported("Transformer", number_format), number_format, **options)

    def in_runtime(self, name: str, number_format: str) -> Translate:
        return translators.in_runtime(Translator(self.exported(name, number_format)))

    def engines(self) -> Dict[str, Dict[str, Translate]]:
        """By number format and name."""
        found = {}
        for number_format in FORMATS:
            each = found[number_format] = {}
            if BESIDE:
                each["CTranslate2"] = self.in_ctranslate2(number_format)
            each["mega_runtime"] = self.in_runtime("Mega", number_format)
            each["mega_runtime, chunks of 128"] = self.in_runtime("Mega in chunks", number_format)
        found["float32"]["PyTorch"] = translators.in_pytorch(self.checkpoint("Mega"))
        return found

    def sources(self, count: int, length: int) -> Sources:
        random = torch.Generator().manual_seed(1)
        return [torch.randint(4, self.types, (length - 1,), generator=random).tolist() + [2] for _ in range(count)]


@lru_cache(maxsize=None)
def models_of(quick: bool) -> Models:
    return Models(quick)


def rows(
    meter: Meter, engines: Dict[str, Dict[str, Translate]], label: str, sources: Sources, length: int, **options: Any
) -> Iterator[Row]:
    """Milliseconds per target token, in each number format."""
    tokens = length * len(sources)
    repeats = max(1, meter.repeats // 3) if tokens > MANY else None
    for number_format, each in engines.items():
        steps = {name: lambda run=translate: run(sources, length) for name, translate in each.items()}
        times = meter.seconds(steps, repeats, **options)
        yield f"{label}, {number_format}", {name: 1000 * seconds / tokens for name, seconds in times.items()}


# ------------------------------------------------------------------------------------------- speed


def sentences(meter: Meter) -> Iterator[Row]:
    """Beam search of one sentence, beam 5: CPU milliseconds per target token"""
    models = models_of(meter.quick)
    engines = models.engines()
    for length in [16] if meter.quick else LENGTHS:
        yield from rows(meter, engines, f"{length:,} tokens", models.sources(1, length), length)


def batches(meter: Meter) -> Iterator[Row]:
    """Beam search of batches of sentences of 30 tokens, beam 5: CPU milliseconds per target token"""
    models = models_of(meter.quick)
    engines = models.engines()
    for count in [2] if meter.quick else BATCHES:
        yield from rows(meter, engines, f"{count:,} sentences", models.sources(count, SHORT), SHORT)


def windows(meter: Meter) -> Iterator[Row]:
    """Beam search of one window of lines of 32 tokens, Mega in chunks, beam 5: CPU milliseconds per target token"""
    models = models_of(meter.quick)
    name, separator = "Mega for documents", models.types
    engines: Dict[str, Dict[str, Translate]] = {}
    for number_format in FORMATS:
        each = engines[number_format] = {}
        if BESIDE:
            each["CTranslate2"] = as_sentences(models.in_ctranslate2(number_format), separator)
        each["mega_runtime"] = models.in_runtime(name, number_format)
    engines["float32"]["PyTorch"] = translators.in_pytorch(models.checkpoint(name))
    for length in [64] if meter.quick else WINDOWS:
        sources = models.sources(1, length)
        sources[0][LINE - 1 : length - 1 : LINE] = [separator] * len(range(LINE - 1, length - 1, LINE))
        yield from rows(meter, engines, f"{length:,} tokens", sources, length)


def as_sentences(translate: Translate, separator: int) -> Translate:
    """For models without a separator, which becomes an ordinary token."""
    return lambda sources, length: translate([[min(n, separator - 1) for n in each] for each in sources], length)


def threads(meter: Meter) -> Iterator[Row]:
    """Beam search on two threads, beam 5: milliseconds per target token, waiting time"""
    if len(os.sched_getaffinity(0)) < 2:
        print("this process has one core; start it on two idle ones, without taskset", flush=True)
        return
    length, count = (16, 4) if meter.quick else (64, 64)
    models = models_of(meter.quick)
    engines: Dict[str, Dict[str, Translate]] = {}
    for number_format in FORMATS:
        each, folder = engines.setdefault(number_format, {}), models.exported("Mega", number_format)
        if BESIDE:
            of = partial(models.in_ctranslate2, number_format, batch=count // 2)
            each["CTranslate2, 1 thread"] = of()
            each["CTranslate2, 2 intra_threads"] = of(intra_threads=2)
            each["CTranslate2, 2 inter_threads"] = of(inter_threads=2)
        translator = Translator(folder)
        of_mega = {
            "1 thread": [translator],
            "threads=2": [Translator(folder, 2)],
            "two searches": [translator, translator],
        }
        each.update(
            (f"mega_runtime, {name}", in_halves(list(map(translators.in_runtime, both))))
            for name, both in of_mega.items()
        )
    for label, sources in (
        (f"1 sentence of {length} tokens", models.sources(1, length)),
        (f"{count} sentences of {length // 2} tokens", models.sources(count, length // 2)),
    ):
        yield from rows(meter, engines, label, sources, len(sources[0]), clock=time.perf_counter)


def in_halves(engines: List[Translate]) -> Translate:
    """Two batches, on as many threads as there are engines."""
    pool = ThreadPoolExecutor(len(engines))

    def translate(sources: Sources, length: int) -> None:
        halves = [half for half in (sources[::2], sources[1::2]) if half]
        list(pool.map(lambda number: engines[number % len(engines)](halves[number], length), range(len(halves))))

    return translate


# ------------------------------------------------------------------------------------------- processes


IMPORTS = {
    "torch, fairseq, mega_fairseq": "import mega_fairseq.models, mega_fairseq.tasks, sentencepiece",
    "mega_runtime": "import mega_runtime, sentencepiece",
    "CTranslate2": "import ctranslate2, sentencepiece",
}
INSTALLED = {
    "torch, fairseq, mega_fairseq": ["mega-fairseq"],
    "mega_runtime": ["numpy", "onnxruntime", "sentencepiece"],
    "CTranslate2": ["ctranslate2", "sentencepiece"],
}
TRANSLATE = {
    "torch, fairseq, mega_fairseq": """
from mega_fairseq.models import MegaTransformerModel
model = MegaTransformerModel.from_pretrained(folder, "checkpoint.pt", folder)
model.translate(text, beam=5, max_len_b=64)
""",
    "mega_runtime": """
from mega_runtime import Translator
Translator(folder, pieces=True, max_len_b=64).translate([text])
""",
    "CTranslate2": """
import ctranslate2
model = ctranslate2.Translator(folder, compute_type=setting, inter_threads=1, intra_threads=1)
model.translate_batch([text.split()], beam_size=5, max_decoding_length=64)
""",
}
WINDOW = {
    "mega_runtime": """
from mega_runtime import Translator
Translator(folder, pieces=True).translate_documents([[text] * 32])
""",
    "CTranslate2": """
import ctranslate2
model = ctranslate2.Translator(folder, compute_type=setting, inter_threads=1, intra_threads=1)
words = text.split() * 32
model.translate_batch([words], beam_size=5, min_decoding_length=len(words), max_decoding_length=len(words))
""",
}
OBSERVE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""  # a small process, since the peak of a process includes what its parent had when it started it
GIVEN = "import sys\nfolder, setting, text = sys.argv[1:]\n"


def process(meter: Meter) -> Iterator[Row]:
    """A process from outside: CPU seconds and peak MiB, and sizes in MB"""
    names = [name for name in IMPORTS if BESIDE or name != "CTranslate2"]
    models = models_of(meter.quick)
    yield "installed packages, MB", {name: installed_mb(INSTALLED[name]) for name in names}
    started = usage("pass", meter)[0]
    yield "importing, CPU seconds", {name: usage(IMPORTS[name], meter)[0] - started for name in names}
    text = " ".join(f"w{number}" for number in range(30))
    for number_format in FORMATS:
        folders = {"mega_runtime": models.exported("Mega", number_format)}
        if number_format == "float32":
            folders = {"torch, fairseq, mega_fairseq": models.checkpoint("Mega").parent, **folders}
        if BESIDE:
            folders["CTranslate2"] = models.exported("Transformer", number_format)
        used = {
            name: usage(GIVEN + TRANSLATE[name], meter, folder, number_format, text) for name, folder in folders.items()
        }
        yield f"translating a sentence, {number_format}, CPU seconds", {name: each[0] for name, each in used.items()}
        yield f"translating a sentence, {number_format}, peak MiB", {name: each[1] for name, each in used.items()}
        sizes = {name: folder_mb(folder, "*") for name, folder in folders.items()}
        yield f"model, {number_format}, MB", sizes


MANY_LINES = """
from mega_runtime import Translator
translator = Translator(folder, pieces=True, batch_tokens=int(setting), min_len=30, max_len_b=30)
translator.translate(text.split("\\n"))
"""


def memory(meter: Meter) -> Iterator[Row]:
    """A process that translates 256 sentences of 30 tokens in int8, by --batch-tokens"""
    folder, count = models_of(meter.quick).exported("Mega", "int8"), 4 if meter.quick else 256
    text = "\n".join(" ".join(f"w{(31 * line + place) % 900}" for place in range(29)) for line in range(count))
    used = {f"{size:,}": usage(GIVEN + MANY_LINES, meter, folder, size, text) for size in [30, 256, 1024, 4096]}
    yield "CPU ms per token", {name: 1000 * seconds / 31 / count for name, (seconds, _) in used.items()}
    yield "peak MiB", {name: mib for name, (_, mib) in used.items()}


def window(meter: Meter) -> Iterator[Row]:
    """A process that translates a window of 32 sentences of 30 tokens, beam 5: peak MiB"""
    models, text = models_of(meter.quick), " ".join(f"w{number}" for number in range(30))
    for number_format in FORMATS:
        folders = {"mega_runtime": models.exported("Mega for documents", number_format)}
        if BESIDE:
            folders["CTranslate2"] = models.exported("Transformer", number_format)
        peaks = {name: usage(GIVEN + WINDOW[name], meter, folders[name], number_format, text)[1] for name in folders}
        yield number_format, peaks


def usage(program: str, meter: Meter, *words: Any) -> Tuple[float, float]:
    """CPU seconds, the median of several, and peak MiB of a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command, found = [sys.executable, "-c", OBSERVE, sys.executable, "-c", program, *map(str, words)], []
    for _ in range(1 if meter.quick else meter.repeats):
        seen = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        found.append(tuple(map(float, seen.stdout.split()[-2:])))
    return statistics.median(seconds for seconds, _ in found), max(mib for _, mib in found)


def installed_mb(names: List[str]) -> float:
    """Files of distributions and of what they require, as pip has recorded them, without those of this repository."""
    missing, sizes = list(names), {}
    while missing:
        name = missing.pop().lower().replace("_", "-")
        if name not in sizes:
            distribution = metadata.distribution(name)
            sizes[name] = sum(file.size or 0 for file in distribution.files) / 1e6
            required = map(Requirement, distribution.requires or [])
            missing += [each.name for each in required if not each.marker or each.marker.evaluate({"extra": ""})]
    return sum(sizes.values())


def folder_mb(folder: Path, files: str) -> float:
    return sum(path.stat().st_size for path in folder.glob(files)) / 1e6


if __name__ == "__main__":
    tables = [sentences, batches, windows, threads, process, memory, window]
    main(__doc__, {table.__name__: table for table in tables})
