"""What `make gpu` measures: tables of contenders, in groups that are compared with the first of them."""

import gc
import re
import time
from functools import lru_cache, partial
from itertools import product
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch.autograd import DeviceType

from benchmarks import contenders as c
from benchmarks import decode, train
from benchmarks.measure import Meter, Step
from benchmarks.models import used_size

Built = Tuple[Step, float]  # a step, and the products or bytes that it takes in any form


class Contender(NamedTuple):
    case: str
    name: str
    build: Callable[[], Built]
    count: float  # tokens or sentences of a step
    repeats: int = 5
    profiled: bool = True


class Table(NamedTuple):
    title: str
    unit: str
    resource: str  # whose share is shown
    contenders: Callable[[torch.device, bool], Iterator[Contender]]


# ------------------------------------------------------------------------------------------- one contender

LAUNCH = re.compile(r"cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")


def measured(contender: Contender, device: torch.device, ceilings: Dict[str, float], resource: str) -> Dict[str, float]:
    """Numbers of a step: speed, milliseconds until it is done, launches, peak MiB with its graphs."""
    gpu = device.type == "cuda"
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step, work = contender.build()
    wall = seconds(step, device, contender.repeats if gpu else 1)
    numbers = {"speed": contender.count / wall, "wall ms": 1000 * wall}
    if gpu and resource == "products":  # translators share a model
        numbers["MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if gpu and contender.profiled:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        numbers.update(kernels(profile.events()))
    if work:
        numbers["share"] = work / numbers.get("device ms", numbers["wall ms"]) * 1000 / ceilings[resource]
    return numbers


def seconds(step: Step, device: torch.device, repeats: int) -> float:
    """Median seconds until a step is done, after as many steps to warm up."""

    def done() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return Meter(repeats=repeats).seconds({"": done}, warm_up=repeats, clock=time.perf_counter)[""]


def kernels(events: List[Any]) -> Dict[str, float]:
    """The time of kernels and copies, and how often the host started one or several of them."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    calls = [e.name for e in events if e.device_type == DeviceType.CPU]
    device = sum(e.time_range.elapsed_us() for e in on_device) / 1000
    return {"device ms": device, "launches": sum(map(bool, map(LAUNCH.match, calls)))}


def ceilings(device: torch.device, quick: bool) -> Dict[str, float]:
    """Products in bf16, and bytes copied (read and written), per second."""
    size = 256 if quick else 8192
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    big = torch.zeros(8, size, size, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(big)
    multiplied, copied = (seconds(step, device, 5) for step in (lambda: factor @ factor, lambda: other.copy_(big)))
    return {"products": 2 * size**3 / multiplied, "bandwidth": 4 * big.numel() / copied}


# ------------------------------------------------------------------------------------------- training

TRAINED = 32_768  # tokens of a step
LENGTHS = [("language", 2048), ("base", 128), ("language", 8192), ("base", 512), ("language", 512), ("base", 34)]
OFF, ADAM = "--cuda-graphs=off", "--optimizer=mega_adam"


def training(device: torch.device, quick: bool) -> Iterator[Contender]:
    mega = {"Mega": [ADAM]}
    all_forms = {**mega, "Mega, fairseq's Adam": [], "Mega, graphs off": [ADAM, OFF]}
    if quick:
        return (yield from trained("small", 34, all_forms, quick))
    for number, (table, length) in enumerate(LENGTHS):
        yield from trained(table, length, all_forms if number < 2 else mega)
    for table, length in LENGTHS[:2]:
        yield from trained(table, length, mega, precision="bf16")


def trained(
    table: str, length: int, forms: Dict[str, List[str]], quick: bool = False, precision: str = "fp16"
) -> Iterator[Contender]:
    chosen, tokens = train.TABLES[table], (2 * length if quick else TRAINED // length * length)
    models = {"Transformer": chosen.models["Transformer"]}
    models.update({name: [*chosen.models["Mega"], *words] for name, words in forms.items()})
    for name, words in models.items():
        half = [f"--{'memory-efficient-' * (ADAM in words)}{precision}", "--fp16-init-scale=4"]
        words = [*words, *(["--cpu", "--encoder-layers=1"] if quick else half)]
        build = partial(update, words, chosen.types, length, tokens)
        yield Contender(f"{table}, {length:,} tokens, {precision}", name, build, tokens)


def update(words: List[str], types: int, length: int, tokens: int) -> Built:
    trainer = train.build(words, types)
    return train.update(trainer, length, tokens), 6 * used_size(trainer.get_model()) * tokens


# ------------------------------------------------------------------------------------------- translating

BATCHES, SENTENCES = [1, 16, 64, 256], [64, 1024]
MEGA = decode.MODELS["Mega"]
TRANSLATORS = {
    "Transformer": decode.MODELS["Transformer"],
    "Mega": MEGA,
    "Mega, --task mega_translation": [*MEGA, "--task=mega_translation"],
}


def translating(device: torch.device, quick: bool) -> Iterator[Contender]:
    for name, batch in product(TRANSLATORS, [2] if quick else BATCHES):
        build = partial(translation, name, device, quick, decode.SHORT, decode.SHORT, batch)
        yield Contender(f"batch {batch}", name, build, batch, repeats=3)


def sentence(device: torch.device, quick: bool) -> Iterator[Contender]:
    lengths = [8] if quick else SENTENCES
    for name, length in product(TRANSLATORS, lengths):
        build = partial(translation, name, device, quick, lengths[-1], length, 1)
        yield Contender(f"{length:,} tokens", name, build, length, 3 if length < SENTENCES[-1] else 1, profiled=False)


@lru_cache(maxsize=1)
def translator(name: str, device: torch.device, quick: bool, longest: int) -> Tuple[FairseqTask, BaseFairseqModel]:
    words = [*TRANSLATORS[name], *["--encoder-layers=1", "--decoder-layers=1"] * quick]
    task, model = decode.build(words, 1000 if quick else decode.TYPES, longest)
    return task, model.to(device, torch.float32 if device.type == "cpu" else torch.float16)


def translation(name: str, device: torch.device, quick: bool, longest: int, length: int, batch: int) -> Built:
    """Beam search, which reads the decoder's weights for each token of a sentence, however large the batch is."""
    task, model = translator(name, device, quick, longest)
    weights = sum(p.numel() * p.element_size() for p in model.decoder.parameters())
    return decode.search(task, model, length, batch), weights * length


# ------------------------------------------------------------------------------------------- one layer

TOKENS = 65_536  # of a step
MEGA_LAYER = "Mega, chunks"
PEERS = [  # layer, form, lengths; the Llama-like layer is the reference
    (c.LLAMA, "compiled", [2048, 8192]),
    (MEGA_LAYER, "graphs", [2048, 8192, 65_536]),
    (c.CAUSAL_TRANSFORMER, "", [2048, 8192]),
    (MEGA_LAYER, "", [2048]),
    (MEGA_LAYER, "compiled", [2048]),
    (c.CAUSAL_TRANSFORMER, "compiled", [2048]),
]


def peers(device: torch.device, quick: bool) -> Iterator[Contender]:
    for name, form, lengths in PEERS:
        for length in lengths if not quick else [] if form else lengths[:1]:  # compiling takes long, graphs need a GPU
            yield one_layer(name, length, device, quick, form)


def mixers(device: torch.device, quick: bool) -> Iterator[Contender]:
    for length, name in product((2048,) if quick else (2048, 8192), c.GROUPS["mixers"][: 2 if quick else None]):
        yield one_layer(name, length, device, quick, "" if quick else "graphs")  # as in training


def one_layer(name: str, length: int, device: torch.device, quick: bool, form: str = "") -> Contender:
    length, tokens = (128, 128) if quick else (length, TOKENS)

    def build() -> Built:
        size = c.size_of(c.layer(name))
        return c.layer_step(name, length, tokens, torch.bfloat16, device, form), 6 * size * tokens

    return Contender(f"{length:,} tokens", f"{name}, {form}" if form else name, build, tokens)


LAYER = "forward and backward, 65,536 tokens, bf16"
TABLES = {
    "training": Table("Updates of fairseq's trainer, 32,768 tokens", "tokens/s", "products", training),
    "translating": Table("Beam search of 30 tokens, beam 5, fp16", "sentences/s", "bandwidth", translating),
    "sentence": Table("Beam search of one sentence, beam 5, fp16", "tokens/s", "bandwidth", sentence),
    "peers": Table(f"One layer, {LAYER}", "tokens/s", "products", peers),
    "mixers": Table(f"One layer with each mixer, {LAYER}", "tokens/s", "products", mixers),
}
