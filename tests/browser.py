"""A real browser for tests: Chromium without a window, driven over a pipe by its DevTools protocol.

The standard library is enough for that. Nothing is loaded from elsewhere.
"""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
KEYS = {"Backspace": 8, "ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9, "Enter": 13}
PATIENCE = 120.0  # seconds until a browser that does not answer is given up


class Browser:
    """One tab. What the page writes on the console, and what goes wrong in it, is in `said`; addresses in `fetched`."""

    def __init__(self, to: int, back: int) -> None:
        self.to, self.back, self.rest, self.number = to, back, b"", 0
        self.session: str | None = None
        self.said: list[str] = []
        self.fetched: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Note what else the browser tells meanwhile."""
        self.number += 1
        about = {"sessionId": self.session} if self.session else {}
        message = {"id": self.number, "method": method, "params": parameters, **about}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.note(answer)
        raise AssertionError(f"Chromium does not answer {method}")

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            some = os.read(self.back, 1 << 16)
            assert some, "Chromium has ended"
            self.rest += some
        first, self.rest = self.rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(first)
        return found

    def note(self, event: dict[str, Any]) -> None:
        name, what = event.get("method"), event.get("params", {})
        if name == "Runtime.consoleAPICalled":
            self.said.append(f"{what['type']}: " + " ".join(str(a.get("value", a)) for a in what["args"]))
        elif name == "Runtime.exceptionThrown":
            self.said.append(json.dumps(what["exceptionDetails"]))
        elif name == "Log.entryAdded":
            self.said.append(what["entry"]["text"])
        elif name == "Network.requestWillBeSent" and not what["request"]["url"].startswith("data:"):
            self.fetched.append(what["request"]["url"])

    def look(
        self, width: int = 1100, height: int = 900, dark: bool = False, media: str = "screen", mobile: bool = False
    ) -> None:
        """Set the size of the window, and whether it is dark, paper (`media="print"`), or has a touch screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, page: Path | str, ready: str = "document.readyState === 'complete'") -> None:
        """Open a file or an address, and wait until it is ready."""
        address = page if isinstance(page, str) else page.as_uri()
        self.said.clear()
        self.fetched.clear()
        self.call("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && ({ready})")

    def wait(self, condition: str) -> None:
        """Wait until a condition of JavaScript holds."""
        deadline = time.monotonic() + PATIENCE
        while not self.ask(f"!!({condition})"):
            assert time.monotonic() < deadline, f"it never holds: {condition}; {self.said}"
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse to a place in the window, and click if asked to."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key of the keyboard and let it go."""
        code = KEYS.get(key, ord(key.upper()[0]))
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def tap(self, selector: str) -> None:
        """Touch the middle of an element."""
        x, y = self.ask(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def picture(self, path: Path, **clip: float) -> Path:
        """Save the whole page as png, or a part of it."""
        if not clip:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        found = self.call("Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def paper(self, path: Path) -> Path:
        """Print the page into a PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))
        return path


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """Start Chromium, and end it afterwards."""
    assert CHROMIUM is not None
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    # High numbers, so that none of them is 3 or 4, where Chromium expects its ends.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
    moves: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
    for number, name in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        moves.append((os.POSIX_SPAWN_OPEN, number, str(profile / f"chromium.{name}"), flags, 0o600))
    arguments = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
    scratch = tempfile.mkdtemp()  # a short path, because a socket is in it, and removed afterwards
    process = os.posix_spawn(CHROMIUM, arguments, {**os.environ, "TMPDIR": scratch}, file_actions=moves, setpgroup=0)
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    try:
        browser = Browser(to, back)
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        yield browser
    finally:
        os.killpg(process, signal.SIGKILL)  # it and its children, which are a group of their own
        os.waitpid(process, 0)
        os.close(to)
        os.close(back)
        shutil.rmtree(scratch, ignore_errors=True)
