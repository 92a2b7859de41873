"""Draws docs/page.png, the page with a chapter that it translated: python -m tests.helpers.page_picture MODELS [PNG]"""

import sys
from pathlib import Path

from tests.helpers.browser import Browser
from tests.helpers.commands import ROOT
from tests.helpers.page import Served

WIDTH, HEIGHT = 1280, 1240
WORD = 12  # of the translation: the one whose source is marked
READY = "return document.body.dataset.ready"
DONE = "return document.querySelector('#translate form').getAttribute('aria-busy') === 'false'"


def draw(models: Path, path: Path, example: str = "last-child", width: int = WIDTH, dark: bool = False) -> None:
    """The panel that translates, after one of its examples."""
    with Served(models) as server, Browser() as page:
        page.resize(width, HEIGHT)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.open(server.address)
        page.wait(lambda: page.run(READY))
        page.click(f"#translate .examples button:{example}")
        page.wait(lambda: page.run(DONE), 600)
        page.run("document.querySelectorAll('.translation span')[arguments[0]].focus()", WORD)
        page.run("scrollTo(0, 0)")
        page.picture(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/page.png")
