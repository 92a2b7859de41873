"""Some minutes with Mega on two CPU cores, beside fairseq's Transformer: `make demo`, or this file by itself.

Trains a translation model on the shipped Bible and a language model on the bytes of the shipped addresses, each next to
a Transformer of equal size on equal batches for as many updates; translates, evaluates at several chunk sizes, draws
and ends with a table. Interrupt it as you like: called again, it goes on where it was.
"""

import argparse
import fcntl
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/, whose models take part

import contest
import torch
from contest import ADDRESSES, BIBLE, LANGUAGE, TRANSLATION, Task
from race import Failed, Run, count, last_number, race
from report import draw, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="everything goes in here")
    parser.add_argument(
        "--updates", type=int, help=f"of each model (default: {TRANSLATION.updates} and {LANGUAGE.updates})"
    )
    args = parser.parse_args()
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, signal.default_int_handler)  # as Ctrl-C: what runs is ended too
    demo, started = Demo(args.out.resolve(), args.updates), time.monotonic()
    demo.out.mkdir(parents=True, exist_ok=True)
    if not alone(demo.out / "lock"):
        sys.exit(f"another demo, or what one that was killed has started, is at work in {demo.out}: wait, or end it")
    try:
        race("making the corpora ready", demo.preparing())
        race("training to translate", demo.training(TRANSLATION))
        race("translating the test set", demo.translating())
        race("training to model language", demo.training(LANGUAGE))
        race("evaluating at several chunk sizes", demo.evaluating())
    except Failed as failure:
        sys.exit(f"\n{failure}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")
    draw(demo.folders, demo.out / "demo.png")
    text = table(demo.folders, demo.updates, demo.out)
    (demo.out / "demo.txt").write_text(text)
    print(f"\n{text}\nThis call took {(time.monotonic() - started) / 60:.1f} minutes.")


def alone(lock: Path) -> bool:
    """Holds the lock for this process and all that it starts, as long as one of them lives."""
    file = os.open(lock, os.O_CREAT | os.O_WRONLY, 0o644)
    os.set_inheritable(file, True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Demo:
    """Where everything is, and the commands that make it."""

    def __init__(self, out: Path, updates: Optional[int]):
        self.out = out
        self.updates = {task.name: updates or task.updates for task in (TRANSLATION, LANGUAGE)}
        self.folders = {  # updates are in the name, so that nothing is taken for what it is not
            name: {model: out / f"{name}-{updates}" / model.lower() for model in TRANSLATION.models}
            for name, updates in self.updates.items()
        }
        self.data = {
            TRANSLATION.name: out / "bible/sentencepiece/bin",
            LANGUAGE.name: out / "addresses/bytes/bin",
        }
        gpu, threads = torch.cuda.is_available(), max(1, (os.cpu_count() or 1) // 2)  # two models at a time
        self.device = [] if gpu else ["--cpu"]
        self.environment = {"OMP_NUM_THREADS": str(threads), "PYTHON": sys.executable, "GPUS": str(int(gpu))}

    def preparing(self) -> List[Run]:
        runs = []
        for name, recipe, steps in (("bible", BIBLE, 5), ("addresses", ADDRESSES, 3)):
            log, command = self.out / f"{name}.log", ["bash", str(recipe / "prepare.sh")]
            choices = {"DATA": str(self.out / name), "VOCABULARY": str(contest.VOCABULARY)}
            done = partial(count, log, "^== making .*\n(?=.*== )")  # those that another has followed
            runs.append(Run(name, command, log, steps, "step", done, {**self.environment, **choices}))
        return runs

    def training(self, task: Task) -> List[Run]:
        runs, updates, data = [], self.updates[task.name], self.data[task.name]
        for model, folder in self.folders[task.name].items():
            log, command = folder / "train.log", contest.training(task, model, updates, data, folder)
            done = partial(last_number, log, r'"num_updates": "(\d+)"')
            runs.append(Run(model, command + self.device, log, updates, "update", done, self.environment))
        return runs

    def translating(self) -> List[Run]:
        runs, command = [], ["bash", str(BIBLE / "generate.sh")]
        for model, folder, checkpoint in self._trained(TRANSLATION):
            choices = {"DATA": str(self.out / "bible"), "CHECKPOINT": str(checkpoint), "RESULTS": str(folder)}
            done = partial(count, folder / "generate.out", "^H-")
            environment = {**self.environment, **choices}
            runs.append(Run(model, command, folder / "translate.log", contest.SENTENCES, "sentence", done, environment))
        return runs

    def evaluating(self) -> List[Run]:
        runs, data = [], self.data[LANGUAGE.name]
        for model, folder, checkpoint in self._trained(LANGUAGE):
            if model == "Mega":
                command, total = contest.sweeping(checkpoint, data, folder / "sweep"), len(contest.CHUNKS)
                done = partial(count, folder / "sweep.json", '"bits"')
            else:
                command, total = contest.sliding(checkpoint, data), 1
                done = partial(count, folder / "evaluate.log", "Perplexity")
            command, log = command + self.device, folder / "evaluate.log"
            runs.append(Run(model, command, log, total, "evaluation", done, self.environment))
        return runs

    def _trained(self, task: Task) -> Iterator[Tuple[str, Path, Path]]:
        for model, folder in self.folders[task.name].items():
            yield model, folder, folder / "checkpoint_last.pt"


if __name__ == "__main__":
    main()
