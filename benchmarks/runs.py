"""Trainings side by side: each run is a folder with its train.log, done once, gone on with, collected and drawn."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

PLUGIN = Path(__file__).resolve().parent.parent / "mega_fairseq"
WITH_PLUGIN = ["--user-dir", str(PLUGIN)]  # a Transformer's checkpoint needs it too, to go on from


def fairseq(command: str) -> List[str]:
    """The command of this Python's fairseq, whatever is on PATH."""
    return [sys.executable, "-m", f"fairseq_cli.{command}"]


def train(folder: Path, updates: int, *arguments: str) -> None:
    """fairseq-train into `folder`, unless its log says that all updates are done; what was interrupted goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    if log.exists() and f'"train_num_updates": "{updates}"' in log.read_text():
        return
    print(f"training {folder}: tail -f {log}", flush=True)
    command = [*fairseq("train"), *arguments, *WITH_PLUGIN, "--save-dir", str(folder), "--cpu"]
    with open(log, "a") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT)


def is_done(result: Path, checkpoint: Path, said: str) -> bool:
    """Whether `result` says so, of the checkpoint as it is now."""
    return result.exists() and said in result.read_text() and result.stat().st_mtime > checkpoint.stat().st_mtime


def parameters(log: str) -> Optional[int]:
    found = re.search(r"num\. shared model params: ([\d,]+)", log)
    return found and int(found.group(1).replace(",", ""))


def curve(log: str, source: str, loss: str, updates: str) -> List[Tuple[int, float]]:
    """A loss against updates, from the JSON that fairseq-train logs as `train_inner` or `valid`."""
    entries = map(json.loads, re.findall(rf"\| INFO \| {source} \| (\{{.*\}})", log))
    return sorted({int(entry[updates]): float(entry[loss]) for entry in entries}.items())


def collect(out: Path, target: Path, read: Callable[[Path, str], Dict], progress: str) -> Dict[str, Dict]:
    """Writes what `read` makes of each run's folder and log, by name; without any `progress` a run has just begun."""
    runs = {}
    for log in sorted(out.glob("*/train.log")):
        text = log.read_text()
        found = {"parameters": parameters(text), **read(log.parent, text)}
        if found[progress]:
            runs[log.parent.name] = found
    target.write_text(json.dumps(runs, indent=1) + "\n")
    return runs


def plot(source: Path, losses: str, unit: str, title: str, style: Callable[[str], Dict], **legend: Any) -> None:
    """Losses against updates, a line for each run that `collect` wrote into `source`, drawn beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for name, found in json.loads(source.read_text()).items():
        axis.plot(*zip(*found[losses]), **style(name))
    axis.set(xlabel="updates", ylabel=unit, title=title)
    axis.grid(alpha=0.3)
    axis.legend(**legend)
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=120)
