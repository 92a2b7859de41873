"""A Python that starts fairseq's commands, ours, the benchmarks and the demo without importing fairseq.

Importing takes five seconds, and such programs start many processes. Theirs are forked from one that has imported
fairseq and the plugin, but no command. Each has the environment, folder, streams and signals of a new process.
"""

import atexit
import functools
import json
import os
import shlex
import shutil
import socket
import socketserver
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.helpers.commands import ROOT, fresh, run_forked, start_forked

FORKED = [f"{ROOT}/benchmarks/", f"{ROOT}/examples/demo/"]  # programs that import fairseq, or start others that do
CLIENT = """
import json, os, signal, socket, struct, sys
words = sys.argv[1:]
modules = words[:1] == ["-m"] and words[1].startswith(("fairseq_cli.", "mega_fairseq."))
if not (modules or words[0].startswith({forked!r})):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendmsg([b"0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", 0, 1, 2))])  # the streams
    request = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}}
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
    path, client, address = (str(Path(folder, name)) for name in ("python", "client.py", "socket"))
    Path(client).write_text(CLIENT.format(python=sys.executable, forked=tuple(FORKED), address=address))
    # Started by sh, because the first line of a script cannot name a program with a space in its path.
    write_script(Path(path), f'exec {shlex.join([sys.executable, "-SE", client])} "$@"')
    server = socketserver.ThreadingUnixStreamServer(address, _Fork)
    server.python = path
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return path


def write_script(path: Path, commands: str) -> None:
    """Writes an executable file with these commands of the shell."""
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)


def benchmark(script: str, *words: Any) -> str:
    """Runs a program of benchmarks/, which must succeed, and returns its output."""
    return fresh(python(), ROOT / "benchmarks" / script, *words)


class _Fork(socketserver.StreamRequestHandler):
    """Starts a process and answers its number, and later its exit code."""

    def handle(self) -> None:
        _, ((_, _, streams),), *_ = self.request.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("3i")))
        process = start_forked(_run, list(struct.unpack("3i", streams)), self.server.python, self.rfile.readline())
        self.wfile.write(b"%d\n" % process.pid)
        process.join()
        self.wfile.write(b"%d\n" % process.exitcode)


def _run(python: str, request: bytes) -> None:
    asked = json.loads(request)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.executable = python
    run_forked(asked["words"], asked["folder"])
