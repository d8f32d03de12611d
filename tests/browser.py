"""Control a headless Chromium over its debugging pipe, and use JavaScript to read the visible content of a page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DEADLINE_S = 60.0


def find_browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of the browser. Commands and events are JSON, each followed by a zero byte (Chrome DevTools Protocol)."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._events = os.fdopen(events, "rb")
        self._sent = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and requests that failed or were refused."""
        self.requests: list[str] = []
        """The addresses that were requested, without data URLs."""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, path: Path, width: int, *, scheme: str = "light") -> None:
        """Open the page in a window of ``width`` CSS pixels, "light" or "dark", and wait until it has loaded."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self._send("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._receive()

    def evaluate(self, script: str) -> Any:
        """Return the value of the JavaScript expression, as JSON. Raise ``RuntimeError`` if it throws."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def close(self) -> None:
        """Close the browser."""
        self._session = None
        self._send("Browser.close")

    def _send(self, method: str, **params: Any) -> Any:
        self._sent += 1
        session = {} if self._session is None else {"sessionId": self._session}
        command = {"id": self._sent, "method": method, "params": params, **session}
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != self._sent:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._events.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            text += byte
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.requests.append(params["request"]["url"])
        elif (
            (event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
            or (event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"))
            or event in ("Runtime.exceptionThrown", "Network.loadingFailed")
        ):
            self.complaints.append(str(params))


@contextmanager
def browsing(browser: str) -> Iterator[Page]:
    """Start the browser and yield a page. A browser that hangs is killed, and calls to it raise ``RuntimeError``."""
    read_commands, commands = os.pipe()
    events, write_events = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads descriptor 3 and writes descriptor 4. bash is used, because a POSIX shell need not support
        # descriptors of two digits.
        shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_events}'
        process = subprocess.Popen(
            ["bash", "-c", shell, browser, *options, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            pass_fds=(read_commands, write_events),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_events)
        killer = threading.Timer(_DEADLINE_S, process.kill)
        killer.start()
        try:
            page = Page(commands, events)
            yield page
            with suppress(RuntimeError, OSError):
                page.close()
            process.wait()
        finally:
            killer.cancel()
            process.kill()
            process.wait()
