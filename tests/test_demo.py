"""`make demo` from nothing to its table, on parts of the corpora; interrupted, called again, with what may fail."""

import importlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial

import fairseq
import pytest
import torch

from benchmarks.models import as_told, size_of
from tests.commands import ROOT

DEMO = ROOT / "examples/demo/demo.py"
PARTS = {"train": 1500, "valid": 30, "test": 25}  # lines of the Bible; and as many times a thousand bytes of addresses


def demo(out, *arguments, wait=True):
    """The demo as a process, which says what it says on one stream."""
    process = subprocess.Popen(
        [sys.executable, str(DEMO), "--out", str(out), "--updates=4", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a signal reaches its children too, as Ctrl-C does
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests in the background do without Ctrl-C
    )
    return process.communicate(timeout=500)[0] if wait else process


def processes():
    """Command lines, however long."""
    return subprocess.run(["ps", "-e", "-ww", "-o", "args"], stdout=subprocess.PIPE, text=True).stdout


def put_small_corpora(out):
    """Where prepare.sh would put the shipped ones: what is there it does not make."""
    bible, addresses = out / "bible/raw", out / "addresses/raw"
    for folder in (bible, addresses):
        folder.mkdir(parents=True)
    with tarfile.open(ROOT / "examples/wmt16_en_de/bible/bible-ende.tar.xz") as shipped:
        for member in filter(lambda member: re.search(r"\.(en|de)$", member.name), shipped.getmembers()):
            name = os.path.basename(member.name)
            lines = shipped.extractfile(member).read().splitlines(keepends=True)
            (bible / name).write_bytes(b"".join(lines[: PARTS[name.split(".")[0]]]))
    with tarfile.open(ROOT / "examples/lm/addresses/lm-sotu.tar.xz") as shipped:
        for split, size in PARTS.items():
            (member,) = (m for m in shipped.getmembers() if m.name.endswith(f"{split}.txt"))
            (addresses / f"{split}.txt").write_bytes(shipped.extractfile(member).read(1000 * size))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo that was interrupted in its first training and then called again; and what it said, both times."""
    out = tmp_path_factory.mktemp("demo")
    put_small_corpora(out)
    process, log = demo(out, wait=False), out / "translation-4/mega/train.log"
    while process.poll() is None and not (log.exists() and '"num_updates": "1"' in log.read_text()):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return out, process.communicate()[0], demo(out)


@pytest.mark.slow
def test_the_demo_ends_with_a_table_of_both_models_on_both_tasks(finished):
    out, _, said = finished
    shown = said[said.index("Mega   Transformer") :]
    rows = dict(re.findall(r"^  (\S.{31}) +([\d.,]+) +[\d.,]+ +[\d.]+$", shown, re.MULTILINE))
    names = [name.strip() for name in rows]
    of_both = {"parameters", "training, tokens/s", "validation, bits per token"}
    assert {*of_both, "BLEU", "chrF", "translating, tokens/s", "test, bits per byte", "evaluating, tokens/s"} == set(
        names
    )
    bits = dict(re.findall(r"(\d+): (\d\.\d{3})", shown))
    assert list(bits) == ["64", "128", "256", "512", "1024"]
    assert all(6 < float(bit) < 10 for bit in bits.values())  # after four updates: about what guessing takes
    assert re.search(r"This call took \d+\.\d minutes\.$", said.strip())
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "demo.txt").read_text() in said


@pytest.mark.slow
def test_each_step_says_when_it_is_done_where_no_terminal_shows_a_bar(finished):
    steps = re.split(r"^== ", finished[2], flags=re.MULTILINE)[1:]
    assert steps[0].endswith("done before\n\n")
    for step in steps[1:]:
        assert len(re.findall(r"^(Mega|Transformer): done after \d+ s$", step, re.MULTILINE)) == 2, step


@pytest.mark.parametrize(("task", "types"), [("TRANSLATION", 2000), ("LANGUAGE", 208)])
def test_the_models_of_the_demo_are_of_equal_size(task, types, monkeypatch):
    """In the parameters that they use: fairseq 0.12.2 gives its Transformer more."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    contest = importlib.import_module("contest")
    sizes = []
    for model in ("Mega", "Transformer"):
        _, _, _, _, *words = contest.training(getattr(contest, task), model, 10, "data", "folder")
        sizes.append(size_of(as_told(words, types)))
    assert abs(sizes[0] / sizes[1] - 1) < 0.03


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "no gpu"])
def test_the_demo_uses_one_gpu_where_there_is_any(gpu, tmp_path, monkeypatch):
    """Its commands, not run: of a machine without GPUs they show no more."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    module = importlib.import_module("demo")
    built = module.Demo(tmp_path, None)
    trainings = built.training(module.TRANSLATION) + built.training(module.LANGUAGE)
    assert all("--distributed-world-size=1" in run.command for run in trainings)
    fairseqs = trainings + built.evaluating()
    assert ["--cpu" in run.command for run in fairseqs] == [not gpu] * 6
    assert {run.environment["GPUS"] for run in built.preparing() + built.translating()} == {str(int(gpu))}


@pytest.mark.slow
@pytest.mark.skipif(fairseq.__version__ == "0.12.2", reason="counts parameters of its Transformer that nothing uses")
def test_the_table_says_that_they_are_of_equal_size(finished):
    counts = re.findall(r"^  parameters +([\d,]+) +([\d,]+)", (finished[0] / "demo.txt").read_text(), re.MULTILINE)
    assert len(counts) == 2
    for mega, transformer in counts:
        assert abs(int(mega.replace(",", "")) / int(transformer.replace(",", "")) - 1) < 0.03


@pytest.mark.slow
def test_an_interrupted_demo_says_so_and_leaves_no_process(finished):
    out, interrupted, said = finished
    assert interrupted.endswith("interrupted; the same command goes on from here\n")
    assert "making the corpora ready: done before" in said
    until = time.monotonic() + 10  # workers that read data end when they see that whoever asked them has
    while str(out) in processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert str(out) not in processes()


@pytest.mark.slow
def test_a_finished_demo_only_shows_its_table_again(finished):
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}
    said = demo(out)
    assert said.count(": done before") == 5
    assert (out / "demo.txt").read_text() in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")} == before


@pytest.mark.slow
def test_what_a_killed_demo_has_started_is_not_started_twice(tmp_path):
    put_small_corpora(tmp_path)
    process, log = demo(tmp_path, wait=False), tmp_path / "translation-4/mega/train.log"
    while process.poll() is None and not log.exists():
        time.sleep(0.05)
    process.kill()  # and not its trainings
    process.wait()
    assert str(log.parent) in processes()
    assert demo(tmp_path) == (
        f"another demo, or what one that was killed has started, is at work in {tmp_path}: wait, or end it\n"
    )
    while str(tmp_path) in processes():  # they end by themselves
        time.sleep(0.1)
    assert demo(tmp_path).count("\n== ") == 5


@pytest.mark.slow
def test_a_demo_whose_command_fails_shows_its_last_words(tmp_path):
    put_small_corpora(tmp_path)
    (tmp_path / "bible/raw/train.de").unlink()
    process = demo(tmp_path, wait=False)
    said = process.communicate()[0]
    assert process.returncode == 1
    assert "bible failed; " in said
    assert "train.de" in said.splitlines()[-1]


def test_a_command_that_fails_ends_what_the_others_have_started(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO.parent))
    race = importlib.import_module("race")
    child = f"{sys.executable} -c 'import time; time.sleep(300)' {tmp_path} & touch {tmp_path}/begun; wait"
    late = f"until [ -e {tmp_path}/begun ]; do sleep 0.1; done; echo no more; exit 3"
    commands = {"slow": ["bash", "-c", child], "failing": ["bash", "-c", late]}
    runs = [
        race.Run(name, command, tmp_path / f"{name}.log", 1, "step", lambda: 0, {})
        for name, command in commands.items()
    ]
    with pytest.raises(race.Failed, match="(?s)failing failed; .*no more"):
        race.race("both", runs)
    time.sleep(0.2)
    assert str(tmp_path) not in processes()
