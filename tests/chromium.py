"""A headless Chromium that a test drives over a pipe: no package but the browser is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PLAYWRIGHT = ".cache/ms-playwright/chromium*/chrome-*/*"


def find_chromium() -> str | None:
    """The path of a Chromium, of the system or of playwright, or None."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    found = [p for p in Path.home().glob(_PLAYWRIGHT) if p.name in ("chrome", "headless_shell")]
    return str(sorted(found)[-1]) if found else None


class Chromium:
    """One page in one browser, over the DevTools protocol; use it in a `with` statement.

    `requests` are the addresses that pages asked for, `complaints` their console messages and
    exceptions.
    """

    def __init__(self, binary: str, profile: Path) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._buffer = b""
        self._last_id = 0
        command = [
            binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()

        def at_three_and_four() -> None:
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
            for place, end in enumerate(ends, start=3):
                os.dup2(end, place)

        self._process = subprocess.Popen(
            command,
            pass_fds=(3, 4),
            preexec_fn=at_three_and_four,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        """Send a command and return its result; events on the way are taken."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last_id:
            self._take(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool, phone: bool) -> None:
        """Show a page as a screen of that size would, in light or dark, until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.call("Page.navigate", url=page.resolve().as_uri())
        while (event := self._receive()).get("method") != "Page.loadEventFired":
            self._take(event)

    def value(self, expression: str):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        image = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1}
        )
        path.write_bytes(base64.b64decode(image["data"]))

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _receive(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has exited")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _take(self, event) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(event["params"]))
