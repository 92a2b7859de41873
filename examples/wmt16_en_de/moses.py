"""Moses tokenisation and its inverse with sacremoses, in several processes.

moses.py tokenize|detokenize LANGUAGE WORKERS < text > text
"""

import functools
import multiprocessing
import sys
from typing import Callable

import lines


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


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    action, language, workers = sys.argv[1:]
    job = functools.partial(work, action, language)
    if int(workers) == 1:
        lines.write(map(job, lines.stdin()))
        return
    with multiprocessing.Pool(int(workers)) as pool:
        lines.write(pool.imap(job, lines.stdin(), chunksize=2000))


if __name__ == "__main__":
    main()
