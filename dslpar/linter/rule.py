"""A lint rule: a code, a name, a severity, and a function from the linted config to problems.

The function's docstring is the summary of the rule's page. The rest of the page is in `pages/CODE.md` beside the rule's
module, in the sections `What it does`, `Why`, `Example` and `Use instead`. Both examples are whole config files, and
the tests lint them. The sections of a page come from ruff, one file per page from clang-tidy, and one function per rule
from flake8 and pluggy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dslpar.core.errors import Finding, Severity
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError

Check = Callable[[Context], Iterable[Problem | Finding]]


class Rule(NamedTuple):
    """One rule: its code, name and severity, and the function that checks a config."""

    code: str
    name: str
    severity: Severity
    check: Check

    def text(self) -> str:
        """Return the page that `dslpar explain CODE` prints below the title. Reads its file, which lint never does.

        Raises:
            FileNotFoundError: the rule has no page file.
        """
        from importlib.resources import files  # only `explain` and SARIF read pages
        from inspect import getdoc

        page = files(self.check.__module__.rpartition(".")[0]) / "pages" / f"{self.code}.md"
        return f"{getdoc(self.check)}\n\n{page.read_text(encoding='utf-8').rstrip()}"

    def findings(self, cx: Context) -> Iterator[Finding]:
        """Yield the findings of this rule; the rule ends at the first value that is unknown."""
        try:
            for problem in self.check(cx):
                yield problem if isinstance(problem, Finding) else self.finding(problem)
        except UnknownValueError:
            return

    def finding(self, problem: Problem) -> Finding:
        """Make a finding of a problem, with this rule's code, name and severity."""
        location, message, hint, key, fix = problem
        return Finding(self.code, self.name, self.severity, message, hint, location, key, fix)


def rule(code: str, name: str, severity: Severity = "error") -> Callable[[Check], Rule]:
    """Return a decorator that makes a Rule of a function."""
    return lambda check: Rule(code, name, severity, check)
