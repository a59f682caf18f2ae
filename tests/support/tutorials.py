"""Pages of docs/tutorials: their blocks of code, and the commands with their expected output.

A block whose info string names a file, as in

    ```python mine.py

is that file. A `console` block has commands, which begin with `$`, each followed by lines of its output. In such a
line, `...` matches anything. `# exit status N` gives the expected exit status. There are no other blocks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    name: str
    text: str
    line: int


class Command(NamedTuple):
    """A command of a console block."""

    text: str
    status: int
    expected: list[str]
    """Lines that it must print."""

    def check(self, status: int, printed: str, where: str) -> None:
        """Fail on another status, or on a missing line."""
        assert status == self.status, f"{where}: {self.text}: status {status}:\n{printed}"
        for each in self.expected:
            pattern = ".*".join(map(re.escape, each.strip().split("...")))
            assert re.search(pattern, printed), f"{where}: {self.text}: no line {each!r} in:\n{printed}"


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*) ?(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(*each.groups(), line=text[: each.start()].count("\n") + 1) for each in found]


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE):
        if part:
            line, *output = part.splitlines()
            command, _, wanted = line.partition("  # exit status ")
            expected = [each for each in output if each.strip()]
            found.append(Command(command.partition("  #")[0].strip(), int(wanted or 0), expected))
    return found
