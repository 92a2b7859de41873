"""What a training of fairseq-train did, update by update."""

from pathlib import Path
from types import SimpleNamespace
from typing import Dict

import torch


def course(folder: Path) -> Dict[int, SimpleNamespace]:
    """Metrics and model in the checkpoint of each update.

    fairseq rounds metrics when it prints them. Metrics of validation are sums over all validations so far.
    """
    found = {}
    for path in folder.glob("checkpoint*[0-9].pt"):
        state = torch.load(path, weights_only=True)
        meters = {
            source: {name: meter for _, name, _, meter in listed if "val" in meter}
            for source, listed in state["extra_state"]["metrics"].items()
        }
        found[state["optimizer_history"][-1]["num_updates"]] = SimpleNamespace(
            train={name: float(meter["val"]) for name, meter in meters["train"].items()},
            valid={name: (float(meter["sum"]), float(meter["count"])) for name, meter in meters["valid"].items()},
            model=state["model"],
        )
    return found
