"""The table of a source: what becomes of each of its keys. One file below data/ holds one source.

    title: LiBai                                                      # facts about the source, up to an empty line
    packages: libai oneflow                                           # see `Framework` and `Table`
    defaults: dropout=0.1                                             # what it takes where a config is silent

    renamed train.log_period -> train.log_interval                    # fate, key -> key of dslpar's | why
    dropped train.dist.{num_nodes num_gpus_per_node} | the hostfile says it                    # {...}: one row each
    renamed optim.{lr betas} -> optimizer.{}                                                   # {}: the same name
    renamed model.{depth=num_layers} -> model.{}                                               # {}: another name
    renamed zero.** -> zero.** | "auto" is left out                   # ** stands for any rest, in both keys the same
            among @zero                                               # whose first name is one of these (@: a list)
    changed train.scheduler.alpha -> lr_scheduler.min_lr | alpha times optim.lr
            alpha                                                     # the conversion of the value, and its argument

A conversion is a function by its name (`Conversion`): of the module of the source, or of `dslpar.migrate.conversions`,
which has those that sources share. The first row about a key counts. docs/import.md shows all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dslpar.schema.frameworks import Framework

Fate = Literal["kept", "renamed", "changed", "dropped", "dead", "needed", "added"]
FATES: Mapping[Fate, str] = {
    "needed": "needs you",
    "changed": "changed in meaning",
    "added": "added",
    "dropped": "dropped",
    "dead": "dead there too",
    "renamed": "renamed",
    "kept": "kept",
}
"""Each fate and its title, in the order of a report."""

REST = "**"


class Unread:
    """The value of a key that is there, and that the evaluator could not tell."""

    def __repr__(self) -> str:
        return "(not evaluated)"


UNREAD = Unread()


class Epoch(NamedTuple):
    """What an epoch is: samples of the data, and of one optimizer step."""

    samples: int
    global_size: int


class View(NamedTuple):
    """What a conversion may look at besides its own value."""

    values: Mapping[str, Any]
    """The plain value of every leaf key."""
    used: Collection[str] = ()
    """Top-level names that an expression of the source reads."""
    model: str = ""
    """The class that the source's model names, in full; empty: none."""
    epoch: Epoch | None = None
    """Given by --num-samples, which no source says."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; None says nothing, and what could not be evaluated has no value."""
        value = self.values.get(key)
        return default if value is None or value is UNREAD else value

    def any_of(self, *keys: str) -> Any:
        """Return the first of these values that is there."""
        return next((self.get(key) for key in keys if self.get(key) is not None), None)


class Outcome(NamedTuple):
    """What became of one value."""

    fate: Fate
    to: str = ""
    value: Any = None
    why: str = ""
    also: Mapping[str, object] = {}
    """Keys of dslpar's that the value implies besides, unless the source says them."""


def dropped(why: str, also: Mapping[str, object] | None = None) -> Outcome:
    """Make the outcome of a value without counterpart, or that needs none."""
    return Outcome("dropped", why=why, also=also or {})


def dead(why: str) -> Outcome:
    """Make the outcome of a key that the framework itself does not read."""
    return Outcome("dead", why=why)


def needed(why: str, to: str = "") -> Outcome:
    """Make the outcome of what only the author can say."""
    return Outcome("needed", to, why=why)


def changed(to: str, value: object, why: str, also: Mapping[str, object] | None = None) -> Outcome:
    """Make the outcome of another value, or another meaning."""
    return Outcome("changed", to, value, why, also or {})


class Row(NamedTuple):
    """One row of a source's table."""

    fate: Fate
    pattern: str
    """A dotted key, or a prefix and `**`."""
    to: str = ""
    why: str = ""
    conversion: str = ""
    """The name of the function that has the outcome; empty: the value stands as it is."""
    argument: str = ""
    """What the row hands to that function."""
    among: Collection[str] = ()
    """Names that may stand at the start of the rest; empty: any."""
    needs_value: bool = True
    """Whether the key must have been evaluated, and not only be there."""

    def rest(self, key: str) -> str | None:
        """Return what `**` stands for in the key; None where the row is not about it."""
        if not self.pattern.endswith(REST):
            return "" if key == self.pattern else None
        prefix = self.pattern.removesuffix(REST)
        if not key.startswith(prefix):
            return "" if key == prefix.removesuffix(".") and not self.among else None
        rest = key.removeprefix(prefix)
        return rest if not self.among or rest.partition(".")[0] in self.among else None

    def as_is(self, value: object, why: str = "") -> Outcome:
        """Make the outcome of a value that stands as it is, under the row's key."""
        return Outcome(self.fate, self.to, value, why)


Conversion = Callable[[object, View, Row], object]
"""From a value, the view and the row: another value for `row.to`, or an Outcome."""


class Table(NamedTuple):
    """A source: its rows and what else is known of it."""

    framework: Framework
    rows: Sequence[Row]
    conversions: Mapping[str, Conversion]
    wrapper: str = ""
    """A top-level dict that may hold all sections."""
    own_names: bool = False
    """Whether top-level names that are in no row are the author's own variables."""
    ignores: bool = False
    """Whether the framework ignores top-level keys that it does not know."""
    partial: bool = False
    """Whether the framework has keys that no row is about."""
    defaults: Mapping[str, object] = {}
    """Keys and the values that the framework takes where they are absent, and dslpar takes otherwise."""
    adds: Mapping[str, object] = {}
    """Keys of dslpar's that every such source implies."""
    wants: Mapping[str, str] = {}
    """Keys of dslpar's that must be written where the source does not give them, and why."""
    includes: Table | None = None
    """The source whose rows follow its own."""

    @property
    def title(self) -> str:
        """The framework's name."""
        return self.framework.title

    def name_of(self, key: str) -> str:
        """Return a key as rows have it."""
        return self.framework.name_of(key)

    def outcome(self, row: Row, value: object, rest: str, view: View) -> Outcome:
        """Return what becomes of a value by its row."""
        made = self.conversions[row.conversion](value, view, row) if row.conversion else row.as_is(value, row.why)
        if not isinstance(made, Outcome):
            made = changed(row.to, made, row.why)
        return made._replace(to=filled(made.to, rest))


def filled(to: str, rest: str) -> str:
    """Put what `**` stands for into dslpar's key."""
    return to.replace(REST, rest) if rest else to.removesuffix(f".{REST}")
