"""Training runs to compare. Each is a folder with a train.log; it is resumed if interrupted, and never repeated."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

PLUGIN = Path(__file__).resolve().parent.parent / "mega_fairseq"
STOPPABLE = PLUGIN.parent / "benchmarks/stoppable_train.py"
WITH_PLUGIN = ["--user-dir", str(PLUGIN)]  # resuming a Transformer needs it too


def fairseq(command: str) -> List[str]:
    """The command of this Python's fairseq, not the one on PATH."""
    return [sys.executable, "-m", f"fairseq_cli.{command}"]


def train(folder: Path, updates: int, *arguments: str) -> None:
    """Runs or resumes fairseq-train in `folder`, unless its log says that it is done: by updates, or by --patience."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    ends = (f'"train_num_updates": "{updates}"', "early stop since valid performance hasn't improved")
    if log.exists() and any(end in log.read_text() for end in ends):
        return
    print(f"training {folder}: tail -f {log}", flush=True)
    command = [sys.executable, str(STOPPABLE), *WITH_PLUGIN, *arguments, "--save-dir", str(folder), "--cpu"]
    with open(log, "a") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT)


def is_done(result: Path, checkpoint: Path, content: str) -> bool:
    """Whether `result` has this content and is newer than the checkpoint."""
    return result.exists() and content in result.read_text() and result.stat().st_mtime > checkpoint.stat().st_mtime


def parameters(log: str) -> Optional[int]:
    found = re.search(r"num\. shared model params: ([\d,]+)", log)
    return found and int(found.group(1).replace(",", ""))


def curve(log: str, source: str, loss: str, updates: str) -> List[Tuple[int, float]]:
    """A loss against updates, from the JSON that fairseq-train logs as `train_inner` or `valid`."""
    entries = map(json.loads, re.findall(rf"\| INFO \| {source} \| (\{{.*\}})", log))
    return sorted({int(entry[updates]): float(entry[loss]) for entry in entries}.items())


def collect(out: Path, target: Path, read: Callable[[Path, str], Dict], progress: str) -> Dict[str, Dict]:
    """Writes what `read` returns for each run's folder and log, by name. Runs without `progress` are left out.

    Runs that are in `target` already, from another folder, are kept.
    """
    runs = json.loads(target.read_text()) if target.exists() else {}
    for log in sorted(out.glob("*/train.log")):
        text = log.read_text()
        found = {"parameters": parameters(text), **read(log.parent, text)}
        if found[progress]:
            runs[log.parent.name] = found
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(runs.items()))
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return runs


def plot(
    source: Path, losses: str, unit: str, title: str, style: Callable[[str], Optional[Dict]], **legend: Any
) -> None:
    """Draws losses against updates next to `source`, which `collect` wrote: one line per run that has a style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for name, found in json.loads(source.read_text()).items():
        if style(name) is not None:
            axis.plot(*zip(*found[losses]), **style(name))
    axis.set(xlabel="updates", ylabel=unit, title=title)
    axis.grid(alpha=0.3)
    axis.legend(**legend)
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=120)
