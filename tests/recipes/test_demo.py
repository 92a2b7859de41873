"""`make demo` on parts of the corpora: interrupted, resumed, finished, run again, and failing."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial

import pytest
import torch

from benchmarks.models import from_args, used_size
from tests.helpers.commands import ROOT
from tests.helpers.forking import python

pytestmark = pytest.mark.slow

DEMO = ROOT / "examples/demo/demo.py"
SHORT = ["--updates=4", "--longest=512"]
PARTS = {"train": 1500, "valid": 30, "test": 25}  # lines of the Bible
FEW = {**PARTS, "train": 200}  # kilobytes of the addresses, images


def demo(out, wait=True):
    """The output of the demo, or without `wait` its process, which may be killed with its child processes."""
    process = subprocess.Popen(
        [python() if wait else sys.executable, str(DEMO), "--out", str(out), *SHORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a signal can be sent to the process group, as Ctrl-C does
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # which tests in the background ignore
    )
    return process.communicate(timeout=500)[0] if wait else process


def processes():
    """The command lines of all processes, in full."""
    return subprocess.run(["ps", "-e", "-ww", "-o", "args"], stdout=subprocess.PIPE, text=True).stdout


def put_small_corpora(out):
    """Writes them to the folder in which prepare.sh keeps the corpora and uses those that it finds."""
    bible, addresses = out / "bible/raw", out / "addresses/raw"
    for folder in (bible, addresses):
        folder.mkdir(parents=True)
    with tarfile.open(ROOT / "examples/wmt16_en_de/bible/bible-ende.tar.xz") as shipped:
        for member in filter(lambda member: re.search(r"\.(en|de)$", member.name), shipped.getmembers()):
            name = os.path.basename(member.name)
            lines = shipped.extractfile(member).read().splitlines(keepends=True)
            (bible / name).write_bytes(b"".join(lines[: PARTS[name.split(".")[0]]]))
    with tarfile.open(ROOT / "examples/lm/addresses/lm-sotu.tar.xz") as shipped:
        for split, size in FEW.items():
            (member,) = (m for m in shipped.getmembers() if m.name.endswith(f"{split}.txt"))
            (addresses / f"{split}.txt").write_bytes(shipped.extractfile(member).read(1000 * size))
    with tarfile.open(ROOT / "examples/lra/image/cls-fashion.tar.xz") as shipped:
        for member in filter(lambda member: re.search(r"\.(src|label)$", member.name), shipped.getmembers()):
            path = out / "fashion/small/bin" / member.name.split("/", 1)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = shipped.extractfile(member).read().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[: FEW[path.stem]]))


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
    process, log = demo(out, wait=False), out / "translation-4/mega/train.log"
    while process.poll() is None and not (log.exists() and '"num_updates": "1"' in log.read_text()):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return out, process.communicate()[0], demo(out)


def test_the_demo_ends_with_figures_and_a_table_of_all_tasks(finished):
    out, _, said = finished
    shown = said[said.index("Mega   Transformer") :]
    rows = re.findall(r"^  (\S.{31}) +[\d.,]+ +[\d.,]+ +[\d.]+$", shown, re.MULTILINE)
    scores = {"BLEU", "test, bits per byte", "test, accuracy in percent", "512 bytes, ms per 1,000", "512 bytes, MiB"}
    assert scores < {name.strip() for name in rows}
    assert [chunk for _, chunk in re.findall(r"(\d\.\d{3}) at (\d+)", shown)] == ["64", "256", "1024"]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("demo.png", "images.png"))
    assert (out / "demo.txt").read_text(encoding="utf-8") in said


def test_the_demo_shows_translations_and_a_continued_text(finished):
    out, _, said = finished
    shown = said[said.index("5 short sentences") : said.index("Mega   Transformer")]
    blocks = re.findall(r"  source +(.+)\n  reference +(.+)\n  Mega +.*\n  Transformer +.*\n", shown)
    sources, references = ((out / f"bible/raw/test.{language}").read_text().splitlines() for language in ("en", "de"))
    assert len(set(blocks)) == 5
    for source, reference in blocks:
        assert references[sources.index(source)].startswith(reference.replace(" ...", ""))
    text = " ".join(shown[shown.index("bytes\n") :].split())
    prompt, generated = text.split(" [...]")
    assert prompt.replace("bytes ", "", 1) in (out / "addresses/raw/test.txt").read_text()
    assert len(generated) > 50


def test_an_interrupted_demo_loses_no_update_and_leaves_no_process(finished, module):
    out, interrupted, said = finished
    assert "the same command resumes from there" in interrupted
    assert "preparing the corpora: done before" in said
    _, resumed = re.split(r"(?=Loaded checkpoint)", (out / "translation-4/mega/train.log").read_text(), maxsplit=1)
    kept = module("jobs").updates(resumed.splitlines()[0])
    assert kept >= 1
    assert f'"num_updates": "{kept + 1}"' in resumed
    assert f'"num_updates": "{kept}"' not in resumed
    until = time.monotonic() + 10  # data loading processes end soon after the training
    while str(out) in processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert str(out) not in processes()


def test_a_demo_waits_for_processes_of_a_killed_one(finished, tmp_path):
    """With all steps done except one training."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    (out / "translation-4/mega/train.ended").unlink()
    log = out / "translation-4/mega/train.log"
    size, process = log.stat().st_size, demo(out, wait=False)
    while process.poll() is None and log.stat().st_size == size:
        time.sleep(0.05)
    process.kill()  # but not its training
    process.wait()
    assert demo(out).startswith("another demo")
    while str(out) in processes():
        time.sleep(0.1)
    assert demo(out).count(": done before") == 6


def test_a_demo_shows_the_last_lines_of_a_failing_command(tmp_path):
    put_small_corpora(tmp_path)
    (tmp_path / "bible/raw/train.de").unlink()
    process = demo(tmp_path, wait=False)
    said = process.communicate()[0]
    assert process.returncode == 1
    assert "bible failed; " in said
    assert "train.de" in said.splitlines()[-1]


def test_the_models_of_the_demo_have_the_same_size(module):
    settings = module("settings")
    for task, types in ((settings.TRANSLATION, 2000), (settings.LANGUAGE, 208)):
        words = [settings.training(task, model, 10, "data", "folder")[3:] for model in ("Mega", "Transformer")]
        mega, transformer = (used_size(from_args(each, types)) for each in words)
        assert abs(mega / transformer - 1) < 0.03


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "no gpu"])
def test_the_demo_uses_one_gpu_if_there_are_any(gpu, tmp_path, module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    demo = module("demo")
    trainings = [job for task in (demo.TRANSLATION, demo.LANGUAGE) for job in demo.Demo(tmp_path).training(task)]
    assert all("--distributed-world-size=1" in job.command for job in trainings)
    assert {"--cpu" in job.command for job in trainings} == {not gpu}


def test_progress_counts_completed_work(module):
    jobs = module("jobs")
    assert jobs.updates("Loaded checkpoint last.pt (epoch 3 @ 20 updates)\n") == 20
    assert jobs.updates('(epoch 3 @ 20 updates)\n{"num_updates": "22"}\n{"num_updates": "24"}\n') == 24
    assert jobs.steps("== making raw\n== 5 bytes\n") == 0  # not completed
    assert jobs.steps("== have raw\n== making text\n== making bin\n== ready: train.sh reads bin\n") == 3
