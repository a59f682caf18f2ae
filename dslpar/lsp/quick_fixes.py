"""Quick fixes of a finding in an editor: lint's own fix, or what the finding's help says, one action per alternative.

    for fix in quick_fixes(analysis, finding, texts):
        fix.title, fix.edit       # "num_heads=8 (TEN205)"

A help is carried out where the file writes the keys (`dslpar.language.source_edits`), change by change. The result is
linted: a fix is offered only if its finding is gone then and no new error is there. This is what ruff's server does
not need, since its fixes are edits from the start, and what dhall-lsp-server and starpls leave to the author.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import Finding, Fix, Location
from dslpar.language import source_edits
from dslpar.language.load import Config
from dslpar.language.recovery import recovered
from dslpar.linter import check, fixes
from dslpar.linter.help_edits import (
    Change,
    LeaveEntry,
    LeaveItOut,
    LeaveOut,
    Meant,
    Move,
    SetKey,
    Start,
    UnreadableHelpError,
    Write,
    alternatives,
    changes,
)
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.schema.keys import shorthands

_WORLD = re.compile(r"(#\s*dslpar:.*\bworld-size=)(\S+)")
"""The setting in a comment (`dslpar.lsp.settings`)."""


class QuickFix(NamedTuple):
    """An action on a finding."""

    title: str
    edit: Fix
    """One replacement in the config's text."""
    is_own: bool
    """Lint's own fix, which an editor may apply without asking."""


def quick_fixes(analysis: Analysis, item: Finding, texts: Mapping[str, str]) -> list[QuickFix]:
    """Return the fixes of a finding of this file, the preferred one first."""
    if item.fix is not None and item.fix.location.path == analysis.path:
        return [QuickFix(f"{item.help or item.message} ({item.code})", item.fix, True)]
    return [*_from_help(analysis, item, texts)]


def _from_help(analysis: Analysis, item: Finding, texts: Mapping[str, str]) -> Iterator[QuickFix]:
    for alternative in alternatives(item.help):
        try:
            asked = changes(alternative, item)
        except UnreadableHelpError:
            continue  # prose: the author reads it beside the finding
        text: str | None = analysis.text
        for change in asked:
            text = None if text is None else _changed(analysis, text, change, item, texts)
        if text is not None and text != analysis.text and _is_better(analysis, text, item, texts):
            yield QuickFix(f"{alternative} ({item.code})", replacement(analysis.path, analysis.text, text), False)


def _is_better(analysis: Analysis, text: str, item: Finding, texts: Mapping[str, str]) -> bool:
    """Return whether a text has no longer this finding, and no error that was not there."""
    after = analysed(analysis.path, {**texts, os.path.realpath(analysis.path): text})

    def subjects(made: Analysis) -> set[tuple[str, str, str]]:
        shown = (each.finding for each in made.findings)
        return {(each.code, each.key, each.message) for each in shown if each.severity == "error" or each == item}

    this = item.code, item.key, item.message
    left = {(each.finding.code, each.finding.key, each.finding.message) for each in after.findings}
    return this not in left and subjects(after) <= subjects(analysis)


def _changed(analysis: Analysis, text: str, change: Change, item: Finding, texts: Mapping[str, str]) -> str | None:
    """Return a text with one change; None if the file does not write the keys, or the change is none of the file's."""
    if isinstance(change, Start):
        return _WORLD.sub(rf"\g<1>{change.world}", text, count=1) if _WORLD.search(text) else None
    if item.location.path != analysis.path:
        return None
    config = _loaded(analysis, text, texts)
    edits: list[Fix | None]
    match change:
        case SetKey(key, value):
            edits = [source_edits.set_key(config, text, key, value, shorthands())]
        case LeaveOut(key):
            edits = [source_edits.leave_out(config, text, key)]
        case LeaveEntry(which):
            edits = [source_edits.leave_one_of_two_out(config, text, item.location, first=which == "first")]
        case LeaveItOut():
            edits = [item.fix or source_edits.leave_statement_out(config, text, item.location.line)]
        case Meant(name):
            quote = source_edits.excerpt(text, item.location)[:1]
            edits = [Fix(item.location, f"{quote}{name}{quote}" if quote in ("'", '"') else name)]
        case Write(code):
            edits = [Fix(item.location, code)]
        case Move(key):
            return _moved(analysis, text, item.key, key, texts)
        case _:
            return None
    return _applied(text, edits)


def _moved(analysis: Analysis, text: str, key: str, to: str, texts: Mapping[str, str]) -> str | None:
    config = _loaded(analysis, text, texts)
    node = config.root.get(key)
    if node is None or os.path.realpath(node.location.path) != os.path.realpath(analysis.path):
        return None
    value = source_edits.excerpt(text, node.location)
    without = _applied(text, [source_edits.leave_out(config, text, key)])
    if without is None:
        return None
    after = _loaded(analysis, without, texts)
    return _applied(without, [source_edits.set_key(after, without, to, value, shorthands())])


def with_keys(analysis: Analysis, words: Sequence[str], texts: Mapping[str, str]) -> str | None:
    """Return the text with overrides such as `zero.stage=2` written into it; None if the file computes one of them."""
    text: str | None = analysis.text
    for word in words:
        key, _, value = word.partition("=")
        if text is not None:
            config = _loaded(analysis, text, texts)
            text = _applied(text, [source_edits.set_key(config, text, key, value, shorthands())])
    return text


def _loaded(analysis: Analysis, text: str, texts: Mapping[str, str]) -> Config:
    path = analysis.path
    return check.load(path, (), {**texts, os.path.realpath(path): recovered(text, path).text})


def _applied(text: str, edits: list[Fix | None]) -> str | None:
    known = [edit for edit in edits if edit is not None]
    return fixes.apply(text, known) if len(known) == len(edits) else None


def replacement(path: str, before: str, after: str) -> Fix:
    """Return the shortest single replacement that turns one text into another."""
    begin = _num_common(before, after)
    same = _num_common(before[begin:][::-1], after[begin:][::-1])
    end, last = len(before) - same, len(after) - same
    at = Location(path, *_line_and_column(before, begin), *_line_and_column(before, end))
    return Fix(at, after[begin:last])


def _num_common(one: str, other: str) -> int:
    """Return the number of characters at the begin that two texts share."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return at
    return min(len(one), len(other))


def _line_and_column(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1
