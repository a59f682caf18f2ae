"""A real VS Code with the extension of editors/vscode, in a headless Chromium, driven by keys as an author types them.

with VSCode(folder, home, package) as editor:
    editor.open("cfg.py")
    editor.wait(lambda: editor.problems(), "findings")
    editor.at(3, 7)
    editor.act("did you mean")                  # the quick fix with this in its title
    editor.text("cfg.py")                       # each change is saved at once

The editor is code-server, which serves VS Code to a browser and runs extensions beside the files: `make vscode-check`
installs it. The marketplace cannot be reached, so no other extension runs; of the Python extension's API only the types
are checked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from tests.support.chromium import Browser, executable
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

CODE_SERVER = ROOT / "build" / "code-server"
_MAIN = "node_modules/code-server/out/node/entry.js"
_SETTINGS: Mapping[str, object] = {
    "workbench.startupEditor": "none",
    "workbench.colorTheme": "Default Light Modern",
    "workbench.activityBar.location": "hidden",
    "workbench.layoutControl.enabled": False,
    "window.commandCenter": False,
    "window.menuBarVisibility": "hidden",
    "breadcrumbs.enabled": False,
    "editor.minimap.enabled": False,
    "files.autoSave": "afterDelay",
    "files.autoSaveDelay": 100,
    "git.enabled": False,
    "extensions.ignoreRecommendations": True,
    "telemetry.telemetryLevel": "off",
    "remote.autoForwardPorts": False,
}
_WAIT_S = 60
_KEYS = {"Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowRight": 39, "ArrowDown": 40, "F1": 112, "F2": 113}
_MODIFIERS = {"Alt": 1, "Ctrl": 2, "Shift": 8}
_SUGGESTIONS = ".suggest-widget.visible .monaco-list-row"
_ACTIONS = ".action-widget .monaco-list-row.action"
_PALETTE = ".quick-input-widget .monaco-list-row"


def lacks() -> str:
    """Return what this machine lacks for these tests; empty if nothing."""
    if shutil.which("npm") is None:
        return "no npm on PATH"
    if executable() is None:
        return "no Chromium on PATH (Debian: apt-get install chromium)"
    if not (CODE_SERVER / ".complete").exists():
        return "no VS Code in build/code-server (make vscode-check)"
    return ""


class VSCode:
    """An editor with one folder; its settings, extensions and profile are below `home`."""

    def __init__(self, folder: Path, home: Path, package: Path, width: int = 900, height: int = 600) -> None:
        self.folder, self.home, self.package = folder, home, package
        self.browser = Browser(home / "browser", width, height)

    def __enter__(self) -> VSCode:
        bin = self.home / "bin"
        bin.mkdir(parents=True)
        (bin / "dslpar").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dslpar "$@"\n')
        (bin / "dslpar").chmod(0o755)
        settings = self.home / "data" / "User" / "settings.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps(_SETTINGS))
        # VS Code asks a login shell for the environment of its extensions.
        (self.home / ".bash_profile").write_text(f"export PATH={bin}:$PATH\n")
        env = {**os.environ, "HOME": str(self.home), "SHELL": "/bin/bash"}
        folders = ["--user-data-dir", str(self.home / "data"), "--extensions-dir", str(self.home / "extensions")]
        start = ["node", str(CODE_SERVER / _MAIN), "--config", str(self.home / "config.yaml"), *folders]
        installed = [*start, "--install-extension", str(self.package)]
        subprocess.run(installed, env=env, check=True, capture_output=True, timeout=300)
        log = self.home / "log.txt"
        quiet = ("--disable-telemetry", "--disable-update-check", "--disable-workspace-trust")
        serve = [*start, "--auth", "none", "--bind-addr", "127.0.0.1:0", *quiet]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                serve, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        listening = re.compile(r"HTTP server listening on http://([\d.:]+)/")
        wait_until(lambda: listening.search(log.read_text()), log.read_text)
        found = listening.search(log.read_text())
        assert found is not None
        self._host = found[1]
        self.browser.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.browser.__exit__()
        self._process.terminate()  # ends its own processes, and the servers that the extension has started
        self._process.wait(60)

    def open(self, name: str) -> None:
        """Load the window anew, with a file of the folder."""
        files = [["openFile", f"vscode-remote://{self._host}{self.folder / name}"]]
        self.browser.navigate(
            f"http://{self._host}/?folder={quote(str(self.folder))}&payload={quote(json.dumps(files))}"
        )
        self.wait(lambda: self.shown(".monaco-editor .view-line"), "text")

    def wait(self, met: Callable[[], object], what: str) -> None:
        """Wait until something holds."""
        # Not `wait_until`: an editor always makes some progress.
        deadline = time.monotonic() + _WAIT_S
        while not met():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what}; a picture is in {self.picture(self.home / 'failure.png')}")
            time.sleep(0.05)

    def shown(self, selector: str) -> list[str]:
        """Return the texts of all visible elements that a selector of CSS chooses."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        texts = f"{found}.filter((each) => each.getClientRects().length).map((each) => each.innerText)"
        return [each.replace("\xa0", " ").replace("\u200a", " ") for each in self.browser.evaluate(texts)]

    def focused(self) -> str:
        """Return the classes of the element that takes the keys."""
        return str(self.browser.evaluate("document.activeElement.className"))

    def text(self, name: str) -> str:
        """Return the text of a file, which the editor saves."""
        return (self.folder / name).read_text()

    def becomes(self, name: str, text: str) -> None:
        """Wait until a file has a text."""
        self.wait(lambda: self.text(name) == text, f"{text!r} but {self.text(name)!r}")

    def press(self, *chords: str) -> None:
        """Press keys: `Enter`, `Ctrl+.`."""
        for chord in chords:
            *held, key = chord.split("+")
            code = _KEYS.get(key) or {".": 190, " ": 32}.get(key) or ord(key.upper())
            self.browser.press(key, code, sum(_MODIFIERS[each] for each in held))

    def type(self, text: str) -> None:
        """Type a text where the cursor is."""
        self.browser.type(text)

    def command(self, title: str) -> None:
        """Run a command of the palette."""
        self.press("F1")
        self.wait(lambda: self.shown(_PALETTE), "palette")
        self.type(title)
        self.wait(lambda: any(title in row for row in self.shown(f"{_PALETTE}.focused")), f"command {title!r}")
        self.press("Enter")
        self.wait(lambda: title not in "".join(self.shown(_PALETTE)), "end of the palette")

    def at(self, line: int, column: int) -> None:
        """Put the cursor to a line and column, both from 1."""
        self.press("Ctrl+G")
        self.wait(lambda: self.shown(".quick-input-widget"), "prompt for a line")
        self.type(f"{line}:{column}")
        self.wait(lambda: f"line {line}" in "".join(self.shown(_PALETTE)), "line")
        self.press("Enter")
        self.wait(lambda: f"Ln {line}, Col {column}" in "".join(self.shown(".statusbar")), "cursor")

    def actions(self) -> list[str]:
        """Open the quick fixes at the cursor, and return their titles."""
        # VS Code drops its question if the file is saved meanwhile, and says that there are none.
        answered = f"{_ACTIONS}, .monaco-editor-overlaymessage"

        def asked() -> bool:
            self.press("Escape")
            self.wait(lambda: not self.shown(answered), "end of the last answer")
            self.press("Ctrl+.")
            self.wait(lambda: self.shown(answered), "answer")
            return bool(self.shown(_ACTIONS))

        self.wait(asked, "quick fixes")
        return self.shown(_ACTIONS)

    def act(self, title: str) -> None:
        """Choose the quick fix with this in its title."""
        titles = self.actions()
        at = next(index for index, each in enumerate(titles) if title in each)
        self.press(*["ArrowDown"] * at)
        self.wait(lambda: title in "".join(self.shown(f"{_ACTIONS}.focused")), f"choice of {title!r}")
        self.press("Enter")
        self.wait(lambda: not self.shown(_ACTIONS), "end of the quick fixes")

    def suggestions(self) -> list[str]:
        """Return the labels of the completions that are shown now, in their order."""
        return self.shown(f"{_SUGGESTIONS} .label-name")

    def follow(self, what: str) -> None:
        """Wait for the menu of completions; a slow editor drops a request for it: then ask again."""
        asked = time.monotonic()

        def is_open() -> bool:
            nonlocal asked
            if self.shown(".suggest-widget.visible"):
                return True
            if time.monotonic() > asked + 5:
                self.press("Ctrl+ ")
                asked = time.monotonic()
            return False

        self.wait(is_open, what)

    def complete(self, label: str) -> None:
        """Choose a completion; the list is open already, or opens as an author asks for it."""
        if not self.suggestions():
            self.press("Ctrl+ ")
        self.wait(lambda: label in self.suggestions(), f"completion {label!r} in {self.suggestions()}")
        at = self.suggestions().index(label)
        self.press(*["ArrowDown"] * at)
        self.wait(lambda: self.shown(f"{_SUGGESTIONS}.focused .label-name") == [label], f"choice of {label!r}")
        self.press("Enter")
        self.wait(lambda: label not in self.suggestions(), "end of the completion")

    def problems(self) -> list[str]:
        """Return the rows of the panel of problems; it is open."""
        return self.shown(".markers-panel .marker-message-line.details-container")

    def notifications(self) -> list[str]:
        """Return the texts of all notifications."""
        return self.shown(".notification-toast .notification-list-item-message")

    def picture(self, path: Path) -> Path:
        """Write what is seen as a PNG."""
        time.sleep(0.5)  # the cursor's and the lists' animations
        path.write_bytes(self.browser.screenshot(whole=False))
        return path

    def settings(self, values: Mapping[str, object]) -> None:
        """Write the folder's own settings."""
        path = self.folder / ".vscode" / "settings.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values))
