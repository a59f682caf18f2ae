"""Reader for sections: checks keys and types, resolves shorthands and aliases, and collects all mistakes.

`Reader` does not know any section by name. `dslpar.schema.sections_reader` reads all sections, and
`dslpar.schema.class_sections` those that name a class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dslpar.core.errors import Fix, Location
from dslpar.core.frozen import is_required
from dslpar.language.errors import WRITE_VALUE
from dslpar.language.source import import_by_position
from dslpar.language.tree import Node, Reference
from dslpar.schema.known_keys import Entry, KnownKeys, entries_of, known_keys
from dslpar.schema.types import SEQUENCE, TYPES, ValueType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dslpar.language.load import Config
    from dslpar.schema.spelling import Correction


Section = TypeVar("Section", bound="DataclassInstance")
Registered = Mapping[str, Collection[str]]
"""Registry ("models", "layers" or "gradient_handlers") -> the names that this process has registered."""


class Misread(NamedTuple):
    """A mistake in the config that reading it found: the code of the rule that reports the mistake, and its message."""

    code: str
    location: Location
    message: str
    help: str
    key: str
    fix: Fix | None = None


class Typed(NamedTuple):
    """A section that names a class, split into the class and the other keys."""

    name: str | None
    """The class, without its package if it is the expected package; None if the section names no class."""
    entries: list[Entry]
    """The keys of the section without `type`."""
    location: Location
    """Location of the value of `type`, or of the section if it has no `type`."""


class Reader:
    """One pass over the tree of a config; collects mistakes, invalid keys and written keys."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.misreads: list[Misread] = []
        self.invalid: set[str] = set()
        """Dotted keys without a valid value; the spec has a default or a placeholder instead."""
        self.written: dict[str, str] = {}
        """Dotted key -> the dotted key as the author wrote it."""

    # Sections ------------------------------------------------------------------------------------------------

    def section(self, cls: type[Section], node: Node, key: str, source_key: str) -> Section | None:
        """Read a section into an instance of `cls`; None if it is neither a dict nor a shorthand."""
        shorthand = known_keys(cls).shorthand
        if node.is_mapping:
            return self.fields(cls, entries_of(node, source_key), node, key, source_key)
        if not shorthand or isinstance(node.value, SEQUENCE):
            names = [item.name for item in fields(cls) if is_required(item)] or [item.name for item in fields(cls)][:2]
            hint = f"{source_key.rpartition('.')[2]}=dict({', '.join(name + '=...' for name in names)})"
            self.report("CFG102", node.location, f"{source_key} must be a dict", hint, source_key, key)
            return None
        return self.fields(cls, [Entry(shorthand, node, source_key)], node, key, source_key)

    def fields(
        self, cls: type[Section], entries: Iterable[Entry], node: Node, key: str, source_key: str, **values: object
    ) -> Section:
        """Make an instance of `cls` from these entries and from `values`, which are already checked.

        An invalid field gets its default, or a placeholder if it is required; see `invalid`.
        """
        values |= self.values(known_keys(cls), _inlined(cls, entries), key)
        for field in fields(cls):
            name = field.name
            if values.get(name) is None:
                values.pop(name, None)
            if name in values or not is_required(field):
                continue
            values[name] = _PLACEHOLDER
            if not {f"{key}.{name}", f"{source_key}.{name}"} & (self.invalid | self.config.unknown):
                self.missing_key(name, source_key, node.location, f"{key}.{name}")
        return cls(**values)

    # Keys and their values -----------------------------------------------------------------------------------

    def values(self, known: KnownKeys, entries: Iterable[Entry], key: str) -> dict[str, Any]:
        """Read the entries of one section in one pass; return name -> value for the valid ones.

        Section classes, mappings in them, and arguments of torch's and DeepSpeed's classes are all read here. A key
        with the value None counts as absent.
        """
        values = {}
        for entry in entries:
            name = known.names.get(entry.name)
            if name is None:
                self._unknown_entry(known, entry, key)
            elif entry.node.value is not None and self._is_new(f"{key}.{name}", entry.source_key):
                values[name] = self._value(known, name, entry, f"{key}.{name}")
        return {name: value for name, value in values.items() if value is not None}

    def _is_new(self, key: str, source_key: str) -> bool:
        """Note that the author wrote a key; report it and return False if it was written before, by another name."""
        if key not in self.written:
            self.written[key] = source_key
            return True
        both = f"{source_key} and {self.written[key]}"
        message, hint = f"{both} are the same key", f"keep one of {both}"
        self.report("CFG110", self.config.key_at(source_key), message, hint, source_key)
        return False

    def _unknown_entry(self, known: KnownKeys, entry: Entry, key: str) -> None:
        if known.explain is not None:
            code, message, hint, fix = known.explain(self.config, entry)
            self.report(code, self.config.key_at(entry.source_key), message, hint, entry.source_key, fix=fix)
            return
        meant = self.unknown_key(entry.name, entry.source_key, list(known.names))
        if meant is not None:
            self.invalid.add(f"{key}.{known.names[meant]}")

    def _value(self, known: KnownKeys, name: str, entry: Entry, key: str) -> Any:
        type_ = known.type_of(name)
        if isinstance(type_, ValueType):
            return self.scalar(type_, entry.node, key, entry.source_key, known.code)
        if isinstance(type_, KnownKeys):
            return self._mapping(type_, entry, key)
        return self.section(type_, entry.node, key, entry.source_key)

    def _mapping(self, known: KnownKeys, entry: Entry, key: str) -> object:
        """Return the values of a mapping; a bare value is that of its shorthand, which is required."""
        name, source_key = known.shorthand, entry.source_key
        if entry.node.is_mapping:
            below = entries_of(entry.node, source_key)
            given = {item.name for item in below if item.node.value is not None}
            unknown = f"{source_key}.{name}" in self.config.unknown or not given <= set(known.names)
            if name and name not in given and not unknown:
                self.missing_key(name, source_key, entry.node.location, key)
            return self.values(known, below, key)
        if not name:
            return self.scalar(TYPES["Dict"], entry.node, key, source_key, known.code)
        return {name: self._value(known, name, entry, key)}

    def scalar(self, type_: ValueType, node: Node, key: str, source_key: str, code: str = "") -> Any:
        """Return the value if it is valid; else report it, and return the value that must be meant, or None.

        `code`: the rule that reports it, if it is not the rule for the kind of mistake.

        Two kinds of mistakes leave no doubt about the meaning: a choice in the wrong case, and a number in quotes. The
        rules then check the meant value, so that further mistakes are found at once.
        """
        value = node.plain()
        only = type_.choices[0] if len(type_.choices) == 1 and type_.python_types == (str,) else None
        hint = f"write {only!r}" if only else f"choose {type_.description}"
        # type(), not isinstance: in Python True is an int, but an author does not mean a number.
        is_of_type = type(value) in type_.python_types or (type_.python_types == (dict,) and isinstance(value, dict))
        meant, unquoted = _unquoted(type_, value)
        if not is_of_type or unquoted:
            message = f"{source_key} is {show(value)}, which is not {type_.description}"
            hint = self._of_reference(type_, value) or unquoted or _in_a_list(type_, value) or hint
            self.report(code or "CFG102", node.location, message, hint, source_key, key, meant=meant)
            return meant
        if type_.choices and type(value) is str and value not in type_.choices:
            why = type_.refused.get(value)
            unknown = f"unknown {type_.noun or source_key} {value!r}"
            message = f"{source_key} cannot be {value!r}: {why}" if why else unknown
            close, choice, fix = _of_choice(self.config, node.location, value, type_.choices)
            close = ("" if why else close) or hint
            self.report(code or type_.code, node.location, message, close, source_key, key, fix, choice)
            return choice
        if not type_.holds(value):
            message = f"{source_key} is {show(value)}, but must be {type_.description}"
            return self.report(code or "CFG103", node.location, message, hint, source_key, key)
        return tuple(value) if type_.python_types == SEQUENCE else value

    def _of_reference(self, type_: ValueType, value: object) -> str:
        """Return the hint for an imported name (such as torch.bfloat16) in place of a value; empty for other values."""
        if not isinstance(value, Reference):
            return ""
        meant = _OF_TORCH.get(value.name)
        return (
            f"write {meant!r}"
            if meant in type_.choices
            else import_by_position(value.name, self.config.path) or WRITE_VALUE
        )

    # Classes by name -----------------------------------------------------------------------------------------

    def typed(self, node: Node, source_key: str, package: str, default: str | None = None) -> Typed:
        """Split a section into the class that it names (by `type` or as a LazyCall) and its other keys."""
        written = node.value.get("type")
        value = node.target if node.target is not None else (written.value if written else None)
        value = default if value is None else value  # type=None means that type is absent
        if isinstance(value, Reference):
            value = value.name
        if isinstance(value, str) and value.startswith(package):
            value = value.rpartition(".")[2]
        entries = [entry for entry in entries_of(node, source_key) if entry.name != "type"]
        return Typed(value if isinstance(value, str) else None, entries, written.location if written else node.location)

    # Mistakes ------------------------------------------------------------------------------------------------

    def report(
        self,
        code: str,
        location: Location,
        message: str,
        hint: str,
        source_key: str,
        key: str = "",
        fix: Fix | None = None,
        meant: object = None,
    ) -> None:
        """Record a mistake. Unless `meant` is known, mark `key` (or else `source_key`) as invalid."""
        self.misreads.append(Misread(code, location, message, hint, source_key, fix))
        if meant is None:
            self.invalid.add(key or source_key)

    def unknown_type(
        self, source_key: str, name: object, location: Location, known: Iterable[str], more: str = ""
    ) -> str | None:
        """Report an unknown class name; return the known name that must be meant, or None."""
        names = list(known)
        close, meant, fix = _of_choice(self.config, location, name, names)
        hint = close or f"choose one of {', '.join(names)}"
        message = f"unknown {source_key} {name!r}"
        self.report("CFG108", location, message, hint + more, f"{source_key}.type", source_key, fix, meant)
        return meant

    def missing_type(self, source_key: str, location: Location, hint: str) -> None:
        """Report a section without a type, unless its type is already unknown for another reason."""
        if f"{source_key}.type" in self.config.unknown:
            self.invalid.add(source_key)
        else:
            self.report("CFG104", location, f"missing key 'type' in {source_key}", hint, source_key)

    def missing_key(self, name: str, source_key: str, location: Location, key: str, why: str = "") -> None:
        """Report a missing required key."""
        message = f"missing key {name!r} in {source_key}{why}"
        self.report("CFG104", location, message, f"add {name}=... to {source_key}", source_key, key)

    def unknown_key(self, name: str, source_key: str, known: Iterable[str]) -> str | None:
        """Report an unknown key; return the key that must be meant, which is then invalid, or None."""
        location = self.config.key_at(source_key)
        if source_key.partition(".")[0] in _OF_DEEPSPEED:
            # Imported here: only a mistake needs the table of DeepSpeed's keys.
            from dslpar.schema.deepspeed_policy import explain

            if (explained := explain(source_key, self.config.root.get("zero") is not None)) is not None:
                code, message, hint, _ = explained
                self.report(code, location, message, hint, source_key)
                return None
        from dslpar.schema import spelling  # only a mistake needs it

        names = list(known)
        section = source_key.rpartition(".")[0]
        message = f"unknown key {name!r} in {section}" if section else f"unknown section {name!r}"
        close, meant, fix = spelling.of_key(self.config, source_key, names)
        hint = close or f"choose from the {'keys' if section else 'sections'} {', '.join(names)}"
        self.report("CFG101", location, message, hint, source_key, fix=fix)
        if meant is not None:
            self.invalid.add(f"{section}.{meant}" if section else meant)
        return meant


_PLACEHOLDER = 1  # every required field is a PositiveInt
_OF_DEEPSPEED = ("zero", "precision", "optimizer", "lr_scheduler")
"""Sections with a counterpart in DeepSpeed's config, which are sometimes written in DeepSpeed's form."""


def _of_choice(config: Config, location: Location, name: object, known: Sequence[str]) -> Correction:
    from dslpar.schema import spelling  # only a mistake needs it

    return spelling.of_choice(config, location, name, known)


def _unquoted(type_: ValueType, value: object) -> tuple[bool | float | None, str]:
    """Return the value that a string must mean, and the hint: a number in quotes, or YAML 1.1's yes, no, on and off."""
    if not isinstance(value, str):
        return None, ""
    if value == "auto" and (bool in type_.python_types or {int, float} & set(type_.python_types)):
        return None, f"leave it out, or choose {type_.description}: transformers fills in 'auto', DeepSpeed does not"
    if bool in type_.python_types and value.lower() in _SWITCHES:
        switch = _SWITCHES[value.lower()]
        return switch, f"{switch} without quotes ({value!r} is a string, in YAML 1.2 too)"
    if {int, float} & set(type_.python_types) and re.fullmatch(_NUMBER, value) and type_.holds(number := float(value)):
        if float not in type_.python_types and number == int(number):
            return int(number), f"{int(number)} without quotes: {value!r} is a string"
        return number, f"{value} without quotes: {value!r} is a string"
    return None, ""


def _in_a_list(type_: ValueType, value: object) -> str:
    """Return the hint for a single value in place of a list; empty for other values."""
    is_one = type_.python_types == SEQUENCE and type(value) not in SEQUENCE and type_.holds([value])
    return f"write [{value!r}]" if is_one else ""


_OF_TORCH = {"torch.float32": "fp32", "torch.float": "fp32", "torch.bfloat16": "bf16"} | {
    "torch.float16": "fp16",
    "torch.half": "fp16",
}
"""torch's names of data types -> the names in `precision`."""
_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,2})?"


def show(value: object) -> str:
    """Return a value as text for a message, shortened if it is long."""
    text = value.name if isinstance(value, Reference) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _inlined(cls: type, entries: Iterable[Entry]) -> Iterable[Entry]:
    """Replace the mapping that `cls.INLINE` names by its entries."""
    inline = getattr(cls, "INLINE", None)
    for entry in entries:
        if entry.name == inline and entry.node.is_mapping:
            yield from entries_of(entry.node, entry.source_key)
        else:
            yield entry
