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
from typing import Dict, Iterator, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for benchmarks/, which defines some of the models

import settings
import torch
from figures import draw
from jobs import AT_ONCE, Failed, Job, run_together
from report import report
from settings import ADDRESSES, BIBLE, FASHION, IMAGES, LANGUAGE, TRAININGS, TRANSLATION, Task

from mega_fairseq.cli.cpu import KEEP_MEMORY, Limit, cpu_bf16

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for all results")
    usual = ", ".join(f"{task.updates:,}" for task in TRAININGS)
    parser.add_argument("--updates", type=int, help=f"updates of each model (default: {usual})")
    parser.add_argument(
        "--longest", type=int, default=4096, help="bytes of the longest text that is timed (default: %(default)s)"
    )
    args = parser.parse_args()
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, signal.default_int_handler)  # like Ctrl-C
    demo, started = Demo(args.out.resolve(), args.updates, args.longest), time.monotonic()
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
        run_together("preparing the corpora", demo.preparing())
        demo.separate_lines()
        trainings = [*demo.training(TRANSLATION), *demo.training(LANGUAGE)]
        run_together("training to translate, training language models", trainings)
        images = reversed(demo.training(IMAGES))  # the Transformer first, since it takes longest
        run_together("translating the test set, training to classify images", [*demo.translating(), *images])
        evaluations = [*demo.evaluating(), *demo.classifying()]
        run_together("evaluating language models, classifying the test images", evaluations)
        run_together("timing updates on longer and longer texts", demo.timing())
    except Failed as failure:
        sys.exit(f"\n{failure}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; training has saved a checkpoint, and the same command resumes from there")
    draw(demo.folders, demo.timed, demo.out)
    text = report(demo.folders, demo.timed, demo.updates, demo.out)
    (demo.out / "demo.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis run took {(time.monotonic() - started) / 60:.1f} minutes.")


def fast_precision(kept: Path) -> List[str]:
    """`--bf16` on a CPU that multiplies it fast. A training that has begun keeps its precision, in this file."""
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            cpu_bf16()
            kept.write_text("--bf16")
        except Limit:
            kept.write_text("")
    return kept.read_text().split()


class Demo:
    """The files of the demo, and the commands that write them."""

    def __init__(self, out: Path, updates: Optional[int] = None, longest: int = 4096):
        self.out, self.longest = out, longest
        self.updates = {task.name: updates or task.updates for task in TRAININGS}
        self.folders = {  # their names contain the updates, so that runs of different lengths do not collide
            task.name: {model: out / f"{task.name}-{self.updates[task.name]}" / model.lower() for model in task.models}
            for task in TRAININGS
        }
        self.timed = {
            model: folder / f"lengths-{longest}.json" for model, folder in self.folders[LANGUAGE.name].items()
        }
        self.data = {
            TRANSLATION.name: out / "bible/sentencepiece/bin",
            LANGUAGE.name: out / "addresses/bytes/bin",
            IMAGES.name: out / "fashion/small/bin",
        }
        gpu, threads = torch.cuda.is_available(), max(1, (os.cpu_count() or 1) // AT_ONCE)
        self.device = [] if gpu else ["--cpu"]
        self.precision = [] if gpu else fast_precision(out / "precision")
        self.environment = {"OMP_NUM_THREADS": str(threads), "PYTHON": sys.executable, "GPUS": str(int(gpu))}
        self.environment.update(KEEP_MEMORY)

    def preparing(self) -> List[Job]:
        jobs = []
        for name, recipe in (("bible", BIBLE), ("addresses", ADDRESSES), ("fashion", FASHION)):
            files = {"DATA": str(self.out / name), "VOCABULARY": str(settings.VOCABULARY)}
            jobs.append(self._job(name, ["bash", str(recipe / "prepare.sh")], self.out / f"{name}.log", files))
        return jobs

    def separate_lines(self) -> None:
        """Copies the Bible to `lines`, where each line of the test set is a document of its own."""
        for part in ("raw", "sentencepiece/bin"):
            shutil.copytree(self.out / "bible" / part, self.out / "lines" / part, dirs_exist_ok=True)
        docs = self.out / "lines/sentencepiece/bin/test.docs"
        docs.write_text("".join(f"{number}\n" for number in range(docs.read_text().count("\n"))))

    def training(self, task: Task) -> List[Job]:
        jobs = []
        for model, folder in self.folders[task.name].items():
            command = settings.training(task, model, self.updates[task.name], self.data[task.name], folder)
            command += self.device + (self.precision if task is LANGUAGE else [])  # the others are too narrow to gain
            jobs.append(self._job(f"{model}, {task.name}", command, folder / "train.log"))
        return jobs

    def translating(self) -> List[Job]:
        """Translates the test set line by line, and in windows of chapters."""
        jobs, command = [], ["bash", str(BIBLE / "generate.sh")]
        for unit, data in (("windows", "bible"), ("lines", "lines")):
            for model, folder, checkpoint in self._trained(TRANSLATION):
                files = {"DATA": self.out / data, "CHECKPOINT": checkpoint, "RESULTS": folder / unit}
                variables = {**{name: str(path) for name, path in files.items()}, **settings.SEARCH}
                jobs.append(self._job(f"{model}, {unit}", command, folder / f"{unit}.log", variables))
        return jobs

    def evaluating(self) -> List[Job]:
        jobs = []
        for model, folder, checkpoint in self._trained(LANGUAGE):
            command = settings.evaluating(model, checkpoint, self.data[LANGUAGE.name]) + self.device
            jobs.append(self._job(f"evaluating {model}", command, folder / "evaluate.log"))
        return jobs

    def classifying(self) -> List[Job]:
        jobs, program = [], [sys.executable, str(HERE / "classifying.py")]
        for model, folder, checkpoint in self._trained(IMAGES):
            command = [*program, str(checkpoint), str(self.data[IMAGES.name]), str(folder / "classified.json")]
            jobs.append(self._job(f"classifying, {model}", command, folder / "classify.log"))
        return jobs

    def timing(self) -> List[Job]:
        """On one CPU thread each, also if there is a GPU."""
        program = [sys.executable, str(HERE / "lengths.py")]
        return [
            self._job(model, [*program, model, str(self.longest), str(out)], out.with_suffix(".log"))
            for model, out in self.timed.items()
        ]

    def _job(self, name: str, command: List[str], log: Path, variables: Optional[Dict[str, str]] = None) -> Job:
        return Job(name, command, log, {**self.environment, **(variables or {})})

    def _trained(self, task: Task) -> Iterator[Tuple[str, Path, Path]]:
        for model, folder in self.folders[task.name].items():
            yield model, folder, folder / "checkpoint_last.pt"


if __name__ == "__main__":
    main()
