"""Draws docs/page.png, the page with a translated chapter: python -m tests.helpers.page_picture MODELS [PNG]"""

import sys
from pathlib import Path

from PIL import Image

from tests.helpers.browser import Browser
from tests.helpers.commands import ROOT
from tests.helpers.page import Served

WIDTH, HEIGHT = 1280, 1480
TURNS = 3
COLOURS = 128  # of the file: fewer bytes
WORD = 12  # of the translation: the one whose source is marked
READY = "return document.body.dataset.ready"
BUSY = "return document.querySelector('#translate form').getAttribute('aria-busy')"


def draw(models: Path, path: Path) -> None:
    """The panel that translates, after its last example. The browser has compiled the code in an earlier turn."""
    with Served(models) as server, Browser() as page:
        page.resize(WIDTH, HEIGHT)
        page.open(server.address)
        page.wait(lambda: page.run(READY))
        for _ in range(TURNS):
            page.click("#translate .examples button:last-child")
            page.wait(lambda: page.run(BUSY) == "true")
            page.wait(lambda: page.run(BUSY) == "false", 600)
        page.run("document.querySelectorAll('.translation span')[arguments[0]].focus()", WORD)
        page.run("scrollTo(0, 0)")
        page.picture(path)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/page.png")
