"""CFG114 and on: the comments `# dslpar: ignore[CODE]` of a config, which `dslpar.linter.suppressions` reads.

These rules run last: they look at what the others found.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG114", "ignore-without-code", "warning")
def ignore_without_code(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore` without a code.

    What it does:
        Finds the comments `# dslpar: ignore` and `# dslpar: ignore-file` without codes in brackets. They silence
        nothing.

    Why:
        A comment that silenced everything would also silence the next mistake on its line.

    Example:
        idle = dict(a=1)  # dslpar: ignore

    Use instead:
        idle = dict(a=1)  # dslpar: ignore[CFG106] another tool reads it
    """
    yield from cx.comment_problems("CFG114")


@rule("CFG115", "unused-ignore", "warning")
def unused_ignore(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` where there is nothing to ignore.

    What it does:
        Finds codes in these comments that silence nothing, and duplicates. Codes of rules that depend on the world size
        or the hosts are accepted, since they may apply elsewhere; and so is every code if overrides are given. The
        comment must be on the line of the finding: the first or the last line of a value that spans several.

    Why:
        The mistake is gone; if it came back, the comment would hide it.

    Example:
        train = dict(steps=100)  # dslpar: ignore[CFG106]

    Use instead:
        train = dict(steps=100)
    """
    yield from cx.comment_problems("CFG115")


@rule("CFG116", "ignored-error", "warning")
def ignored_error(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` with the code of an error.

    What it does:
        Finds codes of errors in these comments. Comments silence warnings and infos, in every command; errors are
        always shown, and stop a run.

    Why:
        A config with an error cannot run, whatever its comments say. `dslpar lint --ignore CODE` leaves an error out of
        the report; the config still does not start.

    Example:
        zero = dict(stage=1)  # dslpar: ignore[CFG103]

    Use instead:
        zero = dict(stage=1)
    """
    yield from cx.comment_problems("CFG116")


@rule("CFG117", "unknown-ignore", "warning")
def unknown_ignore(cx: Context) -> Iterator[Problem]:
    """`# dslpar: ignore[CODE]` with an unknown code.

    What it does:
        Compares the codes and names in these comments with the linter's rules.

    Why:
        The comment silences nothing; probably the code is misspelt.

    Example:
        idle = dict(a=1)  # dslpar: ignore[CFG106, unused-thing]

    Use instead:
        idle = dict(a=1)  # dslpar: ignore[CFG106, CFG115]
    """
    yield from cx.comment_problems("CFG117")


RULES = (ignore_without_code, unused_ignore, ignored_error, unknown_ignore)
