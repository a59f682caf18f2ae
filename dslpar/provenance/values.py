"""Values of a config by key, each with its reason: written, overridden, inferred, or a default.

>>> from dslpar.linter.check import load_text
>>> model = "model = dict(type='GPT', num_layers=2, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=16)"
>>> size = values_of(Subject(load_text(model, "cfg.py"), 4))["parallel.data.size"]
>>> size.value, size.how, size.why
(4, 'inferred', '4 ranks / (pipeline 1 * tensor 1)')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.language.load import Config
from dslpar.layout.inferred_value import InferredValue
from dslpar.linter.problem import UnknownValueError
from dslpar.provenance.inferred import INFERRED, RECOMPUTED, notes, of_model
from dslpar.provenance.origins import Step, steps_of
from dslpar.provenance.reference import NAMES, below, help_of
from dslpar.provenance.subject import Subject
from dslpar.schema import sections
from dslpar.schema.keys import other_forms, shorthands
from dslpar.schema.parallel_forms import pipeline_of, tensor_of

How = Literal["written", "overridden", "inferred", "default", "unknown"]


class Value(NamedTuple):
    """Value of a key, with its reason."""

    key: str
    value: Any
    how: How
    why: str = ""
    source_key: str = ""
    """The key as the author wrote it, perhaps an alias; empty if it was not written."""
    steps: tuple[Step, ...] = ()
    """The place where the value was written, then the assignment and imports that bring it into the loaded config."""
    over: tuple[Any, Location] | None = None
    """The value in the file and its location, if the command line overrides it."""
    sources: tuple[str, ...] = ()
    """The keys that an inferred value follows from."""
    notes: tuple[str, ...] = ()
    """How the value is used at run time, such as its padding."""
    help: str = ""
    """The help of the key."""

    @property
    def location(self) -> Location | None:
        """The location where the value was written; None if it was not written."""
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
        elif path in _AXES:  # set in `parallel` or in LiBai's `train.dist`; if in neither, its size is 1
            cls, axis_of = _AXES[path]
            axis = axis_of(subject.reading.spec)
            no_axis = [_leaf(subject, f"{path}.size", 1, help_of(cls, "size"))] if axis is None else []
            yield from no_axis or _section(subject, path, axis)
        elif path == "train.dist" and path not in subject.reading.written:
            continue  # LiBai's form, not used in this config
        elif field.name == "dataset":  # part of a blend: the data set's keys belong to the part
            yield from _section(subject, key, value)
        elif is_dataclass(value):
            yield from _section(subject, path, value)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for index, item in enumerate(value):
                yield from _section(subject, f"{path}.{index}", item)
        else:
            yield _leaf(subject, path, value, help_text)


def _nested(subject: Subject, key: str, table: Mapping[str, Any], help_text: str) -> Iterator[Value]:
    """Yield the values of a mapping and of its nested mappings."""
    for name, value in table.items():
        path = f"{key}.{name}"
        if isinstance(value, Mapping) and value:
            yield from _nested(subject, path, value, help_text)
            continue
        # A DeepSpeed key has its own help if the reference has a row for it, else its section's help.
        row = next((row for row in below(path) if row.key == path), None)
        has_default = row is not None and row.default not in ("", "required")
        default = f" Its default there: {row.default}." if row is not None and has_default else ""
        yield _leaf(subject, path, value, help_text if row is None else row.help + default)


_AXES: Mapping[str, tuple[type, Callable[[sections.Spec], object]]] = {
    "parallel.pipeline": (sections.PipelineParallel, pipeline_of),
    "parallel.tensor": (sections.TensorParallel, tensor_of),
}


# One value --------------------------------------------------------------------------------------------------------


def _leaf(subject: Subject, key: str, value: Any, help_text: str) -> Value:
    source_key = source_key_of(subject, key)
    over, steps = _before(subject, key), _steps(subject, source_key)
    parts = key.split(".")
    if not subject.reading.invalid.isdisjoint(".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        why = "the written value is wrong: see the findings"
        return Value(key, None, "unknown", why, source_key, steps)
    if key in RECOMPUTED or not source_key:
        return _unwritten(subject, key, value, help_text)._replace(over=over)
    if value is None and (node := subject.config.root.get(source_key)) is not None:  # set by another form of the key
        value = node.plain()
    how: How = "overridden" if steps and steps[0].location.path == COMMAND_LINE else "written"
    over = over if how == "overridden" else None
    return Value(key, value, how, "", source_key, steps, over, notes=_notes(subject, key), help=help_text)


def _unwritten(subject: Subject, key: str, value: Any, help_text: str) -> Value:
    infer = RECOMPUTED.get(key) or INFERRED.get(key)
    try:
        found = infer(subject) if infer is not None else of_model(subject, key)
    except UnknownValueError:
        return Value(key, None, "unknown", _unknown(subject), help=help_text)
    if found is None:
        # A field's help states what leaving it out means.
        _, says, reason = help_text.replace("Left out:", "left out:").partition("left out:")
        found = InferredValue(
            value, f"left out: {reason.strip().rstrip('.')}" if says else "the default", (), "default"
        )
    value, how, why, sources = found.value, found.how, found.why, found.sources
    return Value(key, value, how, why, sources=sources, notes=_notes(subject, key), help=help_text)


def _unknown(subject: Subject) -> str:
    if not subject.sound:
        return "unknown until the errors are corrected"
    if subject.world_size is None:
        return "follows from the world size: --world-size N, or --hostfile FILE"
    return "known when the model is built"


def _notes(subject: Subject, key: str) -> tuple[str, ...]:
    try:
        return notes(subject, key)
    except UnknownValueError:
        return ()


# Written keys -----------------------------------------------------------------------------------------------------


def source_key_of(subject: Subject, key: str) -> str:
    """Return the key as written, under its own name or that of another form (LiBai's); empty if it is not written."""
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
    if name == "type":  # written as its own key, or by the section's LazyCall
        if above is None or (above.target is None and above.get("type") is None):
            return ""
        return key if above.target is None else section
    # The reader records where keys of the spec are written, but not the arguments of other classes.
    of_spec = not key.startswith(("model.", "optimizer.", "gradient_handler", "deepspeed"))
    return key if node is not None and node.value is not None and not of_spec else ""


def _decides(spec_: sections.Spec, key: str, other: str) -> bool:
    """Return whether the value comes from the other form of the key.

    A key of LiBai's `train.dist` does not count if its value is 1, or if `parallel` sets the same axis.
    """
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
    return tuple(steps_of(subject.config, source_key, subject.ways)) if source_key else ()


def _before(subject: Subject, key: str) -> tuple[Any, Location] | None:
    """Return the file's value and location if the command line changes or removes it, else None."""
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
