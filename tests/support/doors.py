"""How many files an addition touches: `python -m tests.support.doors` carries out the recipes of docs/contributing.md.

Each recipe is applied to a copy of this checkout, as the page shows it; then its commands run there, and must print
what the page says they print. The files that changed are counted against the bound that the page gives. Generated pages
are not counted, nor are tests: they come with every addition.

A block of the page names its file, and where in it the code goes; without `after` or `before` the file is new:

    ```python file=dslpar/linter/rules/parallel.py before="RULES = ("

Of the blocks that begin with `$`, each line after a command is a line of its output; others may stand between them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "contributing.md"
SECTION = re.compile(r"^## (.+?) \((\d+) files?\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r'^```\w+ file=(\S+)(?: (after|before|in place of)="([^\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
IGNORED = re.compile(r"tests/|docs/(config|import)\.md|docs/rules/")
"""Not counted: tests, and pages that are generated."""


class Edit(NamedTuple):
    """One block of a recipe: what is written into which file."""

    path: str
    how: str
    anchor: str
    text: str

    def apply(self, folder: Path) -> None:
        """Write it below `folder`; the anchor must stand there once, in one line."""
        file = folder / self.path
        if not self.anchor:
            assert not file.exists(), f"{self.path} is there already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text, encoding="utf-8")
            return
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [number for number, line in enumerate(lines) if self.anchor in line]
        assert len(found) == 1, f"{self.path}: {self.anchor!r} stands in {len(found)} lines"
        start = found[0] + (self.how == "after")
        lines[start : start + (self.how == "in place of")] = [self.text]
        file.write_text("".join(lines), encoding="utf-8")


class Recipe(NamedTuple):
    """A section of the page."""

    name: str
    bound: int
    edits: tuple[Edit, ...]
    commands: tuple[tuple[str, tuple[str, ...]], ...]
    """Each with lines of its output."""

    @property
    def files(self) -> list[str]:
        """The files that count, each once."""
        return sorted({edit.path for edit in self.edits if not IGNORED.match(edit.path)})


def recipes() -> Iterator[Recipe]:
    """The recipes of docs/contributing.md."""
    for name, bound, text in SECTION.findall(PAGE.read_text(encoding="utf-8")):
        shells = "".join(SHELL.findall(text))
        parts = [part.splitlines() for part in re.split(r"^\$ ", shells, flags=re.MULTILINE) if part]
        yield Recipe(
            name,
            int(bound),
            tuple(Edit(*groups) for groups in BLOCK.findall(text)),
            tuple((command, tuple(line for line in output if line)) for command, *output in parts),
        )


def carry_out(recipe: Recipe, folder: Path) -> None:
    """Apply a recipe to a copy of the checkout in `folder`, and run its commands there. Raises AssertionError."""
    copy = folder / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target, follow_symlinks=False)
    for edit in recipe.edits:
        edit.apply(copy)
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for command, expected in recipe.commands:
        words = shlex.split(command)
        words[:1] = {"dslpar": [sys.executable, "-m", "dslpar.cli"], "python": [sys.executable]}.get(
            words[0], words[:1]
        )
        ran = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True, timeout=120)
        printed = ran.stdout + ran.stderr
        for line in expected:
            assert line in printed, f"{command}: no line {line!r} in:\n{printed}"


def main() -> int:
    """Print each recipe's files against its bound; 1 if one has too many, or does not work."""
    failed = False
    for recipe in recipes():
        with tempfile.TemporaryDirectory() as folder:
            try:
                carry_out(recipe, Path(folder))
                verdict = "works"
            except AssertionError as error:
                verdict = f"FAILS: {error}"
        failed |= verdict != "works" or len(recipe.files) > recipe.bound
        print(f"{recipe.name:28} {len(recipe.files)} of {recipe.bound} files, {verdict}: {', '.join(recipe.files)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
