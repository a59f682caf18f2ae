"""What a lint rule is: a code, a name, a severity, and a function from the linted config to problems.

The function's docstring is the rule's page. After its first line it has the sections `What it does`, `Why`, `Example`
and `Use instead`; both examples are whole config files, and the tests lint them. The shape of a page is ruff's, the
one-function-one-rule shape is flake8's and pluggy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dslpar.core.errors import Finding, Severity
from dslpar.core.named_tuple import NamedTuple
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError

Check = Callable[[Context], Iterable[Problem | Finding]]


class Rule(NamedTuple):
    """One rule: what it is called, and how it checks a config."""

    code: str
    name: str
    severity: Severity
    check: Check

    @property
    def page(self) -> str:
        """What `dslpar explain CODE` prints below the title."""
        return self.check.__doc__ or ""

    def text(self) -> str:
        """Return the page without the indentation of a docstring."""
        from inspect import cleandoc

        return cleandoc(self.page)

    def findings(self, cx: Context) -> Iterator[Finding]:
        """Check a config; at the first value that is not known, the rule stops."""
        try:
            for problem in self.check(cx):
                yield problem if isinstance(problem, Finding) else self.finding(problem)
        except UnknownValueError:
            return

    def finding(self, problem: Problem) -> Finding:
        """Put a problem under this rule's code, name and severity."""
        location, message, hint, key, fix = problem
        return Finding(self.code, self.name, self.severity, message, hint, location, key, fix)


def rule(code: str, name: str, severity: Severity = "error") -> Callable[[Check], Rule]:
    """Make a rule of a function; use as a decorator."""
    return lambda check: Rule(code, name, severity, check)
