"""A real browser: Debian's Chromium without a window, through the W3C WebDriver protocol of its chromedriver."""

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64decode
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference to an element
CONTROL, ENTER, ARROW_LEFT, ARROW_RIGHT = "\ue009", "\ue007", "\ue012", "\ue014"


def missing() -> Optional[str]:
    """Why there is no browser, or None."""
    for name, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian's package {package})"
    return None


class Browser:
    """A window of a browser with an empty profile."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        self.profile = tempfile.TemporaryDirectory()
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = next(filter(None, (re.search(r"success.* on port (\d+)", line) for line in self.driver.stdout)))[1]
        self.address = f"http://127.0.0.1:{port}/session"
        switches = [*SWITCHES, f"--user-data-dir={self.profile.name}", f"--window-size={width},{height}"]
        chrome = {"args": switches + ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] * dark}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/{made['sessionId']}"

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.driver.stdout.close()
            self.profile.cleanup()

    # ---------------------------------------------------------------------------------------- what a test does

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; arguments are `arguments[0]` and so on."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        """The size of the page, not of the window around it."""
        emulate = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", emulate)

    def devtools(self, command: str, parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def element(self, selector: str) -> str:
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self.element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Presses the keys of a text while an element has the focus."""
        self._ask("POST", f"/element/{self.element(selector)}/value", {"text": text})

    def drag(self, selector: str, points: Sequence[Sequence[int]]) -> None:
        """Moves the pressed pointer along points, in pixels from the middle of an element."""
        origin = {ELEMENT: self.element(selector)}
        moves = [{"type": "pointerMove", "duration": 20, "origin": origin, "x": x, "y": y} for x, y in points]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "pen", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._ask("POST", "/actions", {"actions": [pointer]})

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        """What a condition returns as soon as that is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            time.sleep(0.05)
        raise TimeoutError(f"not within {seconds} seconds")

    def picture(self, path: Path) -> None:
        path.write_bytes(b64decode(self._ask("GET", "/screenshot")))

    def errors(self) -> list:
        """What the browser complained about since the last call."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]
