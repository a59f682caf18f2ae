"""From the config tree to the typed `Spec`: closed sections, kinds, shorthands and aliases, all problems at once.

What cannot be read is a problem at its place, and its key is remembered as invalid, so that a rule which needs it keeps
silent (`UnknownValueError`) instead of adding a second finding to one mistake. `None` is as absent wherever a field may
be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.core.frozen import fields
from dslpar.core.named_tuple import NamedTuple
from dslpar.core.suggest import did_you_mean
from dslpar.language.tree import Node
from dslpar.schema import classes
from dslpar.schema import sections as spec
from dslpar.schema.reader import (
    Misread,
    Reader,
    Registered,
    certain,
    entries_of,
    listed,
    renamed,
    said_here,
    said_or_meant,
)
from dslpar.schema.types import TYPES

if TYPE_CHECKING:
    from dslpar.language.load import Config

SECTIONS = tuple(field.name for field in fields(spec.Spec))


class Reading(NamedTuple):
    """What was read: the spec, problems, and where each key was written."""

    spec: spec.Spec
    misreads: tuple[Misread, ...]
    invalid: frozenset[str]
    """Canonical dotted keys whose value in `spec` is a default or a placeholder, since what was written is wrong."""
    written: Mapping[str, str]
    """Canonical dotted key -> the dotted key as the author wrote it; keys that nobody wrote are absent."""


def read(config: Config, registered: Registered | None = None) -> Reading:
    """Read every section of `config`; never raises for a user's mistake."""
    reader = Reader(config)
    top = {entry.name: entry.node for entry in entries_of(config.root, "") if entry.node.value is not None}
    values = {name: _top(reader, name, top[name], registered or {}) for name in SECTIONS if name in top}
    _refuse_strangers(reader)
    reader.invalid |= config.unknown
    if "model" not in values and "model" not in reader.invalid and config.complete:
        reader.fail("CFG107", Location(config.path), "there is no model", classes.MODEL_HELP, "model")
    ready = {"model": _NO_MODEL} | {name: value for name, value in values.items() if value is not None}
    return Reading(spec.Spec(**ready), tuple(reader.misreads), frozenset(reader.invalid), reader.written)


_NO_MODEL = spec.OtherModel(target="")


# Sections ---------------------------------------------------------------------------------------------------------


def _top(reader: Reader, name: str, node: Node, registered: Registered) -> Any:
    reader.written[name] = name
    if name in _PLAIN:
        return reader.section(_PLAIN[name], node, name, name)
    return _OWN[name](reader, node, registered)


def _zero(reader: Reader, node: Node, registered: Registered) -> Any:
    return _with_extra(reader, spec.Zero, "stage", "ZERO", node, "zero")


def _precision(reader: Reader, node: Node, registered: Registered) -> Any:
    dtype = node.value.get("dtype", node) if node.is_mapping else node
    known = {"bf16": "BF16", "fp16": "FP16"}.get(str(dtype.value), "")
    return _with_extra(reader, spec.Precision, "dtype", known, node, "precision")


def _with_extra(reader: Reader, cls: type, main: str, known: str, node: Node, key: str) -> Any:
    """A section of one field of ours and DeepSpeed's own keys (ds_keys' list of that name), which pass through."""
    if not node.is_mapping:
        return reader.section(cls, node, key, key)
    entries = entries_of(node, key)
    own = {entry.name: entry for entry in entries if entry.name == main}
    extra: dict[str, Any] = {}
    if len(own) < len(entries):
        from dslpar.schema import deepspeed_policy

        kinds = {main: "", **getattr(deepspeed_policy, known, {})}
        extra = reader.typed_values(kinds, [entry for entry in entries if entry.name not in own])
    made = reader.fields(cls, own.values(), node, key, key)
    return cls(**{main: getattr(made, main), "extra": extra})


def _raw(reader: Reader, node: Node, registered: Registered) -> Any:
    if reader.scalar(TYPES["Dict"], node, "deepspeed", "deepspeed") is None:
        return None
    from dslpar.schema.deepspeed import raw

    return raw(reader, node)


_PLAIN: Mapping[str, type] = {
    "parallel": spec.Parallel,
    "batch": spec.Batch,
    "train": spec.Train,
    "activation_checkpoint": spec.ActivationCheckpoint,
    "checkpoint": spec.Checkpoint,
    "monitor": spec.Monitor,
    "schedule": spec.PipelineSchedule,
}
_OWN: Mapping[str, Callable[[Reader, Node, Registered], Any]] = {
    "model": classes.model,
    "data": classes.data,
    "optimizer": classes.optimizer,
    "lr_scheduler": classes.lr_scheduler,
    "gradient_handler": classes.gradient_handlers,
    "zero": _zero,
    "precision": _precision,
    "deepspeed": _raw,
}


# Names that no section has ----------------------------------------------------------------------------------------


def _refuse_strangers(reader: Reader) -> None:
    """Top-level names: an author's own variables may stand, misspelt sections and idle dicts may not."""
    config = reader.config
    for name in (name for name in config.modules if name in SECTIONS):
        message = f"{name} is imported by an absolute import, which gives a reference to a class, not a section"
        hint = f"import a config file by its position, as in `from .common.train import {name}`"
        reader.fail("CFG102", config.modules[name], message, hint, name)
    for name, node, _ in entries_of(config.root, ""):
        if name in SECTIONS or name == "resolved":
            continue
        place = config.key_at(name)
        if place.path == COMMAND_LINE or not place.path.endswith(".py"):
            reader.unknown(name, name, SECTIONS)
        elif not (name.startswith("_") or name.isupper() or name in config.used):
            _stranger(reader, name, node, place)


def _stranger(reader: Reader, name: str, node: Node, place: Location) -> None:
    if did_you_mean(name, SECTIONS):
        message = f"{name!r} resembles a section's name, and nothing uses it"
        close, fix = said_or_meant(name, SECTIONS), renamed(reader.config, name, SECTIONS)
        reader.fail("CFG105", place, message, f"{close} (a name of your own may begin with _)", name, fix=fix)
        reader.invalid.add(certain(reader.config, name, SECTIONS) or name)
    elif node.value is not None and said_here(name):
        message = f"nothing uses {name!r}, which is a key of other frameworks"
        reader.fail("CFG121", place, message, f"{said_here(name)}; a name of your own may begin with _", name)
    elif node.is_mapping:
        message = f"nothing uses the dict {name!r}"
        hint = f"the sections are {listed(SECTIONS)}; a name of your own may begin with _"
        reader.fail("CFG106", place, message, hint, name)
