"""The registry of rules: all rules in the order in which they run, and the pages of all codes.

A family of rules is one module. To add a rule, add it to the tuple RULES of its module. To add a family, add its module
here. Rules about the keys of a model are in the package of that model (`dslpar.schema.families`). Rules that forecast
memory or time are in `dslpar.planner.rules`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from dslpar.core import catalog
from dslpar.core.catalog import Page, read_pages
from dslpar.core.errors import Finding, Location
from dslpar.linter.problem import Problem
from dslpar.linter.rule import Rule
from dslpar.linter.rules import (
    batch,
    blends,
    comments,
    data,
    deepspeed,
    experts,
    foreign,
    hosts,
    images,
    keys,
    language,
    no_effect,
    offload,
    parallel,
    pipeline,
    targets,
    tensor,
    transformers,
    zero,
)
from dslpar.schema.families import FAMILIES

_PLANNER = import_module("dslpar.planner.rules")
"""The planner's rules, imported by name: the planner itself imports the linter, to lint the layouts that it tries."""

RULES: tuple[Rule, ...] = (
    *language.RULES,
    *keys.RULES,
    *foreign.RULES,
    *targets.RULES,
    *parallel.RULES,
    *tensor.RULES,
    *experts.RULES,
    *transformers.RULES,
    *images.RULES,
    *pipeline.RULES,
    *batch.RULES,
    *data.RULES,
    *blends.RULES,
    *zero.RULES,
    *offload.RULES,
    *deepspeed.RULES,
    *hosts.RULES,
    *_PLANNER.LEGAL_BUT_SLOW,
    *(rule for package in FAMILIES.values() for rule in import_module(f"{package}.rules").RULES),
    *no_effect.RULES,
    *_PLANNER.FORECAST,  # only of legal layouts
    *comments.RULES,  # last: they check the findings of all other rules
)


def page_of(code: str) -> Rule | Page | None:
    """Return the page of a code or of a name; the letters' case does not matter."""
    wanted = code.lower()
    return next((page for page in pages() if wanted in (page.code.lower(), page.name)), None)


@cache
def url_of(code: str) -> str:
    """Return the address of a code's page, a file of this installation; empty if there is no such code."""
    from importlib.util import find_spec  # only reports for other programs ask

    rule = next((rule for rule in RULES if rule.code == code), None)
    package = catalog.__name__ if rule is None else rule.check.__module__.rpartition(".")[0]
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder, *([] if rule is None else ["pages"]), f"{code}.md")
        if path.is_file():
            return path.as_uri()
    return ""


def rule_finding(code: str, message: str, hint: str, location: Location, key: str = "") -> Finding:
    """Make a rule's finding about something outside the config: a model or an optimizer that a program passes."""
    rule = next(rule for rule in RULES if rule.code == code)
    return rule.finding(Problem(location, message, hint, key))


def codes() -> list[str]:
    """Return every code that has a page."""
    return [page.code for page in pages()]


def pages() -> list[Rule | Page]:
    """Return the rules, and the pages of findings that only a run can make."""
    return [*RULES, *read_pages()]
