"""Origin of each value in DeepSpeed's config: a dslpar key, dslpar's own choice, or DeepSpeed's default.

`dslpar.layout.deepspeed_config` makes the dict, and has the reasons for dslpar's own choices. `dslpar.schema.keys`
declares which dslpar key sets which DeepSpeed key. A key that is not in the dict has DeepSpeed's own default, from a
list that is generated from DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dslpar.layout.deepspeed_config import CHOICES, ds_config
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value
from dslpar.schema.deepspeed_policy import KEYS, known
from dslpar.schema.keys import deepspeed_keys

PREFIX = "deepspeed."
_OFF = "None: clipping is off, which DeepSpeed must be told (its default is 1.0)"


def deepspeed_values(subject: Subject, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of DeepSpeed's dict by key; `values` are the config's values.

    Raises:
        UnknownValueError: lint finds an error, so there is no dict.
    """
    leaves = flat(ds_config(subject.job_of_some_world))
    return {f"{PREFIX}{path}": _value(subject, values, path, value) for path, value in leaves}


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, by dotted path."""
    for name, value in table.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def _value(subject: Subject, values: Mapping[str, Value], path: str, value: Any) -> Value:
    key = f"{PREFIX}{path}"
    if key in values:
        return values[key]  # from the raw `deepspeed` section
    sources, why = origin_of(path, values)
    if not sources:
        return Value(key, value, "default", why, help=_describe(path))
    first = values[sources[0]]
    if first.how == "unknown":
        return Value(key, None, "unknown", first.why, sources=sources)
    why = why or (_OFF if path == "gradient_clipping" and first.value is None else first.key)
    return Value(key, value, "inferred", why, sources=sources, help=_describe(path))


def origin_of(path: str, values: Mapping[str, Value]) -> tuple[tuple[str, ...], str]:
    """Return the keys that a DeepSpeed key follows from, and the reason if dslpar chooses the value.

    Raises:
        KeyError: dslpar never sets the key.
    """
    ours, above = deepspeed_keys(), path
    while above not in ours and "." in above:
        above = above.rpartition(".")[0]
    key = ours[above] + path.removeprefix(above) if above in ours else ""
    if key in values:
        return (key,), ""
    choice = CHOICES[path]
    return tuple(source for source in choice.sources if source in values), choice.why


# Keys that dslpar does not set ------------------------------------------------------------------------------------


def default_of(path: str) -> Value | None:
    """Return DeepSpeed's own value of a key that dslpar does not set; None for a key that DeepSpeed does not have."""
    row = known(path)
    if row is None:
        return None
    why = "a section that dslpar does not set" if row[0] == "section" else "DeepSpeed's own default"
    return Value(f"{PREFIX}{path}", row[1], "default", why, help=_describe(path))


def all_keys() -> list[str]:
    """List every DeepSpeed key as a dotted path."""
    return [f"{section}.{name}" if section else name for section, names in KEYS.items() for name in names]


def _describe(path: str) -> str:
    """Describe the type and default of a DeepSpeed key."""
    row = known(path)
    if row is None or row[0] == "section":
        return ""
    return f"DeepSpeed's default: {row[1]!r}" + (f", of type {row[0]}" if row[0] else "")


def dict_or_unknown(subject: Subject, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return `deepspeed_values`, or an empty dict if lint finds an error."""
    try:
        return deepspeed_values(subject, values)
    except UnknownValueError:
        return {}
