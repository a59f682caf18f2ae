"""Compare two resolved configs key by key. Values are compared, not texts.

Each difference is in one of three groups:

- `written`: a config sets the key, and the jobs differ;
- `follows`: no config sets the key, and its value differs because of other keys;
- `form`: the configs are written differently, but both jobs do the same.

Examples of `form` are LiBai's keys and `parallel`, a shorthand and a dict, or a name and a number. A key that only
determines how another value is found is form too: the partition method, if the stages are the same. So is a value that
follows from the config's file name alone.
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
    """One key on both sides; None for a side without it."""

    key: str
    group: Group
    """`form` if both configs do the same; `written` or `follows` if they do not."""
    left: Value | None
    right: Value | None


def compare(left: Subject, right: Subject) -> list[Difference]:
    """Return all differences of the configs and DeepSpeed's dicts, sorted by section, then by position."""
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
    """Return the keys whose values are unknown on both sides."""
    sides = [{key for key, value in values_of(subject).items() if value.how == "unknown"} for subject in (left, right)]
    return sorted(sides[0] & sides[1])


def of_what_runs(found: list[Difference]) -> list[Difference]:
    """Return the differences that change what the jobs do: all but those of form."""
    return [each for each in found if each.group != "form"]


def _keys(left: Values, right: Values) -> list[str]:
    """Return the keys of both sides in an order that does not depend on the side; `train.dist` is left out."""
    places = [{key: index for index, key in enumerate(values)} for values in (left, right)]
    last = len(left) + len(right)
    first = {key: min(place.get(key, last) for place in places) for key in {**left, **right}}
    sections = {name: index for index, name in enumerate(SECTIONS)}
    own = [key for key in first if not key.startswith("train.dist.")]
    return sorted(own, key=lambda key: (sections[key.partition(".")[0]], first[key], key))


Side = tuple[Subject, Value | None]


def _group(key: str, one: Side, other: Side, sides: tuple[Values, Values]) -> Group | None:
    """Return how the two sides differ; None if they do not."""
    spelt = [value.source_key if value is not None else "" for _, value in (one, other)]
    a, b = _plain(*one), _plain(*other)
    # True == 1 in Python, but not in a config.
    if a == b and isinstance(a, bool) == isinstance(b, bool):
        return "form" if spelt[0] != spelt[1] else None
    if _is_form(key, any(spelt), *sides):
        return "form" if any(spelt) else None
    return "written" if any(spelt) else "follows"


def _plain(subject: Subject, value: Value | None) -> object:
    """Normalize a value for comparison: tuples become lists, and file paths become absolute."""
    if value is None or value.value is None:
        return None
    if value.key == "data.files":
        return [os.path.abspath(os.path.join(os.path.dirname(subject.config.path), name)) for name in value.value]
    return _listed(value.value)


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value


# Differences of form ----------------------------------------------------------------------------------------------

_EFFECT: Mapping[str, str] = {
    "parallel.pipeline.method": "parallel.pipeline.stage_ids",
    "parallel.tensor.sequence": "parallel.tensor.residual",
    "schedule.num_microbatches": "batch.accumulation",
}
"""Keys that only determine another key's value, by the key that they determine."""
_OF_NO_SCHEDULE: Mapping[str, object] = {"schedule.type": "1f1b", "schedule.num_model_chunks": 1}
"""Values that apply if the section `schedule` is left out."""


def _is_form(key: str, spelt: bool, left: Values, right: Values) -> bool:
    """Return whether both configs do the same in spite of the difference."""
    if key in _EFFECT:
        one, other = left.get(_EFFECT[key]), right.get(_EFFECT[key])
        return one is not None and other is not None and one.value is not None and one.value == other.value
    if key.startswith("parallel.tensor."):
        return all(values["parallel.tensor.size"].value == 1 for values in (left, right))
    if key.startswith("monitor."):  # no effect if the monitor is off on both sides
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
    """Drop keys of DeepSpeed's dict, unless a config writes them or they follow from a difference beyond `form`."""
    differ = {each.key for each in found if each.group != "form"}
    for each in found:
        values = [side for side in (each.left, each.right) if side is not None]
        from_one = any(source in differ for side in values for source in side.sources)
        if not each.key.startswith(PREFIX) or from_one or any(side.source_key for side in values):
            yield each
