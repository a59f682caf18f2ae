"""From the config tree to the typed `Spec`: closed sections, kinds, shorthands and aliases, all problems at once.

What cannot be read is a problem at its place, and its key is remembered as invalid, so that a rule which needs it keeps
silent (`UnknownValueError`) instead of adding a second finding to one mistake. `None` is as absent wherever a field may
be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from dslpar import ds_keys, spec
from dslpar.config.tree import Node, Reference
from dslpar.errors import COMMAND_LINE, Location
from dslpar.kinds import KINDS, SEQUENCE

if TYPE_CHECKING:
    from dslpar.config.load import Config

SHORTHANDS: Mapping[str, str] = {
    "parallel.data": "size",
    "parallel.pipeline": "size",
    "parallel.tensor": "size",
    "zero": "stage",
    "precision": "dtype",
}
"""Keys at which a bare scalar stands for a mapping with one key."""

SECTIONS = tuple(field.name for field in fields(spec.Spec))


class Misread(NamedTuple):
    """One thing that could not be read: the code of the rule that reports it, and what it says."""

    code: str
    location: Location
    message: str
    help: str
    key: str


class Entry(NamedTuple):
    """One key of a section: its name, its value, and the dotted key as the author wrote it."""

    name: str
    node: Node
    wrote: str


class Reading(NamedTuple):
    """What was read: the spec, problems, and where each key was written."""

    spec: spec.Spec
    misreads: tuple[Misread, ...]
    invalid: frozenset[str]
    """Canonical dotted keys whose value in `spec` is a default or a placeholder, since what was written is wrong."""
    written: Mapping[str, str]
    """Canonical dotted key -> the dotted key as the author wrote it; keys that nobody wrote are absent."""


_CLASSES = {cls.__name__: cls for cls in (spec.DataParallel, spec.PipelineParallel, spec.TensorParallel, spec.Dist)}
_TYPED = {"optimizer": ("torch.optim.", spec.OPTIMIZERS, "AdamW"), "data": ("dslpar.data.", spec.DATASETS, "text")}


def read(config: Config) -> Reading:
    """Read every section of `config`; never raises for a user's mistake."""
    return _Reader(config).reading()


class _Reader:
    """One pass over the tree; problems, invalid keys and written keys gather here."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.misreads: list[Misread] = []
        self.invalid: set[str] = set()
        self.written: dict[str, str] = {}

    def reading(self) -> Reading:
        top = {entry.name: entry.node for entry in _entries(self.config.root, "") if entry.node.value is not None}
        values = {name: self._top(name, top[name]) for name in SECTIONS if name in top}
        self._refuse_strangers()
        self.invalid |= self.config.unknown
        if "model" not in values and "model" not in self.invalid and self.config.complete:
            self._fail("CFG107", Location(self.config.path), "there is no model", _MODEL_HELP, "model")
        ready = {"model": _NO_MODEL} | {name: value for name, value in values.items() if value is not None}
        return Reading(spec.Spec(**ready), tuple(self.misreads), frozenset(self.invalid), self.written)

    # Sections ------------------------------------------------------------------------------------------------

    def _top(self, name: str, node: Node) -> Any:
        self.written[name] = name
        if name == "model":
            return self._model(node)
        if name in _TYPED:
            return self._by_type(name, node, *_TYPED[name])
        if name == "zero":
            return self._with_extra(spec.Zero, "stage", ds_keys.ZERO, node, name)
        if name == "precision":
            return self._precision(node)
        if name == "deepspeed":
            return self._scalar("Table", node, name, name)
        return self._section(_SECTION_CLASSES[name], node, name, name)

    def _section(self, cls: type, node: Node, key: str, wrote: str) -> Any:
        """An instance of `cls`; None if the node is no mapping."""
        shorthand = getattr(cls, "SHORTHAND", None)
        if node.is_mapping:
            return self._fields(cls, _entries(node, wrote), node, key, wrote)
        if shorthand is None or isinstance(node.value, SEQUENCE):
            return self._fail("CFG102", node.location, f"{wrote} must be a dict", _like(cls, wrote), wrote, key)
        return self._fields(cls, [Entry(shorthand, node, wrote)], node, key, wrote)

    def _fields(self, cls: type, entries: Iterable[Entry], node: Node, key: str, wrote: str) -> Any:
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}
        for entry in _inlined(cls, entries):
            field = known.get(getattr(cls, "ALIASES", {}).get(entry.name, entry.name))
            if field is None and entry.node.value is None and entry.wrote in spec.LATER:
                continue
            if field is None:
                self._unknown(entry.name, entry.wrote, [*known, *getattr(cls, "ALIASES", ())])
            elif entry.node.value is not None:
                self._field(field, entry, f"{key}.{field.name}", values)
        return self._make(cls, known, values, node, key, wrote)

    def _field(self, field: Field[Any], entry: Entry, key: str, values: dict[str, Any]) -> None:
        if key in self.written:
            self._twice(entry.wrote, self.written[key])
            return
        self.written[key] = entry.wrote
        nested = _CLASSES.get(str(field.type).removesuffix(" | None"))
        if nested is not None:
            values[field.name] = self._section(nested, entry.node, key, entry.wrote)
        else:
            values[field.name] = self._scalar(str(field.type).removesuffix(" | None"), entry.node, key, entry.wrote)

    def _make(
        self, cls: type, known: Mapping[str, Field[Any]], values: dict[str, Any], node: Node, key: str, wrote: str
    ) -> Any:
        """An instance; what is invalid has its default, and a required field a placeholder that `invalid` guards."""
        for name, field in known.items():
            if values.get(name) is None:
                values.pop(name, None)
            if name in values or not _required(field):
                continue
            values[name] = _PLACEHOLDER
            if not {f"{key}.{name}", f"{wrote}.{name}"} & (self.invalid | self.config.unknown):
                said = f"{wrote} has no {name}"
                self._fail("CFG104", node.location, said, f"add {name}=... to {wrote}", wrote, f"{key}.{name}")
        return cls(**values)

    def _scalar(self, kind_name: str, node: Node, key: str, wrote: str) -> Any:
        kind = KINDS[kind_name]
        value = node.plain()
        help_ = f"{wrote.rpartition('.')[2]} is {kind.words}"
        if type(value) not in kind.types and not (kind.types == (dict,) and isinstance(value, dict)):
            said = f"{wrote} is {_show(value)}, which is not {kind.words}"
            return self._fail("CFG102", node.location, said, help_, wrote, key)
        if kind.names and value not in kind.names:
            close = did_you_mean(value, kind.names) or help_
            return self._fail("CFG108", node.location, f"{wrote} has no choice {value!r}", close, wrote, key)
        if not kind.holds(value):
            said = f"{wrote} is {_show(value)}, and must be {kind.words}"
            return self._fail("CFG103", node.location, said, help_, wrote, key)
        return tuple(value) if kind.types == SEQUENCE else value

    # Sections with a shape of their own ----------------------------------------------------------------------

    def _model(self, node: Node) -> Any:
        if not node.is_mapping:
            return self._fail("CFG102", node.location, "model must be a dict with a type", _MODEL_HELP, "model")
        name, entries, place = self._type_of(node, "model", "dslpar.models.", None)
        if name is None:
            return self._fail("CFG104", node.location, "model has no type", _MODEL_HELP, "model")
        if name in spec.MODELS:
            return self._fields(spec.MODELS[name], entries, node, "model", "model")
        if "." not in name:
            return self._bad_type("model", name, place, spec.MODELS)
        return spec.OtherModel(target=name, args={entry.name: entry.node.plain() for entry in entries})

    def _by_type(self, key: str, node: Node, package: str, table: Mapping[str, type], default: str) -> Any:
        if not node.is_mapping:
            said = f"{key} must be a dict"
            return self._fail("CFG102", node.location, said, f"{key} = dict(type={default!r}, ...)", key)
        name, entries, place = self._type_of(node, key, package, default)
        if name not in table:
            return self._bad_type(key, str(name), place, table)
        return self._fields(table[str(name)], entries, node, key, key)

    def _type_of(
        self, node: Node, key: str, package: str, default: str | None
    ) -> tuple[str | None, list[Entry], Location]:
        """The class that a section names, short if it is one of ours, and the section without its type."""
        written = node.value.get("type")
        value = node.target if node.target is not None else (written.value if written else default)
        if isinstance(value, Reference):
            value = value.name
        if isinstance(value, str) and value.startswith(package):
            value = value.rpartition(".")[2]
        entries = [entry for entry in _entries(node, key) if entry.name != "type"]
        place = written.location if written else node.location
        return (value if isinstance(value, str) else None), entries, place

    def _bad_type(self, key: str, name: str, place: Location, table: Mapping[str, type]) -> None:
        help_ = did_you_mean(name, table) or f"the types of {key} are {_listed(table)}"
        if key == "model":
            help_ += " (a class of your own goes by its full name, such as 'my_package.my_module.MyModel')"
        self._fail("CFG108", place, f"{key} has no type {name!r}", help_, f"{key}.type", key)

    def _precision(self, node: Node) -> Any:
        dtype = node.value.get("dtype", node) if node.is_mapping else node
        known = {"bf16": ds_keys.BF16, "fp16": ds_keys.FP16}.get(str(dtype.value), {})
        return self._with_extra(spec.Precision, "dtype", known, node, "precision")

    def _with_extra(self, cls: type, main: str, known: Mapping[str, str], node: Node, key: str) -> Any:
        """A section of one field of ours and DeepSpeed's own keys, which pass through by name."""
        if not node.is_mapping:
            return self._section(cls, node, key, key)
        entries = _entries(node, key)
        passed = set(known) - {main, *(name.rpartition(".")[2] for name in spec.LATER if name.startswith(f"{key}."))}
        extra = {entry.name: entry for entry in entries if entry.name in passed}
        self.written |= {entry.wrote: entry.wrote for entry in extra.values()}
        for entry in entries:
            if entry.name != main and entry.name not in extra:
                self._unknown(entry.name, entry.wrote, [main, *known])
        made = self._fields(cls, [entry for entry in entries if entry.name == main], node, key, key)
        plain = {
            name: self._scalar(known[name], entry.node, entry.wrote, entry.wrote)
            for name, entry in extra.items()
            if entry.node.value is not None
        }
        return None if made is None else cls(**{main: getattr(made, main), "extra": plain})

    # Names that no section has -------------------------------------------------------------------------------

    def _refuse_strangers(self) -> None:
        """Top-level names: an author's own variables may stand, misspelt sections and idle dicts may not."""
        for name in (name for name in self.config.modules if name in SECTIONS):
            said = f"{name} is imported by an absolute import, which gives a reference to a class, not a section"
            help_ = f"import a config file by its position, as in `from .common.train import {name}`"
            self._fail("CFG102", self.config.modules[name], said, help_, name)
        for name, node, _ in _entries(self.config.root, ""):
            if name in SECTIONS or name == "resolved":
                continue
            place = self.config.key_at(name)
            if name in spec.LATER:
                if node.value is not None:
                    self._unknown(name, name, SECTIONS)
                continue
            if place.path == COMMAND_LINE or not place.path.endswith(".py"):
                self._unknown(name, name, SECTIONS)
            elif not (name.startswith("_") or name.isupper() or name in self.config.used):
                self._stranger(name, node, place)

    def _stranger(self, name: str, node: Node, place: Location) -> None:
        close = did_you_mean(name, SECTIONS)
        if close:
            said = f"{name!r} resembles a section's name, and nothing uses it"
            self._fail("CFG105", place, said, f"{close} (a name of your own may begin with _)", name)
        elif node.is_mapping:
            said = f"nothing uses the dict {name!r}"
            help_ = f"the sections are {_listed(SECTIONS)}; a name of your own may begin with _"
            self._fail("CFG106", place, said, help_, name)

    def _unknown(self, name: str, wrote: str, known: Iterable[str]) -> None:
        if wrote in spec.LATER:
            said = f"{wrote}: {spec.LATER[wrote]} is not part of this version of dslpar"
            self._fail("CFG109", self.config.key_at(wrote), said, f"leave {wrote} out", wrote)
            return
        names = list(known)
        section = wrote.rpartition(".")[0]
        said = f"unknown key {name!r} in {section}" if section else f"unknown section {name!r}"
        help_ = did_you_mean(name, names) or f"the {'keys' if section else 'sections'} are {_listed(names)}"
        self._fail("CFG101", self.config.key_at(wrote), said, help_, wrote)

    def _twice(self, wrote: str, other: str) -> None:
        said = f"{wrote} and {other} say the same thing twice"
        self._fail("CFG110", self.config.key_at(wrote), said, f"keep one of {wrote} and {other}", wrote)

    # Bookkeeping ---------------------------------------------------------------------------------------------

    def _fail(self, code: str, place: Location, message: str, help_: str, wrote: str, key: str = "") -> None:
        self.misreads.append(Misread(code, place, message, help_, wrote))
        self.invalid.add(key or wrote)


_MODEL_HELP = "model = dict(type='GPT', num_layers=8, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=128)"
_SECTION_CLASSES: Mapping[str, type] = {
    "parallel": spec.Parallel,
    "lr_scheduler": spec.LRScheduler,
    "batch": spec.Batch,
    "train": spec.Train,
}


_NO_MODEL = spec.OtherModel(target="")
_PLACEHOLDER = 1  # every required field is a Count


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """'did you mean ...?' for the closest of the known names, or the empty text."""
    import difflib

    by_lower = {item.lower(): item for item in known}
    close = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.75)
    return f"did you mean {by_lower[close[0]]!r}?" if close else ""


def _entries(node: Node, wrote: str) -> list[Entry]:
    prefix = f"{wrote}." if wrote else ""
    items = node.value.items() if isinstance(node.value, dict) else ()
    return [Entry(str(name), child, f"{prefix}{name}") for name, child in items]


def _inlined(cls: type, entries: Iterable[Entry]) -> Iterable[Entry]:
    """The entries, with those of the mapping that `cls.INLINE` names in its place."""
    inline = getattr(cls, "INLINE", None)
    for entry in entries:
        if entry.name == inline and entry.node.is_mapping:
            yield from _entries(entry.node, entry.wrote)
        else:
            yield entry


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _like(cls: type, wrote: str) -> str:
    """A help text that shows the section's required keys, or its first ones."""
    names = [item.name for item in fields(cls) if _required(item)] or [item.name for item in fields(cls)][:2]
    return f"{wrote.rpartition('.')[2]}=dict({', '.join(name + '=...' for name in names)})"
