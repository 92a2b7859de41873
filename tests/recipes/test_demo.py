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

from benchmarks import quality_classify
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


def test_the_demo_ends_with_a_table_of_both_models_on_both_tasks(finished):
    out, _, said = finished
    shown = said[said.index("Mega   Transformer") :]
    rows = dict(re.findall(r"^  (\S.{31}) +([\d.,]+) +[\d.,]+ +[\d.]+$", shown, re.MULTILINE))
    names = {name.strip() for name in rows}
    of_both = {"parameters", "training, tokens/s", "validation, bits per token"}
    assert names == {
        *[*of_both, "BLEU", "chrF", "translating, tokens/s"],
        *["test, bits per byte", "evaluating, tokens/s"],
        *["test, accuracy in percent", "classifying, images/s"],
        *["256 bytes, ms per 1,000", "512 bytes, ms per 1,000", "512 bytes, MiB"],
    }
    bits, chunks = zip(*re.findall(r"(\d\.\d{3}) at (\d+)", shown))
    assert chunks == ("64", "256", "1024")
    assert all(5 < float(bit) < 8 for bit in bits)  # about as many as by chance, after four updates
    assert re.search(r"This run took \d+\.\d minutes\.$", said.strip())
    for figure in ("demo.png", "images.png"):
        assert (out / figure).read_bytes().startswith(b"\x89PNG")
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


def test_the_demo_reports_each_step_without_a_terminal(finished):
    steps = re.split(r"^== ", finished[2], flags=re.MULTILINE)[1:]
    assert steps[0].endswith("done before\n\n")
    for step in steps[1:]:
        assert len(re.findall(r"^(Mega|Transformer): done after \d+ s$", step, re.MULTILINE)) == 2, step


def test_an_interrupted_demo_loses_no_update_and_leaves_no_process(finished, module):
    out, interrupted, said = finished
    assert interrupted.endswith(
        "interrupted; training has saved a checkpoint, and the same command resumes from there\n"
    )
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


def test_a_finished_demo_only_prints_its_results_again(finished):
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}
    said = demo(out)
    assert said.count(": done before") == 7
    assert (out / "demo.txt").read_text(encoding="utf-8") in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")} == before


def test_a_demo_refuses_to_start_while_processes_of_a_killed_one_are_running(finished, tmp_path):
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
    assert str(log.parent) in processes()
    assert demo(out) == f"another demo, or a process left by a killed one, is running in {out}: wait for it or end it\n"
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


# ------------------------------------------------------------------------------------------------ parts of the demo


@pytest.mark.parametrize(("task", "types"), [("TRANSLATION", 2000), ("LANGUAGE", 208)])
def test_the_models_of_the_demo_have_the_same_size(task, types, module):
    """Counts only parameters that are used: the Transformer of fairseq 0.12.2 also has unused ones."""
    settings = module("settings")
    sizes = []
    for model in ("Mega", "Transformer"):
        _, _, _, *words = settings.training(getattr(settings, task), model, 10, "data", "folder")
        sizes.append(used_size(from_args(words, types)))
    assert abs(sizes[0] / sizes[1] - 1) < 0.03


def test_the_classifiers_of_the_demo_have_the_same_size(module):
    models = module("settings").IMAGES.models
    sizes = [used_size(quality_classify.build("fashion", words)) for words in models.values()]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "no gpu"])
def test_the_demo_uses_one_gpu_if_there_are_any(gpu, tmp_path, module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    demo = module("demo")
    text = tmp_path / "addresses/raw/test.txt"
    text.parent.mkdir(parents=True)
    text.write_text("word " * 100)
    built = demo.Demo(tmp_path)
    (built.folders["language"]["Mega"]).mkdir(parents=True)
    trainings = built.training(demo.TRANSLATION) + built.training(demo.LANGUAGE)
    assert all("--distributed-world-size=1" in job.command for job in trainings)
    assert {"--cpu" in job.command for job in trainings + built.evaluating()} == {not gpu}
    assert {job.environment["GPUS"] for job in built.preparing() + built.translating()} == {str(int(gpu))}


def test_progress_counts_completed_work(module, tmp_path):
    jobs = module("jobs")
    assert jobs.updates("") == 0
    assert jobs.updates("Loaded checkpoint last.pt (epoch 3 @ 20 updates)\n") == 20
    assert jobs.updates('(epoch 3 @ 20 updates)\n{"num_updates": "22"}\n{"num_updates": "24"}\n') == 24
    assert jobs.steps("== making raw\n== 5 bytes\n") == 0  # not completed
    assert jobs.steps("== have raw\n== making text\n== making bin\n== ready: train.sh reads bin\n") == 3
    (tmp_path / "out").write_text("H-1\nS-1\nH-2\n")
    assert jobs.matches("^H-", tmp_path / "out")("H-0") == 2
    assert jobs.matches("^H-")("H-0") == 1


def test_a_failing_command_ends_the_others_and_their_processes(tmp_path, module):
    jobs = module("jobs")
    child = f"{sys.executable} -c 'import time; time.sleep(300)' {tmp_path} & touch {tmp_path}/begun; wait"
    late = f"until [ -e {tmp_path}/begun ]; do sleep 0.1; done; echo the last line; exit 3"
    commands = {"slow": ["bash", "-c", child], "failing": ["bash", "-c", late]}
    both = [
        jobs.Job(name, command, tmp_path / f"{name}.log", 1, "step", jobs.steps, {})
        for name, command in commands.items()
    ]
    with pytest.raises(jobs.Failed, match="(?s)failing failed; .*the last line"):
        jobs.run_together("both", both)
    assert str(tmp_path) not in processes()


def test_commands_run_two_at_a_time(tmp_path, module):
    jobs = module("jobs")
    counted = f"echo >>{tmp_path}/$$; ls {tmp_path} | grep -c '^[0-9]*$'; sleep 0.5; rm {tmp_path}/$$"
    three = [
        jobs.Job(name, ["bash", "-c", counted], tmp_path / f"{name}.log", 1, "step", jobs.steps, {}) for name in "abc"
    ]
    jobs.run_together("three", three)
    counts = [int((tmp_path / f"{name}.log").read_text()) for name in "abc"]
    assert max(counts) <= 2
    assert all((tmp_path / f"{name}.ended").exists() for name in "abc")
