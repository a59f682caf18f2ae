"""Reference of config keys: the type, default, help and other names of each key.

The rows are made from the fields of `dslpar.schema.sections`. The help is the string below a field, which `ast` reads
from the source. Keys of torch and DeepSpeed come from the tables of dslpar.schema. `dslpar config --reference` and
docs/config.md show this list.

    >>> row = next(row for row in rows() if row.key == "model.num_layers")
    >>> row.type, row.default, row.aliases
    ('a whole number, at least 1 and at most 10,000', 'required', ('model.hidden_layers',))
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from dslpar.core.frozen import is_required
from dslpar.layout.deepspeed_config import CHOICES
from dslpar.schema import datasets, deepspeed_policy, families, sections
from dslpar.schema.fields import facts_of
from dslpar.schema.keys import WRITTEN_AS, classes_of, shorthand_of, type_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.types import TYPES


class Row(NamedTuple):
    """Reference entry of one key."""

    key: str
    """The dotted key; `*` stands for any name."""
    type: str
    default: str
    """The default as written in a config; 'required' if there is none, empty if it is not dslpar's."""
    help: str
    aliases: tuple[str, ...] = ()
    """Other keys that mean the same."""
    of: str = ""
    """The section type that has the key: `type='AdamW'`; empty if all types have it or there is only one."""
    field: str = ""
    """The field of the spec, such as 'GPT.num_layers'; empty for a key of torch or DeepSpeed."""


NAMES: Mapping[type, str] = {
    cls: name for table in (families.sections(), datasets.DATASETS, sections.OPTIMIZERS) for name, cls in table.items()
}
"""The `type` that selects each class of the spec."""


@cache
def helps(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the string below each field, by class and field; the empty name has the class's own docstring."""
    # Python does not keep the string below a field, so it is read from the source.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_texts(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    yield "", ast.get_docstring(node) or ""
    for one, below in zip(node.body, node.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield ast.unparse(one.target), " ".join(text.value.split())


def help_of(cls: type, name: str) -> str:
    """Return the help of a field, from the class or a base class; the class's own help for the empty name."""
    found = (helps(each.__module__).get(each.__name__, {}).get(name) for each in cls.__mro__ if each is not object)
    return next((text for text in found if text), "")


# All keys ---------------------------------------------------------------------------------------------------------


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of all keys, section by section."""
    return tuple(_all_rows())


def _all_rows() -> Iterator[Row]:
    for field in fields(sections.Spec):
        name, classes = field.name, classes_of(field)
        yield Row(name, _section_type(field), _default(field), help_of(sections.Spec, name), field=f"Spec.{name}")
        for cls in classes:
            of = _of(cls, classes)
            if cls in NAMES and (of or name == "data"):
                summary = help_of(cls, "").partition("\n")[0]
                yield Row(f"{name}.type", repr(NAMES[cls]), _DEFAULT_TYPES.get(name, ""), summary)
            yield from _fields(cls, name, of)
        yield from _EXTRA[name]() if name in _EXTRA else ()


_DEFAULT_TYPES: Mapping[str, str] = {"optimizer": "'AdamW'", "data": "'text'"}


def _of(cls: type, classes: tuple[type, ...]) -> str:
    """Name the section type that has a key; empty if there is only one type."""
    if len(classes) == 1:
        return ""
    if cls is sections.LRScheduler:
        return "type=" + " / ".join(map(repr, sections.LR_SCHEDULERS))
    return f"type={NAMES[cls]!r}" if cls in NAMES else "another type"


def _fields(cls: type, section: str, of: str = "") -> Iterator[Row]:
    """Yield the rows of a class's fields and of its nested classes."""
    for field in fields(cls):
        key, below = f"{section}.{WRITTEN_AS.get(field.name, field.name)}", classes_of(field)
        takes = _section_type(field) if below else type_of(field).description
        facts = facts_of(field)
        aliases = tuple(f"{section}.{alias}" for alias in facts.aliases.split())
        aliases += (facts.same_as,) if facts.same_as else ()
        yield Row(key, takes, _default(field), help_of(cls, field.name), aliases, of, f"{cls.__name__}.{field.name}")
        for each in below:
            yield from _fields(each, key, of)


def _section_type(field: Field[Any]) -> str:
    if str(field.type).startswith("tuple["):
        return "a list of dicts" if is_required(field) else "a dict, or a list of them"
    shorthand = next((name for name in map(shorthand_of, classes_of(field)) if name), "")
    return f"a dict, or its {shorthand}" if shorthand else "a dict"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    if field.default_factory is MISSING:
        return "required"
    return "{}" if field.type == "Dict" else "dict()"


# Keys of torch and DeepSpeed --------------------------------------------------------------------------------------


def _zero_rows() -> Iterator[Row]:
    yield from _deepspeed_rows("zero", "zero_optimization", deepspeed_policy.ZERO, skip=("stage",))
    for type_, (_, known) in deepspeed_policy.TABLES.items():
        name = next(key for key, of in deepspeed_policy.ZERO.items() if of == type_)
        yield from _deepspeed_rows(f"zero.{name}", f"zero_optimization.{name}", known)


def _deepspeed_rows(
    section: str, theirs: str, known: Mapping[str, str], of: str = "", skip: tuple[str, ...] = ()
) -> Iterator[Row]:
    for name, type_ in known.items():
        if name not in skip:
            takes = TYPES[type_].description if type_ in TYPES else "a dict, or its device"
            default = repr(deepspeed_policy.KEYS[theirs][name][1])
            text = f"DeepSpeed's {theirs}.{name}."
            if choice := CHOICES.get(f"{theirs}.{name}"):
                text += f" dslpar may choose {choice.value!r}, by {' and '.join(choice.sources)}: {choice.why}."
            yield Row(f"{section}.{name}", takes, default, text, of=of)


def _raw_rows() -> Iterator[Row]:
    for name in deepspeed_policy.TOP:
        type_, default = deepspeed_policy.KEYS[""][name]
        takes = "a dict" if type_ == "section" else type_ or "as DeepSpeed takes it"
        yield Row(f"deepspeed.{name}", takes, repr(default), f"DeepSpeed's {name}.")


def _optimizer_rows() -> Iterator[Row]:
    for name, row in OPTIMIZERS.items():
        yield from _class_rows("optimizer", name, row.dotted, row.refused, row.args, {})


def _scheduler_rows() -> Iterator[Row]:
    for name, row in LR_SCHEDULERS.items():
        defaults = {row.sets_lr: "the optimizer's lr"} | dict.fromkeys(row.required, "required")
        yield from _class_rows("lr_scheduler", name, row.dotted, row.refused, row.args, defaults)


def _class_rows(
    section: str, name: str, dotted: str, refused: str, args: Mapping[str, str], defaults: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the rows of a torch or DeepSpeed class and of its arguments."""
    of = f"type={name!r}"
    yield Row(f"{section}.type", repr(name), "", f"Refused: {refused}." if refused else f"{dotted}.", of=of)
    for arg, type_ in args.items():
        takes, default = TYPES[type_].description, defaults.get(arg, "")
        yield Row(f"{section}.{arg}", takes, default, f"An argument of {dotted}.", of=of)


_EXTRA: Mapping[str, Callable[[], Iterator[Row]]] = {
    "zero": _zero_rows,
    "precision": lambda: chain(
        _deepspeed_rows("precision", "bf16", deepspeed_policy.BF16, of="dtype='bf16'"),
        _deepspeed_rows("precision", "fp16", deepspeed_policy.FP16, of="dtype='fp16'"),
    ),
    "optimizer": _optimizer_rows,
    "lr_scheduler": _scheduler_rows,
    "deepspeed": _raw_rows,
}


# Lookup -----------------------------------------------------------------------------------------------------------


def below(key: str) -> list[Row]:
    """Return the rows of a key, given by any of its names, and of all keys below it; all rows for the empty key."""
    key = other_names().get(key, key)
    return [row for row in rows() if not key or row.key == key or row.key.startswith(f"{key}.")]


@cache
def other_names() -> Mapping[str, str]:
    """Return the key of each alias."""
    return {alias: row.key for row in rows() for alias in row.aliases}
