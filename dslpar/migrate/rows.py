"""What becomes of a key: rows, a table of them for each source, and outcomes.

A row's pattern is a dotted key, or a prefix and `**`, which stands for any rest; in `to` it stands for the same rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

Fate = Literal["kept", "renamed", "changed", "dropped", "needed", "added"]
FATES: Mapping[Fate, str] = {
    "needed": "needs you",
    "changed": "changed in meaning",
    "added": "added",
    "dropped": "dropped",
    "renamed": "renamed",
    "kept": "kept",
}
"""Each fate and its words, in the order of a report."""

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
    """What a row may look at besides its own value."""

    values: Mapping[str, Any]
    """The plain value of every leaf key."""
    used: Collection[str] = ()
    """Top-level names that an expression of the source reads."""
    model: str = ""
    """The class that the source's model names, in full; empty: none."""
    epoch: Epoch | None = None
    """Given by --num-samples, which no source says."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; None says nothing, and what could not be evaluated has no value."""
        value = self.values.get(key)
        return default if value is None or value is UNREAD else value

    def any_of(self, *keys: str) -> Any:
        """The first of these values that is there."""
        return next((self.get(key) for key in keys if self.get(key) is not None), None)


class Outcome(NamedTuple):
    """What became of one value."""

    fate: Fate
    to: str = ""
    value: Any = None
    why: str = ""
    also: Mapping[str, Any] = {}
    """Keys of dslpar's that the value implies besides, unless the source says them."""


Make = Callable[[Any, View], Any]
"""From a value and the view to another value for `to`, or to an Outcome."""


class Row(NamedTuple):
    """One row of a source's table."""

    pattern: str
    fate: Fate
    to: str = ""
    why: str = ""
    make: Make | None = None
    among: Collection[str] = ()
    """Names that may stand at the start of the rest; empty: any."""
    unread: bool = False
    """Whether it is enough that the key is there."""

    def rest(self, key: str) -> str | None:
        """What `**` stands for in the key; None where the row is not about it."""
        if not self.pattern.endswith(REST):
            return "" if key == self.pattern else None
        prefix = self.pattern.removesuffix(REST)
        if not key.startswith(prefix):
            return "" if key == prefix.removesuffix(".") and not self.among else None
        rest = key.removeprefix(prefix)
        return rest if not self.among or rest.partition(".")[0] in self.among else None

    def outcome(self, value: Any, rest: str, view: View) -> Outcome:
        """What becomes of this value."""
        to = filled(self.to, rest)
        if self.make is None:
            return Outcome(self.fate, to, value, self.why)
        made = self.make(value, view)
        if isinstance(made, Outcome):
            return made._replace(to=filled(made.to, rest))
        return Outcome("changed", to, made, self.why)


def filled(to: str, rest: str) -> str:
    return to.replace(REST, rest) if rest else to.removesuffix(f".{REST}")


class Table(NamedTuple):
    """A source: its rows and what else is said of it."""

    name: str
    title: str
    rows: tuple[Row, ...]
    own_names: bool
    """Whether top-level names that are in no row are the author's own variables."""


def same(pattern: str, to: str = "", why: str = "", among: Collection[str] = ()) -> Row:
    """The value stands as it is, under its own key or another."""
    to = to or pattern
    return Row(pattern, "kept" if to == pattern else "renamed", to, why, among=among)


def rename(pattern: str, to: str, why: str, make: Make, among: Collection[str] = ()) -> Row:
    """The value stands under another key, or the same, where `make` says no otherwise."""
    return Row(pattern, "kept" if to == pattern else "renamed", to, why, make, among)


def drop(pattern: str, why: str, among: Collection[str] = ()) -> Row:
    """The key has no counterpart, or needs none."""
    return Row(pattern, "dropped", why=why, among=among, unread=True)


def change(pattern: str, to: str, why: str, make: Make, unread: bool = False, among: Collection[str] = ()) -> Row:
    """Another value, or another meaning."""
    return Row(pattern, "changed", to, why, make, among, unread)


def ask(pattern: str, to: str, why: str) -> Row:
    """Only the author can say."""
    return Row(pattern, "needed", to, why)


def dropped(why: str) -> Outcome:
    """The outcome of a value without counterpart."""
    return Outcome("dropped", why=why)


def needed(why: str, to: str = "") -> Outcome:
    """The outcome of what only the author can say."""
    return Outcome("needed", to, why=why)


def changed(to: str, value: Any, why: str, also: Mapping[str, Any] | None = None) -> Outcome:
    """The outcome of another value, or another meaning."""
    return Outcome("changed", to, value, why, also or {})


def expected(right: Any, why: str, otherwise: str) -> Make:
    """Dropped where it has the value that dslpar's way implies; else the author must see to it."""

    def make(value: Any, view: View) -> Outcome:
        return dropped(why) if value == right else needed(otherwise)

    return make


def only(pattern: str, right: Any, why: str, otherwise: str) -> Row:
    """A row of `expected`."""
    return Row(
        pattern, "dropped", why=f"{why} ({right!r}); any other value needs you", make=expected(right, why, otherwise)
    )


def on(to: str, value: Any, why: str, off: str) -> Make:
    """True becomes `to`; False is dropped."""

    def make(flag: Any, view: View) -> Outcome:
        if flag is True:
            return changed(to, value, why)
        return dropped(off) if flag is False else needed(f"it is {flag!r}, neither True nor False", to)

    return make


def numeric(to: str, make: Make) -> Make:
    """`make`, for numbers; of anything else only the author can say what it means."""

    def checked(value: Any, view: View) -> Any:
        right = type(value) in (int, float) and math.isfinite(value)
        return make(value, view) if right else needed(f"it is {value!r}, which is no number", to)

    return checked


def _exponent(value: Any, view: View) -> Any:
    exponent = int(value).bit_length() - 1
    if value < 1 or 2**exponent != value:
        return needed(f"DeepSpeed starts from a power of two, and {value!r} is none", "precision.initial_scale_power")
    return exponent


power_of_two = numeric("precision.initial_scale_power", _exponent)
"""log2 of a loss scale."""
