"""Run every rule over one config, and leave out what the config's comments silence."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import Finding, has_errors
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.registry import RULES

FOREIGN = "CFG123"


def run_rules(cx: Context) -> list[Finding]:
    """Return all findings: those of the file first, in file order, then imports, overrides, hosts and world."""
    found: set[Finding] = set()
    if not any("dslpar:" in text for text in cx.sources.values()):
        suppressions = None
    else:
        from dslpar.linter.suppressions import Suppressions  # most configs have no such comments

        suppressions = Suppressions(cx, RULES)

        def comment_problems(code: str) -> Iterator[Problem]:
            # Called by the rules of comments, which run last; until then `found` grows.
            return suppressions.problems(code, found)

        cx.comment_problems = comment_problems
    cx.is_legal = lambda: not has_errors(found)
    for rule in RULES:
        found.update(rule.findings(cx))
    # Of another framework's config, each key would be a finding: it is converted, not mended, unless it loads as it is.
    foreign = {item for item in found if item.code == FOREIGN}
    found = foreign if foreign and has_errors(found - foreign) else found - foreign
    kept = found if suppressions is None else suppressions.unsilenced(found)
    return sorted(kept, key=lambda finding: (finding.location.path != cx.config.path, *finding.sort_key()))
