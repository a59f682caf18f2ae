"""JSON Schema of configs in YAML and JSON, from the same declarations as lint: `dslpar schema`.

    schema()                  # draft 2020-12, closed: an unknown key of a section is an error

Editors complete and check YAML and JSON with it. It knows keys, types and choices. What depends on several keys, on the
world size or on files, lint alone reports. The keys of a section that names a class (model, data, optimizer,
lr_scheduler) depend on its `type`; your own class, with a dot in its name, takes any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from dslpar.core.frozen import is_required
from dslpar.provenance.reference import help_of
from dslpar.schema import datasets, deepspeed_policy, families, sections
from dslpar.schema.fields import facts_of
from dslpar.schema.keys import WRITTEN_AS, aliases_of, classes_of, shorthand_of, type_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.types import TYPES, ValueType

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

_WHOLE = {"type": "integer"}
_BOUNDS: Mapping[str, Schema] = {
    "PositiveInt": {"minimum": 1, "exclusiveMaximum": 2**31},
    "NonNegativeInt": {"minimum": 0, "exclusiveMaximum": 2**63},
    "LayerCount": {"minimum": 1, "maximum": 10_000},
    "LayerIndex": {"minimum": -1, "exclusiveMaximum": 10_000},
    "ExitStatus": {"minimum": 1, "maximum": 125},
    "ZeroStage": {"minimum": 0, "maximum": 3},
    "ScalePower": {"minimum": 0, "maximum": 62},
    "ModuleDepth": {"minimum": -1, "exclusiveMaximum": 2**31},
    "WholeNumber": {"minimum": 0, "exclusiveMaximum": 2**63, "multipleOf": 1},
    "PositiveWholeNumber": {"minimum": 1, "exclusiveMaximum": 2**63, "multipleOf": 1},
    "AtLeastOne": {"minimum": 1},
    "PositiveFloat": {"exclusiveMinimum": 0},
    "NonNegativeFloat": {"minimum": 0},
    "NonPositiveFloat": {"maximum": 0},
    "Fraction": {"minimum": 0, "exclusiveMaximum": 1},
    "PositiveFraction": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "Probability": {"minimum": 0, "maximum": 1},
    "PositiveProbability": {"exclusiveMinimum": 0, "maximum": 1},
}
"""Bounds of types whose condition is one."""


def _list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_NAMES = _list_of({"type": "string", "minLength": 1})
_SHAPES: Mapping[str, Schema] = {
    "Dict": {"type": "object"},
    "Dataset": {"type": "object"},
    "IntList": _list_of(_WHOLE),
    "CountList": _list_of({"type": "integer", "minimum": 0}),
    "MeshShape": _list_of({"type": "integer", "minimum": 1}, minItems=3, maxItems=3),
    "StrList": _list_of({"type": "string"}),
    "ModuleNames": {"anyOf": [{"const": "all-linear"}, _NAMES]},
    "Milestones": _list_of({"type": "integer", "minimum": 1}),
    "Betas": _list_of({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, minItems=2, maxItems=2),
    "PositivePair": _list_of({"type": "number", "exclusiveMinimum": 0}, minItems=2, maxItems=2),
    "Etas": _list_of({"type": "number", "exclusiveMinimum": 0}, minItems=2, maxItems=2),
    "AdafactorEps": _list_of({"type": ["number", "null"]}, minItems=2, maxItems=2),
    "AxisOrder": {"enum": [["pipe", "data", "tensor"], ["data", "pipe", "tensor"]]},
    "ChannelMeans": {"anyOf": [{"type": "number"}, _list_of({"type": "number"}, minItems=1)]},
    "ChannelDeviations": {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            _list_of({"type": "number", "exclusiveMinimum": 0}, minItems=1),
        ]
    },
    "CompileComponents": _list_of({"enum": ["layers", "loss"]}, minItems=1),
    "CommOverlap": {"anyOf": [{"type": "boolean"}, {"const": "symmetric_memory"}]},
    "ResumeFrom": {"type": "string", "pattern": r"^(newest|newest_whole|best|step_\d+)$|/"},
}
"""Schemas of types that are no plain number, string or choice. Where lint says more, it says it alone."""


def schema() -> Schema:
    """Return the JSON Schema of a config."""
    top = {field.name: _described(_top_section(field), sections.Spec, field) for field in fields(sections.Spec)}
    required = [field.name for field in fields(sections.Spec) if is_required(field)]
    return {
        "$schema": DRAFT,
        "title": "dslpar config",
        "type": "object",
        "properties": top,
        "required": required,
        "additionalProperties": False,
    }


def type_schema(name: str) -> Schema:
    """Return the schema of a type of `dslpar.schema.types`, by its name."""
    known = TYPES[name]
    if name in _SHAPES:
        return dict(_SHAPES[name])
    return {**_plain(known), **_BOUNDS.get(name, {})}


def _plain(known: ValueType) -> Schema:
    if known.choices:
        return {"enum": list(known.choices)}
    if bool in known.python_types:
        return {"type": "boolean"}
    if float in known.python_types:
        return {"type": "number"}
    return {"type": "integer"} if int in known.python_types else {"type": "string", "minLength": 1}


def _described(made: Schema, cls: type, field: Field[Any]) -> Schema:
    """Return a schema with the help and the default of a field."""
    help = help_of(cls, field.name)
    made = {**made, **({"description": help} if help else {})}
    if field.default is not MISSING and field.default is not None:
        made["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return made


def _or_null(made: Schema) -> Schema:
    """Allow null, which leaves a key out."""
    return {"anyOf": [made, {"type": "null"}]}


def _or_nothing(made: Schema, field: Field[Any]) -> Schema:
    """Allow null for a key that may be left out."""
    return made if is_required(field) else _or_null(made)


def _field(cls: type, field: Field[Any]) -> Schema:
    if classes_of(field):
        made = _section(field)
    else:
        facts, name = facts_of(field), str(field.type).removesuffix(" | None")
        made = {"enum": list(facts.choices)} if facts.choices else type_schema(name)
        assert facts.choices or type_of(field) is TYPES[name]
    return _described(_or_nothing(made, field), cls, field)


def _top_section(field: Field[Any]) -> Schema:
    """Return the schema of a section of the config, or of None in its place."""
    made = _NAMED[field.name]() if field.name in _NAMED else _section(field, _EXTRA.get(field.name))
    return _or_nothing(made, field)


def _section(field: Field[Any], extra: Callable[[], Mapping[str, str]] | None = None) -> Schema:
    """Return the schema of a section, or of a bare value in its place; `extra` are keys that only DeepSpeed knows."""
    classes = classes_of(field)
    whole = _object(classes[0]) if len(classes) == 1 else {"type": "object"}
    if extra is not None:
        whole = _with(whole, _of_deepspeed(extra()))
    if str(field.type).startswith("tuple["):
        return {"anyOf": [whole, _list_of(whole)]}
    short = next((name for name in map(shorthand_of, classes) if name), "")
    if not short or len(classes) != 1:
        return whole
    (bare,) = (item for item in fields(classes[0]) if item.name == short)
    return {"anyOf": [whole, _field(classes[0], bare)]}


def _object(cls: type, names: Mapping[str, Schema] = {}) -> Schema:
    """Return the schema of a section class; `names` are more keys."""
    properties = {
        WRITTEN_AS.get(item.name, item.name): _field(cls, item)
        for item in fields(cls)
        if WRITTEN_AS.get(item.name) != "*"
    }
    of_class = {item.name: item for item in fields(cls)}
    properties |= {alias: _field(cls, of_class[name]) for alias, name in aliases_of(cls).items()}
    required = [
        WRITTEN_AS.get(item.name, item.name)
        for item in fields(cls)
        if is_required(item) and not any(name == item.name for name in aliases_of(cls).values())
    ]
    takes_any = any(WRITTEN_AS.get(item.name) == "*" for item in fields(cls))
    made: Schema = {"type": "object", "properties": {**properties, **names}, "additionalProperties": takes_any}
    return made | ({"required": required} if required else {})


def _with(made: Schema, names: Mapping[str, Schema]) -> Schema:
    return made | {"properties": {**made["properties"], **names}, "additionalProperties": False}


def _of_deepspeed(types: Mapping[str, str]) -> dict[str, Schema]:
    return {name: _or_null(_deepspeed(kind)) for name, kind in types.items()}


def _deepspeed(kind: str) -> Schema:
    if kind in TYPES:
        return type_schema(kind)
    if kind in deepspeed_policy.TABLES:
        short, below = deepspeed_policy.TABLES[kind]
        whole: Schema = {
            "type": "object",
            "properties": _of_deepspeed(below),
            "additionalProperties": False,
        }
        return {"anyOf": [whole, whole["properties"][short]]} if short else whole
    return {}


# ---- sections that name a class ----


def _of_types(named: Mapping[str, Schema], default: str = "", others: bool = True) -> Schema:
    """Return the schema of a section whose `type` selects its keys; `others`: a dotted name selects any."""
    rows = []
    for name, made in named.items():
        whole = {
            **made,
            "properties": {
                "type": {"enum": [name, None]} if name == default else {"const": name},
                **made["properties"],
            },
        }
        required = [each for each in made.get("required", []) if each != "type"]
        rows.append(whole | {"required": [*required, *([] if name == default else ["type"])]})
    if others:
        dotted = {"type": "string", "pattern": r"\."}
        rows.append({"type": "object", "properties": {"type": dotted}, "required": ["type"]})
    return {"anyOf": rows}


def _model() -> Schema:
    named = {name: _object(cls) for name, cls in families.sections().items()}
    named["Sequential"] = {
        "type": "object",
        "properties": {"layers_cfg": _list_of({"type": "object", "required": ["type"]}, minItems=1)},
        "required": ["layers_cfg"],
        "additionalProperties": True,
    }
    return _of_types(named)


def _data() -> Schema:
    named = {name: _object(cls) for name, cls in datasets.DATASETS.items()}
    return _of_types(named, default="text")


def _optimizer() -> Schema:
    named = {name: _object(cls) for name, cls in sections.OPTIMIZERS.items()}
    shared = {"lr": type_schema("PositiveFloat"), "weight_decay": type_schema("NonNegativeFloat")}
    for name, row in OPTIMIZERS.items():
        if not row.refused and name not in named:
            named[name] = _arguments({**dict.fromkeys(shared, ""), **row.args}, shared)
    return _of_types(named, default="AdamW")


def _lr_scheduler() -> Schema:
    of_ours = _object(sections.LRScheduler)
    named = {
        name: {**of_ours, "properties": {key: each for key, each in of_ours["properties"].items() if key != "type"}}
        for name in sections.LR_SCHEDULERS
    }
    for name, row in LR_SCHEDULERS.items():
        if not row.refused:
            named[name] = _arguments(row.args, {}, row.required)
    return _of_types(named, default="constant")


def _arguments(types: Mapping[str, str], known: Mapping[str, Schema], required: Collection[str] = ()) -> Schema:
    made = {name: known.get(name) or _deepspeed(kind) for name, kind in types.items()}
    properties = {name: each if name in required else _or_null(each) for name, each in made.items()}
    whole = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**whole, "required": list(required)} if required else whole


def _precision() -> Schema:
    """Return the schema of precision, whose keys of DeepSpeed's depend on the dtype."""
    whole, rows = _object(sections.Precision), []
    for dtype, extra in (("fp32", {}), ("bf16", deepspeed_policy.BF16), ("fp16", deepspeed_policy.FP16)):
        row = _with(whole, _of_deepspeed(extra))
        row["properties"] = {**row["properties"], "dtype": {"enum": [dtype, None] if dtype == "fp32" else [dtype]}}
        rows.append(row | {"required": [] if dtype == "fp32" else ["dtype"]})
    return {"anyOf": [*rows, type_schema("DType")]}


def _gradient_handler() -> Schema:
    one = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    return {"anyOf": [one, _list_of(one), {"type": "null"}]}


_NAMED = {
    "model": _model,
    "data": _data,
    "optimizer": _optimizer,
    "lr_scheduler": _lr_scheduler,
    "gradient_handler": _gradient_handler,
    "precision": _precision,
}
"""Sections whose `type` names a class, or whose keys depend on a value."""
_EXTRA = {"zero": lambda: deepspeed_policy.ZERO}
"""DeepSpeed's keys in sections of dslpar."""


def keys_of(made: Schema) -> Iterable[str]:
    """Return the names of a section's keys, of any type."""
    found = dict.fromkeys(made.get("properties", {}))
    for row in made.get("anyOf", []):
        found |= dict.fromkeys(keys_of(row))
    return found
