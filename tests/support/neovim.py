"""A real Neovim, with the lines of editors/neovim.md, driven by keys as an author types them.

with neovim(folder, "cfg.py") as editor:
    editor.wait(lambda: editor.diagnostics())
    editor.act("did you mean")                  # the code action with this in its title
    editor.type("Gozero = dict(")
    editor.complete("stage=")                   # Ctrl-X Ctrl-O, and the item that begins so

It has no screen, unless it gets a terminal: then menus are Neovim's own, and `moment` is called while they are open.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.paths import ROOT
from tests.support.waiting import wait_until

if TYPE_CHECKING:  # pyte, which it needs, is of the extra docs
    from tests.support.terminal import Terminal

NVIM = shutil.which("nvim")
LACKS = "no nvim on PATH (Debian: apt-get install neovim)"
_ANSWERS_S = 60
_CHOICE = """
vim.ui.select = function(items, _, done)
  _G.titles = vim.tbl_map(function(item) return (item.action or item[2]).title end, items)
  for at, title in ipairs(_G.titles) do
    if title:find(_G.wanted, 1, true) then return done(items[at], at) end
  end
  done(nil, nil)
end
"""
"""Chooses the action that a test wants; Neovim's own prompt would wait for a number. 0.10 names an item's parts."""


class Neovim:
    """A running editor with one file."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self.moment: Callable[[str], None] = lambda name: None
        """Called while something that has a name is on the screen."""

    def _ask(self, flag: str, what: str) -> str:
        assert NVIM is not None
        command = [NVIM, "--headless", "--server", self._socket, flag, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_S, check=True)
        return done.stdout + done.stderr

    def type(self, keys: str) -> None:
        """Type keys; `<CR>`, `<Esc>`, `<C-x>` as in Vim."""
        self._ask("--remote-send", keys)

    def lua(self, code: str) -> Any:
        """Return the value of an expression of Lua."""
        # Through a file: Neovim 0.7 cuts what --remote-expr prints at 1,025 bytes.
        written = f"{self._socket}.json"
        whole = f"vim.fn.writefile({{vim.json.encode({code})}}, {json.dumps(written)})"
        self._ask("--remote-expr", f"luaeval({json.dumps(whole)})")
        return json.loads(Path(written).read_text(encoding="utf-8"))

    def wait(self, met: Callable[[], object], what: str) -> None:
        """Wait until something holds."""
        wait_until(met, f"no {what}")

    @property
    def text(self) -> str:
        """The text in the editor."""
        return "\n".join(self.lua("vim.api.nvim_buf_get_lines(0, 0, -1, true)")) + "\n"

    def diagnostics(self) -> list[tuple[str, int]]:
        """Return the codes and lines, from 1, of what the editor shows."""
        return [(each["code"], each["lnum"] + 1) for each in self.lua("vim.diagnostic.get(0)")]

    def act(self, title: str, moment: str = "") -> list[str]:
        """Choose the action with this in its title; return the titles of all. Without a screen there is no moment."""
        before = self.text
        self.lua(f"(function() _G.wanted, _G.titles = {json.dumps(title)}, nil; return true end)()")
        self.type("<Esc>:lua vim.lsp.buf.code_action()<CR>")
        self.wait(lambda: self.lua("_G.titles or {}") and self.text != before, f"action {title!r}")
        return list(self.lua("_G.titles"))

    def complete(self, item: str, moment: str = "") -> None:
        """Complete the word before the cursor, in insert mode, with the item that begins so."""
        self.type("<C-x><C-o>")
        self.wait(lambda: self._items(), f"items that complete to {item!r}")
        words = self._items()
        # Neovim 0.11 lists labels, and inserts the text afterwards.
        labels = [index for index, word in enumerate(words) if word and item.strip("'").startswith(word)]
        at = next((index for index, word in enumerate(words) if word.startswith(item)), next(iter(labels), None))
        assert at is not None, f"no {item!r} among {words}"
        selected = self.lua("vim.fn.complete_info({'selected'}).selected")
        self.type("<C-n>" * (at - selected))
        if moment:
            self.moment(moment)
        self.type("<C-y>")
        self.wait(lambda: not self.lua("vim.fn.pumvisible()"), "end of the completion")

    def _items(self) -> list[str]:
        items = "vim.fn.complete_info({'items'}).items"
        return list(self.lua(f"vim.tbl_map(function(item) return item.word end, {items})"))


class NeovimOnScreen(Neovim):
    """A running editor with one file on a terminal."""

    def __init__(self, socket: str, terminal: Terminal) -> None:
        super().__init__(socket)
        self.terminal = terminal

    def act(self, title: str, moment: str = "") -> list[str]:
        """Choose the action with this in its title from Neovim's menu, by its number; return the titles of all."""
        before = self.text
        self.type("<Esc>:lua vim.lsp.buf.code_action()<CR>")
        self.terminal.wait("Type number and")
        titles = [found[1] for line in self.terminal.lines if (found := re.match(r"\d+: (.*)", line))]
        if moment:
            self.moment(moment)
        self.type(f"{next(number for number, each in enumerate(titles, 1) if title in each)}<CR>")
        self.wait(lambda: self.text != before, f"action {title!r}")
        return titles


def version() -> tuple[int, int]:
    """Return the version of the installed Neovim, such as (0, 7)."""
    assert NVIM is not None
    printed = subprocess.run([NVIM, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"NVIM v(\d+)\.(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def neovim(folder: Path, name: str, terminal: Terminal | None = None, more: str = "") -> Iterator[Neovim]:
    """Start an editor on a file of a folder, with nothing of the user's own settings but `more` lines of Lua."""
    assert NVIM is not None
    lines = re.findall(r"```lua\n(.*?)```", (ROOT / "editors" / "neovim.md").read_text(encoding="utf-8"), re.DOTALL)
    with tempfile.TemporaryDirectory() as home:
        bin = Path(home, "bin")
        bin.mkdir()
        server = bin / "dslpar"
        start = f'cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m dslpar "$@"'
        server.write_text(f"#!/bin/sh\n{start}\n")
        server.chmod(0o755)
        init = Path(home, "init.lua")
        init.write_text("\n".join([*lines, *([_CHOICE] if terminal is None else []), more]), encoding="utf-8")
        socket = str(Path(home, "socket"))
        env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "HOME": home}
        env |= {f"XDG_{kind}_HOME": home for kind in ("CONFIG", "STATE", "CACHE", "DATA")}
        command = [NVIM, "-n", "-u", str(init), "--listen", socket]
        if terminal is not None:
            # By its name alone, which the screen shows.
            start_in = f"cd {shlex.quote(str(folder))} && exec {shlex.join([*command, name])}"
            process = terminal.start(["sh", "-c", start_in], env)
        else:
            with open(Path(home, "log"), "wb") as log:
                process = subprocess.Popen(
                    [*command, "--headless", str(folder / name)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                )
        try:
            wait_until(lambda: Path(socket).exists(), "no socket of Neovim")
            editor = Neovim(socket) if terminal is None else NeovimOnScreen(socket, terminal)
            editor.wait(lambda: editor.lua("vim.bo.omnifunc ~= ''"), "server")
            yield editor
        finally:
            process.terminate()
            process.wait(timeout=_ANSWERS_S)
