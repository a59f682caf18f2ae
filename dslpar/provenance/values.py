"""Each value of a config, by its key, with its reason: written, overridden, inferred, or a default.

>>> from dslpar.linter.check import load_text
>>> model = "model = dict(type='GPT', num_layers=2, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=16)"
>>> size = values_of(Case(load_text(model, "cfg.py"), 4))["parallel.data.size"]
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
from dslpar.provenance.subject import Case
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


def values_of(case: Case) -> dict[str, Value]:
    """All of them by key, in the order of the spec."""
    return {value.key: value for value in _all(case)}


def _all(case: Case) -> Iterator[Value]:
    for field in fields(sections.Spec):
        section = getattr(case.reading.spec, field.name)
        if is_dataclass(section):
            yield from _section(case, field.name, section)
        elif isinstance(section, tuple) and section:
            for index, item in enumerate(section):
                yield from _section(case, f"{field.name}.{index}", item)
        else:
            hint = help_of(sections.Spec, field.name)
            empty = [_leaf(case, field.name, section, hint)] if not section else []
            yield from empty or _nested(case, field.name, section, hint)


def _section(case: Case, key: str, section: Any) -> Iterator[Value]:
    if type(section) in NAMES:
        yield _leaf(case, f"{key}.type", NAMES[type(section)], help_of(type(section), "").partition("\n")[0])
    for field in fields(section):
        path, value, hint = f"{key}.{field.name}", getattr(section, field.name), help_of(type(section), field.name)
        if field.name == "target":
            yield _leaf(case, f"{key}.type", value, hint)
        elif field.name in ("extra", "args"):
            yield from _nested(case, key, value, hint)
        elif path in _AXES:
            yield from _axis(case, path, _AXES[path](case.reading.spec))
        elif path == "train.dist":
            yield from _dist(case, value)
        elif is_dataclass(value):
            yield from _section(case, path, value)
        else:
            yield _leaf(case, path, value, hint)


def _nested(case: Case, key: str, table: Mapping[str, Any], hint: str) -> Iterator[Value]:
    """The items of a mapping, and of mappings in it."""
    for name, value in table.items():
        path = f"{key}.{name}"
        yield from _nested(case, path, value, hint) if _inner(value) else [_leaf(case, path, value, _own(path, hint))]


def _own(path: str, hint: str) -> str:
    """What the reference says of a key of DeepSpeed's, where it has a row for it."""
    row = next((row for row in below(path) if row.key == path), None)
    told = row is not None and row.default not in ("", "required")
    return hint if row is None else row.help + (f" Its default there: {row.default}." if told else "")


def _inner(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


_AXES = {"parallel.pipeline": pipeline_of, "parallel.tensor": tensor_of}


def _axis(case: Case, key: str, section: Any) -> Iterator[Value]:
    """Of either form; where there is none, its size is one."""
    cls = sections.PipelineParallel if key == "parallel.pipeline" else sections.TensorParallel
    yield from (
        _section(case, key, section) if section is not None else [_leaf(case, f"{key}.size", 1, help_of(cls, "size"))]
    )


def _dist(case: Case, dist: sections.Dist) -> Iterator[Value]:
    """LiBai's form, where somebody writes it."""
    if "train.dist" in case.reading.written:
        for field in fields(dist):
            yield _leaf(case, f"train.dist.{field.name}", getattr(dist, field.name), help_of(sections.Dist, field.name))


# One value --------------------------------------------------------------------------------------------------------


def _leaf(case: Case, key: str, value: Any, hint: str) -> Value:
    source_key = wrote_of(case, key)
    over = _before(case, key)
    if not case.reading.invalid.isdisjoint(_and_above(key)):
        return Value(
            key, None, "unknown", "what is written is wrong: see the findings", source_key, _steps(case, source_key)
        )
    if key in RECOMPUTED or not source_key:
        return _unwritten(case, key, value, hint)._replace(over=over)
    if value is None:  # another form says it
        value = _node(case.config, source_key)
    message = _steps(case, source_key)
    how = "overridden" if message and message[0].location.path == COMMAND_LINE else "written"
    return Value(
        key, value, how, "", source_key, message, over if how == "overridden" else None, (), _notes(case, key), hint
    )


def _unwritten(case: Case, key: str, value: Any, hint: str) -> Value:
    infer = RECOMPUTED.get(key) or DECISIONS.get(key)
    try:
        found = infer(case) if infer is not None else of_model(case, key)
    except UnknownValueError:
        return Value(key, None, "unknown", _unknown(case), help=hint)
    if found is None:
        found = Decision(value, _default_reason(hint), (), "default")
    return Value(key, found.value, found.how, found.why, sources=found.sources, notes=_notes(case, key), help=hint)


def _unknown(case: Case) -> str:
    if not case.sound:
        return "not known while the errors stand"
    if case.world_size is None:
        return "follows from the world size: --world-size N, or --hostfile FILE"
    return "known when the model is built"


def _notes(case: Case, key: str) -> tuple[str, ...]:
    try:
        return notes(case, key)
    except UnknownValueError:
        return ()


def _default_reason(hint: str) -> str:
    """What a field's help says of leaving it out."""
    _, found, reason = hint.replace("Left out:", "left out:").partition("left out:")
    return f"left out: {reason.strip().rstrip('.')}" if found else "the default"


def _and_above(key: str) -> set[str]:
    """The key and the sections that it is in."""
    parts = key.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


# Who wrote it -----------------------------------------------------------------------------------------------------


def wrote_of(case: Case, key: str) -> str:
    """The key as somebody wrote it, under this name or another form's; empty where nobody did."""
    return _wrote(case.config, case.reading.written, case.reading.spec, key)


def _wrote(config: Config, written: Mapping[str, str], spec_: sections.Spec, key: str) -> str:
    if key in written:
        return written[key]
    other = other_forms().get(key, "")
    if other in written and _says(spec_, key, other):
        return written[other]
    section, _, name = key.rpartition(".")
    node, above = config.root.get(key), config.root.get(section)
    if shorthands().get(section) == name and section in written and above is not None and not above.is_mapping:
        return written[section]
    if name == "type":
        return _type_key(above, key)
    return key if node is not None and node.value is not None and not _of_spec(key) else ""


def _of_spec(key: str) -> bool:
    """Whether it is a key whose writing the reader notes."""
    return not key.startswith(("model.", "optimizer.", "gradient_handler", "deepspeed"))


def _type_key(section: Node | None, key: str) -> str:
    """The key of a section's type: its own, or the section's, which a LazyCall makes."""
    if section is None or (section.target is None and section.get("type") is None):
        return ""
    return key if section.target is None else key.rpartition(".")[0]


def _says(spec_: sections.Spec, key: str, other: str) -> bool:
    """Whether the other form decides: LiBai's says nothing by 1, and nothing where `parallel` speaks of the axis."""
    if not other.startswith("train.dist."):
        return spec_.batch.accumulation is None
    value = getattr(spec_.train.dist, other.rpartition(".")[2])
    axis = key.split(".")[1]
    spoken = axis != "data" and getattr(spec_.parallel, axis) is not None
    return value not in (None, 1) and not spoken


def _steps(case: Case, source_key: str) -> tuple[Step, ...]:
    node = case.config.root.get(source_key) if source_key else None
    if node is not None and node.target_location is not None and node.target is not None:
        return (Step("named", node.target_location),)
    return tuple(steps_of(case.config, source_key)) if source_key else ()


def _node(config: Config, source_key: str) -> Any:
    node = config.root.get(source_key)
    return None if node is None else node.plain()


def _before(case: Case, key: str) -> tuple[Any, Location] | None:
    """What the file says where the command line says something else, or takes it away."""
    if case.before is None:
        return None
    config, reading = case.before
    source_key = _wrote(config, reading.written, reading.spec, key)
    node = config.root.get(source_key) if source_key else None
    if node is None or node.value is None:
        return None
    value = node.target.name if node.target is not None else node.plain()
    now = wrote_of(case, key)
    return None if now and case.config.at(now) == config.at(source_key) else (value, node.location)
