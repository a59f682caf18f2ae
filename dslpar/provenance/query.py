"""Look up the values of a key under any of its names.

The name of a section finds all keys in it. LiBai's and ColossalAI's names find dslpar's keys, and the reverse. A name
that begins with `deepspeed.` finds keys of DeepSpeed's dict. A valid key that this config does not have is shown with
its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dslpar.core.suggest import did_you_mean
from dslpar.provenance import deepspeed
from dslpar.provenance.reference import Row, below, other_names, rows
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value

ZERO = "zero."


class Answers:
    """Values of one config, found by any of their names."""

    def __init__(self, subject: Subject, values: Mapping[str, Value]) -> None:
        self.subject, self.values = subject, values
        self.deepspeed = deepspeed.dict_or_unknown(subject, values)

    def of(self, query: str) -> list[Value]:
        """Return the values of a key or section; empty for an unknown key."""
        for key in self._names(query):
            for table in (self.values, self.deepspeed):
                found = _at_or_below(table, key)
                # `deepspeed` is also a section of the config. Its keys are looked up below, in the dict that runs.
                if found and not key.startswith("deepspeed"):
                    return found
            found = self._of_deepspeed(key) if key.startswith("deepspeed") else self._not_in_this_config(key)
            if found:
                return found
        return []

    def _names(self, query: str) -> Iterable[str]:
        """Yield the names of the key, the given one first."""
        yield query
        by_source_key = {value.source_key: key for key, value in self.values.items() if value.source_key}
        plain = query.replace(".cfg.", ".").replace(".kwargs.", ".")
        names = (by_source_key.get(query), other_names().get(query), other_names().get(plain), plain)
        yield from (name for name in names if name)

    def _of_deepspeed(self, key: str) -> list[Value]:
        """Return values of DeepSpeed's dict, or DeepSpeed's own default of a key."""
        found = _at_or_below(self.deepspeed, key) or _at_or_below(self.values, key)
        if found:
            return found
        path = key.removeprefix("deepspeed").removeprefix(".")
        value = deepspeed.default_of(path)
        if not path or value is None:
            return []
        if not self.subject.sound:
            return [value._replace(value=None, how="unknown", why="unknown until the errors are corrected")]
        return [value]

    def _not_in_this_config(self, key: str) -> list[Value]:
        """Return the default of a key that this config does not have but another config could."""
        if key.startswith(ZERO) and (value := deepspeed.default_of(f"zero_optimization.{key.removeprefix(ZERO)}")):
            return [value._replace(key=key)]
        found = [row for row in below(key) if row.key == key]
        if not found:
            return []
        section = key.partition(".")[0]
        type_ = self.values.get(f"{section}.type")
        return [_not_here(row, type_) for row in found[:1]]

    def hint(self, query: str) -> str:
        """Return "did you mean ...?", or the command that lists the keys."""
        if query.startswith(deepspeed.PREFIX):
            known = [f"{deepspeed.PREFIX}{path}" for path in deepspeed.all_keys()]
        else:
            known = [row.key for row in rows()] + [*self.values, *other_names()]
        return did_you_mean(query, known) or "dslpar config --reference lists the keys"


def _at_or_below(table: Mapping[str, Value], key: str) -> list[Value]:
    return [value for name, value in table.items() if name == key or name.startswith(f"{key}.")]


def _not_here(row: Row, type_: Value | None) -> Value:
    if row.of and type_ is not None and type_.value is not None:
        why = f"a key of {row.of}; here the type is {type_.value!r}"
        return Value(row.key, None, "default", why, help=row.help)
    section = row.key.rpartition(".")[0]
    default = f"; with it, the default would be {row.default}" if row.default not in ("", "required") else ""
    why = f"there is no {section} here{default}" if section else "left out"
    return Value(row.key, None, "default", why, help=row.help)
