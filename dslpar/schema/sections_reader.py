"""Read the tree of a config into a typed `Spec`; report all mistakes at once.

A key with a mistake is marked as invalid. A lint rule that reads an invalid key ends (`UnknownValueError`), so that no
mistake gets a second finding. A key that may be left out counts as absent if its value is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.source import import_by_position
from dslpar.language.tree import Node, Reference
from dslpar.schema import class_sections, data_reader
from dslpar.schema import sections as spec
from dslpar.schema.keys import WITHOUT_COUNTERPART, classes_of, synonym_of
from dslpar.schema.known_keys import arguments, entries_of
from dslpar.schema.reader import Misread, Reader, Registered
from dslpar.schema.types import TYPES

if TYPE_CHECKING:
    from dslpar.language.load import Config

_FIELDS = {field.name: field for field in fields(spec.Spec)}
SECTIONS = tuple(_FIELDS)


class Reading(NamedTuple):
    """The result of reading: the spec, the mistakes, and the keys that the author wrote."""

    spec: spec.Spec
    misreads: tuple[Misread, ...]
    invalid: frozenset[str]
    """Canonical dotted keys whose value in `spec` is a default or a placeholder, since the written value is invalid."""
    written: Mapping[str, str]
    """Canonical dotted key -> the dotted key as the author wrote it; keys that nobody wrote are absent."""


def read(config: Config, registered: Registered | None = None, by_program: bool = False) -> Reading:
    """Read every section of `config`. A mistake in the config raises no exception; it becomes a misread.

    `by_program`: a program passes the model, so the config may lack one.
    """
    reader = Reader(config)
    top = {entry.name: entry.node for entry in entries_of(config.root, "") if entry.node.value is not None}
    values = {name: _section(reader, name, top[name], registered or {}) for name in SECTIONS if name in top}
    _report_other_names(reader, by_program and not config.has("model"))
    reader.invalid |= config.unknown
    if not ("model" in values or {"model", "*"} & reader.invalid or by_program) and config.complete:
        hint = f"{class_sections.MODEL_HELP}; or --program (if a program passes the model to dslpar.initialize)"
        reader.report("CFG107", Location(config.path), "there is no model", hint, "model")
    ready: dict[str, Any] = {"model": _NO_MODEL} | {name: value for name, value in values.items() if value is not None}
    return Reading(spec.Spec(**ready), tuple(reader.misreads), frozenset(reader.invalid), reader.written)


_NO_MODEL = spec.OtherModel(target="")


# Sections ---------------------------------------------------------------------------------------------------------


def _section(reader: Reader, name: str, node: Node, registered: Registered) -> object:
    reader.written[name] = name
    if name in _READERS:
        return _READERS[name](reader, node, registered)
    return reader.section(classes_of(_FIELDS[name])[0], node, name, name)


def _precision(reader: Reader, node: Node, registered: Registered) -> object:
    dtype = node.value.get("dtype", node) if node.is_mapping else node
    known = {"bf16": "BF16", "fp16": "FP16"}.get(str(dtype.value), "")
    return _with_extra(reader, spec.Precision, known, node, "precision")


def _with_extra(reader: Reader, cls: type, known: str, node: Node, key: str) -> object:
    """Read a section with dslpar fields and DeepSpeed keys, which pass through as `extra`.

    `known`: the name of a table of DeepSpeed keys in `deepspeed_policy`: "ZERO", "BF16", "FP16", or "" for none.
    """
    if not node.is_mapping:
        return reader.section(cls, node, key, key)
    entries = entries_of(node, key)
    names = [field.name for field in fields(cls) if field.name != "extra"]
    own = {entry.name: entry for entry in entries if entry.name in names}
    extra: dict[str, object] = {}
    if len(own) < len(entries):
        from dslpar.schema import deepspeed_policy  # imported here, as below: it reads a table

        types = {**dict.fromkeys(names, ""), **getattr(deepspeed_policy, known, {})}
        extra = reader.values(arguments(types), [entry for entry in entries if entry.name not in own], key)
    return reader.fields(cls, own.values(), node, key, key, extra=extra)


def _raw(reader: Reader, node: Node, registered: Registered) -> object:
    if reader.scalar(TYPES["Dict"], node, "deepspeed", "deepspeed") is None:
        return None
    from dslpar.schema.deepspeed import raw

    return raw(reader, node)


_READERS: Mapping[str, Callable[[Reader, Node, Registered], object]] = {
    "model": class_sections.model,
    "data": data_reader.data,
    "optimizer": class_sections.optimizer,
    "lr_scheduler": class_sections.lr_scheduler,
    "gradient_handler": class_sections.gradient_handlers,
    "zero": lambda reader, node, registered: _with_extra(reader, spec.Zero, "ZERO", node, "zero"),
    "precision": _precision,
    "deepspeed": _raw,
}
"""Sections with a reader of their own; all others are read by their fields alone."""


# Other names ------------------------------------------------------------------------------------------------------


def _report_other_names(reader: Reader, by_program: bool) -> None:
    """Report top-level names that are neither sections nor variables of the author: unused dicts, suspicious names.

    If a program passes the model, names in capitals belong to that program and are accepted.
    """
    config = reader.config
    for name in (name for name in config.modules if name in SECTIONS):
        value, location, *_ = config.modules[name]
        if isinstance(value, Reference):
            message = f"{name} is imported by an absolute import, which gives a reference to a class, not a section"
            hint = "correct the import: `from .common.train import train` reads a config by its position"
            hint = import_by_position(value.name, config.path) or hint
        else:
            message, hint = f"{name} is a config file, not a section", f"write `{name} = {name}.{name}` below"
        reader.report("CFG102", location, message, hint, name)
    for name, node, _ in entries_of(config.root, ""):
        if name in SECTIONS or name == "resolved":
            continue
        location = config.key_at(name)
        if location.path == COMMAND_LINE or not location.path.endswith(".py"):
            reader.unknown_key(name, name, SECTIONS)
        elif not (name.startswith("_") or name in config.names_read or (by_program and name.isupper())):
            _report_unused(reader, name, node, location)


def _report_unused(reader: Reader, name: str, node: Node, location: Location) -> None:
    config, own = reader.config, f"or write _{name} (if it is your own)"
    synonym, unneeded = synonym_of(name), WITHOUT_COUNTERPART.get(name)
    if node.value is not None and (unneeded or (name.isupper() and synonym)):
        message = f"unused name {name!r}, which ColossalAI's trainer reads"
        hint = f"leave it out: {unneeded}; {own}" if unneeded else f"here that is {synonym}={name}; {own}"
        reader.report("CFG121", location, message, hint, name)
    elif name.isupper():
        return
    elif did_you_mean(name, SECTIONS):
        from dslpar.schema import spelling  # only a mistake needs it

        message = f"unused name {name!r}, which resembles a section"
        close, meant, fix = spelling.of_key(config, name, SECTIONS)
        hint = f"{close} O{own[1:]}" if close.endswith("?") else f"{close}; {own}"
        reader.report("CFG105", location, message, hint, name, fix=fix)
        reader.invalid.add(meant or name)
    elif node.value is not None and synonym is not None:
        message = f"unused name {name!r}, which is a key of other frameworks"
        hint = f"choose {synonym}, which is that here" if node.is_mapping else f"here that is {synonym}"
        reader.report("CFG121", location, message, f"{hint}; {own}", name)
    elif node.is_mapping:
        hint = f"write _{name} (if it is your own); or choose from the sections {', '.join(SECTIONS)}"
        reader.report("CFG106", location, f"unused dict {name!r}", hint, name)
