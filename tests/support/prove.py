"""Run the parts of `make prove`, and continue where the last run stopped.

    python -m tests.support.prove                  # parts that were green at the same content are not run again
    python -m tests.support.prove --fresh          # all parts
    python -m tests.support.prove --part kills     # one part
    python -m tests.support.prove --list

The content of a part is everything its result depends on: the product's sources, its test files with all their imports
from tests/, benchmarks/ and tools/, the pages that tests read, and the versions of Python and all installed packages.
Docstrings and comments belong to it only where tests read them (`Part.texts`).
Results are in build/prove.json, written after each part. A part is recorded as green only if its content was the same
before and after.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT

PRODUCT = ("dslpar", "layers", "configs", "examples", "hostfiles", "train.py", "setup.cfg", "pyproject.toml")
"""Read by every part."""
PAGES = (
    "docs",
    "editors/emacs.md",
    "editors/helix.md",
    "editors/neovim.md",
    "editors/vscode/package-lock.json",
    "editors/vscode/package.json",
    "editors/vscode/src",
    "editors/zed.md",
    "README.md",
    "Makefile",
    ".ci",
    ".github",
    ".importlinter",
    "constraints.txt",
    "benchmarks",
    "tools",
)
"""Read by parts that test pages and tools."""
SHARED = ("tests/conftest.py", "tests/support")
RECORD = ROOT / "build" / "prove.json"


SELECTS = (
    "-k",
    "-m",
    "--lf",
    "--last-failed",
    "--deselect",
    "--ignore",
    "--sw",
    "--stepwise",
    "--collect-only",
    "--co",
)
"""pytest options that may select fewer tests: such a run is not recorded."""


class Part(NamedTuple):
    """Some minutes of tests, at most an hour on two cores."""

    paths: tuple[str, ...]
    without: tuple[str, ...] = ()
    """Folders below `paths` that belong to other parts."""
    pages: tuple[str, ...] = ()
    """Files and folders besides PRODUCT that its tests read."""
    texts: bool = False
    """Whether its tests read the docstrings, comments or line numbers of Python files."""


def _below(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names.split())


PARTS: Mapping[str, Part] = {
    "unit": Part(("tests/unit",), pages=PAGES, texts=True),
    "layers": Part(("tests/distributed/layers",)),
    "policies": Part(
        ("tests/distributed/policies",),
        pages=_below("docs", "derived_policies.md porting.md transformers.md transformers_classes.md"),
    ),
    "distributed": Part(
        ("tests/distributed",),
        _below("tests/distributed", "layers policies"),
        pages=_below("docs", "plans.md porting.md transformers.md"),
    ),
    "layouts": Part(("tests/properties/layouts",)),
    "invariance": Part(("tests/properties/invariance",)),
    "families": Part(("tests/properties/families",)),
    "reshape": Part(("tests/properties/reshape",)),
    "schedules": Part(("tests/properties/schedules",)),
    "context": Part(("tests/properties/context_parallel",)),
    "oracle": Part(("tests/properties/oracle",), texts=True),
    "linter": Part(
        ("tests/properties",),
        _below("tests/properties", "context_parallel families invariance layouts oracle reshape schedules"),
        pages=PAGES,
        texts=True,
    ),
    "kills": Part(("tests/system/kills",)),
    "hosts": Part(("tests/system/two_hosts",), pages=PAGES, texts=True),
    "system": Part(("tests/system",), _below("tests/system", "kills two_hosts"), pages=PAGES, texts=True),
}
"""Together the parts are all of tests/."""


class Result(NamedTuple):
    """The result of a part."""

    content: str
    green: bool
    passed: int
    wall_s: float
    cpu_s: float


# ---- content ----


def content(part: Part, root: Path = ROOT) -> str:
    """Return a hash of everything that a part's result depends on."""
    own = [path for path in _files(root, part.paths) if not any(_is_below(path, root / out) for out in part.without)]
    named = (*PRODUCT, *SHARED, *part.pages)
    digest = hashlib.blake2b("\n".join(versions()).encode(), digest_size=16)
    for path in sorted({*own, *_files(root, named), *_imported(root, own)}):
        name, data = path.relative_to(root), path.read_bytes()
        is_code = path.suffix == ".py" and name.parts[0] not in ("configs", "examples")
        digest.update(f"{name}\0".encode() + (_code(data) if is_code and not part.texts else data) + b"\0")
    return digest.hexdigest()


@cache
def _code(source: bytes) -> bytes:
    """Return what Python runs of a file: without comments, docstrings, and the positions of its lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_docstring(each)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a string, such as the docstring of a function or of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def versions() -> list[str]:
    """Return the versions of Python and all installed packages."""
    return [platform.python_version(), *sorted({f"{one.name}=={one.version}" for one in distributions()})]


def _files(root: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in found if one.is_file() and "__pycache__" not in one.parts)


def _is_below(path: Path, folder: Path) -> bool:
    return folder in path.parents


def _imported(root: Path, files: Iterable[Path]) -> set[Path]:
    """Return the files from tests/, benchmarks/ and tools/ that these files import, directly or indirectly."""
    found, left = set[Path](), list(files)
    while left:
        path = left.pop()
        if path.suffix != ".py":
            continue
        for name in _imports(ast.parse(path.read_bytes())):
            for other in (root / f"{name}.py", root / name / "__init__.py"):
                if other.is_file() and other not in found:
                    found.add(other)
                    left.append(other)
    return found


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.replace(".", "/") for name in names if name.split(".")[0] in ("tests", "benchmarks", "tools"))


# ---- the record ----


class Record:
    """The last result of each part, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Result]:
        """Return the known results by part, or nothing if there is no file."""
        if not self.path.exists():
            return {}
        return {name: Result(**row) for name, row in json.loads(self.path.read_text()).items()}

    def write(self, name: str, result: Result) -> None:
        """Store a part's result in place of its last one."""
        rows: dict[str, Any] = {key: row._asdict() for key, row in (self.read() | {name: result}).items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unready = self.path.with_suffix(".part")
        unready.write_text(json.dumps(rows, indent=1) + "\n")
        unready.replace(self.path)

    def green(self, name: str, now: str) -> Result | None:
        """Return a part's result if it was green at this content."""
        known = self.read().get(name)
        return known if known and known.green and known.content == now else None


# ---- running ----


def run(name: str, part: Part, pytest_args: Sequence[str], folder: Path, root: Path = ROOT) -> Result:
    """Run a part's tests and return their result."""
    report, before, began = folder / f"{name}.xml", content(part, root), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    ignored = [f"--ignore={out}" for out in part.without]
    command = [sys.executable, "-m", "pytest", *pytest_args, "-m", "", f"--junitxml={report}", *part.paths, *ignored]
    process = subprocess.Popen(command, cwd=root)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    green = status == 0 and content(part, root) == before
    return Result(before, green, _passed(report), time.monotonic() - began, usage.ru_utime + usage.ru_stime)


def _passed(report: Path) -> int:
    if not report.exists():
        return 0
    counts = [suite.attrib for suite in ElementTree.parse(report).iter("testsuite")]
    return sum(int(one["tests"]) - sum(int(one[bad]) for bad in ("failures", "errors", "skipped")) for one in counts)


def prove(names: Iterable[str], record: Record, pytest_args: Sequence[str], fresh: bool = False) -> bool:
    """Run the parts that are not green in the record, print a table of all, and return whether all are green."""
    rows, all_green = [f"{'part':12} {'passed':>7} {'wall min':>9} {'CPU s':>7}"], True
    for name in names:
        known = None if fresh else record.green(name, content(PARTS[name]))
        if known:
            print(f"{name}: green at this content already; --fresh runs it again", flush=True)
            result = known
        else:
            result = run(name, PARTS[name], pytest_args, record.path.parent / "prove")
            if not any(word.startswith(SELECTS) or Path(word.partition("::")[0]).exists() for word in pytest_args):
                record.write(name, result)
        how = "from the record" if known else "run" if result.green else "run: RED"
        rows.append(f"{name:12} {result.passed:7} {result.wall_s / 60:9.1f} {result.cpu_s:7.0f}  {how}")
        all_green &= result.green
    print("\n".join(rows))
    return all_green


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts on the command line; return 1 if a part is red."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.prove", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--fresh", action="store_true", help="run green parts again")
    parser.add_argument("--list", action="store_true", help="print the parts")
    options, pytest_args = parser.parse_known_args(argv)
    names = [options.part] if options.part else list(PARTS)
    if options.list:
        for name in names:
            without = f" without {', '.join(PARTS[name].without)}" if PARTS[name].without else ""
            print(f"make prove PART={name:12} {' '.join(PARTS[name].paths)}{without}")
        return 0
    return 0 if prove(names, Record(RECORD), pytest_args, options.fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
