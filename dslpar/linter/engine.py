"""The rule book: every rule, a tuple a family, and the run of all of them over one config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslpar.core.errors import Finding, Location
from dslpar.language.load import Config
from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, Rule
from dslpar.linter.rules import (
    batch,
    comments,
    dead,
    deepspeed,
    divisors,
    hosts,
    keys,
    language,
    offload,
    parallel,
    performance,
    pipeline,
    schedules,
    tensor,
    zero,
)
from dslpar.schema.reader import Registered

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster
    from dslpar.core.catalog import Page

RULES: tuple[Rule, ...] = (
    *language.RULES,
    *keys.RULES,
    *parallel.RULES,
    *tensor.RULES,
    *divisors.RULES,
    *pipeline.RULES,
    *batch.RULES,
    *zero.RULES,
    *offload.RULES,
    *schedules.RULES,
    *deepspeed.RULES,
    *hosts.RULES,
    *performance.RULES,
    *dead.RULES,
    *comments.RULES,  # the last: they look at what the others found
)


def lint(
    config: Config,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    registered: Registered | None = None,
) -> list[Finding]:
    """All findings of one config: those of the file first, in file order, then imports, overrides, hosts and world."""
    cx = Context(config, world_size, cluster, registered)
    for rule in RULES:
        cx.found.update(rule.findings(cx))
    found = cx.found if cx.ignores is None else cx.ignores.left(cx.found)
    return sorted(found, key=lambda finding: (finding.location.path != config.path, *finding.sort_key()))


def page_of(code: str) -> Rule | Page | None:
    """The page of a code or of a name, in any case."""
    wanted = code.lower()
    return next((page for page in pages() if wanted in (page.code.lower(), page.name)), None)


def rule_finding(code: str, message: str, hint: str, location: Location, key: str = "") -> Finding:
    """Make a rule's finding of what no config says: a model or an optimizer that a program gives."""
    rule = next(rule for rule in RULES if rule.code == code)
    return rule.finding(Problem(location, message, hint, key))


def codes() -> list[str]:
    """Every code that has a page."""
    return [page.code for page in pages()]


def pages() -> list[Rule | Page]:
    """The rules, and the pages of what only a run can find; to lint needs none of those."""
    from dslpar.core.catalog import read_pages

    return [*RULES, *read_pages()]
