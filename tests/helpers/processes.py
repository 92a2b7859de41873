"""Runs a function in several processes that can exchange tensors, and compares trainings update by update."""

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, List

import pytest
import torch
import torch.distributed as dist

from tests.helpers.commands import FORKS, LIMIT


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> List[Any]:
    """`function(*arguments)` in each process of a group of `count`; what they return, in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(_run, folder, count, function, arguments)
        running = [FORKS.Process(target=start, args=(rank,)) for rank in range(count)]
        for process in running:
            process.start()
        for process in running:
            process.join(LIMIT)
            process.kill()
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failure"))]
        assert not failures, "\n".join(failures)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(count)]


def assert_workers_end_with_epoch(iterator: Any) -> None:
    """Checks that the processes that load the batches of fairseq's iterator live as long as one epoch."""
    others, epoch = set(multiprocessing.active_children()), iterator.next_epoch_itr()
    next(epoch)
    workers = set(multiprocessing.active_children()) - others
    list(epoch)
    start = time.monotonic()
    while None in [worker.exitcode for worker in workers] and time.monotonic() - start < 20:
        time.sleep(0.01)  # while a thread of the iterator joins them
    assert [worker.exitcode for worker in workers] == [0]


def _run(folder: str, count: int, function: Callable[..., Any], arguments: Any, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
        torch.save(function(*arguments), Path(folder, f"{rank}.pt"))
    except BaseException:
        Path(folder, f"{rank}.failure").write_text(f"process {rank} of {count}:\n{traceback.format_exc()}")
        raise


def course(folder: Path) -> Dict[int, SimpleNamespace]:
    """Metrics and model in the checkpoint of each update.

    fairseq rounds metrics when it prints them. Metrics of validation are sums over all validations so far.
    """
    updates = {}
    for path in folder.glob("checkpoint*[0-9].pt"):
        state = torch.load(path, weights_only=True)
        meters = {
            source: {name: meter for _, name, _, meter in listed if "val" in meter}
            for source, listed in state["extra_state"]["metrics"].items()
        }
        updates[state["optimizer_history"][-1]["num_updates"]] = SimpleNamespace(
            train={name: float(meter["val"]) for name, meter in meters["train"].items()},
            valid={name: (float(meter["sum"]), float(meter["count"])) for name, meter in meters["valid"].items()},
            model=state["model"],
        )
    return updates


def assert_same_course(
    folder: Path, other: Path, updates: Iterable[int], tolerance: float = 0.0, of_models: float = 0.0
) -> None:
    """Checks that a training made these updates, with the metrics and models of another one within tolerances."""
    ours, theirs = course(folder), course(other)
    assert sorted(ours) == list(updates)
    for number, found in ours.items():
        assert found.train.keys() >= {"loss", "gnorm", "bsz", "wpb", "lr"}
        for name, value in found.train.items():
            assert value == pytest.approx(theirs[number].train[name], abs=tolerance, rel=0), (number, name)
        torch.testing.assert_close(found.model, theirs[number].model, rtol=0, atol=of_models)
