"""A headless Chromium for tests of pages, driven over the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_STARTED = re.compile(r"started successfully on port (\d+)")


def require_chromium() -> None:
    """Skip the test where Debian's Chromium and its driver are not installed."""
    if shutil.which("chromedriver") is None or shutil.which("chromium") is None:
        pytest.skip("needs Chromium: scripts/install_browser.sh")


class Browser:
    """One session of one tab."""

    def __init__(self, driver: str, session: str) -> None:
        self._url = f"{driver}/session/{session}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return call(method, self._url + path, body)

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns. It may use `arguments`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": arguments})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The value that a script gives its last argument, a function."""
        return self._call("POST", "/execute/async", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def wait(self, script: str, timeout_s: float = 20.0) -> Any:
        """The value of a script once it is true."""
        end = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}; the page shows: {self.text('body')[:2000]}")
            time.sleep(0.1)
        return value

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in CSS pixels, also below what a window can have."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def prefer(self, scheme: str) -> None:
        """Have pages see a user who prefers `dark` or `light`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def screenshot(self, path: Path) -> None:
        """Write what is visible as a PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def log(self) -> list[str]:
        """What the console has shown since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]


def call(method: str, url: str, body: Any = None) -> Any:
    """The value in the answer of the driver. Raises `RuntimeError` with what it says of a failure."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode(errors="replace")[:2000]) from error


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in this folder."""
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        port = next(match[1] for line in driver.stdout if (match := _STARTED.search(line)))
        url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        options = {"args": [*arguments, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        try:
            session = call("POST", f"{url}/session", {"capabilities": wanted})["sessionId"]
            try:
                yield Browser(url, session)
            finally:
                call("DELETE", f"{url}/session/{session}")
        finally:
            driver.terminate()
