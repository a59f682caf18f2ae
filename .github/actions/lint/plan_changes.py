"""Print a Markdown table: memory and time of a step before and after, of each config for which they differ.

    python plan_changes.py BASE CONFIG_FOLDER [flags of dslpar plan ...]

BASE is a commit of the repository of this folder; "before" is its merge base with HEAD, "after" the files of this
folder. A config is planned on both sides if a file that it consists of (itself and its imports) has changed. Plans
also depend on other files, such as a model's config.json: if any other file than configs in Python and Markdown has
changed, every config is planned. Configs with equal numbers are left out, and nothing is printed without a difference.
It needs git and dslpar.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dslpar.linter.check import load

GIB = 1 << 30


def main(base: str, folder: str, *flags: str) -> None:
    """Print the table of a folder's configs."""
    before = _git("merge-base", base, "HEAD")
    top = Path(_git("rev-parse", "--show-toplevel")).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary).resolve() / "before"
        _git("worktree", "add", "--detach", str(old), before)
        try:
            there = {side: _configs(side, folder) for side in (old, top)}
            names = _to_plan(there, old, top, before)
            rows = [_row(name, old, top, flags) for name in names]
        finally:
            _git("worktree", "remove", "--force", str(old))
    if changed := [row for row in rows if row]:
        print("| config | memory of the fullest rank | time per step |\n| --- | --- | --- |")
        print("\n".join(changed))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def _configs(side: Path, folder: str) -> set[str]:
    """Return the configs of a folder, as lint finds them, by path from `side`."""
    if not (side / folder).exists():
        return set()
    command = [sys.executable, "-m", "dslpar", "lint", folder, "--show-files"]
    shown = subprocess.run(command, cwd=side, capture_output=True, text=True).stdout
    return {line for line in shown.splitlines() if (side / line).is_file()}


def _to_plan(there: dict[Path, set[str]], old: Path, new: Path, before: str) -> list[str]:
    """Return the configs of either side whose plans may differ."""
    names = sorted(there[old] | there[new])
    parts = {name: _parts(old, name) | _parts(new, name) for name in names}
    changed = {name for name in _git("diff", "--name-only", "--no-renames", "-z", before).split("\0") if name}
    changed = {name for name in changed if not name.endswith(".md")}
    python = {part for each in parts.values() for part in each if part.endswith(".py")}
    if changed - python:
        return names
    return [name for name in names if changed & parts[name]]


def _parts(side: Path, name: str) -> set[str]:
    """Return the files that a config consists of, by path from `side`: itself and what it imports."""
    if not (side / name).is_file():
        return {name}
    sources = load(str(side / name)).sources
    paths = (Path(path).resolve() for path in sources)
    return {name, *(path.relative_to(side).as_posix() for path in paths if path.is_relative_to(side))}


def _row(name: str, old: Path, new: Path, flags: tuple[str, ...]) -> str:
    """Return a config's row; empty if nothing differs."""
    before, after = _plan(old, name, flags), _plan(new, name, flags)
    if before == after:
        return ""
    memory = _change(before, after, lambda plan: plan["binding"]["bytes"] / GIB, "{:.1f} GiB")
    time = _change(before, after, lambda plan: plan["step_s"], "{:.3g} s")
    fits = after if isinstance(after, str) else after["verdict"]
    mark = "" if fits == "fits" else f" ({fits})"
    return f"| `{name}`{mark} | {memory} | {time} |"


def _plan(side: Path, name: str, flags: tuple[str, ...]) -> dict[str, Any] | str:
    """Return what `dslpar plan` forecasts, or why it does not."""
    if not (side / name).is_file():
        return "no such config"
    command = [sys.executable, "-m", "dslpar", "plan", name, "--format", "json", *flags]
    made = subprocess.run(command, cwd=side, capture_output=True, text=True)
    if not made.stdout.startswith("{"):
        return "errors" if made.returncode == 1 else "no forecast"
    plan = json.loads(made.stdout)
    return {key: plan[key] for key in ("verdict", "binding", "step_s")}


def _change(before: dict[str, Any] | str, after: dict[str, Any] | str, of: Callable[[Any], float], form: str) -> str:
    """Return "1.0 GiB -> 1.5 GiB (+50.0 %)"; a side without a forecast is a dash."""
    one, other = (None if isinstance(side, str) else of(side) for side in (before, after))
    texts = ["-" if value is None else form.format(value) for value in (one, other)]
    percent = f" ({100 * (other / one - 1):+.1f} %)" if one and other is not None else ""
    return " -> ".join(texts) + percent


if __name__ == "__main__":
    main(*sys.argv[1:])
