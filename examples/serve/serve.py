"""Serves an exported translation model to this machine: each POST of lines gets as many lines.

    python examples/serve/serve.py pretrained/bible-en-de
    curl --data-binary @new.en http://127.0.0.1:8000

A sketch for your own service. It has no limit of requests, goes on for clients that have left, and after an interrupt
answers those that it has.
"""

import argparse
import os
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Semaphore

from mega_runtime import Translator

LONGEST = 100_000  # bytes


class Service(BaseHTTPRequestHandler):
    translator: Translator
    timeout = 60  # seconds without a byte of the request
    cores = Semaphore(os.cpu_count() or 1)

    def handle(self) -> None:
        with suppress(ConnectionError):  # of clients that have left
            super().handle()

    def do_POST(self) -> None:
        length = self.headers["Content-Length"] or ""
        if not length.isdecimal() or len(length) > 9 or int(length) > LONGEST:
            status = 413 if length.isdecimal() else 411
            return self.answer(status, f"send at most {LONGEST:,} bytes, with their Content-Length")
        text = self.rfile.read(int(length))
        if len(text) < int(length):
            return self.answer(400, "send as many bytes as Content-Length says")
        try:
            with self.cores:  # no more searches at once
                lines = self.translator.translate(text.decode("utf-8-sig").split("\n"))
            self.answer(200, "\n".join(line.text for line in lines))
        except UnicodeDecodeError:
            self.answer(400, "send text in UTF-8")
        except ValueError as error:  # such as a line that is too long
            self.answer(400, str(error))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # clients that connect at once; the others are refused
    daemon_threads = False  # ONNX Runtime aborts the process if it ends during a search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="made by mega-fairseq export")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    Service.translator = Translator(args.folder)
    server = Server(("127.0.0.1", args.port), Service)
    print(f"http://127.0.0.1:{server.server_port} translates what is sent by POST", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()  # refuses new clients


if __name__ == "__main__":
    main()
