"""Every key that a config may have: its type, its default, its help, its other names.

The help of a field is the text beneath it in spec.py, read from the source by `ast`; types come from
dslpar.schema.types, what
torch and DeepSpeed name from dslpar.schema. `dslpar config --reference` and docs/config.md are this list.

    >>> row = next(row for row in rows() if row.key == "model.num_layers")
    >>> row.type, row.default, row.aliases
    ('a whole number, at least 1 and at most 10,000', 'required', ('model.hidden_layers',))
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import NamedTuple

from dslpar.schema import deepspeed_policy, sections
from dslpar.schema.types import KINDS


class Row(NamedTuple):
    """One key."""

    key: str
    """Dotted; `*` stands for any name."""
    type: str
    default: str
    """As a config would write it; 'required' where there is none, empty where it is not dslpar's."""
    help: str
    aliases: tuple[str, ...] = ()
    """Other keys that mean the same."""
    of: str = ""
    """The type of the section that has it: `type='AdamW'`; empty where every type has it, or there is one."""
    field: str = ""
    """The field of the spec: 'GPT.num_layers'; empty for a key of torch's or DeepSpeed's."""


LIBAI: Mapping[str, str] = {
    "parallel.data.size": "train.dist.data_parallel_size",
    "parallel.tensor.size": "train.dist.tensor_parallel_size",
    "parallel.pipeline.size": "train.dist.pipeline_parallel_size",
    "parallel.pipeline.stage_ids": "train.dist.custom_pipeline_stage_id",
}
"""dslpar's key -> LiBai's."""
COLOSSAL: Mapping[str, str] = {"batch.accumulation": "schedule.num_microbatches"}
"""dslpar's key -> ColossalAI's."""

TYPES: Mapping[str, tuple[type, ...]] = {
    "model": (sections.GPT, sections.OtherModel),
    "data": (sections.TextData,),
    "optimizer": (sections.AdamW, sections.Adam, sections.SGD, sections.OtherOptimizer),
    "lr_scheduler": (sections.LRScheduler, sections.OtherSchedule),
}
"""Sections that name a class, and the classes of the spec that they may be."""
NAMES: Mapping[type, str] = {
    cls: name for table in (sections.MODELS, sections.DATASETS, sections.OPTIMIZERS) for name, cls in table.items()
}
"""The type by which a class of the spec goes."""


@cache
def helps() -> Mapping[str, Mapping[str, str]]:
    """Class of the spec -> field -> the text beneath it; the class's own docstring goes by the empty name."""
    with open(sections.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {node.name: dict(_texts(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    yield "", ast.get_docstring(node) or ""
    for one, below in zip(node.body, node.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield ast.unparse(one.target), " ".join(text.value.split())


def help_of(cls: type, name: str) -> str:
    """The help of a field, which a parent may have; of a class, for the empty name."""
    found = (helps().get(each.__name__, {}).get(name) for each in cls.__mro__)
    return next((text for text in found if text), "")


# All keys ---------------------------------------------------------------------------------------------------------


@cache
def rows() -> tuple[Row, ...]:
    """All of them, section by section."""
    return tuple(_all_rows())


def _all_rows() -> Iterator[Row]:
    for field in fields(sections.Spec):
        name, hint = field.name, help_of(sections.Spec, field.name)
        default = "required" if field.default is MISSING and field.default_factory is MISSING else ""
        yield Row(name, _section_type(field), default or _default(field), hint, field=f"Spec.{name}")
        for cls in classes_of(name):
            of = _of(name, cls)
            if (cls in NAMES and len(TYPES.get(name, ())) > 1) or name == "data":
                yield Row(f"{name}.type", repr(NAMES[cls]), _default_type(name), help_of(cls, "").partition("\n")[0])
            yield from _fields(cls, name, of)
        yield from _EXTRA.get(name, lambda: iter(()))()


def classes_of(section: str) -> tuple[type, ...]:
    """The classes of the spec that a section may be."""
    if section in TYPES:
        return TYPES[section]
    return tuple(cls for cls in (_class_of(str(_SECTIONS[section].type)),) if cls is not None)


_SECTIONS: Mapping[str, Field[object]] = {field.name: field for field in fields(sections.Spec)}


def _class_of(annotation: str) -> type | None:
    """The class of the spec that an annotation names, if it names one."""
    name = annotation.removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]")
    found = getattr(sections, name, None)
    return found if isinstance(found, type) and found.__module__ == sections.__name__ else None


def _of(section: str, cls: type) -> str:
    if section not in TYPES or len(TYPES[section]) == 1:
        return ""
    if cls is sections.LRScheduler:
        return "type=" + " / ".join(map(repr, sections.SCHEDULES))
    return f"type={NAMES[cls]!r}" if cls in NAMES else "another type"


def _default_type(section: str) -> str:
    return {"optimizer": "'AdamW'", "data": "'text'"}.get(section, "")


def _fields(cls: type, key: str, of: str = "") -> Iterator[Row]:
    """The rows of a class's fields, and of the classes below it."""
    for field in fields(cls):
        below = _class_of(str(field.type))
        path = _key(key, field.name)
        shorthand = getattr(below, "SHORTHAND", "")
        words = f"a dict, or its {shorthand}" if shorthand else "a dict" if below else type_of(field)
        hint, aliases = help_of(cls, field.name), _aliases(cls, path)
        yield Row(path, words, _default(field), hint, aliases, of, f"{cls.__name__}.{field.name}")
        if below is not None:
            yield from _fields(below, path, of)


def _key(section: str, name: str) -> str:
    """The key by which an author writes a field: `target` is the type, `extra` and `args` are any others."""
    return f"{section}.{_WRITTEN_AS.get(name, name)}"


_WRITTEN_AS = {"target": "type", "extra": "*", "args": "*"}


def type_of(field: Field[object]) -> str:
    """What a field takes, in words."""
    name = str(field.type).removesuffix(" | None")
    return KINDS[name].words if name in KINDS else "a text"


def _section_type(field: Field[object]) -> str:
    (first, *_) = classes_of(field.name) or (None,)
    shorthand = getattr(first, "SHORTHAND", "")
    if str(field.type).startswith("tuple["):
        return "a dict, or a list of them"
    return f"a dict, or its {shorthand}" if shorthand else "a dict"


def _default(field: Field[object]) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    if field.default_factory is MISSING:
        return "required"
    return "{}" if field.type == "Table" else "dict()"


def _aliases(cls: type, path: str) -> tuple[str, ...]:
    """Other keys that mean the same as the field's at `path`."""
    section, _, name = path.rpartition(".")
    found = [f"{section}.{other}" for other, own in getattr(cls, "ALIASES", {}).items() if own == name]
    return (*found, *(table[path] for table in (LIBAI, COLOSSAL) if path in table))


# What torch and DeepSpeed name ------------------------------------------------------------------------------------


def _zero_rows() -> Iterator[Row]:
    yield from _deepspeed_rows("zero", "zero_optimization", deepspeed_policy.ZERO, skip=("stage",))
    for kind, (_, known) in deepspeed_policy.TABLES.items():
        name = next(key for key, of in deepspeed_policy.ZERO.items() if of == kind)
        yield from _deepspeed_rows(f"zero.{name}", f"zero_optimization.{name}", known)


def _precision_rows() -> Iterator[Row]:
    for dtype, known in (("bf16", deepspeed_policy.BF16), ("fp16", deepspeed_policy.FP16)):
        yield from _deepspeed_rows("precision", dtype, known, of=f"dtype={dtype!r}")


def _deepspeed_rows(
    section: str, theirs: str, known: Mapping[str, str], of: str = "", skip: tuple[str, ...] = ()
) -> Iterator[Row]:
    for name, kind in known.items():
        if name not in skip:
            words = KINDS[kind].words if kind in KINDS else "a dict, or its device"
            yield Row(f"{section}.{name}", words, _their_default(theirs, name), f"DeepSpeed's {theirs}.{name}.", of=of)


def _their_default(section: str, name: str) -> str:
    from dslpar.schema.deepspeed_keys import KEYS

    known = KEYS.get(section, {}).get(name)
    return "" if known is None else repr(known[1])


def _raw_rows() -> Iterator[Row]:
    from dslpar.schema.deepspeed_keys import KEYS

    for name in deepspeed_policy.TOP:
        type_, default = KEYS[""].get(name, ("", None))
        words = "a dict" if type_ == "section" else type_ or "as DeepSpeed takes it"
        yield Row(f"deepspeed.{name}", words, repr(default), f"DeepSpeed's {name}.")


def _optimizer_rows() -> Iterator[Row]:
    from dslpar.schema.torch_optimizers import OPTIMIZERS

    for name, row in OPTIMIZERS.items():
        message = f"Refused: {row.refused}." if row.refused else f"{row.dotted}."
        yield Row("optimizer.type", repr(name), "", message, of=f"type={name!r}")
        for arg, kind in row.args.items():
            yield Row(f"optimizer.{arg}", KINDS[kind].words, "", f"An argument of {row.dotted}.", of=f"type={name!r}")


def _schedule_rows() -> Iterator[Row]:
    from dslpar.schema.torch_schedulers import SCHEDULES

    for name, row in SCHEDULES.items():
        message = f"Refused: {row.refused}." if row.refused else f"{row.dotted}."
        yield Row("lr_scheduler.type", repr(name), "", message, of=f"type={name!r}")
        for arg, kind in row.args.items():
            default = "required" if arg in row.required else "the optimizer's lr" if arg == row.sets_lr else ""
            hint = f"An argument of {row.dotted}."
            yield Row(f"lr_scheduler.{arg}", KINDS[kind].words, default, hint, of=f"type={name!r}")


_EXTRA = {
    "zero": _zero_rows,
    "precision": _precision_rows,
    "optimizer": _optimizer_rows,
    "lr_scheduler": _schedule_rows,
    "deepspeed": _raw_rows,
}


# Looking up -------------------------------------------------------------------------------------------------------


def below(key: str) -> list[Row]:
    """The rows of a key and of all below it, by its name or another one; all for the empty key."""
    key = other_names().get(key, key)
    return [row for row in rows() if not key or row.key == key or row.key.startswith(f"{key}.")]


@cache
def other_names() -> Mapping[str, str]:
    """Alias -> key."""
    return {alias: row.key for row in rows() for alias in row.aliases} | {
        alias: key for key, alias in (*LIBAI.items(), *COLOSSAL.items())
    }
