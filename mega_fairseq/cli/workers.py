"""Work in several processes, which end with the process that started them."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Callable, Iterable, Iterator


def in_order(job: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
    """`job(item)` of each item, in order. Few items are read ahead, so there may be any number of them.

    Raises BrokenProcessPool if a worker is killed, where multiprocessing.Pool would wait forever.
    """
    if workers < 2:
        yield from map(job, items)
        return
    waiting: deque = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(job, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:  # after an error
                each.cancel()


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
