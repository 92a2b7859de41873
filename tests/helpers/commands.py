"""Runs fairseq's commands with real command lines, each in its own process, and reads their output.

Importing fairseq and the plugin takes longer than most of the tests' commands. Therefore processes are forked from one
that has imported both, but no command; `fresh` starts a new process, as a shell does.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

SIZES = {"train": 600, "valid": 23, "test": 37}  # primes, so that no batch size divides them
SYLLABLES = [consonant + vowel for consonant in "bdgklmnp" for vowel in "aeiou"]

# Arguments for a translation model that trains within seconds.
PLUGIN = ["--user-dir", ROOT / "mega_fairseq"]
CPU = ["--cpu", "--required-batch-size-multiple", 1]  # the default, 8, drops the remainder


def on_each_side(**sizes: int) -> Dict[str, int]:
    return {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}


def as_words(options: Dict[str, Any]) -> List[str]:
    """Options as words of a command line; True is a flag."""
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]


SMALL = {"layers": 1, "embed_dim": 32, "ffn_embed_dim": 64}
MEGA_SIZES = on_each_side(**SMALL, hidden_dim=64, z_dim=16, n_dim=4, chunk_size=5)  # sentences are several chunks long
MEGA = ["--arch=mega_transformer", *as_words(MEGA_SIZES), "--normalize-before", "--share-all-embeddings"]
STOCK = ["--arch=transformer_iwslt_de_en", *as_words(on_each_side(**SMALL, attention_heads=2))]
TRAINING = [
    *CPU, "--optimizer=adam", "--lr=0.02", "--clip-norm=1", "--criterion=label_smoothed_cross_entropy",
    "--label-smoothing=0.1", "--max-tokens=300", "--no-epoch-checkpoints", "--log-format=json", "--log-interval=1",
    "--num-workers=0",
]  # fmt: skip
TRANSLATION = [*PLUGIN, *MEGA, *TRAINING]  # for fairseq-train
SEARCH = ["--beam=4", "--max-len-a=0", "--max-len-b=30"]
GENERATION = [*PLUGIN, *CPU, *SEARCH]  # for fairseq-generate


def write_corpus(folder: Path) -> None:
    """Writes sentences of words with one or two pieces; their translations repeat every word that ends in `a`."""
    for split, size in SIZES.items():
        chance, pairs = random.Random(split), []
        for _ in range(size):
            words = [
                "@@ ".join(chance.choices(SYLLABLES, k=chance.choice([1, 2]))) for _ in range(chance.randint(1, 7))
            ]
            pairs.append((words, [f"{word} {word}" if word.endswith("a") else word for word in words]))
        for language, sentences in zip(("de", "en"), zip(*pairs)):
            text = "".join(" ".join(sentence) + "\n" for sentence in sentences)
            (folder / f"{split}.{language}").write_text(text)


# Arguments for a language model.
LM = [*PLUGIN, "--task=mega_language_modeling", "--cpu"]
LM_CHUNK, LM_MULTIPLES = 16, (2, 4)
LM_SIZES = {f"decoder_{name}": size for name, size in {**SMALL, "hidden_dim": 48, "z_dim": 16, "n_dim": 4}.items()}
LM_SIZES["decoder_chunk_size"] = LM_CHUNK
MEGA_LM = ["--arch=mega_lm", *as_words(LM_SIZES), "--rel-pos-bias=rotary", "--normalize-before"]
LM_HEADS = {
    "softmax": ["--share-decoder-input-output-embed"],
    "adaptive": [
        "--adaptive-softmax-cutoff=10,18", "--adaptive-softmax-factor=2", "--adaptive-softmax-dropout=0.1",
        "--adaptive-input", "--adaptive-input-factor=2", "--tie-adaptive-weights", "--tie-adaptive-proj",
    ],
}  # fmt: skip
LM_TRAINING = [
    *as_words({f"variant_block_multiple_{end}": m for end, m in zip(("min", "max"), LM_MULTIPLES)}),
    "--optimizer=adam", "--lr=0.01", "--clip-norm=1", "--criterion=mega_lm_cross_entropy", "--max-tokens=256",
    "--log-format=json", "--log-interval=1", "--num-workers=0",
]  # fmt: skip
LANGUAGE_MODELS = {head: [*LM, *MEGA_LM, *words, *LM_TRAINING] for head, words in LM_HEADS.items()}
LM_LINES = {"train": 280, "valid": 31, "test": 11}


def write_text(folder: Path) -> None:
    """Writes lines of letters with some repeated words, and a blank line at the end of some documents."""
    for split, size in LM_LINES.items():
        chance, lines = random.Random(split), []
        for _ in range(size):
            words = ["".join(chance.choices(SYLLABLES, k=chance.choice([1, 2]))) for _ in range(chance.randint(1, 6))]
            spoken = "_".join(f"{word}_{word}" if word.endswith("a") else word for word in words)
            lines.append(" ".join(spoken) + "\n" * chance.choice([1, 1, 1, 2]))
        (folder / f"{split}.text").write_text("".join(lines))


# ------------------------------------------------------------------------------------------------ running


LIMIT = 300  # seconds for one command
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile: forks of several OpenMP threads may crash
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["fairseq.tasks", "fairseq.models", "fairseq.criterions", "fairseq.trainer", "torch._dynamo", "mega_fairseq"]
)  # torch's optimizers import torch._dynamo


@functools.lru_cache(maxsize=None)
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """Where commands run: fairseq-train makes its folder of checkpoints before it checks anything."""
    return tempfile.TemporaryDirectory()


class Running:
    """A command in a separate process: fairseq-COMMAND, or mega-fairseq. The process calls `fault` first."""

    def __init__(
        self, command: str, *arguments: Any, cwd: Optional[Path] = None, fault: Optional[Callable[[], None]] = None
    ):
        output, self.output = tempfile.mkstemp()
        module = "mega_fairseq.cli" if command == "mega-fairseq" else f"fairseq_cli.{command.replace('-', '_')}"
        words, streams = ["-m", module, *map(str, arguments)], [os.open(os.devnull, os.O_RDWR), output, os.dup(output)]
        self.process = start_forked(run_forked, streams, words, str(cwd or _scratch().name), fault)

    def wait(self) -> Tuple[Optional[int], str]:
        """Waits for the process; returns its exit code, and its stdout and stderr together."""
        self.process.join(LIMIT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        output = Path(self.output).read_text()
        os.remove(self.output)
        return self.process.exitcode, output


def start_forked(target: Callable[..., None], streams: List[int], *arguments: Any) -> BaseProcess:
    """Calls a function in a forked process with these descriptors, which are closed here, as its standard streams."""
    passed = [Connection(number) for number in streams]  # which multiprocessing can pass on, for any descriptor
    process = FORKS.Process(target=_with_streams, args=(target, passed, arguments))
    process.start()
    for stream in passed:
        stream.close()
    return process


def _with_streams(target: Callable[..., None], streams: List[Connection], arguments: Tuple[Any, ...]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    for name, number in (("stdout", 1), ("stderr", 2)):  # Python's own remember whether the old ones could seek
        setattr(sys, name, open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115
    try:
        target(*arguments)
    finally:
        sys.stdout.flush()  # before multiprocessing writes a traceback


def run_forked(words: List[str], folder: str, fault: Optional[Callable[[], None]] = None) -> None:
    """Runs a Python program, as `python WORDS` does, in this process, which was forked for it."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has replaced it
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # data loaders start their workers as usual
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if sys.argv[0].endswith(("fairseq_cli.train", "stoppable_train.py")):
        logging.root.handlers.clear()  # they set the format of their log before they import fairseq, which also does so
    sys.path.insert(0, folder if is_module else os.path.dirname(words[0]))
    if fault is not None:
        fault()
    run: Any = functools.partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    try:
        run(sys.argv[0], run_name="__main__")
    finally:  # a forked process skips this, and files of exit functions would lose their last lines
        atexit._run_exitfuncs()


def fairseq(command: str, *arguments: Any, cwd: Optional[Path] = None) -> str:
    """Runs a command that must succeed and returns its output."""
    code, output = Running(command, *arguments, cwd=cwd).wait()
    assert code == 0, output
    return output


def interactive(data: Path, inputs: Sequence[str], *arguments: Any) -> str:
    """Runs fairseq-interactive, which must succeed, on lines of text and returns its output."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(f"{line}\n" for line in inputs))
        file.flush()
        return fairseq("interactive", data, "--input", file.name, *arguments)


SHARED = Path("unset")  # a folder of all processes of a test run; tests/conftest.py sets it


def once(name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns for a new folder, in the first process of the test run that asks for it."""
    folder, kept = SHARED / name, SHARED / f"{name}.pickle"
    with open(SHARED / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a test that failed
            folder.mkdir()
            kept.write_bytes(pickle.dumps(make(folder)))
    return pickle.loads(kept.read_bytes())


def _preprocessed(write: Callable[[Path], None], suffix: str, *words: str) -> Path:
    """A folder with the text of `write`, binarised in `bin`. Made once and then copied."""

    def make(folder: Path) -> Path:
        write(folder)
        files = [f"--{split}pref={folder}/{split}{suffix}" for split in ("train", "valid", "test")]
        fairseq("preprocess", *words, *files, f"--destdir={folder}/bin")
        return folder

    return once(write.__name__, make)


def preprocess_text(folder: Path) -> Path:
    """Puts the text of `write_text` into a folder and binarises it with fairseq-preprocess."""
    shutil.copytree(_preprocessed(write_text, ".text", "--only-source"), folder, dirs_exist_ok=True)
    return folder / "bin"


def preprocess_pairs(folder: Path) -> Path:
    """Puts the sentences of `write_corpus` into a folder and binarises them with one dictionary."""
    words = ("--source-lang=de", "--target-lang=en", "--joined-dictionary")
    shutil.copytree(_preprocessed(write_corpus, "", *words), folder, dirs_exist_ok=True)
    return folder / "bin"


def trained(kind: str) -> SimpleNamespace:
    """A model trained once: "translation", 3 updates, or a language model of LM_HEADS, 40 updates."""

    def train(folder: Path) -> SimpleNamespace:
        if kind == "translation":
            languages = ["--source-lang=de", "--target-lang=en"]
            data, words, updates = preprocess_pairs(folder), [*TRANSLATION, *languages], 3
        else:
            data, words, updates = preprocess_text(folder), LANGUAGE_MODELS[kind], 40
        where = ["--save-dir", folder, "--no-epoch-checkpoints"]
        said = fairseq("train", data, *words, *where, "--max-update", updates)
        return SimpleNamespace(folder=folder, data=data, words=words, last=folder / "checkpoint_last.pt", said=said)

    return once(f"trained-{kind}", train)


def fresh(*words: Any, cwd: Optional[Path] = None) -> str:
    """Runs any program, which must succeed, in a new process and returns its output."""
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def failure(command: str, *arguments: Any) -> str:
    """Runs a command that must fail and returns the last line of its output."""
    code, output = Running(command, *arguments).wait()
    assert code, output
    return output.splitlines()[-1]


def refused_by(command: str, result: Tuple[int, str, str], *words: Any) -> None:
    """Checks that `mega-fairseq COMMAND` failed with one sentence on stderr with these words and a remedy."""
    code, out, err = result
    assert (code, out) == (1, ""), err
    assert err.startswith(f"mega-fairseq {command}: ")
    assert err.count("\n") == 1, err
    assert err[:-1].isprintable(), err
    assert ";" in err, "no remedy"
    assert not [word for word in map(str, words) if word not in err], err


ON_CPUS = ["--distributed-no-spawn", "--distributed-backend=gloo", "--ddp-backend=legacy_ddp"]


def free_port() -> int:
    """Not one that the system gives to other connections, which could take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as unused, contextlib.suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port


def start_processes(
    *arguments: Any,
    command: str = "train",
    count: int = 2,
    faults: Optional[Sequence[Optional[Callable[[], None]]]] = None,
    own: Optional[Sequence[List[Any]]] = None,
) -> List[Running]:
    """Starts a command of fairseq in `count` processes on CPUs; `own` are the arguments of each process alone."""
    shared = [*ON_CPUS, f"--distributed-world-size={count}", f"--distributed-init-method=tcp://127.0.0.1:{free_port()}"]
    faults, own = faults or [None] * count, own or [[]] * count
    return [
        Running(command, *arguments, *shared, "--distributed-rank", rank, *own[rank], fault=faults[rank])
        for rank in range(count)
    ]


def succeed(running: List[Running]) -> str:
    """Waits for processes, which must all succeed, and returns the output of the first."""
    ends = [process.wait() for process in running]
    assert not any(code for code, _ in ends), ends
    return ends[0][1]


def train_in_processes(*arguments: Any, count: int = 2) -> str:
    """Runs fairseq-train, which must succeed, in processes on CPUs and returns the output of the first."""
    return succeed(start_processes(*arguments, count=count))


# ------------------------------------------------------------------------------------------------ reading the output


def records(output: str, source: str) -> List[Dict[str, float]]:
    """Numbers that fairseq-train logs as JSON under `train_inner`, `train` or `valid`."""
    found = re.findall(rf"\b{source}\b\W*?(\{{.*\}})$", output, re.MULTILINE)
    return [{name: float(value) for name, value in json.loads(record).items()} for record in found]


def losses(output: str) -> List[float]:
    """The losses that fairseq-train logs, one for each update with `--log-interval=1`."""
    return [record["loss"] for record in records(output, "train_inner")]


def perplexity(output: str) -> Tuple[int, float, float]:
    """Tokens, loss in bits and perplexity that fairseq-eval-lm prints."""
    tokens = re.search(r"Evaluated ([\d,]+) tokens", output).group(1)
    loss, ppl = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", output).groups()
    return int(tokens.replace(",", "")), float(loss), float(ppl)


def checkpoint(path: Path) -> Dict[str, Any]:
    import torch

    import mega_fairseq.models  # noqa: F401 - torch.load may then read what fairseq saves

    return torch.load(path, weights_only=True)


def lines(output: str, letter: str) -> Iterator[Tuple[int, str]]:
    """Number and content of lines like `H-12<tab>...`."""
    for number, rest in re.findall(rf"^{letter}-(\d+)\t(.*)$", output, re.MULTILINE):
        yield int(number), rest


def translations(output: str) -> List[Tuple[int, str, float]]:
    """Number, text and score of all hypotheses, sorted by sentence."""
    found = [(number, *rest.split("\t")) for number, rest in lines(output, "H")]
    return [(number, text, float(score)) for number, score, text in sorted(found, key=lambda line: line[0])]


def assert_same_translations(said: str, other: str, count: int = SIZES["test"]) -> None:
    """Checks that both outputs have the same text, with the same score, for each of `count` sentences."""
    (numbers, texts, scores), (_, other_texts, other_scores) = (zip(*translations(each)) for each in (said, other))
    assert list(numbers) == list(range(count))
    assert texts == other_texts
    assert scores == pytest.approx(other_scores, abs=1e-4)
