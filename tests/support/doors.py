"""How many files an addition touches: `python -m tests.support.doors` carries out the recipes of docs/contributing.md.

Each recipe is applied to a copy of this checkout, as the page shows it; then its commands run there, and must print
what the page says they print. The files that changed are counted against the bound that the page gives. Pages of rules
and generated ones are not counted, nor are tests: they come with every addition.

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
SECTION = re.compile(
    r"^## (.+?) \((?:the folder (\S+) and )?(\d+) files?(?: and its page)?\)\n(.*?)(?=^## |\Z)",
    re.MULTILINE | re.DOTALL,
)
BLOCK = re.compile(
    r'^```\w+ file=(\S+)(?: (after|before|in place of)="([^\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)
SHELL = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
IGNORED = re.compile(
    r"tests/|outputs/|docs/(config|import)\.md|docs/rules/|.*/pages/\w+\.md|.*__pycache__/|\.\w+_cache/"
)
"""Not counted: tests, pages of rules (data, not code), and pages that are generated."""


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
    folder: str
    """One that is new, and whose files are not counted; empty: there is none."""
    bound: int
    edits: tuple[Edit, ...]
    commands: tuple[tuple[str, tuple[str, ...]], ...]
    """Each with lines of its output."""


def recipes() -> Iterator[Recipe]:
    """The recipes of docs/contributing.md."""
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
    """Apply a recipe to a copy of the checkout in `folder`, and run its commands there; the files that it touched.

    Raises:
        AssertionError: an anchor is gone, or a command prints something else.
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
        # `dslpar lint` has found what it should where it exits with 1; a program or a test must end well.
        assert command.startswith("dslpar ") or ran.returncode == 0, f"{command}: status {ran.returncode}:\n{printed}"
        for line in expected:
            assert line in printed, f"{command}: no line {line!r} in:\n{printed}"
    return sorted(name for name in touched(copy) if not (recipe.folder and name.startswith(f"{recipe.folder}/")))


def tracked() -> Iterator[str]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    yield from (name for name in listed.split("\0") if name and os.path.lexists(ROOT / name))


def touched(copy: Path) -> Iterator[str]:
    """Files of the copy that are new or other than here; not tests, nor pages that are generated."""
    for file in copy.rglob("*"):
        name = file.relative_to(copy).as_posix()
        if file.is_file() and not IGNORED.match(name):
            here = ROOT / name
            if not here.exists() or here.read_bytes() != file.read_bytes():
                yield name


def main() -> int:
    """Print each recipe's files against its bound; 1 if one has too many, or does not work."""
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
