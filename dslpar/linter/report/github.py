"""Findings as workflow commands of GitHub Actions, which shows them beside the lines of a pull request.

::

    ::error file=configs/a.py,line=3,endLine=3,col=9,endColumn=13,title=TEN103 not-a-cube::size 6, and ...%0Ahelp: ...

Control characters are made visible, and then the text is escaped as in GitHub's own toolkit. Paths are relative to the
checkout: GITHUB_WORKSPACE if it is set, else the working folder. Only findings on a single line have columns, since
GitHub does not accept columns for longer ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding
from dslpar.core.visible import visible

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def github(findings: Sequence[Finding], environ: Mapping[str, str]) -> str:
    """Return one command per finding."""
    root = root_of(environ)
    return "".join(_command(finding, root) + "\n" for finding in findings)


def root_of(environ: Mapping[str, str]) -> str:
    """Return the folder that paths are relative to."""
    return os.path.realpath(environ.get("GITHUB_WORKSPACE") or os.getcwd())


def relative(path: str, root: str) -> str | None:
    """Return the path of a file below `root`, with `/`; None for a file elsewhere."""
    real = os.path.realpath(path)
    if real == root:
        return "."
    below = real.startswith(root.rstrip(os.sep) + os.sep)
    return os.path.relpath(real, root).replace(os.sep, "/") if below else None


def _command(finding: Finding, root: str) -> str:
    parameters = _position(finding, root) | {"title": f"{finding.code} {finding.name}"}
    values = {name: _escape(visible(value)) for name, value in parameters.items()}
    escaped = ",".join(f"{name}={value.replace(':', '%3A').replace(',', '%2C')}" for name, value in values.items())
    return f"::{_COMMANDS[finding.severity]} {escaped}::{_escape(message_with_help(finding))}"


def message_with_help(finding: Finding) -> str:
    """Return the finding's message and, below it, its help."""
    return finding.lines() + (f"\nhelp: {visible(finding.help)}" if finding.help else "")


def _position(finding: Finding, root: str) -> dict[str, object]:
    """Return file, line and columns; empty for a finding without a file."""
    path, line, column, end_line, end_column = finding.location
    if path in (COMMAND_LINE, WORLD):
        return {}
    position: dict[str, object] = {"file": relative(path, root) or path, "line": line, "endLine": end_line}
    return position | ({"col": column, "endColumn": end_column} if line == end_line else {})


def _escape(text: str) -> str:
    # % comes first: later it would also replace the % of the other escapes.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
