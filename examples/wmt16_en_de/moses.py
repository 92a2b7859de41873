"""Moses tokenisation and its inverse with sacremoses, in several processes.

moses.py tokenize|detokenize LANGUAGE WORKERS < text > text
"""

import functools
import itertools
import sys
from concurrent.futures.process import BrokenProcessPool
from typing import Callable, Iterable, Iterator, List

import lines

from mega_fairseq.cli.workers import in_order

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


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    action, language, workers = sys.argv[1:]
    done = in_order(functools.partial(work, action, language), batches(lines.stdin()), int(workers))
    try:
        lines.write(itertools.chain.from_iterable(done))
    except BrokenProcessPool:
        sys.exit("error: a worker was killed, perhaps for lack of memory: run this again with fewer WORKERS.")


if __name__ == "__main__":
    main()
