"""Findings as workflow commands of GitHub Actions, which shows them beside the lines of a pull request.

::

    ::error file=configs/a.py,line=3,endLine=3,col=9,endColumn=13,title=TEN103 not-a-cube::size 6, and ...%0Ahelp: ...

The escapes are those of GitHub's own toolkit. Paths count from the checkout: GITHUB_WORKSPACE where it is set, else the
working folder. A column is given where a finding stays on one line, since GitHub takes none for longer ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def github(findings: Sequence[Finding], environ: Mapping[str, str]) -> str:
    """One command a finding."""
    root = root_of(environ)
    return "".join(_command(finding, root) + "\n" for finding in findings)


def root_of(environ: Mapping[str, str]) -> str:
    """The folder that paths count from."""
    return os.path.realpath(environ.get("GITHUB_WORKSPACE") or os.getcwd())


def relative(path: str, root: str) -> str | None:
    """The path of a file below `root`, with `/`; None of a file elsewhere."""
    real = os.path.realpath(path)
    if real == root:
        return "."
    below = real.startswith(root.rstrip(os.sep) + os.sep)
    return os.path.relpath(real, root).replace(os.sep, "/") if below else None


def _command(finding: Finding, root: str) -> str:
    text = finding.message + (f"\nhelp: {finding.help}" if finding.help else "")
    given = _place(finding, root) | {"title": f"{finding.code} {finding.name}"}
    parameters = ",".join(f"{name}={_in_parameter(str(value))}" for name, value in given.items())
    return f"::{_COMMANDS[finding.severity]} {parameters}::{_in_text(text)}"


def _place(finding: Finding, root: str) -> dict[str, object]:
    """File, line and columns; nothing of what no file wrote."""
    path, line, column, end_line, end_column = finding.location
    if path in (COMMAND_LINE, WORLD):
        return {}
    place: dict[str, object] = {"file": relative(path, root) or path, "line": line, "endLine": end_line}
    return place | ({"col": column, "endColumn": end_column} if line == end_line else {})


def _in_text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _in_parameter(text: str) -> str:
    return _in_text(text).replace(":", "%3A").replace(",", "%2C")
