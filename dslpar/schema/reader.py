"""How sections are read: closed sets of keys, kinds, shorthands and aliases; what is wrong gathers, reading goes on.

`Reader` is the machinery, which knows no section: `dslpar.schema.sections_reader` has the sections,
`dslpar.schema.classes` what goes by the
name of a class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dslpar.core.errors import Fix, Location
from dslpar.core.frozen import Field, fields
from dslpar.core.named_tuple import NamedTuple
from dslpar.core.suggest import did_you_mean, only_near, only_recased, rename_fix
from dslpar.language.tree import Node, Reference
from dslpar.schema.keys import aliases_of, classes_of, shorthand_of, synonym_of, type_of
from dslpar.schema.types import SEQUENCE, TYPES, ValueType

if TYPE_CHECKING:
    from dslpar.language.load import Config


Registered = Mapping[str, Collection[str]]
"""Names that a process has registered: under "models", "layers" and "gradient_handlers"."""


class Misread(NamedTuple):
    """One thing that could not be read: the code of the rule that reports it, and what it says."""

    code: str
    location: Location
    message: str
    help: str
    key: str
    fix: Fix | None = None


class Entry(NamedTuple):
    """One key of a section: its name, its value, and the dotted key as the author wrote it."""

    name: str
    node: Node
    source_key: str


class Typed(NamedTuple):
    """A section that names a class."""

    name: str | None
    """The class, short if it is of the package that was asked for; None where nothing names one."""
    entries: list[Entry]
    """The section without its type."""
    place: Location
    """Where the type stands, or the section."""


class Reader:
    """One pass over the tree; problems, invalid keys and written keys gather here."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.misreads: list[Misread] = []
        self.invalid: set[str] = set()
        self.written: dict[str, str] = {}

    # Sections ------------------------------------------------------------------------------------------------

    def section(self, cls: type, node: Node, key: str, source_key: str) -> Any:
        """An instance of `cls`; None if the node is no mapping."""
        shorthand = shorthand_of(cls)
        if node.is_mapping:
            return self.fields(cls, entries_of(node, source_key), node, key, source_key)
        if not shorthand or isinstance(node.value, SEQUENCE):
            return self.fail(
                "CFG102", node.location, f"{source_key} must be a dict", _like(cls, source_key), source_key, key
            )
        return self.fields(cls, [Entry(shorthand, node, source_key)], node, key, source_key)

    def fields(self, cls: type, entries: Iterable[Entry], node: Node, key: str, source_key: str, **values: Any) -> Any:
        """An instance of `cls` from these entries, and from `values`, which are right already."""
        known, aliases = {item.name: item for item in fields(cls)}, aliases_of(cls)
        for entry in _inlined(cls, entries):
            field = known.get(aliases.get(entry.name, entry.name))
            if field is None:
                meant = self.unknown(entry.name, entry.source_key, [*known, *aliases])
                self.invalid.add(f"{key}.{aliases.get(str(meant), meant)}")
            elif entry.node.value is not None:
                self._field(field, entry, f"{key}.{field.name}", values)
        return self._make(cls, known, values, node, key, source_key)

    def _field(self, field: Field, entry: Entry, key: str, values: dict[str, Any]) -> None:
        if key in self.written:
            self._twice(entry.source_key, self.written[key])
            return
        self.written[key] = entry.source_key
        nested = classes_of(field)
        if nested:
            values[field.name] = self.section(nested[0], entry.node, key, entry.source_key)
        else:
            values[field.name] = self.scalar(type_of(field), entry.node, key, entry.source_key)

    def _make(
        self, cls: type, known: Mapping[str, Field], values: dict[str, Any], node: Node, key: str, source_key: str
    ) -> Any:
        """An instance; what is invalid has its default, and a required field a placeholder that `invalid` guards."""
        for name, field in known.items():
            if values.get(name) is None:
                values.pop(name, None)
            if name in values or not field.required:
                continue
            values[name] = _PLACEHOLDER
            if not {f"{key}.{name}", f"{source_key}.{name}"} & (self.invalid | self.config.unknown):
                message = f"{source_key} has no {name}"
                self.fail(
                    "CFG104", node.location, message, f"add {name}=... to {source_key}", source_key, f"{key}.{name}"
                )
        return cls(**values)

    def scalar(self, type_: ValueType, node: Node, key: str, source_key: str) -> Any:
        """A value of that type; None, and a problem, if it is none."""
        value = node.plain()
        hint = f"{source_key.rpartition('.')[2]} is {type_.description}"
        if type(value) not in type_.python_types and not (type_.python_types == (dict,) and isinstance(value, dict)):
            message = f"{source_key} is {show(value)}, which is not {type_.description}"
            return self.fail("CFG102", node.location, message, _unquoted(type_, value) or hint, source_key, key)
        if type_.choices and value not in type_.choices:
            why = type_.refused.get(value)
            message = f"{source_key} cannot be {value!r}: {why}" if why else f"{source_key} has no choice {value!r}"
            close = ("" if why else did_you_mean(value, type_.choices)) or hint
            fix = recased(self.config, node.location, value, type_.choices)
            return self.fail("CFG108", node.location, message, close, source_key, key, fix)
        if not type_.holds(value):
            message = f"{source_key} is {show(value)}, and must be {type_.description}"
            return self.fail("CFG103", node.location, message, hint, source_key, key)
        return tuple(value) if type_.python_types == SEQUENCE else value

    def typed_values(self, known: Mapping[str, str], entries: Iterable[Entry]) -> dict[str, Any]:
        """Plain values of entries whose types are known by name; an unknown one is a problem, None is as absent."""
        values = {}
        for entry in entries:
            if entry.name not in known:
                self.unknown(entry.name, entry.source_key, known)
            elif entry.node.value is not None:
                self.written[entry.source_key] = entry.source_key
                values[entry.name] = self._typed_value(known[entry.name], entry)
        return {name: value for name, value in values.items() if value is not None}

    def _typed_value(self, type_name: str, entry: Entry) -> Any:
        """A scalar, or one of DeepSpeed's mappings, for which a bare text may stand."""
        source_key = entry.source_key
        if type_name in TYPES:
            return self.scalar(TYPES[type_name], entry.node, source_key, source_key)
        from dslpar.schema import deepspeed_policy

        shorthand, known = deepspeed_policy.TABLES[type_name]
        if entry.node.is_mapping:
            below = entries_of(entry.node, source_key)
            given = {item.name for item in below if item.node.value is not None}
            unknown = f"{source_key}.{shorthand}" in self.config.unknown or not given <= set(known)
            if shorthand and shorthand not in given and not unknown:
                message = f"{source_key} has no {shorthand}"
                self.fail("CFG104", entry.node.location, message, f"add {shorthand}=...", source_key)
            return self.typed_values(known, below)
        if not shorthand:
            return self.scalar(TYPES["Dict"], entry.node, source_key, source_key)
        return {shorthand: self.scalar(TYPES[known[shorthand]], entry.node, source_key, source_key)}

    # Classes by name -----------------------------------------------------------------------------------------

    def typed(self, node: Node, source_key: str, package: str, default: str | None = None) -> Typed:
        """The class that a mapping names by its type, or as a LazyCall."""
        written = node.value.get("type")
        value = node.target if node.target is not None else (written.value if written else None)
        value = default if value is None else value  # type=None is as absent
        if isinstance(value, Reference):
            value = value.name
        if isinstance(value, str) and value.startswith(package):
            value = value.rpartition(".")[2]
        entries = [entry for entry in entries_of(node, source_key) if entry.name != "type"]
        return Typed(value if isinstance(value, str) else None, entries, written.location if written else node.location)

    def bad_type(self, source_key: str, name: object, place: Location, known: Iterable[str], more: str = "") -> None:
        """The problem of a class that nobody knows by that name."""
        names = list(known)
        hint = did_you_mean(name, names) or f"the types of {source_key} are {listed(names)}"
        fix = recased(self.config, place, name, names)
        self.fail(
            "CFG108", place, f"{source_key} has no type {name!r}", hint + more, f"{source_key}.type", source_key, fix
        )

    def no_type(self, source_key: str, place: Location, hint: str) -> None:
        """The problem of a section that names no class, unless what it names is unknown for another reason."""
        if f"{source_key}.type" in self.config.unknown:
            self.invalid.add(source_key)
        else:
            self.fail("CFG104", place, f"{source_key} has no type", hint, source_key)

    # What is wrong -------------------------------------------------------------------------------------------

    def unknown(self, name: str, source_key: str, known: Iterable[str]) -> str | None:
        """The problem of a key that its section does not have. The key that is certain to be meant: it is invalid."""
        if source_key.partition(".")[0] in _OF_DEEPSPEED:
            from dslpar.schema.deepspeed_policy import explain

            if (explained := explain(source_key)) is not None:
                code, message, hint = explained
                self.fail(code, self.config.key_at(source_key), message, hint, source_key)
                return None
        names = list(known)
        section = source_key.rpartition(".")[0]
        message = f"unknown key {name!r} in {section}" if section else f"unknown section {name!r}"
        keys = f"the {'keys' if section else 'sections'} are {listed(names)}"
        hint = said_or_meant(source_key, names) or keys
        self.fail(
            "CFG101",
            self.config.key_at(source_key),
            message,
            hint,
            source_key,
            fix=renamed(self.config, source_key, names),
        )
        meant = certain(self.config, source_key, names)
        if meant is not None:
            self.invalid.add(f"{section}.{meant}" if section else meant)
        return meant

    def _twice(self, source_key: str, other: str) -> None:
        message = f"{source_key} and {other} say the same thing twice"
        self.fail(
            "CFG110", self.config.key_at(source_key), message, f"keep one of {source_key} and {other}", source_key
        )

    def fail(
        self,
        code: str,
        place: Location,
        message: str,
        hint: str,
        source_key: str,
        key: str = "",
        fix: Fix | None = None,
    ) -> None:
        """Note a problem; the key that it makes unknown is `key`, or the one that was written."""
        self.misreads.append(Misread(code, place, message, hint, source_key, fix))
        self.invalid.add(key or source_key)


_PLACEHOLDER = 1  # every required field is a PositiveInt
_OF_DEEPSPEED = ("zero", "precision", "optimizer", "lr_scheduler")
"""Sections that stand for one of DeepSpeed's, and are sometimes written as DeepSpeed has it."""


def certain(config: Config, source_key: str, known: Iterable[str]) -> str | None:
    """The one known name that a key can mean, by its letters or in another framework; none that its section has."""
    section, _, name = source_key.rpartition(".")
    beside = config.root.get(section)
    given = beside.value if beside is not None and beside.is_mapping else ()
    left = [item for item in known if item not in given]
    theirs = _here(source_key, left)
    if theirs is not None:
        meant = theirs.rpartition(".")[2]
        return meant if meant in left else None
    return only_near(name, left)


def renamed(config: Config, source_key: str, known: Iterable[str]) -> Fix | None:
    """The change of a misspelt key, where it can be only one of the known names, and none that its section has.

    A key of another framework that is written quite otherwise here has none: its values may mean something else, too.
    """
    name, meant = source_key.rpartition(".")[2], certain(config, source_key, known)
    near = meant is not None and only_near(name, [meant]) is not None
    return rename_fix(config.sources, config.key_at(source_key), name, meant if near else None)


def recased(config: Config, place: Location, name: object, known: Iterable[str]) -> Fix | None:
    """The change of a choice that differs from a known one by the case of its letters alone."""
    meant = only_recased(str(name), known)
    return rename_fix(config.sources, place, str(name), meant)


def said_or_meant(source_key: str, known: Collection[str]) -> str:
    """'did you mean ...?', unless the name is one of another framework that says something else; or the empty text."""
    close, theirs = did_you_mean(source_key.rpartition(".")[2], known), _here(source_key, known)
    if theirs is None or theirs == source_key.rpartition(".")[0] or repr(theirs.rpartition(".")[2]) in close:
        return close
    return f"here that is {theirs}"


def _here(source_key: str, known: Collection[str]) -> str | None:
    """The key here of another framework's; in the section of an axis, its size."""
    section, _, name = source_key.rpartition(".")
    theirs = synonym_of(name)
    return f"{theirs}.size" if theirs == section and name.endswith("size") and "size" in known else theirs


def said_here(name: str) -> str:
    """'here that is ...' for a key of another framework, or the empty text."""
    key = synonym_of(name)
    return f"here that is {key}" if key else ""


def _unquoted(type_: ValueType, value: object) -> str:
    """Help for a text that looks like what was meant: a number in quotes, or YAML 1.1's yes, no, on and off."""
    if not isinstance(value, str):
        return ""
    if value == "auto" and (bool in type_.python_types or {int, float} & set(type_.python_types)):
        return f"{type_.description}, or leave it out: transformers fills in 'auto', DeepSpeed does not"
    if bool in type_.python_types and value.lower() in _SWITCHES:
        return f"{_SWITCHES[value.lower()]}, without quotes ({value!r} is a text, in YAML 1.2 too)"
    if {int, float} & set(type_.python_types) and re.fullmatch(_NUMBER, value) and type_.holds(number := float(value)):
        whole = float not in type_.python_types and number == int(number)
        return f"{int(number) if whole else value}, without quotes: {value!r} is a text"
    return ""


_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,2})?"


def entries_of(node: Node, source_key: str) -> list[Entry]:
    """The entries of a mapping, each with its dotted key."""
    prefix = f"{source_key}." if source_key else ""
    items = node.value.items() if isinstance(node.value, dict) else ()
    return [Entry(str(name), child, f"{prefix}{name}") for name, child in items]


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names)


def show(value: object) -> str:
    """A value for a sentence, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _inlined(cls: type, entries: Iterable[Entry]) -> Iterable[Entry]:
    """The entries, with those of the mapping that `cls.INLINE` names in its place."""
    inline = getattr(cls, "INLINE", None)
    for entry in entries:
        if entry.name == inline and entry.node.is_mapping:
            yield from entries_of(entry.node, entry.source_key)
        else:
            yield entry


def _like(cls: type, source_key: str) -> str:
    """A help text that shows the section's required keys, or its first ones."""
    names = [item.name for item in fields(cls) if item.required] or [item.name for item in fields(cls)][:2]
    return f"{source_key.rpartition('.')[2]}=dict({', '.join(name + '=...' for name in names)})"
