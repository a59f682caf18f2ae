"""Actions on `parallel`: the layouts that `dslpar plan` suggests, written into the file.

    for fix in layouts(analysis, texts):
        fix.title, fix.edit       # "zero.stage=3 parallel.pipeline=1: 1.26 times as fast, 45.2 of 79.6 GiB"

A layout is offered if the file's new text gives it, which the search checks with overrides alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from dslpar.core.errors import Location
from dslpar.forecast.candidate import candidate_of
from dslpar.forecast.device import GIB
from dslpar.forecast.machine import MachineError, machine_of
from dslpar.layout.resolve import Job
from dslpar.lsp.analysis import Analysis, analysed, whole_of
from dslpar.lsp.quick_fixes import QuickFix, replacement, with_keys
from dslpar.planner.planning import NoForecastError, Plan, Question, Suggestion, plan_of

MOST = 4
"""The most actions: a menu is short."""


def place_of(analysis: Analysis) -> Location | None:
    """Return the place of `parallel` and its value in this file; None if it has none."""
    node = analysis.config.root.get("parallel")
    begin = node.key_location if node is not None else None
    if node is None or begin is None or {begin.path, node.location.path} != {analysis.path}:
        return None
    return whole_of(begin, node.location)


def layouts(analysis: Analysis, texts: Mapping[str, str]) -> list[QuickFix]:
    """Return the layouts for the first world; none if the config has errors or names no device."""
    made = _plan(analysis, texts)
    return [] if made is None else [*_actions(analysis, made, texts)][:MOST]


def _plan(analysis: Analysis, texts: Mapping[str, str]) -> Plan | None:
    try:
        job = analysis.job()
        if job is None or job.spec.cluster.device is None:
            return None
        question = Question(path=analysis.path, words=(), fixed=(), texts=texts)
        return plan_of(question, analysis.first, job, machine_of(job))
    except (NoForecastError, MachineError):
        return None  # the lens has no forecast either


def _actions(analysis: Analysis, made: Plan, texts: Mapping[str, str]) -> Iterator[QuickFix]:
    seen: set[tuple[str, ...]] = set()
    for suggestion in (*made.repairs, *made.layouts):
        words = suggestion.overrides
        if not words or words in seen:
            continue
        seen.add(words)
        text = with_keys(analysis, words, texts)
        if text is not None and _gives(analysis, made.job, suggestion, text, texts):
            title = f"{' '.join(words)}: {_effect(made, suggestion)}"
            yield QuickFix(title, replacement(analysis.path, analysis.text, text), False)


def _gives(analysis: Analysis, job: Job, suggestion: Suggestion, text: str, texts: Mapping[str, str]) -> bool:
    """Return whether a text has the suggested layout, and the batch as it was."""
    after = analysed(analysis.path, {**texts, os.path.realpath(analysis.path): text})
    changed = after.job()
    if changed is None or changed.batch.global_size != job.batch.global_size:
        return False
    return candidate_of(changed) == suggestion.option.candidate


def _effect(made: Plan, suggestion: Suggestion) -> str:
    option = suggestion.option
    memory = f"{option.bytes / GIB:.1f} of {made.machine.device.memory_bytes / GIB:.1f} GiB"
    if made.own.verdict == "does not fit":
        return f"fits, {memory}"
    return f"{made.own.time.step_s / option.step_s:.2f} times as fast, {memory}"
