"""Findings as GitLab's code quality report, which shows them in a merge request's changes.

    artifacts: {reports: {codequality: dslpar.json}}

The fields are those that GitLab's documentation of the report requires. Paths are relative to the checkout:
CI_PROJECT_DIR if it is set, else the working folder. A fingerprint stays the same when lines move, as in SARIF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dslpar.core.errors import Finding
from dslpar.core.visible import json_text
from dslpar.linter.report.github import message_with_help, relative, root_of
from dslpar.linter.report.sarif import Fingerprints, physical_path

_SEVERITIES = {"error": "major", "warning": "minor", "info": "info"}


def gitlab(
    findings: Sequence[Finding], sources: Mapping[str, str], configs: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Return the report; a finding of no file stands at the first line of the first config."""
    root = root_of({"GITHUB_WORKSPACE": environ.get("CI_PROJECT_DIR", "")})
    fingerprints = Fingerprints(sources)
    return json_text([_entry(item, physical_path(item, configs), root, fingerprints) for item in findings])


def _entry(item: Finding, path: str, root: str, fingerprints: Fingerprints) -> dict[str, object]:
    return {
        "description": message_with_help(item),
        "check_name": f"{item.code} {item.name}",
        "fingerprint": fingerprints.of(item),
        "severity": _SEVERITIES[item.severity],
        "location": {
            "path": relative(path, root) or path,
            "lines": {"begin": item.location.line, "end": item.location.end_line},
        },
    }
