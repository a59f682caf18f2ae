"""Registry of the sources that `dslpar import` knows: one per table in data/.

A table may have conversions of its own: functions in the module of this package that has the table's name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module, resources
from importlib.util import find_spec

from dslpar.migrate import conversions
from dslpar.migrate.defaults import read_defaults
from dslpar.migrate.table import Row, Table
from dslpar.schema import deepspeed_policy
from dslpar.schema.frameworks import framework_of, read_head

_LISTS = {
    "zero": deepspeed_policy.ZERO,
    "offload_optimizer": deepspeed_policy.OFFLOAD_OPTIMIZER,
    "offload_param": deepspeed_policy.OFFLOAD_PARAM,
    "fp16": deepspeed_policy.FP16,
    "bf16": deepspeed_policy.BF16,
    "zero_other_names": [
        f"{name.removeprefix('zero_optimization.')}={other}"
        for name, other in deepspeed_policy.OTHER_NAMES.items()
        if name.startswith("zero_optimization.") and other in deepspeed_policy.ZERO
    ],
    "top": deepspeed_policy.TOP,
    "removed": [name for name in deepspeed_policy.REMOVED if name != "amp"],  # amp has a row of its own
    "unsupported": deepspeed_policy.UNSUPPORTED,
}
"""Lists of DeepSpeed's keys, for rows that refer to them with `@`."""
Lists = Mapping[str, Collection[str]]
_ROW = re.compile(r"(?P<fate>\w+) +(?P<pattern>(?:\{[^}]*\}|\S)+)(?: -> (?P<to>\S+))?(?: \| (?P<why>.*))?")


def read_table(name: str, lists: Lists) -> Table:
    """Read the table of the source `name`; `lists` are the lists that rows refer to with `@`."""
    text = resources.files("dslpar.migrate").joinpath(f"data/{name}.txt").read_text(encoding="utf-8")
    facts = read_head(text)
    included, _, under = facts.get("include", "").partition(" under ")
    includes = read_table(included, lists) if included else None
    rows = (
        *_rows(text.partition("\n\n")[2], lists),
        *(_below(row, under) for row in (includes.rows if includes else ())),
    )
    functions = {**vars(conversions), **(includes.conversions if includes else {})}
    for module in dict.fromkeys((facts.get("conversions", name), name)):
        functions |= vars(import_module(f"dslpar.migrate.{module}")) if find_spec(f"dslpar.migrate.{module}") else {}
    framework, defaults = framework_of(name, facts), read_defaults(facts.get("defaults", name))
    listed = frozenset(default.key for default in defaults) if facts.get("listed") == "yes" else frozenset()
    return Table(
        framework,
        rows,
        {name: functions[name] for name in {row.conversion for row in rows} if name},
        wrapper=facts.get("wrapper", ""),
        own_names=facts.get("own_names") == "yes",
        ignores=facts.get("ignores") == "yes",
        partial=facts.get("partial") == "yes",
        defaults=tuple(default._replace(key=framework.name_of(default.key)) for default in defaults),
        adds=dict(_given(facts.get("adds", ""))),
        wants=_wants(facts.get("wants", "")),
        overrides=_wants(facts.get("override_wants", "")),
        overriding=tuple(facts.get("overriding", "").split()),
        is_open=facts.get("open") == "yes",
        open_in=tuple(facts.get("open_in", "").split()),
        open_sections=facts.get("open_sections", "").split(),
        listed_classes=facts.get("listed_classes", "").split(),
        tried=int(facts.get("tried", "0")),
        tried_there=facts.get("tried_there", ""),
        unset=dict(_given(facts.get("unset", ""))),
        includes=includes,
        keys=listed,
        fill=functions.get("fill"),
        under=under or (includes.under if includes is not None else ""),
    )


def _below(row: Row, under: str) -> Row:
    """Return a row of an included table, for the keys of the section that it is about."""
    return row._replace(pattern=f"{under}.{row.pattern}", under=under) if under else row


def _wants(text: str) -> dict[str, str]:
    """Return the keys and reasons of `a b=why | c=why`."""
    wants = (want.partition("=") for want in filter(None, text.split(" | ")))
    return {key: why for keys, _, why in wants for key in keys.split()}


def _given(text: str) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of `a=1 b='two'`."""
    for item in text.split():
        key, _, value = item.partition("=")
        yield key, ast.literal_eval(value)


def _rows(text: str, lists: Lists) -> Iterator[Row]:
    # Indented lines continue a row: the rest of a list in braces, `among`, `unread` and the conversion.
    for entry in re.split(r"\n+(?! )", text.strip("\n")):
        lines = entry.split("\n")
        first = lines.pop(0)
        while first.count("{") > first.count("}"):
            first += " " + lines.pop(0).strip()
        found = _ROW.fullmatch(first)
        assert found is not None, f"no row: {first!r}"
        fate, pattern, to, why = found.group("fate", "pattern", "to", "why")
        row = Row(fate, pattern, to or (pattern if fate == "kept" else ""), why or "")  # type: ignore[arg-type]
        for line in map(str.strip, lines):
            word, _, rest = line.partition(" ")
            if word == "among":
                row = row._replace(among=_names(rest, lists))
            elif word == "unread":
                row = row._replace(needs_value=False)
            else:
                row = row._replace(conversion=word, argument=rest)
        if fate in ("dropped", "dead") and not row.conversion:
            row = row._replace(needs_value=False)
        yield from _expanded(row, lists)


def _expanded(row: Row, lists: Lists) -> Iterator[Row]:
    braces = re.search(r"\{(.+?)\}", row.pattern)
    if braces is None:
        yield row
        return
    for item in _names(braces[1], lists):
        name, _, other = item.partition("=")
        pattern = row.pattern.replace(braces[0], name)
        yield row._replace(pattern=pattern, to=pattern if row.fate == "kept" else row.to.replace("{}", other or name))


def _names(text: str, lists: Lists) -> tuple[str, ...]:
    return tuple(lists[text[1:]]) if text.startswith("@") else tuple(text.split())


_FILES = sorted(file.name for file in resources.files("dslpar.migrate").joinpath("data").iterdir())
TABLES: Mapping[str, Table] = {
    file.removesuffix(".txt"): read_table(file.removesuffix(".txt"), _LISTS) for file in _FILES if file.endswith(".txt")
}
