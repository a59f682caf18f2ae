"""CFG114 to CFG117: the comments `# dslpar: ignore[CODE]` of a config, which `dslpar.linter.suppressions` reads.

These rules run last, since they need the findings of all other rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG114", "ignore-without-code", "warning")
def ignore_without_code(cx: Context) -> Iterator[Problem]:
    """A comment `# dslpar: ignore` has no code, and silences nothing."""
    yield from cx.comment_problems("CFG114")


@rule("CFG115", "unused-ignore", "warning")
def unused_ignore(cx: Context) -> Iterator[Problem]:
    """A comment `# dslpar: ignore[CODE]` has no finding to ignore."""
    yield from cx.comment_problems("CFG115")


@rule("CFG116", "ignored-error", "warning")
def ignored_error(cx: Context) -> Iterator[Problem]:
    """A comment `# dslpar: ignore[CODE]` has the code of an error, which cannot be ignored."""
    yield from cx.comment_problems("CFG116")


@rule("CFG117", "unknown-ignore", "warning")
def unknown_ignore(cx: Context) -> Iterator[Problem]:
    """A comment `# dslpar: ignore[CODE]` has an unknown code."""
    yield from cx.comment_problems("CFG117")


RULES = (ignore_without_code, unused_ignore, ignored_error, unknown_ignore)
