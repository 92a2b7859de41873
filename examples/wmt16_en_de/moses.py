"""Moses tokenisation and its inverse with sacremoses, in several processes.

moses.py tokenize|detokenize LANGUAGE WORKERS < text > text
"""

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Callable, Iterable, Iterator, List

import lines

AT_ONCE = 2000  # lines that a worker gets at once


@functools.lru_cache(maxsize=None)
def tool(action: str, language: str) -> Callable[[str], str]:
    """The function for one line. Cached, because building a tokeniser compiles hundreds of patterns."""
    import sacremoses

    if action == "tokenize":
        return functools.partial(sacremoses.MosesTokenizer(language).tokenize, return_str=True)
    detokenize = sacremoses.MosesDetokenizer(language).detokenize
    return lambda line: detokenize(line.split())


def work(action: str, language: str, batch: Iterable[str]) -> List[str]:
    return list(map(tool(action, language), batch))


def batches(text: Iterator[str]) -> Iterator[List[str]]:
    return iter(lambda: list(itertools.islice(text, AT_ONCE)), [])


def done(job: Callable[[List[str]], List[str]], items: Iterator[List[str]], workers: int) -> Iterator[List[str]]:
    """`job(item)` of each item, in order. Few items are read ahead, so there may be any number of them.

    Raises BrokenProcessPool if a worker is killed, where multiprocessing.Pool would wait forever.
    """
    waiting: deque = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
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


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    action, language, workers = sys.argv[1:]
    results = done(functools.partial(work, action, language), batches(lines.stdin()), int(workers))
    try:
        lines.write(itertools.chain.from_iterable(results))
    except BrokenProcessPool:
        sys.exit("error: a worker was killed, perhaps for lack of memory: run this again with fewer WORKERS.")


if __name__ == "__main__":
    main()
