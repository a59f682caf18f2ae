"""Project settings for all configs: the table `[tool.dslpar]` of a pyproject.toml.

    [tool.dslpar]
    select = ["CFG", "TEN"]                      # as the flags of `dslpar lint`
    ignore = ["PERF104"]
    exclude = ["experiments/old", "scratch_*.py"]
    configs = ["configs/*"]                      # files that are configs in an editor, whatever they define so far
    world-size = 64                              # or by path: {"configs/small/*" = 8, "*" = 64}
    trusted = ["my_pkg"]                         # packages that configs may call: dslpar.core.trust

    [tool.dslpar.per-file-ignores]
    "configs/debug_*.py" = ["PERF"]

The rules are ruff's. A config uses the nearest pyproject.toml with such a table, in its folder or above. Tables are not
merged. A pattern matches a path relative to the pyproject.toml, or a single file or folder name in that path. `*` also
matches `/`, and a pattern that matches a folder applies to everything below it. The command line takes precedence. An
unknown key is an error.

A file without the table is not parsed. The TOML parser is imported only for a file that has one, so that lint starts
without it.
"""

from __future__ import annotations

import argparse
import os.path
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding, Location
from dslpar.core.suggest import did_you_mean

FILE = "pyproject.toml"
_MAX_BYTES = 1 << 20


class Project(NamedTuple):
    """Settings of one pyproject.toml."""

    path: str
    """Path of the pyproject.toml."""
    select: tuple[str, ...] = ()
    """Rules that lint reports, by name, code or beginning of a code; empty for all."""
    ignore: tuple[str, ...] = ()
    """Rules that lint does not report, by name, code or beginning of a code."""
    per_file_ignores: Mapping[str, tuple[str, ...]] = {}
    """Codes that are not reported for files, by path pattern."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not configs."""
    configs: tuple[str, ...] = ()
    """Patterns of files that are configs in an editor, even if they define no section yet."""
    world_size: Mapping[str, int] = {}
    """Number of ranks by path pattern."""
    device: str = ""
    """The accelerator that `dslpar plan` forecasts for; lint and training do not read it."""
    trusted: tuple[str, ...] = ()
    """Packages, modules and classes that dslpar may import and call for configs."""

    def excludes(self, path: str) -> bool:
        """Return whether the project excludes a file or folder."""
        return matches(path, self.exclude, self.path)

    def claims(self, path: str) -> bool:
        """Return whether the project says that a file is a config."""
        return matches(path, self.configs, self.path)

    def ignored_in(self, path: str) -> list[str]:
        """Return the codes that per-file-ignores lists for a file."""
        rows = self.per_file_ignores.items()
        return [code for pattern, codes in rows if matches(path, (pattern,), self.path) for code in codes]

    def world_size_of(self, path: str) -> int | None:
        """Return the number of ranks for a config, from the longest pattern that matches it; None without a match."""
        fitting = [pattern for pattern in self.world_size if matches(path, (pattern,), self.path)]
        return self.world_size[max(fitting, key=len)] if fitting else None


def matches(path: str, patterns: tuple[str, ...], base: str = FILE) -> bool:
    """Return whether a pattern matches a path or one of its folders, by name or by path from `base`'s folder."""
    if not patterns:
        return False

    parts = os.path.relpath(os.path.abspath(path), os.path.dirname(os.path.abspath(base))).split(os.sep)
    ways = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    plain = [os.path.normpath(pattern).replace(os.sep, "/") for pattern in patterns]
    return any(fnmatchcase(way, pattern) for pattern in plain for way in (*ways, *parts))


def find_project(folder: str) -> Project | None:
    """Return the settings that apply in a folder: the nearest pyproject.toml with `[tool.dslpar]`, there or above.

    Raises:
        DslparError: the table has unknown keys or invalid values, or cannot be parsed.
    """
    folder = os.path.abspath(folder)
    while True:
        path = os.path.join(folder, FILE)
        project = _read(path) if os.path.isfile(path) else None
        if project is not None or os.path.dirname(folder) == folder:
            return project
        folder = os.path.dirname(folder)


def trusted_packages(given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the packages that configs may call: the given ones, and those that the working folder's project trusts.

    A config's own folder is not read, since a file next to a config must not vouch for it.

    Raises:
        DslparError: as `find_project`.
    """
    project = find_project(os.getcwd())
    return (*given, *(project.trusted if project else ()))


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the flag --trust, a list of packages like `trusted`."""
    help = "let configs call these packages, in addition to those trusted in pyproject.toml"
    parser.add_argument("--trust", action="extend", type=parse_packages, default=[], metavar="PACKAGES", help=help)


def parse_packages(text: str) -> list[str]:
    """Parse the value of --trust, a comma-separated list. Raises ArgumentTypeError if a name is not a package's."""
    names = [name.strip() for name in text.split(",")]
    if not all(map(_is_package, names)):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a package")
    return names


def _read(path: str) -> Project | None:
    """Return the settings of a pyproject.toml; None if it has no `[tool.dslpar]` or cannot be read."""
    shown = os.path.relpath(path)
    path = shown if len(shown) < len(path) else path
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES)
    except (OSError, UnicodeDecodeError):
        return None  # reporting an unreadable pyproject.toml is not dslpar's task
    if not _may_have_table(text):
        return None
    table = _parse(text, path).get("tool", {}).get("dslpar")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise DslparError([_finding(path, text, "dslpar", "tool.dslpar is not a table", "write [tool.dslpar]")])
    findings = list(_mistakes(table, path, text))
    if findings:
        raise DslparError(findings)
    return _project(table, path)


def _may_have_table(text: str) -> bool:
    """Return whether a file may have the table; a false positive only costs a parse."""
    compact = text.translate({ord(char): None for char in " \t\"'"})
    if "tool.dslpar" in compact:
        return True
    # As a key of the table [tool]; other tables may mention modules of dslpar.
    return ("[tool]" in compact or "tool=" in compact) and ("dslpar=" in compact or "dslpar." in compact)


def _parse(text: str, path: str) -> dict[str, Any]:
    import tomllib  # here, since lint starts faster without it

    try:
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except tomllib.TOMLDecodeError as error:
        message = f"cannot parse this as TOML: {error}"
        raise DslparError([_finding(path, text, "dslpar", message, "correct the file")]) from None


def _project(table: Mapping[str, Any], path: str) -> Project:
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in table.items()}
    for key in ("select", "ignore", "exclude", "configs", "trusted"):
        values[key] = tuple(values.get(key, ()))
    if isinstance(values.get("world_size"), int):
        values["world_size"] = {"*": values["world_size"]}
    values["per_file_ignores"] = {key: tuple(codes) for key, codes in values.get("per_file_ignores", {}).items()}
    return Project(path, **values)


# ---- mistakes ----


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_package(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


_KINDS = {
    "select": (_is_strings, 'a list of codes, such as ["CFG", "TEN103"]'),
    "ignore": (_is_strings, 'a list of codes, such as ["PERF104"]'),
    "per-file-ignores": (
        lambda value: isinstance(value, dict) and all(map(_is_strings, value.values())),
        'a table of patterns and codes, such as {"configs/debug_*.py" = ["PERF"]}',
    ),
    "exclude": (_is_strings, 'a list of patterns, such as ["experiments/old"]'),
    "configs": (_is_strings, 'a list of patterns, such as ["configs/*"]'),
    "world-size": (
        lambda value: _is_count(value) or (isinstance(value, dict) and all(map(_is_count, value.values()))),
        'a number of ranks, or a table of patterns and numbers, such as {"configs/big/*" = 64}',
    ),
    "device": (lambda value: isinstance(value, str) and bool(value), 'the name of an accelerator, such as "h100-80g"'),
    "trusted": (
        lambda value: _is_strings(value) and all(map(_is_package, value)),
        'a list of packages, such as ["my_pkg"]',
    ),
}
"""For each key, a check of its value and a description of valid values."""


def _mistakes(table: Mapping[str, Any], path: str, text: str) -> Iterator[Finding]:
    for key, value in table.items():
        if key not in _KINDS:
            hint = did_you_mean(key, _KINDS) or f"the keys are {', '.join(_KINDS)}"
            yield _finding(path, text, key, f"unknown key {key!r} in [tool.dslpar]", hint)
        elif not _KINDS[key][0](value):
            yield _finding(path, text, key, f"{key} is {value!r}", f"{key} is {_KINDS[key][1]}")


def project_finding(project: Project, key: str, message: str, hint: str) -> Finding:
    """Make a finding about a valid key of a project whose value only a command can judge."""
    with open(project.path, encoding="utf-8") as file:
        return _finding(project.path, file.read(_MAX_BYTES), key, message, hint)


def _finding(path: str, text: str, key: str, message: str, hint: str) -> Finding:
    """Make a finding at the key's line, searched from the table's header on."""
    table = re.search(r"""tool["'\s]*\.["'\s]*dslpar|\bdslpar["'\s]*[.=]""", text)
    start = table.start() if table else 0
    written = rf"""^[^#\n=]*?(?<![\w-])["']?({re.escape(key)})["']?\s*[].=]"""
    at = re.compile(written, re.MULTILINE).search(text, text.rfind("\n", 0, start) + 1)
    begin, end = at.span(1) if at else (start, start + 1)
    line, column = text.count("\n", 0, begin) + 1, begin - text.rfind("\n", 0, begin)
    return finding("CFG230", message, hint, Location(path, line, column, line, column + end - begin), key)
