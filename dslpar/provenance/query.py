"""A key as a person writes it, to the values that it means.

A section means all that is in it. LiBai's and ColossalAI's names of a key mean what dslpar's mean, in both directions;
`deepspeed.` leads to DeepSpeed's dict. A key that a config could have and this one has not is told with its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dslpar.core.suggest import did_you_mean
from dslpar.provenance import deepspeed
from dslpar.provenance.reference import Row, below, other_names, rows
from dslpar.provenance.subject import Case
from dslpar.provenance.values import Value

ZERO = "zero."


class Answers:
    """The values of one config, to be asked by any name."""

    def __init__(self, case: Case, values: Mapping[str, Value]) -> None:
        self.case, self.values = case, values
        self.deepspeed = deepspeed.dict_or_unknown(case, values)

    def of(self, asked: str) -> list[Value]:
        """The values that a key means; none for a key that nobody has."""
        for key in self._names(asked):
            for table in (self.values, self.deepspeed):
                found = _at_or_below(table, key)
                if found and not key.startswith("deepspeed"):
                    return found
            found = self._theirs(key) if key.startswith("deepspeed") else self._elsewhere(key)
            if found:
                return found
        return []

    def _names(self, asked: str) -> Iterable[str]:
        """The key under its names, the config's own first."""
        yield asked
        by_wrote = {value.source_key: key for key, value in self.values.items() if value.source_key}
        plain = asked.replace(".cfg.", ".").replace(".kwargs.", ".")
        names = (by_wrote.get(asked), other_names().get(asked), other_names().get(plain), plain)
        yield from (name for name in names if name)

    def _theirs(self, key: str) -> list[Value]:
        """Of DeepSpeed's dict, all of it or a part, or DeepSpeed's own default."""
        found = _at_or_below(self.deepspeed, key) or _at_or_below(self.values, key)
        if found:
            return found
        path = key.removeprefix("deepspeed").removeprefix(".")
        value = deepspeed.their_default(path)
        if not path or value is None:
            return []
        if not self.case.sound:
            return [value._replace(value=None, how="unknown", why="not known while the errors stand")]
        return [value]

    def _elsewhere(self, key: str) -> list[Value]:
        """A key that this config does not have, and another could."""
        if key.startswith(ZERO) and (value := deepspeed.their_default(f"zero_optimization.{key.removeprefix(ZERO)}")):
            return [value._replace(key=key)]
        found = [row for row in below(key) if row.key == key]
        if not found:
            return []
        section = key.partition(".")[0]
        type_ = self.values.get(f"{section}.type")
        return [_not_here(row, type_) for row in found[:1]]

    def close_to(self, asked: str) -> str:
        """'did you mean ...?', or what can be asked."""
        if asked.startswith(deepspeed.PREFIX):
            known = [f"{deepspeed.PREFIX}{path}" for path in deepspeed.their_keys()]
        else:
            known = [row.key for row in rows()] + [*self.values, *other_names()]
        return did_you_mean(asked, known) or "dslpar config --reference lists the keys"


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
