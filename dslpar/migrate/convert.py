"""Engine of `dslpar import`: finds the table row of every leaf key of a source, and makes one report entry per leaf.

A leaf is a value that is not a mapping, an empty mapping, or the class of a LazyCall (`_target_`). A list is one leaf.
`dslpar.migrate.table` defines rows, outcomes and fates.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.core.suggest import did_you_mean, only_near
from dslpar.language.tree import TARGET, Node
from dslpar.migrate.defaults import defaults_of
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import DEEPSPEED, JSON_ENDINGS, Source, assigned
from dslpar.migrate.table import REST, Epoch, Fate, Outcome, Row, Table, View, dead, dropped, filled, needed
from dslpar.migrate.unread import UNREAD
from dslpar.schema.sections_reader import SECTIONS

IMPLIED = "implied by "
ENDING = "(ending)"
"""What a default may depend on as on a key: the ending of the source's file, such as py."""
AUTO = "auto"
"""Value of a DeepSpeed key that Hugging Face's libraries fill in."""


class Entry(NamedTuple):
    """Result for one key of the source. The key is empty in an entry that is not about a single key."""

    key: str
    fate: Fate
    to: str
    value: Any
    why: str
    location: Location


class Import(NamedTuple):
    """Converted source: every entry, and the values of the file to write."""

    source: Source
    entries: tuple[Entry, ...]
    values: Mapping[str, Any]
    """Values by dslpar's dotted key."""

    @property
    def needs_you(self) -> bool:
        """Return whether an entry needs the author."""
        return any(entry.fate == "needed" for entry in self.entries)


class Leaf(NamedTuple):
    """Leaf key of the source."""

    key: str
    """The key as written."""
    name: str
    """The key as the rows name it."""
    value: Any
    location: Location
    is_known: bool = True
    """Whether the key is one of the framework's, as far as they are listed."""


def convert(source: Source, model: Mapping[str, object] | None = None, epoch: Epoch | None = None) -> Import:
    """Convert every key by its row. `model` replaces the source's model, and `epoch` is needed to convert epochs."""
    return Converter(source, model, epoch).run()


class Converter:
    """Conversion of one source, which collects entries and values."""

    def __init__(self, source: Source, model: Mapping[str, object] | None, epoch: Epoch | None) -> None:
        self.source, self.model = source, model
        self.table = TABLES[source.name]
        self.known = {row.pattern.partition(".")[0] for row in self.table.rows}
        """Top-level names that some row matches."""
        # A mapping that looks empty may hold unevaluated keys, which are listed separately.
        self.leaves = [
            leaf
            for leaf in leaves_of(source.config.root, self.table)
            if leaf.value != {} or not any(path.startswith(f"{leaf.key}.") for path in source.config.unknown)
        ]
        self.filled: dict[str, str] = {}
        """Where the value of an "auto" comes from, by key."""
        self.leaves = list(self.with_autos(self.leaves))
        named = {ENDING: source.path.rpartition(".")[2]}
        named |= {leaf.name: leaf.value for leaf in self.leaves if leaf.is_known}
        self.unread = _unread(source, self.table)
        named |= {leaf.name: leaf.value for leaf, _ in self.unread}
        model_class = "GPT" if model else _model_of(source.config.root, self.table.wrapper)
        self.defaults = {} if source.is_partial else defaults_of(named, self.table.defaults)
        silent = {key: default.value for key, default in self.defaults.items()}
        folder = os.path.dirname(source.path)
        self.view = View(named, source.config.names_read, model_class, epoch, silent, folder)
        self.entries: list[Entry] = []
        self.values: dict[str, Any] = {}
        self.source_keys: dict[str, str] = {}
        """The source's key that each value comes from, by dslpar's key."""
        self.implied: list[tuple[str, Any, str, Location]] = []
        """Values that other keys imply: dslpar's key, the value, the source's key and its location."""

    def with_autos(self, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
        """Yield the leaves; an "auto" of DeepSpeed's section has the value that the framework fills in, if known."""
        values = {leaf.name: leaf.value for leaf in leaves}
        defaults = {} if self.source.is_partial else defaults_of(values, self.table.defaults)
        silent = {key: default.value for key, default in defaults.items()}
        view = View(values, defaults=silent, folder=os.path.dirname(self.source.path))
        for leaf in leaves:
            start = f"{self.table.under}."
            if self.table.fill is not None and leaf.value == AUTO and leaf.name.startswith(start):
                value, why = self.table.fill(leaf.name.removeprefix(start), view)
                if why:
                    self.filled[leaf.name] = f'"auto": {self.table.title} fills in {why}'
                    leaf = leaf._replace(value=value)
            yield leaf

    def run(self) -> Import:
        """Convert the source. The order matters, since an added value must not replace one that a key sets."""
        for place, file in self.source.missing:
            self.note("", needed(f"missing file {file!r}: what it sets is not in the result"), place)
        for place, reason in (*self.source.unreadable, *self.source.hidden):
            self.note("", needed(f"{reason}: what that file sets is not in the result"), place)
        for leaf in self.leaves:
            self.settle(leaf, self.outcome(leaf))
        self.read_unread()
        self.read_defaults()
        self.finish()
        return Import(self.source, tuple(self.entries), self.values)

    # One key -------------------------------------------------------------------------------------------------

    def outcome(self, leaf: Leaf) -> Outcome:
        """Return the outcome of a leaf."""
        first = leaf.name.partition(".")[0]
        if self.model is not None and first == "model":
            return dropped("--model replaces it")
        row, rest = self.row(leaf.name) if leaf.is_known else (None, "")
        if row is not None and leaf.value is UNREAD:
            if row.needs_value:
                return _not_evaluated(filled(row.to, rest))
            return self.table.outcome(row, UNREAD, rest, self.view)
        says_nothing = leaf.value is None or leaf.value == {}
        if row is None and not (says_nothing and self.is_section(leaf.name)):
            return self.unknown(leaf, first)
        if says_nothing and leaf.name in self.filled:
            return dropped(self.filled[leaf.name])
        if row is None or says_nothing:
            nothing = "None sets nothing" if leaf.value is None else "an empty dict sets nothing"
            return dropped(row.why if row is not None and row.fate == "dropped" and not row.conversion else nothing)
        made = self.table.outcome(row, leaf.value, rest, self.view)
        if self.model is not None and made.to.partition(".")[0] == "model":
            return dropped("--model replaces it")
        if leaf.name in self.filled and made.fate in ("kept", "renamed", "changed"):
            return made._replace(fate="changed", why=self.filled[leaf.name])
        return made

    def is_section(self, name: str) -> bool:
        """Return whether rows match keys below this key, or the key is in a dslpar section that no row mentions."""
        first = name.partition(".")[0]
        if self.table.own_names and first in SECTIONS and first not in self.known:
            return True
        return any(row.pattern.startswith(f"{name}.") for row in self.table.rows)

    def row(self, name: str) -> tuple[Row | None, str]:
        """Find the first row that matches a key, and the rest that its `**` matches."""
        return _index_of(self.source.name).row(name)

    def unknown(self, leaf: Leaf, first: str) -> Outcome:
        """Return the outcome of a key without a row."""
        known = self.known
        if leaf.value is UNREAD and (first in known or first in SECTIONS):
            return _not_evaluated("")
        if self.table.own_names and first in SECTIONS and first not in known:
            return Outcome("kept", leaf.name, leaf.value)
        if self.table.own_names and first not in known:
            return self.own_name(leaf, first)
        if self.table.under and leaf.name.startswith(f"{self.table.under}."):
            return self.unknown_in_section(leaf.name.removeprefix(f"{self.table.under}."))
        if self.table.keys:
            close = did_you_mean(self.table.framework.written(leaf.key), sorted(self.table.keys))
        else:
            close = did_you_mean(leaf.name, [row.pattern for row in self.table.rows] + self.known_names())
        if self.table.ignores and first not in known:
            ignored = f"{self.table.title} ignores top-level keys that it does not know"
            return needed(f"{ignored}; {close}") if close else dead(ignored)
        none = f"{self.table.title} has no such key"
        if self.table.partial or self.source.path.endswith(self.table.open_in):
            none = "dslpar import has no row for this key: leave it out"
        elif self.table.is_open and not close:
            none = f"none of {self.table.title}'s keys, but perhaps the program's own: leave it out"
        elif (section := leaf.key.partition(".")[0]) in self.table.open_sections and (
            not close or self.is_of_other_class(section) or (self.source.is_partial and not self.is_near(leaf.name))
        ):
            none, close = f"it is of a class of {section} that dslpar does not know: leave it out", ""
        return needed(none + (f"; {close}" if close else ""))

    def unknown_in_section(self, name: str) -> Outcome:
        """Return the outcome of a key of DeepSpeed's section without a row, as in a file of DeepSpeed."""
        inner = TABLES[DEEPSPEED]
        close = did_you_mean(name, [row.pattern for row in inner.rows])
        if inner.ignores and name.partition(".")[0] not in {row.pattern.partition(".")[0] for row in inner.rows}:
            ignored = f"{inner.title} ignores top-level keys that it does not know"
            return needed(f"{ignored}; {close}") if close else dead(ignored)
        return needed(f"{inner.title} has no such key" + (f"; {close}" if close else ""))

    def is_near(self, name: str) -> bool:
        """Return whether a key is a misspelt one: a recipe's own class has further keys, some like those here."""
        return only_near(name, {row.pattern for row in self.table.rows}) is not None

    def is_of_other_class(self, section: str) -> bool:
        """Return whether the source names the class of a section, and its keys are not those that are listed."""
        name = self.view.values.get(f"{section}.{TARGET}")
        return name is not None and str(name).rpartition(".")[2] not in self.table.listed_classes

    def own_name(self, leaf: Leaf, first: str) -> Outcome:
        """Drop a top-level variable of the author, unless its name resembles one of the framework's keys."""
        if leaf.value is UNREAD:
            return dropped("a variable of the file's own, not evaluated; keys that use it need you")
        if first in self.view.used:
            return dropped("a variable of the file's own: its value is in the keys that use it")
        near = only_near(first, self.known) if len(first) > 4 else None
        if near is not None:
            return needed(f"{self.table.title} has no such key; did you mean {near!r}?")
        return dropped("a variable of the file's own, which dslpar does not read")

    def known_names(self) -> list[str]:
        """List the keys that rows with `**` match."""
        return [row.pattern.removesuffix("**") + name for row in self.table.rows for name in row.among]

    def settle(self, leaf: Leaf, outcome: Outcome) -> None:
        """Record an outcome, and its value unless another key has set it."""
        if outcome.fate in ("kept", "renamed"):  # rows of an included table are written for its own keys
            outcome = outcome._replace(fate="kept" if outcome.to == leaf.name else "renamed")
        if outcome.fate in ("kept", "renamed", "changed") and outcome.to:
            other = self.clash(outcome.to)
            if other and self.values.get(outcome.to, outcome) == outcome.value:
                outcome = dropped(f"{self.source_keys[other]} sets the same value")
            elif other:
                earlier = f"{self.source_keys[other]} already sets {other} = {self.values[other]!r}"
                this = f"this key sets {outcome.value!r}: leave one of the two out"
                outcome = needed(f"{earlier}, but {this}", outcome.to)
            else:
                self.values[outcome.to], self.source_keys[outcome.to] = outcome.value, leaf.key
        if outcome.fate == "needed" and leaf.value is not UNREAD:
            outcome = outcome._replace(value=leaf.value)
        self.implied += [(key, value, leaf.key, leaf.location) for key, value in outcome.also.items()]
        self.note(leaf.key, outcome, leaf.location)

    def clash(self, to: str) -> str:
        """Return the dslpar key that already has a value and equals, contains or lies below this one; else empty."""
        return next((key for key in self.values if f"{to}.".startswith(f"{key}.") or key.startswith(f"{to}.")), "")

    def note(self, key: str, outcome: Outcome, location: Location) -> None:
        """Add one line to the report."""
        location = own_location(location, self.source)
        self.entries.append(Entry(key, outcome.fate, outcome.to, outcome.value, outcome.why, location))

    # Unevaluated keys ----------------------------------------------------------------------------------------

    def read_unread(self) -> None:
        """Record each unevaluated key with the findings at its place, then the findings that belong to no key."""
        errors = [finding for finding in self.source.config.findings if finding.severity == "error"]
        explained: list[Finding] = []
        for leaf, around in self.unread:
            outcome = self.outcome(leaf)
            why = [finding for finding in errors if _is_within(finding.location, around)]
            if why:
                explained += why
                leaf = leaf._replace(location=why[0].location)
            if why and outcome.fate == "needed":
                messages = "; ".join(dict.fromkeys(finding.message for finding in why))
                outcome = outcome._replace(why=f"could not be read: {messages}")
            self.settle(leaf, outcome)
        for finding in (finding for finding in errors if finding not in explained):
            what = finding.message if self.source.places else f"could not be read: {finding.message}"
            self.note("", needed(what), finding.location)

    # Added values --------------------------------------------------------------------------------------------

    def read_defaults(self) -> None:
        """Add the values that every source of the framework implies, then the framework's defaults for missing keys."""
        whole = Location(self.source.path)
        for key, value in self.table.adds.items():
            if not self.clash(key):
                self.add(key, value, f"{self.table.title} trains it", whole)
        for name, default in self.defaults.items():
            row, rest = self.row(name)
            if row is not None and self.view.values.get(name) is None:
                why = f"{self.table.title}'s default of {name} ({default.place})"
                self.add_default(self.table.outcome(row, default.value, rest, self.view), why, default.value)
        for key, why in self.table.wants.items():
            if not (self.is_settled(key) or (self.model and key.startswith("model"))):
                self.note("", needed(why, key), whole)
        for key, why in self.table.overrides.items() if self.is_overriding else ():
            if not (self.is_settled(key) or self.is_written(key)):
                self.note("", needed(why, key), whole)
        for key, value in self.table.unset.items():
            if not self.is_settled(key):
                self.add(
                    key,
                    value,
                    f"dslpar's default: the config does not set it, {self.table.title}'s program does",
                    whole,
                )

    def add_default(self, made: Outcome, why: str, value: object) -> None:
        """Add what a default of the framework becomes; one that dslpar cannot take needs the author."""
        if not made.to or made.to.startswith("deepspeed."):  # DeepSpeed's own defaults hold by themselves
            return
        if self.is_settled(made.to) or (self.model and made.to.startswith("model")):
            return
        whole = Location(self.source.path)
        if made.fate in ("kept", "renamed", "changed"):
            self.add(made.to, made.value, f"{why}: {made.why}" if made.why else why, whole)
            self.implied += [(key, item, why, whole) for key, item in made.also.items()]
        elif made.fate == "needed":
            self.note("", needed(f"{why} is {value!r}: {made.why}", made.to), whole)

    @property
    def is_overriding(self) -> bool:
        """Return whether the source overrides another config."""
        return bool(self.table.overriding) and (
            self.source.is_partial or self.source.path.endswith(self.table.overriding)
        )

    def is_settled(self, to: str) -> bool:
        """Return whether a key of dslpar has a value, or the report asks the author for it."""
        asked = (entry.to for entry in self.entries if entry.fate == "needed")
        return bool(self.clash(to)) or any(f"{key}.".startswith(f"{to}.") for key in asked)

    def is_written(self, to: str) -> bool:
        """Return whether the source has a key for this one of dslpar, although its value sets nothing (a size of 1)."""
        rows = (self.row(leaf.name)[0] for leaf in (*self.leaves, *(leaf for leaf, _ in self.unread)))
        return any(row is not None and row.to == to for row in rows)

    def finish(self) -> None:
        """Add implied values, ZeRO for half precision, and the model."""
        for key, value, because, place in self.implied:
            # A value that the source sets itself takes precedence over an implied one.
            if not self.clash(key):
                self.add(key, value, IMPLIED + because, place)
        whole = Location(self.source.path)
        half = self.values.get("precision.dtype", self.values.get("precision")) in ("fp16", "bf16")
        if half and not self.clash("zero.stage"):
            self.add("zero.stage", 1, "half precision needs ZeRO 1 or more, which keeps its fp32 masters", whole)
        for key, value in (self.model or {}).items():
            self.add(f"model.{key}", value, "by --model", whole)
        if not any(key.partition(".")[0] == "model" for key in self.values):
            asked = any(entry.fate == "needed" and entry.to == "model" for entry in self.entries)
            self.entries = [entry for entry in self.entries if not asked or entry.key or entry.to != "model"]
            if not asked:
                self.note("", needed("the source names no model: write it, or give --model FILE", "model"), whole)

    def add(self, key: str, value: object, why: str, location: Location) -> None:
        """Add a value that no key of the source sets itself."""
        self.values[key], self.source_keys[key] = value, why
        self.note("", Outcome("added", key, value, why), location)


class _RowIndex:
    """Index of a table's rows, which are looked up for each key of a source and for each default of its framework."""

    def __init__(self, table: Table) -> None:
        self.exact: dict[str, int] = {}
        """Number of the first row for a whole key."""
        self.rows = table.rows
        self.open = [number for number, row in enumerate(table.rows) if row.pattern.endswith(REST)]
        """Numbers of the rows with `**`."""
        self.by_section: dict[str, list[int]] = {}
        """Those of `open` that may match a key, by its first name."""
        for number, row in enumerate(table.rows):
            self.exact.setdefault(row.pattern, number)

    def row(self, name: str) -> tuple[Row | None, str]:
        """Return the first row that matches a key, and what its `**` matches."""
        exact = self.exact.get(name, len(self.rows))
        for number in self.matching(name.partition(".")[0]):
            if number > exact:
                break
            rest = self.rows[number].rest(name)
            if rest is not None:
                return self.rows[number], rest
        return (self.rows[exact], "") if exact < len(self.rows) else (None, "")

    def matching(self, section: str) -> list[int]:
        """Return the numbers of the rows with `**` that may match keys of a section, in order."""
        if section not in self.by_section:
            prefixes = ((number, self.rows[number].pattern.removesuffix(REST)) for number in self.open)
            self.by_section[section] = [
                number
                for number, prefix in prefixes
                if prefix.partition(".")[0] == section or ("." not in prefix and section.startswith(prefix))
            ]
        return self.by_section[section]


@cache
def _index_of(name: str) -> _RowIndex:
    return _RowIndex(TABLES[name])


# Keys of a source -------------------------------------------------------------------------------------------------


def leaves_of(root: Node, table: Table) -> Iterator[Leaf]:
    """Yield every leaf key of a source, in its order."""
    for key, node in root.value.items():
        inside = bool(table.wrapper) and key == table.wrapper and node.is_mapping
        for path, value, place in _leaves(_name(key), node):
            name = path.removeprefix(f"{table.wrapper}.") if inside else path
            yield Leaf(path, table.name_of(name), value, place, table.has(name))


def _leaves(path: str, node: Node) -> Iterator[tuple[str, Any, Location]]:
    if node.target is not None:
        yield f"{path}.{TARGET}", node.target, node.target_location or node.location
    if node.is_mapping and node.value:
        for key, child in node.value.items():
            yield from _leaves(f"{path}.{_name(key)}", child)
    elif node.target is None:
        yield path, node.plain(), node.key_location or node.location


def _name(key: object) -> str:
    """Return a key as the report shows it: an empty key is quoted."""
    return str(key) or '""'


def _unread(source: Source, table: Table) -> list[tuple[Leaf, Location]]:
    """Return the keys whose value could not be evaluated, each with the range of the file around it."""
    made = []
    named = assigned(source) if source.config.unknown else {}
    for path in sorted(source.config.unknown - {"*"}):  # `import *` has a finding of its own
        node = source.config.root.get(path)
        if node is not None and node.is_mapping and node.value:
            continue  # its known keys are leaves, and a finding explains the others
        full = path.removeprefix(f"{table.wrapper}.") if table.wrapper else path
        name = table.name_of(full)
        if node is None:
            place, around = named.get(path) or (source.config.key_at(path), source.config.at(path))
            made.append((Leaf(path, name, UNREAD, place, table.has(full)), around))
    return made


def _model_of(root: Node, wrapper: str) -> str:
    """Return the name of the model's class; empty if there is none."""
    config = root.value.get(wrapper)
    node = root.get("model") or (config.get("model") if config is not None and config.is_mapping else None)
    if node is None:
        return ""
    if node.target is not None:
        return str(node.target)
    named = node.value.get("type") if node.is_mapping else node
    return str(named.value) if named is not None and named.value is not None else ""


def _is_within(inner: Location, outer: Location) -> bool:
    if inner.path != outer.path or (inner.line, inner.column) < (outer.line, outer.column):
        return False
    return (inner.end_line, inner.end_column) <= (outer.end_line, outer.end_column)


def _not_evaluated(to: str) -> Outcome:
    return needed("its value could not be evaluated", to)


def refused(source: Source) -> list[Finding]:
    """Return the findings of a source that could not be read at all, at its own path."""
    hint = "write JSON: comments, trailing commas and plain keys are read; HJSON without commas or braces is not"
    found = [finding._replace(location=own_location(finding.location, source)) for finding in source.config.findings]
    return [item._replace(help=hint) for item in found] if source.path.endswith(JSON_ENDINGS) else found


def own_location(location: Location, source: Source) -> Location:
    """Return a location with the source's own path, since .hjson files are read under another path."""
    return location._replace(path=source.path) if location.path == source.config.path else location
