"""Serves the page and the exported models of a folder on 127.0.0.1, to this machine only.

python serve.py [--port N] [--models FOLDER]
"""

import argparse
import json
import sys
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Optional
from urllib.parse import unquote

PAGE = Path(__file__).resolve().parent
MODELS = PAGE.parent.parent / "pretrained"
PORT = 8000  # or any free one, if another program has it
# What is served, and nothing else.
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".onnx": "application/octet-stream",
    ".bin": "application/octet-stream",
    ".model": "application/octet-stream",
}
HEADERS = {
    "Cache-Control": "no-store",
    # The browser itself refuses to load from, or send to, any other server.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "X-Content-Type-Options": "nosniff",
}


class Handler(BaseHTTPRequestHandler):
    """Answers GET: the page at /, the names of the models at /models/, and their files below it."""

    protocol_version = "HTTP/1.1"

    def __init__(self, models: Path, *arguments):
        self.models = models
        super().__init__(*arguments)

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a page that was closed meanwhile
            super().handle()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/models/":
            names = (config.parent.name for config in self.models.glob("*/config.json"))
            served = sorted(name for name in names if self.file(f"/models/{name}/config.json"))
            self.answer(json.dumps(served).encode(), KINDS[".json"])
            return
        file = self.file(path)
        if file is None:
            self.answer(b"", "text/plain", HTTPStatus.NOT_FOUND)
        else:
            self.answer(file.read_bytes(), KINDS[file.suffix])

    def file(self, path: str) -> Optional[Path]:
        """The file of an address, if it is one of those to serve."""
        if path.startswith("/models/"):
            folder, path = self.models, path[len("/models/") :]
        else:
            folder, path = PAGE, path[1:] or "index.html"
        try:
            file = (folder / path).resolve()
            known = folder.resolve() in file.parents and file.suffix in KINDS
            return file if known and file.is_file() else None
        except (OSError, RuntimeError, ValueError):  # too long a name, symlinks in a circle, a NUL
            return None

    def answer(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Nothing: the terminal is for the address."""


def server(models: Path, port: Optional[int] = None) -> ThreadingHTTPServer:
    """A server on this port; without one, on PORT or any free one."""
    handler = partial(Handler, models)
    try:
        return ThreadingHTTPServer(("127.0.0.1", PORT if port is None else port), handler)
    except (OSError, OverflowError) as error:
        if port is not None:
            sys.exit(f"port {port} cannot be used ({error}): choose another one, or none")
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves the page to this machine.")
    parser.add_argument("--port", type=int, help=f"(default: {PORT}, or any free one)")
    parser.add_argument("--models", type=Path, default=MODELS, metavar="FOLDER", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.models.is_dir():
        sys.exit(f"there is no folder {arguments.models}: give one with exported models as --models")
    with server(arguments.models, arguments.port) as running:
        print(f"open http://127.0.0.1:{running.server_address[1]} in a browser; Ctrl-C ends this", flush=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
