"""Compares the quality of models: trains them with fairseq-train, scores them, and collects and draws the results.

A run is a folder OUT/TASK-MODEL-LR-SEED with train.log, checkpoints and scores.json. What exists is kept, and the same
command resumes an interrupted training. Data are in DATA/TASK.
"""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from benchmarks.figures import Panel, draw
from benchmarks.measure import as_table, names
from mega_fairseq.cli.cpu import KEEP_MEMORY

PLUGIN = Path(__file__).resolve().parent.parent / "mega_fairseq"
TRAIN = PLUGIN.parent / "benchmarks/stoppable_train.py"
WITH_PLUGIN = ["--user-dir", str(PLUGIN)]  # resuming a Transformer needs it too
NAME = re.compile(r"(\w+)-(.*)-([\d.]+e-\d+)-(\d+)")  # of a run


class Run(NamedTuple):
    task: str
    model: str
    lr: str
    seed: str
    data: Path
    folder: Path


class Experiment:
    """Subclasses say which models are trained, how, and how they are scored."""

    updates: Dict[str, int]  # by task, without --updates
    rates: Dict[str, Tuple[str, ...]]  # by model, without --lr
    curve: Tuple[str, str]  # fairseq's names of the log and of the value that is followed over updates
    unit: str
    lower_is_better = True

    def prepare(self, source: Path, data: Path) -> None:
        """Makes the data of tasks."""
        sys.exit("there is nothing to prepare")

    def training(self, run: Run, updates: int) -> List[str]:
        """Arguments of fairseq-train: data, model and recipe."""
        raise NotImplementedError

    def scores(self, run: Run) -> Dict[str, float]:
        """Scores of a trained model."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- the same for all

    def main(self, description: str) -> None:
        parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
        parser.add_argument("data", type=Path, nargs="?", metavar="DATA")
        parser.add_argument("out", type=Path, nargs="?", metavar="OUT")
        parser.add_argument("--tasks", type=names(self.updates), default=[], help=f"of {', '.join(self.updates)}")
        parser.add_argument("--models", type=names(self.rates), default=[], help=f"of {', '.join(self.rates)}")
        parser.add_argument("--lr", type=lambda text: text.split(","), help="peak learning rates")
        parser.add_argument("--seeds", type=lambda text: text.split(","), default=["1"])
        parser.add_argument("--updates", type=int)
        parser.add_argument("--unscored", action="store_true", help="only train and validate")
        parser.add_argument("--prepare", type=Path, metavar="SOURCE", help="only make DATA from this text")
        parser.add_argument("--collect", type=Path, metavar="FILE", help="only add the results of OUT to FILE")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves of FILE, next to it")
        args = parser.parse_args()
        if args.plot:
            return self.plot(args.plot)
        if args.prepare and args.data:
            return self.prepare(args.prepare, args.data)
        if args.out and args.collect:
            return self.collect(args.out, args.collect)
        if not (args.out and args.tasks and args.models):
            parser.error("DATA, OUT, --tasks and --models are needed")
        os.environ.update(KEEP_MEMORY)  # of the commands that train and evaluate
        data, out = args.data.resolve(), args.out.resolve()
        for seed, task, model in product(args.seeds, args.tasks, args.models):
            for lr in args.lr or self.rates[model]:
                run = Run(task, model, lr, seed, data / task, out / f"{task}-{model}-{lr}-{seed}")
                self.run(run, args.updates or self.updates[task], not args.unscored)

    def run(self, run: Run, updates: int, scored: bool) -> None:
        """Trains and scores a model, unless this was done before."""
        self.train(run, updates)
        scores = run.folder / "scores.json"
        trained = (run.folder / "checkpoint_last.pt").stat().st_mtime
        if scored and not (scores.exists() and scores.stat().st_mtime > trained):
            print(f"scoring {run.folder}", flush=True)
            scores.write_text(json.dumps(self.scores(run)))

    def train(self, run: Run, updates: int) -> None:
        train(run.folder, updates, *self.training(run, updates), "--seed", run.seed, "--cpu")

    def collect(self, out: Path, target: Path) -> None:
        """Adds the results of all runs to `target`. Those of other folders that it has are kept."""
        results = json.loads(target.read_text()) if target.exists() else {}
        for path in sorted(out.glob("*/train.log")):
            log, scores = path.read_text(), path.with_name("scores.json")
            if points := curve(log, *self.curve):
                results[path.parent.name] = {
                    "parameters": int(re.search(r"num\. shared model params: ([\d,]+)", log)[1].replace(",", "")),
                    "curve": points,
                    "scores": json.loads(scores.read_text()) if scores.exists() else {},
                }
        lines = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(results.items()))
        target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(self.markdown(results))

    def markdown(self, results: Dict[str, Dict]) -> str:
        """A table of all scored runs."""
        columns, rows = list(dict.fromkeys(name for result in results.values() for name in result["scores"])), []
        for name, result in results.items():
            update, value = self.best(result["curve"])
            cells = (f"{result['scores'][c]:.5g}" if c in result["scores"] else "" for c in columns)
            rows.append([name, f"{result['parameters']:,}", f"{value}, {update:,}", *cells])
        return as_table(["run", "parameters", f"{self.unit}, update", *columns], rows)

    def best(self, curve: List[Tuple[int, float]]) -> Tuple[int, float]:
        return (min if self.lower_is_better else max)(curve, key=lambda point: point[1])

    def plot(self, source: Path) -> None:
        """A panel for each task, a line for each model, at its best learning rate with its first seed."""
        curves: Dict[str, Dict[str, List]] = {}
        for name, result in json.loads(source.read_text()).items():
            task, model, _, seed = NAME.fullmatch(name).groups()
            of_task, curve = curves.setdefault(task, {}), result["curve"]
            if seed == "1":
                known = [of_task[model]] if model in of_task else []
                ends = [self.best(each) for each in (*known, curve)]
                of_task[model] = [*known, curve][ends.index(self.best(ends))]
        panels = [Panel(task, "updates", self.unit, of_task) for task, of_task in curves.items()]
        draw(panels, source.with_suffix(".png"))


def fairseq(command: str) -> List[str]:
    """The command of this Python's fairseq, not the one on PATH."""
    return [sys.executable, "-m", f"fairseq_cli.{command}"]


def output(command: List[str], log: Path, **options: Any) -> str:
    """What a command prints, which is kept in a log file."""
    with open(log, "w") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT, **options)
    return log.read_text()


def train(folder: Path, updates: int, *arguments: str) -> None:
    """Runs or resumes fairseq-train in `folder`, unless its log says that it is done: by updates, or by --patience."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    ends = (f'"train_num_updates": "{updates}"', "early stop since valid performance hasn't improved")
    if log.exists() and any(end in log.read_text() for end in ends):
        return
    print(f"training {folder}: tail -f {log}", flush=True)
    command = [sys.executable, str(TRAIN), *WITH_PLUGIN, *arguments, "--save-dir", str(folder)]
    with open(log, "a") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT)


def curve(log: str, source: str, value: str) -> List[Tuple[int, float]]:
    """A value against updates, from the JSON that fairseq-train logs as `train_inner` or `valid`."""
    updates = "valid_num_updates" if source == "valid" else "num_updates"
    entries = map(json.loads, re.findall(rf"\| INFO \| {source} \| (\{{.*\}})", log))
    return sorted({int(entry[updates]): float(entry[value]) for entry in entries}.items())
