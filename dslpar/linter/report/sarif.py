"""Findings as SARIF 2.1.0, which GitHub's code scanning and others read (OASIS Standard, 2020).

A rule that found something is described with its page; a finding has its place, its change where one is certain, and a
fingerprint that stays as lines move above it. Files below the root (GITHUB_WORKSPACE, else the working folder) have
relative addresses, others absolute ones. Columns count UTF-16 code units, as readers of SARIF do. What no file wrote
(a world, the command line) stands at the first line of the config, since a place must be a file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Location
from dslpar.linter.registry import page_of
from dslpar.linter.report.github import relative, root_of

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif(
    findings: Sequence[Finding], sources: Mapping[str, str], configs: Sequence[str], status: int, env: Mapping[str, str]
) -> str:
    """One run of the linter over `configs`, which ends with exit status `status`."""
    run = _Run(sources, configs, root_of(env))
    codes = sorted({finding.code for finding in findings})
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver(codes)},
                "columnKind": "utf16CodeUnits",
                "originalUriBaseIds": {ROOT: {"uri": Path(run.root).as_uri().rstrip("/") + "/"}},
                "invocations": [{"executionSuccessful": True, "exitCode": status}],
                "results": [run.result(finding, codes.index(finding.code)) for finding in findings],
            }
        ],
    }
    return json.dumps(log, indent=2) + "\n"


def _driver(codes: Sequence[str]) -> dict[str, Any]:
    from dslpar import __version__

    return {"name": "dslpar", "semanticVersion": __version__, "rules": [_rule(code) for code in codes]}


def _rule(code: str) -> dict[str, Any]:
    page = page_of(code)
    assert page is not None, f"{code} has no page"
    text = page.text().strip()
    head = text.partition("\n")[0]
    return {
        "id": page.code,
        "name": "".join(word.capitalize() for word in page.name.split("-")),
        "shortDescription": {"text": head},
        "fullDescription": {"text": _section(text, "What it does") or head},
        "help": {"text": text, "markdown": f"# {page.code} {page.name}\n\n{_markdown(text)}"},
        "defaultConfiguration": {"level": _LEVELS[page.severity]},
        "properties": {"tags": [page.code.rstrip("0123456789")]},
    }


def _section(page: str, head: str) -> str:
    """The text below a heading of a page, on one line."""
    _, _, rest = page.partition(f"\n{head}:\n")
    lines = []
    for line in rest.split("\n"):
        if line and not line.startswith(" "):
            break
        lines.append(line.strip())
    return " ".join(filter(None, lines))


def _markdown(page: str) -> str:
    """A page with its headings marked, prose flush left and examples fenced."""
    lines: list[str] = []
    fenced = False
    for line in page.split("\n"):
        heading = line.endswith(":") and not line.startswith(" ")
        if heading and fenced:
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
        if heading:
            fenced = line in ("Example:", "Use instead:")
            lines += [f"## {line.rstrip(':')}", "", *(["```python"] if fenced else [])]
        else:
            lines.append(line.removeprefix("    "))
    return "\n".join([*lines, "```"] if fenced else lines).rstrip() + "\n"


class _Run:
    """What all results of one run share."""

    def __init__(self, sources: Mapping[str, str], configs: Sequence[str], root: str) -> None:
        self.configs, self.root = configs, root
        self.lines = {path: text.split("\n") for path, text in sources.items()}
        self.seen: Counter[str] = Counter()

    def result(self, finding: Finding, index: int) -> dict[str, Any]:
        text = finding.message + (f"\nhelp: {finding.help}" if finding.help else "")
        made: dict[str, Any] = {
            "ruleId": finding.code,
            "ruleIndex": index,
            "level": _LEVELS[finding.severity],
            "message": {"text": text},
            "locations": [self.location(finding)],
            "partialFingerprints": {"primaryLocationLineHash": self.fingerprint(finding)},
            "properties": {"key": finding.key},
        }
        if finding.fix is not None:
            made["fixes"] = [self.fix(finding)]
        return made

    def location(self, finding: Finding) -> dict[str, Any]:
        place = finding.location
        if place.path not in (COMMAND_LINE, WORLD):
            return {"physicalLocation": {"artifactLocation": self.artifact(place.path), "region": self.region(place)}}
        config = Location(self.configs[0])
        where = {"artifactLocation": self.artifact(config.path), "region": {"startLine": 1}}
        return {"physicalLocation": where, "logicalLocations": [{"fullyQualifiedName": place.path}]}

    def artifact(self, path: str) -> dict[str, str]:
        below = relative(path, self.root)
        if below is not None:
            return {"uri": quote(below, errors="surrogateescape"), "uriBaseId": ROOT}
        return {"uri": Path(path).resolve().as_uri()}

    def region(self, place: Location) -> dict[str, int]:
        return {
            "startLine": place.line,
            "startColumn": self.column(place.path, place.line, place.column),
            "endLine": place.end_line,
            "endColumn": self.column(place.path, place.end_line, place.end_column),
        }

    def column(self, path: str, line: int, column: int) -> int:
        """A column in UTF-16 code units; of a character, if the text is not known."""
        lines = self.lines.get(path, ())
        before = lines[line - 1][: column - 1] if line <= len(lines) else ""
        return column + sum(ord(char) > 0xFFFF for char in before)

    def fix(self, finding: Finding) -> dict[str, Any]:
        assert finding.fix is not None
        place, new = finding.fix
        replacement = {"deletedRegion": self.region(place), "insertedContent": {"text": new}}
        change = {"artifactLocation": self.artifact(place.path), "replacements": [replacement]}
        message = f"write {new!r}" if new else "leave it out"
        return {"description": {"text": message}, "artifactChanges": [change]}

    def fingerprint(self, finding: Finding) -> str:
        """Of the code, the key and the line's own text; and which of several equal ones it is."""
        place = finding.location
        lines = self.lines.get(place.path, ())
        line = lines[place.line - 1].strip() if place.line <= len(lines) and place.path != WORLD else ""
        digest = hashlib.sha256("\0".join((finding.code, finding.key, line)).encode("utf-8", "replace")).hexdigest()[
            :16
        ]
        self.seen[digest + place.path] += 1
        return f"{digest}:{self.seen[digest + place.path]}"
