"""A Python that starts fairseq's commands, ours, the benchmarks and the demo without importing fairseq.

Importing takes five seconds, and such programs start many processes. Theirs are forked from one that has imported
fairseq and the plugin, but no command. Each has the environment, folder, streams and signals of a new process.
"""

import atexit
import functools
import json
import os
import shutil
import socketserver
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, List

from tests.helpers.commands import FORKS, ROOT, fresh, run_forked

FORKED = [f"{ROOT}/benchmarks/", f"{ROOT}/examples/demo/"]  # programs that import fairseq, or start others that do
PYTHON = """#!{python} -SE
import json, os, signal, socket, sys
words = sys.argv[1:]
modules = words[:1] == ["-m"] and words[1].startswith(("fairseq_cli.", "mega_fairseq."))
if not (modules or words[0].startswith({forked})):
    os.execv("{python}", ["{python}", *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{socket}")
    streams = [f"/proc/{{os.getpid()}}/fd/{{stream}}" for stream in range(3)]
    request = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "streams": streams}}
    server.sendall(json.dumps(request).encode() + b"\\n")
    answers = server.makefile()
    process = int(answers.readline())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(answers.readline())
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.lru_cache(maxsize=None)
def python() -> str:
    """The path of such a Python, which works until this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path, socket = Path(folder, "python"), Path(folder, "socket")
    path.write_text(PYTHON.format(python=sys.executable, forked=tuple(FORKED), socket=socket))
    path.chmod(0o755)
    server = socketserver.ThreadingUnixStreamServer(str(socket), _Fork)
    server.python = str(path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return str(path)


def benchmark(script: str, *words: Any) -> str:
    """Runs a program of benchmarks/, which must succeed, and returns its output."""
    return fresh(python(), ROOT / "benchmarks" / script, *words)


class _Fork(socketserver.StreamRequestHandler):
    """Starts a process and answers its number, and later its exit code."""

    def handle(self) -> None:
        request = {**json.loads(self.rfile.readline()), "python": self.server.python}
        process = FORKS.Process(target=_run, kwargs=request)
        process.start()
        self.wfile.write(b"%d\n" % process.pid)
        process.join()
        self.wfile.write(b"%d\n" % process.exitcode)


def _run(words: List[str], folder: str, environment: Dict[str, str], streams: List[str], python: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python
    run_forked(words, folder, streams)
