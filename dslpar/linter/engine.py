"""Run the rules over one config, and drop the findings that its comments silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.core.errors import Finding, has_errors
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from dslpar.linter.rules import foreign, language

FOREIGN = frozenset(rule.code for rule in foreign.RULES)
ERROR_RULES: tuple[Rule, ...] = tuple([rule for rule in RULES if rule.severity == "error" or rule in language.RULES])
"""Rules that report errors. The language rules pass on the findings of loading, which may be of any severity."""


def run_rules(cx: Context, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return all findings of `rules`: first those in the config file, in order, then those elsewhere.

    1. If a source has `# dslpar:` comments, read them, and give them to the context for the rules about comments.
    2. Run each rule. Later rules may ask the context whether an error was found.
    3. For another framework's config, or a program, keep only that finding.
    4. Drop the findings that a comment silences, and sort the rest.
    """
    found: set[Finding] = set()
    if not any("dslpar:" in text for text in cx.config.sources.values()):
        suppressions = None
    else:
        from dslpar.linter.suppressions import Suppressions  # few configs have such comments

        suppressions = Suppressions(cx, RULES)

        def comment_problems(code: str) -> Iterator[Problem]:
            # Called by the rules about comments. They run last, when `found` is complete.
            return suppressions.problems(code, found)

        cx.comment_problems = comment_problems
    cx.is_legal = lambda: not has_errors(found)
    for rule in rules:
        found.update(rule.findings(cx))
    # In another framework's config each key would be a finding, so only the one that says so remains, unless the config
    # has no other error.
    of_others = {item for item in found if item.code in FOREIGN}
    found = of_others if of_others and has_errors(found - of_others) else found - of_others
    kept = found if suppressions is None else suppressions.unsilenced(found)
    return sorted(kept, key=lambda finding: (finding.location.path != cx.config.path, *finding.sort_key()))
