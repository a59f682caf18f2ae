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
    """`# dslpar: ignore` without a code."""
    yield from cx.comment_problems("CFG114")


@rule("CFG115", "unused-ignore", "warning")
def unused_ignore(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` without a finding to ignore."""
    yield from cx.comment_problems("CFG115")


@rule("CFG116", "ignored-error", "warning")
def ignored_error(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` with the code of an error."""
    yield from cx.comment_problems("CFG116")


@rule("CFG117", "unknown-ignore", "warning")
def unknown_ignore(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` with an unknown code."""
    yield from cx.comment_problems("CFG117")


RULES = (ignore_without_code, unused_ignore, ignored_error, unknown_ignore)
