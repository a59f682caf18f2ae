"""Plan: the forecast of a config on a machine, changes that make it fit, and faster layouts.

    made = plan_of(question, checked, job, machine)
    made.repairs[0].overrides          # ["batch.micro_size=2"]

A repair is a layout that fits with few changes to a config that does not. Every suggested layout is checked: the config
with its overrides passes lint, and resolves to the layout that was forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from dslpar.forecast.candidate import Candidate, Workloads, candidate_of, layout_settings, overrides, settings
from dslpar.forecast.plan import Forecast, Machine, forecast
from dslpar.forecast.search import Found, Option, search
from dslpar.forecast.search_space import Pins, anything, pins_of, same_setting
from dslpar.forecast.workload import CostsOf, workload_of
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.check import Checked
from dslpar.planner import alternatives

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
    """Number of layouts in the search, those without offload included."""
    remedies: tuple[Suggestion, ...] = ()
    """If no layout fits: changes of precision, ZeRO and offload, each with the layout that needs the least memory."""
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
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts by real path that an editor has not saved yet."""

    def check(self, world_size: int, more: Sequence[str] = (), errors_only: bool = False) -> Checked:
        """Lint the config with `more` overrides."""
        config = check.load(self.path, [*self.words, *more], trusted=self.trusted, texts=self.texts)
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
    own_search = _search_of(question, checked, job, machine, costs_of)
    found, linted = own_search
    own = found.own.forecast
    repairs = () if own.verdict == "fits" else tuple(_repairs(found, linted))
    searches = [own_search, *_without_offload(question, job, machine, costs_of)]
    layouts = _fastest(searches)
    is_lost = not repairs and not layouts
    return Plan(
        job=job,
        own=own,
        machine=machine,
        repairs=repairs,
        layouts=layouts,
        num_legal=sum(found.num_legal for found, _ in searches),
        remedies=tuple(_remedies(question, job, machine, costs_of)) if is_lost else (),
        fixed=question.fixed,
    )


_Search = tuple[Found, "_Linted"]


def _search_of(
    question: Question,
    checked: Checked,
    job: Job,
    machine: Machine,
    costs_of: CostsOf | None,
    words: Sequence[str] = (),
) -> _Search:
    """Search the layouts of a job; `words` are the overrides that its config has in addition to the question's."""
    workloads = Workloads(job, machine.nodes.per_node, costs_of)
    found = search(workloads, machine, _pins(question, job, workloads))
    return found, _Linted(question, job, checked.reading.written, tuple(words))


def _changed(
    question: Question, words: Sequence[str], job: Job, machine: Machine, costs_of: CostsOf | None
) -> _Search | None:
    """Search the layouts of the config with other words; None if a fixed key forbids them, or lint refuses them."""
    keys = [word.partition("=")[0] for word in words]
    if any(same_setting(key, fixed) for key in keys for fixed in question.fixed):
        return None
    checked = question.check(job.mesh.world_size, words, errors_only=True)
    changed = job_of(checked)
    if changed is None or workload_of(changed, costs_of) is None:
        return None
    return _search_of(question, checked, changed, machine, costs_of, words)


def _without_offload(question: Question, job: Job, machine: Machine, costs_of: CostsOf | None) -> Iterator[_Search]:
    """Yield the search without offload, if the config offloads: what fits without it is usually faster."""
    words = alternatives.without_offload(job.spec)
    if words and (found := _changed(question, words, job, machine, costs_of)) is not None:
        yield found


def _fastest(searches: Sequence[_Search]) -> tuple[Suggestion, ...]:
    """Return the fastest layouts of all searches that pass lint, in order of their time."""
    made: list[Suggestion] = []
    for found, linted in searches:
        linted.refused = 0
        made += linted.first(found.fastest(), MOST_LAYOUTS)
    return tuple(sorted(made, key=lambda each: each.option.step_s)[:MOST_LAYOUTS])


def _remedies(question: Question, job: Job, machine: Machine, costs_of: CostsOf | None) -> Iterator[Suggestion]:
    """Yield what each remedy leaves: the fastest layout that fits with it, else the one that needs the least memory."""
    for words in alternatives.remedies(job.spec):
        changed = _changed(question, words, job, machine, costs_of)
        if changed is None:
            continue
        found, linted = changed
        suggestion = next(iter(linted.first(found.fastest(), 1)), None) or linted.least(found)
        if suggestion is not None:
            yield suggestion


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
    """Turns options into suggestions by linting them, caches the results, and counts refused layouts in `refused`.

    `more` are overrides that the config of `job` has in addition to the question's.
    """

    def __init__(self, question: Question, job: Job, written: Mapping[str, str], more: tuple[str, ...] = ()) -> None:
        self.question, self.job, self.written, self.more, self.refused = question, job, written, more, 0
        self.must_fit = True
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
            words = alternatives.last_of_each_key([*self.more, *overrides(self.job, candidate, self.written)])
            made = job_of(self.question.check(self.job.mesh.world_size, words, errors_only=True))
            passes = (
                made is not None and candidate_of(made) == candidate and made.batch.global_size == self._global_size
            )
            whole = Option(candidate=candidate, forecast=forecast(option.forecast.workload, option.forecast.machine))
            passes = passes and not (self.must_fit and whole.forecast.thrashes)
            self.refused += not passes
            self._known[candidate] = Suggestion(overrides=words, option=whole) if passes else None
        return self._known[candidate]

    def least(self, found: Found) -> Suggestion | None:
        """Return the layout that needs the least memory, although it does not fit; None if lint refuses too many."""
        self.must_fit, self.refused = False, 0
        self._known.clear()
        return next(self.first(found.smallest(), 1), None)

    @property
    def _global_size(self) -> int:
        return self.job.batch.global_size
