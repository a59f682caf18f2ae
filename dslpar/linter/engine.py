"""Run every rule over one config, and leave out what the config's comments silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.core.errors import Finding, has_errors
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from dslpar.linter.rules import language

FOREIGN = "CFG123"
ERROR_RULES: tuple[Rule, ...] = tuple([rule for rule in RULES if rule.severity == "error" or rule in language.RULES])
"""The rules that find errors; those of the language hand on what loading found, whatever its severity."""


def run_rules(cx: Context, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return all findings: those of the file first, in file order, then imports, overrides, hosts and world.

    `rules` are those of them that run.
    """
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
    for rule in rules:
        found.update(rule.findings(cx))
    # Of another framework's config, each key would be a finding: it is converted, not mended, unless it loads as it is.
    foreign = {item for item in found if item.code == FOREIGN}
    found = foreign if foreign and has_errors(found - foreign) else found - foreign
    kept = found if suppressions is None else suppressions.unsilenced(found)
    return sorted(kept, key=lambda finding: (finding.location.path != cx.config.path, *finding.sort_key()))
