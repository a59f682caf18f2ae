"""Run the recipes of docs/contributing.md (`python -m tests.support.doors`), and count the files each touches.

Each recipe is applied to a copy of this checkout as the page shows it. Then its commands run there, and must print the
page's output. The number of changed files must stay within the page's bound. Rule pages, generated pages and tests do
not count, since they come with every addition.

A block of the page names its file and the position of the code. Without `after` or `before`, the file is new:

    ```python file=dslpar/linter/rules/parallel.py before="RULES = ("

In blocks that begin with `$`, the lines after a command are lines of its output, in order, perhaps with others between.
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
SECTION = re.compile(
    r"^## (.+?) \((?:the folder (\S+) and )?(\d+) files?(?: and its page)?\)\n(.*?)(?=^## |\Z)",
    re.MULTILINE | re.DOTALL,
)
BLOCK = re.compile(
    r'^```\w+ file=(\S+)(?: (after|before|in place of)="([^\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)
SHELL = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
IGNORED = re.compile(
    r"tests/|outputs/|docs/(config|import|plans)\.md|docs/llms\.txt|docs/(api|pictures|rules)/|.*/pages/\w+\.md"
    r"|.*__pycache__/|\.\w+_cache/|dslpar/cli/completion\.json"
)
"""Uncounted files: tests, rule pages (data, not code), and generated pages."""


class Edit(NamedTuple):
    """One block of a recipe: its file, position and code."""

    path: str
    how: str
    anchor: str
    text: str

    def apply(self, folder: Path) -> None:
        """Write the block below `folder`. The anchor must occur there once, within one line."""
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
    """A section of the page with a recipe."""

    name: str
    folder: str
    """A new folder whose files are not counted; "" if there is none."""
    bound: int
    edits: tuple[Edit, ...]
    commands: tuple[tuple[str, tuple[str, ...]], ...]
    """Commands, each with lines of its output."""


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of docs/contributing.md."""
    for name, folder, bound, text in SECTION.findall(PAGE.read_text(encoding="utf-8")):
        shells = "".join(SHELL.findall(text))
        parts = [part.splitlines() for part in re.split(r"^\$ ", shells, flags=re.MULTILINE) if part]
        yield Recipe(
            name,
            folder,
            int(bound),
            tuple(Edit(*groups) for groups in BLOCK.findall(text)),
            tuple((command, tuple(line for line in output if line)) for command, *output in parts),
        )


def carry_out(recipe: Recipe, folder: Path) -> list[str]:
    """Apply a recipe to a copy of the checkout in `folder`, run its commands, and return the files that it touched.

    Raises:
        AssertionError: an anchor is missing, or a command prints something else.
    """
    copy = folder / "checkout"
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    for edit in recipe.edits:
        edit.apply(copy)
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for command, expected in recipe.commands:
        words = shlex.split(command)
        words[:1] = {"dslpar": [sys.executable, "-m", "dslpar.cli"], "python": [sys.executable]}.get(
            words[0], words[:1]
        )
        ran = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True)
        printed = ran.stdout + ran.stderr
        # `dslpar lint` exits with 1 after the expected findings; programs and tests must exit with 0.
        assert command.startswith("dslpar ") or ran.returncode == 0, f"{command}: status {ran.returncode}:\n{printed}"
        for line in expected:
            assert line in printed, f"{command}: no line {line!r} in:\n{printed}"
    return sorted(name for name in touched(copy) if not (recipe.folder and name.startswith(f"{recipe.folder}/")))


def tracked() -> Iterator[str]:
    """Yield files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    yield from (name for name in listed.split("\0") if name and os.path.lexists(ROOT / name))


def touched(copy: Path) -> Iterator[str]:
    """Yield new and changed files of the copy, without tests and generated pages."""
    for file in copy.rglob("*"):
        name = file.relative_to(copy).as_posix()
        if file.is_file() and not IGNORED.match(name):
            here = ROOT / name
            if not here.exists() or here.read_bytes() != file.read_bytes():
                yield name


def main() -> int:
    """Print each recipe's files and bound. Return 1 if a recipe exceeds its bound, or does not work."""
    failed = False
    for recipe in recipes():
        files: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                files, verdict = carry_out(recipe, Path(folder)), "works"
            except AssertionError as error:
                verdict = f"FAILS: {error}"
        failed |= verdict != "works" or len(files) > recipe.bound
        there = f"{recipe.folder} and " if recipe.folder else ""
        print(f"{recipe.name:22} {len(files)} of {recipe.bound} files, {verdict}: {there}{', '.join(files)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
