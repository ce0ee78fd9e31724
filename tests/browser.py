"""A real Chromium that tests drive by keyboard and touch, over a pipe (DevTools protocol): no driver, no open port."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
PATIENCE = 60.0  # seconds; a test that waits so long has failed
NAMED = {"Backspace": 8, "ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9, "Enter": 13}


class Browser:
    """One tab of a browser."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._rest, self._number, self.events = b"", 0, list[dict[str, Any]]()
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{part}.enable")

    def command(self, method: str, session: str | None = None, /, **given: Any) -> dict[str, Any]:
        self._number += 1
        whole = {"id": self._number, "method": method, "params": given}
        os.write(self._to, json.dumps(whole | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            some = os.read(self._back, 1 << 20)
            assert some, "the browser has ended"
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def send(self, method: str, **given: Any) -> dict[str, Any]:
        return self.command(method, self._session, **given)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Make the screen as large as this. A mobile one has a touch screen."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.send("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def do(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + PATIENCE
        while not (found := self.do(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.do('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def press(self, key: str) -> None:
        """Press a key of the keyboard and let it go."""
        code = NAMED.get(key, ord(key.upper()[0]))
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def tap(self, selector: str) -> None:
        """Touch the middle of an element."""
        x, y = self.do(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def picture(self, path: Path) -> None:
        """Write what the screen shows as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    @property
    def complaints(self) -> list[str]:
        """What went wrong on the page, by its console: errors, refused loads, policies that were violated."""
        self.do("0")  # so that all events until now have been read
        entries = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        thrown = [e["params"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [str(entry["text"]) for entry in entries if entry["level"] == "error"] + [str(one) for one in thrown]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.do("0")
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [str(e["params"]["request"]["url"]) for e in sent]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    assert CHROMIUM is not None
    (out_read, out_write), (in_read, in_write) = os.pipe(), os.pipe()

    def wire() -> None:
        """The browser reads commands from 3 and writes to 4."""
        first, second = os.dup(in_read), os.dup(out_write)  # out of the way of 3 and 4
        os.dup2(first, 3)
        os.dup2(second, 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    options += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank"]
    with (profile.parent / f"{profile.name}.log").open("wb") as told:
        process = subprocess.Popen(
            [CHROMIUM, *options], stdout=told, stderr=told, preexec_fn=wire, close_fds=False, start_new_session=True
        )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(process, in_write, out_read)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(in_write)
        os.close(out_read)
