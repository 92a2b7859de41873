"""A demonstration on two CPU cores in 14 minutes: `make demo`, or run this file.

Trains a translation model on the shipped Bible, a byte-level language model on the shipped addresses, and a classifier
that reads shipped images pixel by pixel, each next to a Transformer with the same size, batches and number of updates.
Translates, evaluates, classifies, prints a table and draws figures. Interrupt it at any time: training saves a
checkpoint, and the same command resumes from there.
"""

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Iterator, List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for benchmarks/, which defines some of the models

import settings
import torch
from jobs import AT_ONCE, Failed, Job, run_together
from report import figure, report
from settings import IMAGES, LANGUAGE, TASKS, TRANSLATION, VOCABULARY, Task

from mega_fairseq.cli.cpu import KEEP_MEMORY, Limit, cpu_bf16
from mega_fairseq.cli.output import write_figure

LAST = "checkpoint_last.pt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for all results")
    usual = ", ".join(f"{task.updates:,}" for task in TASKS)
    parser.add_argument("--updates", type=int, help=f"updates of each model (default: {usual})")
    args = parser.parse_args()
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, signal.default_int_handler)  # like Ctrl-C
    demo, started = Demo(args.out.resolve(), args.updates), time.monotonic()
    demo.out.mkdir(parents=True, exist_ok=True)
    lock = os.open(demo.out, os.O_RDONLY)
    os.set_inheritable(lock, True)  # until all processes that it starts have ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another demo, or a process left by a killed one, is running in {demo.out}: wait for it or end it")
    except OSError:  # some network file systems have no locks
        pass
    try:
        run_together("preparing the corpora", [*demo.preparing()])
        demo.separate_lines()
        trainings = [*demo.training(TRANSLATION), *demo.training(LANGUAGE)]
        run_together("training to translate, training language models", trainings)
        images = [*demo.training(IMAGES)][::-1]  # the Transformer first, since it takes longest
        run_together("translating the test set, training to classify images", [*demo.translating(), *images])
        run_together("evaluating language models, classifying the test images", [*demo.testing()])
    except Failed as failure:
        sys.exit(f"\n{failure}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; training has saved a checkpoint, and the same command resumes from there")
    write_figure(str(demo.out / "demo.png"), lambda: figure(demo.folders))
    text = report(demo.folders, demo.updates, demo.out)
    (demo.out / "demo.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis run took {(time.monotonic() - started) / 60:.1f} minutes.")


class Demo:
    """The files of the demo, and the commands that write them."""

    def __init__(self, out: Path, updates: Optional[int] = None):
        self.out = out
        self.updates = {task.name: updates or task.updates for task in TASKS}
        self.folders = {  # their names contain the updates, so that runs of different lengths do not collide
            task.name: {model: out / f"{task.name}-{self.updates[task.name]}" / model.lower() for model in task.models}
            for task in TASKS
        }
        self.device = [] if torch.cuda.is_available() else ["--cpu"]
        threads = max(1, (os.cpu_count() or 1) // AT_ONCE)
        self.variables = {**KEEP_MEMORY, "OMP_NUM_THREADS": str(threads), "PYTHON": sys.executable}
        self.variables["GPUS"] = str(int(not self.device))

    def preparing(self) -> Iterator[Job]:
        for task in TASKS:
            variables = {**self.variables, "DATA": str(self.out / task.corpus), "VOCABULARY": str(VOCABULARY)}
            yield Job(task.corpus, ["bash", f"{task.recipe}/prepare.sh"], self.out / f"{task.corpus}.log", variables)

    def separate_lines(self) -> None:
        """Copies the Bible to `lines`, where each line of the test set is a document of its own."""
        for part in ("raw", TRANSLATION.binarised):
            shutil.copytree(self.out / "bible" / part, self.out / "lines" / part, dirs_exist_ok=True)
        docs = self.out / "lines" / TRANSLATION.binarised / "test.docs"
        docs.write_text("".join(f"{number}\n" for number in range(docs.read_text().count("\n"))))

    def training(self, task: Task) -> Iterator[Job]:
        precision = fast_precision() if task is LANGUAGE and self.device else []  # the others are too narrow to gain
        for model, folder in self.folders[task.name].items():
            command = settings.training(task, model, self.updates[task.name], self.data(task), folder)
            command += [*self.device, *precision]
            yield Job(f"{model}, {task.name}", command, folder / "train.log", self.variables)

    def translating(self) -> Iterator[Job]:
        """Translates the test set line by line, and in windows of chapters."""
        command = ["bash", f"{TRANSLATION.recipe}/generate.sh"]
        for unit, corpus in (("windows", "bible"), ("lines", "lines")):
            for model, folder in self.folders[TRANSLATION.name].items():
                files = {"DATA": self.out / corpus, "CHECKPOINT": folder / LAST, "RESULTS": folder / unit}
                variables = {**self.variables, **settings.SEARCH, **{name: str(path) for name, path in files.items()}}
                yield Job(f"{model}, {unit}", command, folder / f"{unit}.log", variables)

    def testing(self) -> Iterator[Job]:
        for task in (LANGUAGE, IMAGES):
            for model, folder in self.folders[task.name].items():
                command = settings.testing(task, model, str(folder / LAST), self.data(task)) + self.device
                yield Job(f"testing {model}, {task.name}", command, folder / "test.log", self.variables)
        command = [sys.executable, "-m", "mega_fairseq.cli", "classify", str(self.folders[IMAGES.name]["Mega"] / LAST)]
        command += [str(self.data(IMAGES)), "--out", str(self.out / "images"), *self.device]
        yield Job("drawing what Mega takes images for", command, self.out / "images.log", self.variables)

    def data(self, task: Task) -> Path:
        return self.out / task.corpus / task.binarised


def fast_precision() -> List[str]:
    """`--bf16` on a CPU that multiplies it fast."""
    try:
        cpu_bf16()
    except Limit:
        return []
    return ["--bf16"]


if __name__ == "__main__":
    main()
