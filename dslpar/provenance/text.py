"""Formats of values, reasons and differences: text, and JSON records for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dslpar.core.errors import Location
from dslpar.core.visible import json_text, visible
from dslpar.language.tree import Reference
from dslpar.provenance.differences import GROUPS, Difference, Group, of_what_runs
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value

_WIDTH = 40


def shown(value: object, width: int = 0) -> str:
    """Return a value as written in a config, shortened to `width` characters unless `width` is 0."""
    text = repr(value.name if isinstance(value, Reference) else value)
    return text if not width or len(text) <= width else text[: width - 3] + "..."


# All values -------------------------------------------------------------------------------------------------------


def listing(subject: Subject, values: Mapping[str, Value]) -> str:
    """List the values, one per line: key, value, how it was determined, and its origin."""
    world = f"{subject.world_size} ranks" if subject.world_size else "no world size"
    texts = ("?" if value.how == "unknown" else shown(value.value, _WIDTH) for value in values.values())
    cells = [(visible(key), visible(text)) for key, text in zip(values, texts, strict=True)]
    first, second = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    lines = [f"{subject.config.path}: {world}"]
    for value, (key, text) in zip(values.values(), cells, strict=True):
        lines.append(f"{key:{first}}  {text:{second}}  {value.how:10}  {_reason(value)}".rstrip())
    return _joined(lines)


def _joined(lines: Iterable[str]) -> str:
    return "".join(visible(line) + "\n" for line in lines)


def _reason(value: Value) -> str:
    """Return in one line where a value was written, or what it follows from."""
    parts = [_location(value)] if value.steps else []
    parts += [value.why] if value.why and value.why != "the default" else []
    if value.over is not None:
        parts.append(f"the file says {shown(value.over[0], _WIDTH)} at {value.over[1]}")
    return ", ".join([*parts, *value.notes])


def _location(value: Value) -> str:
    """Return the location of a value, with the key that is written there if it is another name."""
    location = str(value.location)
    return location if value.source_key == value.key else f"{location} ({value.source_key})"


# One value --------------------------------------------------------------------------------------------------------


def explanation(subject: Subject, value: Value, values: Mapping[str, Value]) -> str:
    """Explain a value: its reason, the values that it follows from, and its key's help."""
    known = "is not known" if value.how == "unknown" else f"= {shown(value.value)} ({value.how})"
    lines = [f"{value.key} {known}", *(f"  {line}" for line in _why(subject, value, values))]
    lines += [f"  {note}" for note in value.notes]
    return _joined(lines + ([f"  help: {value.help}"] if value.help else []))


def _why(subject: Subject, value: Value, values: Mapping[str, Value]) -> Iterator[str]:
    if value.source_key and value.source_key != value.key:
        yield f"by {value.source_key}"
    for step in value.steps:
        yield f"{step.what}, {step.location}"
        yield from _line(subject, step.location)
    if value.over is not None:
        yield f"the file says {shown(value.over[0], 100)}, {value.over[1]}"
        yield from _line(subject, value.over[1])
    if value.why:
        yield f"from {value.why}" if value.why in value.sources else value.why
    for source in value.sources:
        if source in values:
            yield f"  {_source(values[source])}"


def _line(subject: Subject, location: Location) -> Iterator[str]:
    """Yield the source line of a location, if it is not blank."""
    lines = subject.config.sources.get(location.path, "").split("\n")
    if location.line <= len(lines) and lines[location.line - 1].strip():
        yield f"  {location.line:5} | {lines[location.line - 1][:160].rstrip().expandtabs(4)}"


def _source(value: Value) -> str:
    """Describe a value that another follows from, in one line."""
    if value.how == "unknown":
        return f"{value.key} is not known: {value.why}"
    reason = _reason(value)
    return f"{value.key} = {shown(value.value, _WIDTH)}, {value.how}" + (f": {reason}" if reason else "")


# Two configs ------------------------------------------------------------------------------------------------------

_TITLES: Mapping[Group, str] = {
    "written": "written differently",
    "follows": "what follows",
    "form": "the same, in another form",
}


def difference(paths: tuple[str, str], found: Sequence[Difference]) -> str:
    """List the differences by group, each with its two sides."""
    lines = [] if found else ["no difference"]
    if found and not of_what_runs(list(found)):
        lines = ["no difference in what runs"]
    for group in GROUPS:
        members = [each for each in found if each.group == group]
        lines += [f"{_TITLES[group]}:"] if members else []
        lines += [line for each in members for line in _difference(each)]
    head = [f"--- {paths[0]}", f"+++ {paths[1]}"] if found else []
    return _joined([*head, *lines])


def _difference(each: Difference) -> Iterator[str]:
    """Yield a key and its two sides; if the values are equal, yield only the two origins."""
    left, right = each.left, each.right
    if each.group == "form" and left is not None and right is not None and left.value == right.value:
        yield f"  {each.key} = {shown(left.value, _WIDTH)}: {_origin(left)} and {_origin(right)}"
        return
    yield f"  {each.key}"
    yield f"    - {_side(left)}"
    yield f"    + {_side(right)}"


def _origin(value: Value) -> str:
    return _location(value) if value.steps else value.how


def _side(value: Value | None) -> str:
    if value is None:
        return "not there"
    text = "not known" if value.how == "unknown" else shown(value.value, 2 * _WIDTH)
    reason = f"from {value.why}" if value.why in value.sources else _reason(value)
    return f"{text}  {value.how}" + (f": {reason}" if reason else "")


# Records ----------------------------------------------------------------------------------------------------------


def record(value: Value) -> dict[str, Any]:
    """Make the record of a value."""
    over = {"value": _json(value.over[0]), **value.over[1]._asdict()} if value.over is not None else None
    return {
        "key": value.key,
        "value": _json(value.value),
        "how": value.how,
        "why": value.why,
        "written_as": value.source_key or None,
        "places": [{"what": step.what, **step.location._asdict()} for step in value.steps],
        "overrides": over,
        "follows_from": list(value.sources),
        "notes": list(value.notes),
        "help": value.help,
    }


def values_json(subject: Subject, values: Iterable[Value]) -> str:
    """Return values as JSON."""
    made = {"config": subject.config.path, "world_size": subject.world_size, "values": list(map(record, values))}
    return json_text(made)


def differences_json(paths: tuple[str, str], world_size: int | None, found: Sequence[Difference]) -> str:
    """Return differences as JSON."""
    records = [
        {"key": each.key, "group": each.group}
        | {side: value and record(value) for side, value in (("left", each.left), ("right", each.right))}
        for each in found
    ]
    return json_text({"left": paths[0], "right": paths[1], "world_size": world_size, "differences": records})


def _json(value: object) -> object:
    if isinstance(value, Reference):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value if not isinstance(value, float) or value - value == 0 else repr(value)
