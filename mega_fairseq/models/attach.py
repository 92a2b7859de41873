"""Attaches faster forms of passes and steps to models: the one place in `models/` that knows them."""

from typing import Any

from mega_fairseq.acceleration.steps import PreparedSteps
from mega_fairseq.acceleration.train_graph import TrainGraphs


def attach_passes(stack: Any) -> None:
    """Called when a stack is built."""
    if stack.cfg.cuda_graphs != "off":
        stack.passes = TrainGraphs(stack.passes)


def attach_steps(decoder: Any) -> None:
    """Called when fairseq says that a decoder only generates from now on."""
    decoder.steps = PreparedSteps(with_graphs=decoder.cfg.cuda_graphs == "auto")
