"""The keys of a source framework and its defaults, each with its place in the framework's code: data/keys/*.txt.

    [megatron/neox_arguments/neox_args.py NeoXArgsModel]      # file and class or function of the defaults below
    hidden_dropout = 0.0 | 1389                               # key = default | line
    save = None | 1248                                        # a key without a default
    [hybrid_adam.py HybridAdam if optimizer.type is HybridAdam]        # they apply if the key has one of these values
    [configs/common/optim.py without optim._target_]                   # ... if the source does not set the key
    [sharded_model_v2.py ShardedModelV2 if zero.model_config]          # ... if it sets the key, or a key below it
    [trl/trainer/sft_config.py SFTConfig if packing|eos_token]         # ... if it sets one of the keys

Of a dotted value only the last part counts, in any case. What a source leaves out has the framework's default, and not
dslpar's: `convert` writes it into the result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from dslpar.migrate.unread import UNREAD


class Condition(NamedTuple):
    """A fact about a source on which defaults depend."""

    key: str
    names: tuple[str, ...] = ()
    """Values of the key; any value if empty."""
    absent: bool = False
    """Whether the key must be missing instead."""
    others: tuple[str, ...] = ()
    """Further keys, of which one is enough."""

    def holds(self, values: Mapping[str, Any], defaults: Mapping[str, Default]) -> bool:
        """Return whether a source with these values, and so far with these defaults, meets the condition."""
        if self.others:
            each = (self._replace(key=key, others=()) for key in (self.key, *self.others))
            return any(condition.holds(values, defaults) for condition in each)
        value = values.get(self.key)
        if self.absent:
            return value is None and not any(key.startswith(f"{self.key}.") for key in values)
        if value is None and self.key in defaults:
            value = defaults[self.key].value
        if self.names:
            name = str(value).rpartition(".")[2].lower()
            return value is not UNREAD and any(name == item.lower() for item in self.names)
        return value is not None or any(key.startswith(f"{self.key}.") for key in values)


class Default(NamedTuple):
    """One line of a file: a key of the framework, its default, and where the framework defines it."""

    key: str
    value: Any
    """The default; None if there is none."""
    path: str
    symbol: str
    line: str
    """Line of `path`; empty if the symbol suffices."""
    conditions: tuple[Condition, ...] = ()

    @property
    def place(self) -> str:
        """Short place, for reports: the file's name and the line, or the symbol."""
        return f"{self.path.rpartition('/')[2]}:{self.line or self.symbol}"


_HEAD = re.compile(r"\[(?P<path>\S+) (?P<symbol>\S+?)(?: if (?P<given>.+?))?(?: without (?P<absent>\S+))?\]")
_SETTING = re.compile(r"(?P<key>\S+) = (?P<value>.*?)(?: \| (?P<line>\d+))?")


def defaults_of(values: Mapping[str, Any], known: Sequence[Default]) -> dict[str, Default]:
    """Return the defaults that apply to a source with these values, by key; the first of a key's lines counts."""
    found: dict[str, Default] = {}
    for default in known:
        if default.key not in found and all(condition.holds(values, found) for condition in default.conditions):
            found[default.key] = default
    return {key: default for key, default in found.items() if default.value is not None}


def read_defaults(name: str) -> tuple[Default, ...]:
    """Read the file of the source `name`; without one, its framework has no known defaults."""
    file = resources.files("dslpar.migrate").joinpath(f"data/keys/{name}.txt")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    made = []
    path = symbol = ""
    conditions: tuple[Condition, ...] = ()
    for line in filter(None, (line.strip() for line in text.splitlines() if not line.startswith("#"))):
        head = _HEAD.fullmatch(line)
        if head is not None:
            path, symbol, conditions = head["path"], head["symbol"], _conditions(head["given"], head["absent"])
            continue
        setting = _SETTING.fullmatch(line)
        assert setting is not None, f"no default: {line!r}"
        value = ast.literal_eval(setting["value"])
        made.append(Default(setting["key"], value, path, symbol, setting["line"] or "", conditions))
    return tuple(made)


def _conditions(given: str | None, absent: str | None) -> tuple[Condition, ...]:
    made = [Condition(absent, absent=True)] if absent else []
    for item in given.split(" and ") if given else ():
        keys, _, names = item.partition(" is ")
        key, *others = keys.split("|")
        made.append(Condition(key, tuple(names.split()), others=tuple(others)))
    return tuple(made)
