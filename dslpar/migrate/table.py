"""Table of a source framework: what becomes of each of its config keys. Each file in data/ is one table.

    title: LiBai                                                      # facts about the framework, up to an empty line
    packages: libai oneflow                                           # see `Framework` and `Table`
    include: deepspeed under deepspeed                                # its section of this name has DeepSpeed's keys,
                                                                      # or names a JSON file that has them

    renamed train.log_period -> train.log_interval                    # fate, their key -> dslpar's key | reason
    dropped train.dist.{num_nodes num_gpus_per_node} | the hostfile sets it                    # {...}: one row each
    renamed optim.{lr betas} -> optimizer.{}                                                   # {}: the same name
    renamed model.{depth=num_layers} -> model.{}                                               # {}: num_layers
    renamed zero.** -> zero.** | "auto" is left out                   # **: any rest, the same in both keys
            among @zero                                               # the rest begins with a name in the list "zero"
    changed train.scheduler.alpha -> lr_scheduler.min_lr | alpha times optim.lr
            alpha                                                     # the conversion of the value, and its argument

A conversion (`Conversion`) is a function, named in its row. It is defined in the framework's module in this package, or
in `dslpar.migrate.conversions` if several frameworks share it. The first row that matches a key applies. docs/import.md
shows all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dslpar.language.tree import TARGET
from dslpar.migrate.defaults import Default
from dslpar.migrate.unread import UNREAD, UnreadError
from dslpar.schema.frameworks import Framework

Fate = Literal["kept", "renamed", "changed", "dropped", "dead", "needed", "added"]
"""What becomes of a key.

- kept, renamed: the value is unchanged, under the same or another key;
- changed: the value or its meaning changes;
- dropped: dslpar has or needs no counterpart;
- dead: the source framework does not read the key either;
- needed: only the config's author can choose the value;
- added: no key of the source sets it (a default of the framework, or an implied value).
"""
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


class Epoch(NamedTuple):
    """Size of an epoch: samples of the data, and samples per optimizer step."""

    samples: int
    global_size: int


class View(NamedTuple):
    """Facts about the source that a conversion may read in addition to the value that it converts."""

    values: Mapping[str, Any]
    """The plain value of every leaf key."""
    used: Collection[str] = ()
    """Top-level names that an expression of the source reads."""
    model: str = ""
    """The full class name of the source's model; empty if there is none."""
    epoch: Epoch | None = None
    """Size of an epoch, from --num-samples, since no source contains it; None without that option."""
    defaults: Mapping[str, Any] = {}
    """The framework's defaults that apply to this source, by its keys."""
    folder: str = ""
    """Folder of the source, from which its relative paths start."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; `default` if it is missing or None. Raises UnreadError if it was not evaluated."""
        value = self.values.get(key)
        if value is UNREAD:
            raise UnreadError(key)
        return default if value is None else value

    def value(self, key: str) -> Any:
        """Return what the framework takes for a key: the source's value, else its default; None without both."""
        return self.get(key, self.defaults.get(key))

    def below(self, section: str) -> View:
        """Return the view of a section that holds another framework's config, by that framework's keys."""
        start = f"{section}."
        values = {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}
        return self._replace(values=values, defaults={})

    def any_of(self, *keys: str) -> Any:
        """Return the first of these keys' values that `get` finds, or None."""
        return next((self.get(key) for key in keys if self.get(key) is not None), None)


class Outcome(NamedTuple):
    """Result of the conversion of one value."""

    fate: Fate
    to: str = ""
    value: Any = None
    why: str = ""
    also: Mapping[str, object] = {}
    """Further dslpar keys that the value implies, unless the source sets them."""


def dropped(why: str, also: Mapping[str, object] | None = None) -> Outcome:
    """Make the outcome of a value that has or needs no counterpart."""
    return Outcome("dropped", why=why, also=also or {})


def dead(why: str) -> Outcome:
    """Make the outcome of a key that the framework itself does not read."""
    return Outcome("dead", why=why)


def needed(why: str, to: str = "") -> Outcome:
    """Return the outcome 'needed': only the config's author can choose this value."""
    return Outcome("needed", to, why=why)


def changed(to: str, value: object, why: str, also: Mapping[str, object] | None = None) -> Outcome:
    """Make the outcome of a value that changes, or changes its meaning."""
    return Outcome("changed", to, value, why, also or {})


class Row(NamedTuple):
    """Row of a source's table."""

    fate: Fate
    pattern: str
    """A dotted key, or a prefix followed by `**`."""
    to: str = ""
    """The key of dslpar; empty if there is none."""
    why: str = ""
    """Reason, for the report."""
    conversion: str = ""
    """The name of the function that returns the outcome; if empty, the value is unchanged."""
    argument: str = ""
    """Text that the conversion reads."""
    among: Collection[str] = ()
    """First names that `**` may match; any name if empty."""
    needs_value: bool = True
    """Whether the row needs the key's evaluated value. If not, it is enough that the key exists."""
    under: str = ""
    """Section of the source that holds the config of an included table, whose conversions see only that section."""

    def rest(self, key: str) -> str | None:
        """Return the part of the key that `**` matches; None if the row does not match the key."""
        if not self.pattern.endswith(REST):
            return "" if key == self.pattern else None
        prefix = self.pattern.removesuffix(REST)
        if not key.startswith(prefix):
            return "" if key == prefix.removesuffix(".") and not self.among else None
        rest = key.removeprefix(prefix)
        return rest if not self.among or rest.partition(".")[0] in self.among else None

    def as_is(self, value: object, why: str = "") -> Outcome:
        """Make the outcome of an unchanged value, with the row's fate and key."""
        return Outcome(self.fate, self.to, value, why)


Conversion = Callable[[object, View, Row], object]
"""Function of a value, the view and the row that returns another value for `row.to`, or an Outcome."""


Fill = Callable[[str, View], tuple[object, str]]
"""Function of DeepSpeed's key and the view: the value of its "auto" and where it comes from; ("", "") if unknown."""


class Table(NamedTuple):
    """Rows of a source, and further facts about its framework."""

    framework: Framework
    rows: Sequence[Row]
    conversions: Mapping[str, Conversion]
    wrapper: str = ""
    """A top-level dict that may hold all sections."""
    own_names: bool = False
    """Whether top-level names without a row are the author's own variables."""
    ignores: bool = False
    """Whether the framework ignores top-level keys that it does not know."""
    partial: bool = False
    """Whether the framework has keys without a row."""
    defaults: Sequence[Default] = ()
    """The framework's keys and its defaults."""
    adds: Mapping[str, object] = {}
    """Values, by dslpar's keys, that every source of the framework implies."""
    wants: Mapping[str, str] = {}
    """Keys of dslpar that the author must write if neither the source nor a default sets them, and why."""
    overrides: Mapping[str, str] = {}
    """Further keys that the author must write for a file that overrides another config, which sets them; and why."""
    overriding: tuple[str, ...] = ()
    """Endings of such files."""
    is_open: bool = False
    """Whether programs that use the framework may add keys of their own to its files."""
    open_in: tuple[str, ...] = ()
    """Endings of files in which a key without a row may be of the author's own program."""
    open_sections: Collection[str] = ()
    """Sections whose class the author chooses: a key that is not listed may be another class's."""
    listed_classes: Collection[str] = ()
    """Classes of these sections whose keys are listed."""
    tried: int = 0
    """Number of files that the tests lint and convert."""
    tried_there: str = ""
    """Number of files of the framework's repository that were tried, and its commit."""
    unset: Mapping[str, object] = {}
    """dslpar's defaults, by its keys, of what the framework's programs set and its configs need not."""
    includes: Table | None = None
    """Another table whose rows follow this one's."""
    keys: Collection[str] = frozenset()
    """All keys of the framework, if they are listed: another key is none of its, whatever row matches it."""
    fill: Fill | None = None
    """Function that fills in "auto" in the included table's section."""
    under: str = ""
    """Section of the source that the included table's rows are about, or key of the file that has these keys."""

    @property
    def title(self) -> str:
        """The framework's name."""
        return self.framework.title

    def has(self, key: str) -> bool:
        """Return whether a key is one of the framework's, or below one; any key if they are not listed."""
        if not self.keys or key == TARGET:
            return True
        section = key.removesuffix(f".{TARGET}")
        if section != key and any(f"{known}.".startswith(f"{section}.") for known in self.keys):
            return True
        return any(above in self.keys for above in _with_above(self.framework.written(key)))

    def name_of(self, key: str) -> str:
        """Return a key as the rows name it."""
        return self.framework.name_of(key)

    def outcome(self, row: Row, value: object, rest: str, view: View) -> Outcome:
        """Return the outcome of a value by its row."""
        if row.under:
            view = view.below(row.under)
            row = row._replace(pattern=row.pattern.removeprefix(f"{row.under}."))
        try:
            made = self.conversions[row.conversion](value, view, row) if row.conversion else row.as_is(value, row.why)
        except UnreadError as error:
            made = needed(f"it depends on {error.key}, whose value could not be evaluated", row.to)
        if not isinstance(made, Outcome):
            made = changed(row.to, made, row.why)
        return made._replace(to=filled(made.to, rest))


def _with_above(key: str) -> Iterator[str]:
    """Yield a key and the keys above it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def filled(to: str, rest: str) -> str:
    """Replace `**` in dslpar's key by the matched rest."""
    return to.replace(REST, rest) if rest else to.removesuffix(f".{REST}")
