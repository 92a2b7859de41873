"""Moses tokenisation and its inverse with sacremoses, in several processes.

moses.py tokenize|detokenize LANGUAGE WORKERS < text > text
"""

import functools
import itertools
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Callable, Iterator

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


def work(action: str, language: str, line: str) -> str:
    return tool(action, language)(line)


def worked(action: str, language: str, workers: int, text: Iterator[str]) -> Iterator[str]:
    # Ctrl-C ends a worker without a traceback.
    with ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)) as pool:
        read = functools.partial(itertools.islice, text, 8 * workers * AT_ONCE)  # `map` would read the whole text
        for batch in iter(lambda: list(read()), []):
            yield from pool.map(functools.partial(work, action, language), batch, chunksize=AT_ONCE)


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    action, language, workers = sys.argv[1:]
    try:
        lines.write(worked(action, language, int(workers), lines.stdin()))
    except BrokenProcessPool:
        sys.exit("error: a worker was killed, perhaps for lack of memory: run this again with fewer WORKERS.")


if __name__ == "__main__":
    main()
