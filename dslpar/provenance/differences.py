"""Compare two configs when all is decided: what was written differently, and what follows from it.

Two forms of the same job (LiBai's and `parallel`, a shorthand and a dict, a name and a number) do not differ: values
are compared, not texts. What only says how a value is to be found (the method of a cut whose stages are the same) is
form too, and so is what follows from a file's name alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from dslpar.provenance.deepspeed import PREFIX, dict_or_unknown
from dslpar.provenance.inferred import OF_THE_NAME
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value, values_of
from dslpar.schema.sections_reader import SECTIONS

Group = Literal["written", "follows", "form"]
GROUPS: tuple[Group, ...] = ("written", "follows", "form")
Values = Mapping[str, Value]


class Difference(NamedTuple):
    """One key on both sides; None where a side does not have it."""

    key: str
    group: Group
    """`form`: what runs is the same."""
    left: Value | None
    right: Value | None


def compare(left: Subject, right: Subject) -> list[Difference]:
    """Return all differences: those of the configs in the spec's order, then those of DeepSpeed's dict."""
    sides = values_of(left), values_of(right)
    with_theirs = [{**sides[0], **dict_or_unknown(left, sides[0])}, {**sides[1], **dict_or_unknown(right, sides[1])}]
    found = []
    for key in _keys(*with_theirs):
        one, other = (values.get(key) for values in with_theirs)
        group = _group(key, (left, one), (right, other), sides)
        if group is not None:
            found.append(Difference(key, group, one, other))
    return list(_without_echo(found))


def not_compared(left: Subject, right: Subject) -> list[str]:
    """Return the keys that are known on neither side."""
    sides = [{key for key, value in values_of(subject).items() if value.how == "unknown"} for subject in (left, right)]
    return sorted(sides[0] & sides[1])


def of_what_runs(found: list[Difference]) -> list[Difference]:
    """Return those that are more than form."""
    return [each for each in found if each.group != "form"]


def _keys(left: Values, right: Values) -> list[str]:
    """Return the keys of both sides, in an order that does not depend on the sides; `parallel` repeats LiBai's form."""
    places = [{key: index for index, key in enumerate(values)} for values in (left, right)]
    last = len(left) + len(right)
    first = {key: min(place.get(key, last) for place in places) for key in {**left, **right}}
    sections = {name: index for index, name in enumerate(SECTIONS)}
    own = [key for key in first if not key.startswith("train.dist.")]
    return sorted(own, key=lambda key: (sections[key.partition(".")[0]], first[key], key))


Side = tuple[Subject, Value | None]


def _group(key: str, one: Side, other: Side, sides: tuple[Values, Values]) -> Group | None:
    """Return how the two sides differ; None where they do not."""
    spelt = [value.source_key if value is not None else "" for _, value in (one, other)]
    a, b = _plain(*one), _plain(*other)
    # True == 1 in Python, and not in a config.
    if a == b and isinstance(a, bool) == isinstance(b, bool):
        return "form" if spelt[0] != spelt[1] else None
    if _is_form(key, any(spelt), *sides):
        return "form" if any(spelt) else None
    return "written" if any(spelt) else "follows"


def _plain(subject: Subject, value: Value | None) -> object:
    """Return what is compared: lists and tuples are equal, files are absolute."""
    if value is None or value.value is None:
        return None
    if value.key == "data.files":
        return [os.path.abspath(os.path.join(os.path.dirname(subject.config.path), name)) for name in value.value]
    return _listed(value.value)


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value


# What is only form ------------------------------------------------------------------------------------------------

_EFFECT: Mapping[str, str] = {
    "parallel.pipeline.method": "parallel.pipeline.stage_ids",
    "parallel.tensor.sequence": "parallel.tensor.residual",
    "schedule.num_microbatches": "batch.accumulation",
}
"""Keys that only serve to find another's value, and that other."""
_OF_NO_SCHEDULE: Mapping[str, object] = {"schedule.type": "1f1b", "schedule.num_model_chunks": 1}
"""What runs where the section `schedule` is left out."""


def _is_form(key: str, spelt: bool, left: Values, right: Values) -> bool:
    """Whether what runs is the same in spite of the difference."""
    if key in _EFFECT:
        one, other = left.get(_EFFECT[key]), right.get(_EFFECT[key])
        return one is not None and other is not None and one.value is not None and one.value == other.value
    if key.startswith("parallel.tensor."):
        return all(values["parallel.tensor.size"].value == 1 for values in (left, right))
    if key.startswith("monitor."):  # of a monitor that writes on neither side
        enabled = [values.get(".".join([*key.split(".")[:2], "enabled"])) for values in (left, right)]
        if not any(switch is not None and switch.value for switch in enabled):
            return True
    if key.startswith("schedule"):
        ranks = [values["parallel.pipeline.size"].value for values in (left, right)]
        run = [values[key].value if key in values else None for values in (left, right)]
        left_out = _OF_NO_SCHEDULE.get(key)
        return ranks == [1, 1] or len({left_out if each is None else each for each in run}) == 1
    return key.startswith(OF_THE_NAME) and not spelt


def _without_echo(found: list[Difference]) -> Iterator[Difference]:
    """Keep of DeepSpeed's dict only what is written, or follows from a difference in what runs."""
    differ = {each.key for each in found if each.group != "form"}
    for each in found:
        values = [side for side in (each.left, each.right) if side is not None]
        from_one = any(source in differ for side in values for source in side.sources)
        if not each.key.startswith(PREFIX) or from_one or any(side.source_key for side in values):
            yield each
