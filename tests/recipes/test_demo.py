"""`make demo` on parts of the corpora: interrupted, resumed and finished; and with commands that end badly."""

import importlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import torch

from benchmarks.models import from_args, used_size
from tests.helpers.commands import FORKS, ROOT
from tests.helpers.forking import python

pytestmark = pytest.mark.slow

DEMO = ROOT / "examples/demo/demo.py"
BIBLE = {"train": 1500, "valid": 10, "test": 6}  # lines
ADDRESSES = {"train": 60_000, "valid": 3_000, "test": 4_000}  # bytes
FASHION = {"train": 60, "valid": 10, "test": 10}  # images


def put_small_corpora(out):
    """Writes them to the folder in which prepare.sh keeps the corpora and uses those that it finds."""
    for archive, folder, sizes, name in (
        ("wmt16_en_de/bible/bible-ende", "bible/raw", BIBLE, r"\w+\.(en|de)"),
        ("wmt16_en_de/bible/bible-ende-documents", "bible/raw", BIBLE, r"\w+\.docs"),
        ("lm/addresses/lm-sotu", "addresses/raw", ADDRESSES, r"\w+\.txt"),
        ("lra/image/cls-fashion", "fashion/small/bin", FASHION, r"\w+/\w+\.(src|label)"),
    ):
        with tarfile.open(f"{ROOT}/examples/{archive}.tar.xz") as file:
            for member in file.getmembers():
                inner = member.name.partition("/")[2]
                size = sizes.get(os.path.basename(inner).split(".")[0])
                if size is None or not re.fullmatch(name, inner):
                    continue
                content, path = file.extractfile(member).read(), out / folder / inner
                path.parent.mkdir(parents=True, exist_ok=True)
                lines = content.splitlines(keepends=True)
                path.write_bytes(content[:size] if sizes is ADDRESSES else b"".join(lines[:size]))


def start(out):
    """The demo, forked from a process that has imported fairseq."""
    return subprocess.Popen(
        [python(), str(DEMO), "--out", str(out), "--updates=4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def module(monkeypatch):
    """Imports a file of the demo."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    return importlib.import_module


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a demo that was interrupted in its first training and run again, and the output of both runs."""
    out = tmp_path_factory.mktemp("demo")
    put_small_corpora(out)
    process, log = start(out), out / "translation-4/mega/train.log"
    while process.poll() is None and not (log.exists() and '"num_updates": "1"' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    interrupted = process.communicate()[0]
    return out, interrupted, start(out).communicate(timeout=500)[0]


def test_the_demo_ends_with_figures_and_a_table_of_all_tasks(finished):
    out, _, said = finished
    shown = said[said.index("Mega   Transformer") :]
    rows = re.findall(r"^  (\S.{31})(?: +[\d.,]+\*?){2,3}$", shown, re.MULTILINE)
    scores = {"BLEU, lines", "BLEU, windows", "test, bits per byte", "test, accuracy in percent"}
    assert scores < {name.strip() for name in rows}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("demo.png", "images.png"))
    assert (out / "demo.txt").read_text(encoding="utf-8") in said


def test_the_demo_shows_translations(finished):
    out, _, said = finished
    blocks = re.findall(r"  source +(.+)\n  reference +(.+)\n  Mega +.*\n  Transformer +.*\n", said)
    sources, references = ((out / f"bible/raw/test.{language}").read_text().splitlines() for language in ("en", "de"))
    assert len(set(blocks)) == 5
    for source, reference in blocks:
        (row,) = (row for row, sentence in enumerate(sources) if sentence.startswith(source.replace(" ...", "")))
        assert references[row].startswith(reference.replace(" ...", ""))


def test_an_interrupted_demo_loses_no_update(finished):
    out, interrupted, said = finished
    assert "the same command resumes from there" in interrupted
    assert "preparing the corpora: done before" in said
    _, resumed = re.split(r"(?=Loaded checkpoint)", (out / "translation-4/mega/train.log").read_text(), maxsplit=1)
    kept = int(re.search(r"@ (\d+) updates", resumed)[1])
    assert kept >= 1
    assert f'"num_updates": "{kept + 1}"' in resumed
    assert f'"num_updates": "{kept}"' not in resumed


def sleep(out):
    """Runs a demo whose only command sleeps."""
    sys.path.insert(0, str(DEMO.parent))
    demo, jobs = importlib.import_module("demo"), importlib.import_module("jobs")
    demo.Demo.preparing = lambda self: [jobs.Job("sleeping", ["sleep", "300"], out / "sleep.log", {})]
    sys.argv = ["demo.py", "--out", str(out)]
    demo.main()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_waits_for_processes_of_a_killed_one(end, tmp_path):
    demo = FORKS.Process(target=sleep, args=(tmp_path,))
    demo.start()
    child = ""
    while not child and demo.is_alive():
        child = subprocess.run(["pgrep", "-P", str(demo.pid)], stdout=subprocess.PIPE, text=True).stdout.strip()
    time.sleep(1)  # until the demo has it in its list
    os.kill(demo.pid, end)
    demo.join()
    assert os.path.exists(f"/proc/{child}") == (end == signal.SIGKILL)
    if end == signal.SIGKILL:
        assert start(tmp_path).communicate()[0].startswith("another demo")
        os.kill(int(child), signal.SIGKILL)


def test_a_failing_command_ends_all_and_shows_its_last_lines(module, tmp_path):
    jobs = module("jobs")
    commands = {"good": "exec sleep 300", "bad": "seq 9; echo train.de is missing; exit 1"}
    listed = [jobs.Job(name, ["sh", "-c", command], tmp_path / f"{name}.log", {}) for name, command in commands.items()]
    with pytest.raises(jobs.Failed, match=r"bad failed; .*bad.log ends with\n6\n7\n8\n9\ntrain.de is missing$"):
        jobs.run_together("failing", listed)
    assert not list(tmp_path.glob("*.ended"))


def test_the_models_of_the_demo_have_the_same_size(module):
    settings = module("settings")
    for task, types in ((settings.TRANSLATION, 2000), (settings.LANGUAGE, 208)):
        words = [settings.training(task, model, 10, "data", "folder")[3:] for model in task.models]
        with torch.device("meta"):
            mega, *others = (used_size(from_args(each, types)) for each in words)
        assert all(abs(mega / other - 1) < 0.03 for other in others)


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "no gpu"])
def test_the_demo_uses_one_gpu_if_there_are_any(gpu, tmp_path, module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    demo = module("demo")
    trainings = [job for task in (demo.TRANSLATION, demo.LANGUAGE) for job in demo.Demo(tmp_path).training(task)]
    assert all("--distributed-world-size=1" in job.command for job in trainings)
    assert {"--cpu" in job.command for job in trainings} == {not gpu}
