"""Each value of a config, by its key, with its reason: written, overridden, inferred, or a default.

>>> from dslpar.linter.check import load_text
>>> model = "model = dict(type='GPT', num_layers=2, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=16)"
>>> size = values_of(Subject(load_text(model, "cfg.py"), 4))["parallel.data.size"]
>>> size.value, size.how, size.why
(4, 'inferred', '4 ranks / (pipeline 1 * tensor 1)')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.layout.decision import Decision
from dslpar.layout.resolve import pipeline_of, tensor_of
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.inferred import DECISIONS, RECOMPUTED, notes, of_model
from dslpar.provenance.origins import Step, steps_of
from dslpar.provenance.reference import NAMES, below, help_of
from dslpar.provenance.subject import Subject
from dslpar.schema import sections
from dslpar.schema.keys import other_forms, shorthands

How = Literal["written", "overridden", "inferred", "default", "unknown"]


class Value(NamedTuple):
    """A value and its reason."""

    key: str
    value: Any
    how: str
    """One of `How`."""
    why: str = ""
    source_key: str = ""
    """The key as the author wrote it, an alias perhaps; empty where nobody did."""
    steps: tuple[Step, ...] = ()
    """Where it was written, and the ways by which it came."""
    over: tuple[Any, Location] | None = None
    """What the file says, and where, of a value that the command line overrides."""
    sources: tuple[str, ...] = ()
    """The keys that it follows from."""
    notes: tuple[str, ...] = ()
    help: str = ""
    """What the key is."""

    @property
    def location(self) -> Location | None:
        """Where it was written."""
        return self.steps[0].location if self.steps else None


def values_of(subject: Subject) -> dict[str, Value]:
    """Return all values by key, in the order of the spec."""
    return {value.key: value for value in _all(subject)}


def _all(subject: Subject) -> Iterator[Value]:
    for field in fields(sections.Spec):
        section = getattr(subject.reading.spec, field.name)
        if is_dataclass(section):
            yield from _section(subject, field.name, section)
        elif isinstance(section, tuple) and section:
            for index, item in enumerate(section):
                yield from _section(subject, f"{field.name}.{index}", item)
        else:
            help_text = help_of(sections.Spec, field.name)
            empty = [_leaf(subject, field.name, section, help_text)] if not section else []
            yield from empty or _nested(subject, field.name, section, help_text)


def _section(subject: Subject, key: str, section: Any) -> Iterator[Value]:
    if type(section) in NAMES:
        yield _leaf(subject, f"{key}.type", NAMES[type(section)], help_of(type(section), "").partition("\n")[0])
    for field in fields(section):
        path, value, help_text = f"{key}.{field.name}", getattr(section, field.name), help_of(type(section), field.name)
        if field.name == "target":
            yield _leaf(subject, f"{key}.type", value, help_text)
        elif field.name in ("extra", "args"):
            yield from _nested(subject, key, value, help_text)
        elif path in _AXES:
            yield from _axis(subject, path, _AXES[path](subject.reading.spec))
        elif path == "train.dist":
            yield from _dist(subject, value)
        elif is_dataclass(value):
            yield from _section(subject, path, value)
        else:
            yield _leaf(subject, path, value, help_text)


def _nested(subject: Subject, key: str, table: Mapping[str, Any], help_text: str) -> Iterator[Value]:
    """Yield the items of a mapping, and of mappings in it."""
    for name, value in table.items():
        path = f"{key}.{name}"
        yield from (
            _nested(subject, path, value, help_text)
            if _is_filled(value)
            else [_leaf(subject, path, value, _help_of_key(path, help_text))]
        )


def _help_of_key(path: str, help_text: str) -> str:
    """Return the help of a key of DeepSpeed's, if the reference has a row for it; else that of its section."""
    row = next((row for row in below(path) if row.key == path), None)
    has_default = row is not None and row.default not in ("", "required")
    return help_text if row is None else row.help + (f" Its default there: {row.default}." if has_default else "")


def _is_filled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


_AXES = {"parallel.pipeline": pipeline_of, "parallel.tensor": tensor_of}


def _axis(subject: Subject, key: str, section: Any) -> Iterator[Value]:
    """Yield the values of an axis in either form; where there is none, its size is one."""
    cls = sections.PipelineParallel if key == "parallel.pipeline" else sections.TensorParallel
    yield from (
        _section(subject, key, section)
        if section is not None
        else [_leaf(subject, f"{key}.size", 1, help_of(cls, "size"))]
    )


def _dist(subject: Subject, dist: sections.Dist) -> Iterator[Value]:
    """Yield the values of LiBai's form, if it is written."""
    if "train.dist" in subject.reading.written:
        for field in fields(dist):
            yield _leaf(
                subject, f"train.dist.{field.name}", getattr(dist, field.name), help_of(sections.Dist, field.name)
            )


# One value --------------------------------------------------------------------------------------------------------


def _leaf(subject: Subject, key: str, value: Any, help_text: str) -> Value:
    source_key = source_key_of(subject, key)
    over = _before(subject, key)
    if not subject.reading.invalid.isdisjoint(_with_sections(key)):
        return Value(
            key,
            None,
            "unknown",
            "the written value is wrong: see the findings",
            source_key,
            _steps(subject, source_key),
        )
    if key in RECOMPUTED or not source_key:
        return _unwritten(subject, key, value, help_text)._replace(over=over)
    if value is None:  # another form says it
        value = _node(subject.config, source_key)
    steps = _steps(subject, source_key)
    how = "overridden" if steps and steps[0].location.path == COMMAND_LINE else "written"
    return Value(
        key,
        value,
        how,
        "",
        source_key,
        steps,
        over if how == "overridden" else None,
        (),
        _notes(subject, key),
        help_text,
    )


def _unwritten(subject: Subject, key: str, value: Any, help_text: str) -> Value:
    infer = RECOMPUTED.get(key) or DECISIONS.get(key)
    try:
        found = infer(subject) if infer is not None else of_model(subject, key)
    except UnknownValueError:
        return Value(key, None, "unknown", _unknown(subject), help=help_text)
    if found is None:
        found = Decision(value, _default_reason(help_text), (), "default")
    return Value(
        key, found.value, found.how, found.why, sources=found.sources, notes=_notes(subject, key), help=help_text
    )


def _unknown(subject: Subject) -> str:
    if not subject.sound:
        return "not known while the errors stand"
    if subject.world_size is None:
        return "follows from the world size: --world-size N, or --hostfile FILE"
    return "known when the model is built"


def _notes(subject: Subject, key: str) -> tuple[str, ...]:
    try:
        return notes(subject, key)
    except UnknownValueError:
        return ()


def _default_reason(help_text: str) -> str:
    """Take what a field's help says of leaving it out."""
    _, found, reason = help_text.replace("Left out:", "left out:").partition("left out:")
    return f"left out: {reason.strip().rstrip('.')}" if found else "the default"


def _with_sections(key: str) -> set[str]:
    """Return the key and the sections that it is in."""
    parts = key.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


# Who wrote it -----------------------------------------------------------------------------------------------------


def source_key_of(subject: Subject, key: str) -> str:
    """Return the key as it is written, under this name or another form's; empty if it is not written."""
    return _source_key(subject.config, subject.reading.written, subject.reading.spec, key)


def _source_key(config: Config, written: Mapping[str, str], spec_: sections.Spec, key: str) -> str:
    if key in written:
        return written[key]
    other = other_forms().get(key, "")
    if other in written and _decides(spec_, key, other):
        return written[other]
    section, _, name = key.rpartition(".")
    node, above = config.root.get(key), config.root.get(section)
    if shorthands().get(section) == name and section in written and above is not None and not above.is_mapping:
        return written[section]
    if name == "type":
        return _type_key(above, key)
    return key if node is not None and node.value is not None and not _of_spec(key) else ""


def _of_spec(key: str) -> bool:
    """Whether it is a key that the reader notes where it is written."""
    return not key.startswith(("model.", "optimizer.", "gradient_handler", "deepspeed"))


def _type_key(section: Node | None, key: str) -> str:
    """Return the key of a section's type: its own, or the section's where a LazyCall makes it."""
    if section is None or (section.target is None and section.get("type") is None):
        return ""
    return key if section.target is None else key.rpartition(".")[0]


def _decides(spec_: sections.Spec, key: str, other: str) -> bool:
    """Whether the other form decides: LiBai's does not by a size of 1, nor where `parallel` has the axis."""
    if not other.startswith("train.dist."):
        return spec_.batch.accumulation is None
    value = getattr(spec_.train.dist, other.rpartition(".")[2])
    axis = key.split(".")[1]
    has_axis = axis != "data" and getattr(spec_.parallel, axis) is not None
    return value not in (None, 1) and not has_axis


def _steps(subject: Subject, source_key: str) -> tuple[Step, ...]:
    node = subject.config.root.get(source_key) if source_key else None
    if node is not None and node.target_location is not None and node.target is not None:
        return (Step("named", node.target_location),)
    return tuple(steps_of(subject.config, source_key)) if source_key else ()


def _node(config: Config, source_key: str) -> Any:
    node = config.root.get(source_key)
    return None if node is None else node.plain()


def _before(subject: Subject, key: str) -> tuple[Any, Location] | None:
    """Return what the file says, where the command line says something else or removes it."""
    if subject.before is None:
        return None
    config, reading = subject.before
    source_key = _source_key(config, reading.written, reading.spec, key)
    node = config.root.get(source_key) if source_key else None
    if node is None or node.value is None:
        return None
    value = node.target.name if node.target is not None else node.plain()
    now = source_key_of(subject, key)
    return None if now and subject.config.at(now) == config.at(source_key) else (value, node.location)
