"""A session in Neovim: an empty file becomes a legal config for 64 GPUs, by completions, actions and numbers alone.

The author chooses every name from a menu. What they type else are the numbers of the model, the `#` that begins a
comment, commas, and the keys that move the cursor or leave a mode.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.neovim import Neovim, version

WORLD = 64
MODEL = (("num_layers", 32), ("hidden_size", 4096), ("num_heads", 4), ("vocab_size", 32000), ("max_seq_len", 4096))
TEXT = """\
# dslpar: world-size=64 device=h100-80g
model = dict(
    num_layers=32,
    hidden_size=4096,
    num_heads=8,
    vocab_size=32000,
    max_seq_len=4096,
    type='GPT',
)
parallel = dict(
    pipeline=2,
    tensor=dict(size=8, mode='1d'),
)
"""


class Moment(NamedTuple):
    """A moment of the session that a picture shows."""

    on_screen: str
    """A text that is on the screen by then."""
    description: str


MOMENTS = {
    "keys": Moment("num_heads", "Menu of the keys of model, each with its type"),
    "sizes": Moment("legal on 64 ranks", "Menu of the numbers of stages that are legal on 64 ranks"),
    "finding": Moment("num_heads 4", "A finding beside its line: 4 heads on 8 tensor ranks"),
    "fixes": Moment("Type number", "Menu of the actions on the finding: two fixes, and the page of the rule"),
    "layout": Moment("GiB", "The finished config; behind parallel stand the layout, its memory and the time of a step"),
}
LINES = """
vim.cmd('filetype indent off')
vim.o.autoindent, vim.o.ruler, vim.o.showmode = true, false, false
vim.o.completeopt = 'menu'
"""
"""Settings of the author: plain indentation, so that keys on their own lines are typed as they will stand."""


def write_config(editor: Neovim) -> None:
    """Write TEXT into the empty file of an editor, and save it."""
    author = _Author(editor)
    author.type("i", "# ")
    author.complete("dslpar: ")
    author.type(f"{WORLD} ")
    author.complete("device=")
    author.complete("h100-80g")
    author.type("<CR>", "<Esc>", "S")  # `S`: without the `#` with which Neovim goes on
    author.section("model = ")
    for at, (key, number) in enumerate(MODEL):
        author.complete(f"{key}=", "keys" if at == 0 else "")
        author.type(f"{number},", "<CR>")
    author.complete("type=")
    author.complete("'GPT'")
    author.type(",", "<Esc>", "G", "o")
    author.section("parallel = ")
    author.complete("pipeline=")
    author.complete("2", "sizes")
    author.type(",", "<CR>")
    author.complete("tensor=")
    author.open("dict()")
    author.complete("size=")
    author.complete("8")
    author.type(", ")
    author.complete("mode=")
    author.complete("'1d'")
    author.type("<Right>", ",", "<Esc>")
    editor.wait(lambda: "TEN201" in [code for code, _ in editor.diagnostics()], "finding about 4 heads")
    author.type("/num_heads=<CR>")
    editor.moment("finding")
    editor.act("num_heads=8", "fixes")
    editor.wait(lambda: "GiB" in str(editor.lua("vim.lsp.codelens.get(0)")), "layout above parallel")
    author.type("<Esc>", ":w<CR>")
    editor.moment("layout")


_MOVES = frozenset(["i", "S", "G", "o", "O", "<CR>", "<Esc>", "<Left>", "<Right>", "/num_heads=<CR>", ":w<CR>"])
"""Keys that begin a line, move the cursor, save, or change the mode."""


class _Author:
    """Types, and may type no name: those are completed."""

    def __init__(self, editor: Neovim) -> None:
        self._editor = editor
        self._goes_between = version() >= (0, 11)

    def type(self, *keys: str) -> None:
        for each in keys:
            assert each in _MOVES or re.fullmatch(r"[\d\s,#]+", each), f"{each!r} is neither a number nor a move"
        self._editor.type("".join(keys))

    def complete(self, item: str, moment: str = "") -> None:
        self._editor.complete(item, moment)

    def section(self, item: str) -> None:
        """Complete a section, and open its brackets over several lines."""
        self.open(item)
        self.type("<CR>", "<Esc>", "O", "    ")

    def open(self, item: str) -> None:
        """Complete an item with brackets, and go between them: Neovim 0.11 is there already."""
        self.complete(item)
        if not self._goes_between:
            self.type("<Left>")
