"""A headless Chromium, driven through a pipe by the DevTools protocol; no package, no port, no network.

with Browser(folder) as browser:
    browser.open(page, scheme="dark")
    browser.evaluate("document.title"), browser.problems

https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")


def executable() -> str | None:
    """Return the path of this machine's browser, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A browser with one tab; its profile is in `folder`."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, timeout_s: float = 60) -> None:
        self.folder, self.size, self.timeout_s = folder, (width, height), timeout_s
        self.problems: list[str] = []
        """Errors of the console, blocked requests, exceptions of scripts."""
        self.requests: list[str] = []
        """Requested addresses."""
        self._rest, self._count, self._session, self._loaded = b"", 0, "", False

    def __enter__(self) -> Browser:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        found = executable()
        assert found is not None, "a browser on PATH"
        # Chromium reads its descriptor 3 and writes to 4. No sandbox: most containers cannot make one, and the pages
        # are the tests' own.
        shell = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
        profile = f"--user-data-dir={self.folder / 'profile'}"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, found, *options, *quiet, "--remote-debugging-pipe", profile, "about:blank"],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        width, height = self.size
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(self.timeout_s)
        os.close(self._in)

    def open(self, path: Path, scheme: str = "light", scripts: bool = True) -> None:
        """Load a file, for a viewer who prefers a colour scheme. `scripts`: whether JavaScript is on."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)
        self._ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.navigate(path.resolve().as_uri())

    def navigate(self, address: str) -> None:
        """Load an address."""
        self._loaded = False
        self._ask("Page.navigate", url=address)
        deadline = time.monotonic() + self.timeout_s
        while not self._loaded:
            self._handle(self._receive(deadline))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = f"const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        script = f"(() => {{{box}; return [box.x + box.width / 2, box.y + box.height / 2]}})()"
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self.evaluate(script)
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Press and release the mouse on an element."""
        self.point_at(selector)
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press and release a key by its name, such as "ArrowRight", and its code.

        modifiers: the sum of 1 for Alt, 2 for Control, 8 for Shift.
        """
        place = f"Key{key.upper()}" if key.isalpha() and len(key) == 1 else {".": "Period", " ": "Space"}.get(key, key)
        values = {"key": key, "code": place, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, **values)

    def type(self, text: str) -> None:
        """Type characters, one by one."""
        for each in text:
            self._ask("Input.dispatchKeyEvent", type="keyDown", key=each, text=each)
            self._ask("Input.dispatchKeyEvent", type="keyUp", key=each)

    def screenshot(self, whole: bool = True) -> bytes:
        """Return a PNG of the whole page, or of the visible part."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        number, deadline = self._send(method, arguments), time.monotonic() + self.timeout_s
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]  # type: ignore[no-any-return]
            self._handle(answer)

    def _send(self, method: str, arguments: dict[str, Any]) -> int:
        """Return the number that the answer will have."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._count

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer of the browser in {self.timeout_s} s"
            part = os.read(self._in, 1 << 16)
            assert part, f"the browser has ended, with status {self._process.poll()}"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def _handle(self, event: dict[str, Any]) -> None:
        method, values = event.get("method", ""), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Page.javascriptDialogOpening":
            self._send("Page.handleJavaScriptDialog", {"accept": True})  # such as "leave this page?"
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
