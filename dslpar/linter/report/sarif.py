"""Findings as SARIF 2.1.0, which GitHub's code scanning and others read (OASIS Standard, 2020).

Each rule with a finding is described by its page. A finding has its location, related locations, its fix if there is
one, and a fingerprint that does not change when lines are added above it. Files below the root (GITHUB_WORKSPACE, else
the working folder) have relative URIs, other files absolute URIs. Columns count UTF-16 code units, as SARIF readers do.
A location must be a file, so findings without a file (world size, command line) are at the first line of the config.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from dslpar.core.catalog import split_page
from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Fix, Location
from dslpar.core.version import VERSION
from dslpar.core.visible import json_text, visible
from dslpar.linter.registry import page_of
from dslpar.linter.report.github import message_with_help, relative, root_of

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif(
    findings: Sequence[Finding], sources: Mapping[str, str], configs: Sequence[str], status: int, env: Mapping[str, str]
) -> str:
    """Return the log of one run of the linter over `configs`, which ended with exit status `status`."""
    results = _Results(sources, configs, root_of(env))
    codes = sorted({finding.code for finding in findings})
    driver = {"name": "dslpar", "semanticVersion": VERSION, "rules": list(map(_rule, codes))}
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "utf16CodeUnits",
                "originalUriBaseIds": {ROOT: {"uri": Path(results.root).as_uri().rstrip("/") + "/"}},
                "invocations": [{"executionSuccessful": True, "exitCode": status}],
                "results": [results.result(finding, codes.index(finding.code)) for finding in findings],
            }
        ],
    }
    return json_text(log)


def _rule(code: str) -> dict[str, object]:
    page = page_of(code)
    assert page is not None, f"{code} has no page"
    summary, sections = split_page(page.text())
    headline = summary.partition("\n")[0]
    return {
        "id": page.code,
        "name": "".join(word.capitalize() for word in page.name.split("-")),
        "shortDescription": {"text": headline},
        "fullDescription": {"text": " ".join(sections.get("What it does", headline).split())},
        "help": {"text": page.text().strip(), "markdown": _markdown(f"{page.code} {page.name}", summary, sections)},
        "defaultConfiguration": {"level": _LEVELS[page.severity]},
        "properties": {"tags": [page.code.rstrip("0123456789")]},
    }


def _markdown(title: str, summary: str, sections: Mapping[str, str]) -> str:
    parts = [f"# {title}", summary]
    for heading, body in sections.items():
        is_config = heading in ("Example", "Use instead")
        parts += [f"## {heading}", f"```python\n{body}\n```" if is_config else body]
    return "\n\n".join(parts) + "\n"


class Fingerprints:
    """Hashes of findings that stay the same when their lines move; equal ones of a file are numbered in order."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.lines = {path: text.split("\n") for path, text in sources.items()}
        self.seen: Counter[str] = Counter()

    def of(self, finding: Finding) -> str:
        """Hash the code, the key and the text of the line."""
        path, number = finding.location.path, finding.location.line
        lines = self.lines.get(path, ())
        line = lines[number - 1].strip() if number <= len(lines) and path != WORLD else ""
        hashed = "\0".join((finding.code, finding.key, line)).encode("utf-8", "replace")
        digest = hashlib.sha256(hashed).hexdigest()[:16]
        self.seen[digest + path] += 1
        return f"{digest}:{self.seen[digest + path]}"


def physical_path(finding: Finding, configs: Sequence[str]) -> str:
    """Return the file of a finding; that of the first config for a finding of no file."""
    path = finding.location.path
    return configs[0] if path in (COMMAND_LINE, WORLD) else path


class _Results:
    """The results of one run, in order."""

    def __init__(self, sources: Mapping[str, str], configs: Sequence[str], root: str) -> None:
        self.configs, self.root = configs, root
        self.lines = {path: text.split("\n") for path, text in sources.items()}
        self.fingerprints = Fingerprints(sources)

    def result(self, finding: Finding, index: int) -> dict[str, object]:
        result: dict[str, object] = {
            "ruleId": finding.code,
            "ruleIndex": index,
            "level": _LEVELS[finding.severity],
            "message": {"text": message_with_help(finding)},
            "locations": [self.location(finding)],
            "partialFingerprints": {"primaryLocationLineHash": self.fingerprints.of(finding)},
            "properties": {"key": finding.key},
        }
        if finding.related:
            result["relatedLocations"] = [
                {
                    "id": number,
                    "physicalLocation": {
                        "artifactLocation": self.artifact(place.location.path),
                        "region": self.region(place.location),
                    },
                    "message": {"text": visible(place.message)},
                }
                for number, place in enumerate(finding.related)
            ]
        if finding.fix is not None:
            result["fixes"] = [self.fix(finding.fix)]
        return result

    def location(self, finding: Finding) -> dict[str, object]:
        path = finding.location.path
        if path not in (COMMAND_LINE, WORLD):
            position = {"artifactLocation": self.artifact(path), "region": self.region(finding.location)}
            return {"physicalLocation": position}
        first_line = {"artifactLocation": self.artifact(self.configs[0]), "region": {"startLine": 1}}
        return {"physicalLocation": first_line, "logicalLocations": [{"fullyQualifiedName": path}]}

    def artifact(self, path: str) -> dict[str, str]:
        below = relative(path, self.root)
        if below is not None:
            return {"uri": quote(below, errors="surrogateescape"), "uriBaseId": ROOT}
        return {"uri": Path(path).resolve().as_uri()}

    def region(self, location: Location) -> dict[str, int]:
        path, line, column, end_line, end_column = location
        return {
            "startLine": line,
            "startColumn": self.column(path, line, column),
            "endLine": end_line,
            "endColumn": self.column(path, end_line, end_column),
        }

    def column(self, path: str, line: int, column: int) -> int:
        """Convert a column to UTF-16 code units; leave it as it is if the text is unknown."""
        lines = self.lines.get(path, ())
        before = lines[line - 1][: column - 1] if line <= len(lines) else ""
        return column + sum(ord(char) > 0xFFFF for char in before)

    def fix(self, fix: Fix) -> dict[str, object]:
        replacement = {"deletedRegion": self.region(fix.location), "insertedContent": {"text": fix.text}}
        change = {"artifactLocation": self.artifact(fix.location.path), "replacements": [replacement]}
        return {
            "description": {"text": f"write {fix.text!r}" if fix.text else "leave it out"},
            "artifactChanges": [change],
        }
