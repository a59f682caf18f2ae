"""Plan: the forecast of a config on a machine, changes that make it fit, and faster layouts.

    made = plan_of(question, checked, job, machine)
    made.repairs[0].overrides          # ["batch.micro_size=2"]

A repair is a layout that fits with few changes to a config that does not. Every suggested layout is checked: the config
with its overrides passes lint, and resolves to the layout that was forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from dslpar.forecast.candidate import Candidate, Workloads, candidate_of, layout_settings, overrides, settings
from dslpar.forecast.plan import Forecast, Machine, forecast
from dslpar.forecast.search import Found, Option, search
from dslpar.forecast.search_space import Pins, anything, pins_of
from dslpar.forecast.workload import CostsOf, workload_of
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.check import Checked

MOST_REPAIRS, MOST_LAYOUTS = 3, 8
"""The most repairs and the most fast layouts in a plan."""
_MORE_CHANGES = 3
"""The most changes that a repair may have in addition to the number of changes of the smallest repair."""
_MOST_REFUSED = 40
"""The number of layouts that lint may refuse before the search stops."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that passes lint, with the overrides that turn the config into it."""

    overrides: tuple[str, ...]
    """Words for the command line, such as "zero.stage=2"; empty for the config's own layout."""
    option: Option
    """The layout and its forecast."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecast of a config on a machine, with repairs and faster layouts."""

    job: Job
    own: Forecast
    """Forecast of the config's own layout."""
    machine: Machine
    repairs: tuple[Suggestion, ...]
    """The smallest changes that make the config fit, or no longer tight; empty if it fits."""
    layouts: tuple[Suggestion, ...]
    """The fastest layouts that fit, in order of their time."""
    num_legal: int
    """Number of layouts in the search."""
    fixed: tuple[str, ...] = ()
    """Keys whose values the search must not change."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A config with the command line's overrides and fixed keys."""

    path: str
    """The config file."""
    words: tuple[str, ...]
    """Overrides of the command line, including those of the fixed keys."""
    fixed: tuple[str, ...]
    """Keys whose values the search must not change."""
    trusted: tuple[str, ...] = ()
    """Packages whose classes the config may import (`--trust`)."""
    by_program: bool = False
    """True if a program passes the model, so the config may have none (`--program`)."""

    def check(self, world_size: int, more: Sequence[str] = (), errors_only: bool = False) -> Checked:
        """Lint the config with `more` overrides."""
        config = check.load(self.path, [*self.words, *more], trusted=self.trusted)
        return check.check(config, world_size, by_program=self.by_program, forecasts=False, errors_only=errors_only)


def job_of(checked: Checked) -> Job | None:
    """Return the job; None if the config has errors."""
    return None if checked.has_errors else checked.job


NO_MODEL = (
    "the config does not say how to build the program's model, so its costs are unknown: without --program, give"
    " --trace and model.type=MODULE.CLASS, a class of the program that is an nn.Module or a LayeredModel, with its"
    " arguments as model.NAME=VALUE"
)
"""Why a config without a model has no forecast, and what to write."""


class NoForecastError(ValueError):
    """No forecast is possible, because the model's costs are unknown; the message says what to do."""


def plan_of(question: Question, checked: Checked, job: Job, machine: Machine, costs_of: CostsOf | None = None) -> Plan:
    """Forecast a linted config's job, and search for better layouts.

    `costs_of` returns the model's costs if it was traced (`dslpar.dry_run.trace`), and is None otherwise.

    Raises:
        NoForecastError: the model's costs are unknown, and the config may not even have a model.
    """
    if costs_of is None and not job.seq_len and getattr(job.spec.model, "transformers", None) is not None:
        raise NoForecastError("the length of a sample is unknown: set data.seq_len")
    if workload_of(job, costs_of) is None:
        name = getattr(job.spec.model, "target", type(job.spec.model).__name__)
        if not name:
            raise NoForecastError(NO_MODEL)
        raise NoForecastError(f"the costs of {name} are unknown before it is built; --trace builds it")
    workloads = Workloads(job, machine.nodes.per_node, costs_of)
    found = search(workloads, machine, _pins(question, job, workloads))
    own = found.own.forecast
    linted = _Linted(question, job, checked.reading.written)
    repairs = () if own.verdict == "fits" else tuple(_repairs(found, linted))
    linted.refused = 0
    return Plan(
        job=job,
        own=own,
        machine=machine,
        repairs=repairs,
        layouts=tuple(linted.first(found.fastest(), MOST_LAYOUTS)),
        num_legal=found.num_legal,
        fixed=question.fixed,
    )


def _pins(question: Question, job: Job, workloads: Workloads) -> Pins:
    if not question.fixed:
        return anything

    def made(candidate: Candidate) -> Mapping[str, str]:
        return settings(job, candidate)

    return pins_of(question.fixed, made)


def _repairs(found: Found, linted: _Linted) -> Iterator[Suggestion]:
    """Yield the repairs, those with the fewest changes first.

    Of the layouts that change the same keys, or more, only the fastest with the fewest changes is a repair. A layout
    with more than `_MORE_CHANGES` changes above the smallest repair is not one either.
    """
    own, seen = found.own.candidate, list[set[str]]()
    most_changes = 0
    known: dict[tuple[object, ...], Set[str]] = {}

    def covered(candidate: Candidate) -> bool:
        """Return whether earlier repairs make this candidate unnecessary.

        Either it has too many changes, or an earlier repair changes a subset of its keys. Batch keys do not count here.
        """
        if not seen:
            return False
        if candidate.changes(own) > most_changes:
            return True
        layout = candidate.tensor, candidate.context, candidate.pipe, candidate.chunks, candidate.split
        key = *layout, candidate.zero, candidate.interval
        if key not in known:
            known[key] = layout_settings(linted.job, candidate).keys()
        return any(each <= known[key] for each in seen)

    for option in found.repairs(covered):
        if not found.own.forecast.thrashes and option.forecast.verdict != "fits":
            continue  # a tight layout repairs only one that thrashes
        keys = set(settings(linted.job, option.candidate))
        if not keys or any(each <= keys for each in seen):
            continue  # an earlier repair with a subset of these keys suffices
        suggestion = linted.suggestion(option)
        if suggestion is not None:
            most_changes = most_changes or option.candidate.changes(own) + _MORE_CHANGES
            seen.append(keys)
            yield suggestion
        if len(seen) == MOST_REPAIRS or linted.refused > _MOST_REFUSED:
            return


class _Linted:
    """Turns options into suggestions by linting them, caches the results, and counts refused layouts in `refused`."""

    def __init__(self, question: Question, job: Job, written: Mapping[str, str]) -> None:
        self.question, self.job, self.written, self.refused = question, job, written, 0
        self._known: dict[Candidate, Suggestion | None] = {}

    def first(self, options: Iterable[Option], count: int) -> Iterator[Suggestion]:
        """Yield the first `count` options that pass lint."""
        for option in options:
            suggestion = self.suggestion(option)
            if suggestion is not None:
                yield suggestion
                count -= 1
            if not count or self.refused > _MOST_REFUSED:
                return

    def suggestion(self, option: Option) -> Suggestion | None:
        """Return an option as a suggestion; None if lint refuses it, or if one of its pipeline ranks thrashes."""
        candidate = option.candidate
        if candidate not in self._known:
            words = tuple(overrides(self.job, candidate, self.written))
            made = job_of(self.question.check(self.job.mesh.world_size, words, errors_only=True))
            passes = (
                made is not None and candidate_of(made) == candidate and made.batch.global_size == self._global_size
            )
            whole = Option(candidate=candidate, forecast=forecast(option.forecast.workload, option.forecast.machine))
            passes = passes and not whole.forecast.thrashes
            self.refused += not passes
            self._known[candidate] = Suggestion(overrides=words, option=whole) if passes else None
        return self._known[candidate]

    @property
    def _global_size(self) -> int:
        return self.job.batch.global_size
