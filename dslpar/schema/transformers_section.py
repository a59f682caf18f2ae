"""Read the section of a transformers model: a closed list of keys, beside the config's own arguments.

    model = dict(type='transformers.LlamaForCausalLM', config=dict(hidden_size=64, ...), attn_implementation='sdpa')

The config's arguments stand in `config`, and rules check them (`dslpar.linter.rules.transformers`). A key beside
`config` that only the config class has is refused with the place where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.language.tree import Reference
from dslpar.schema import sections
from dslpar.schema.datasets import absolute_path
from dslpar.schema.known_keys import Entry
from dslpar.schema.reader import show
from dslpar.schema.types import TYPES

if TYPE_CHECKING:
    from dslpar.language.tree import Node
    from dslpar.schema.reader import Reader, Typed

_DECLARED = ("lora", "attn_implementation")
"""Keys that are fields of `OtherModel`."""
KEYS = ("config", "pretrained", *_DECLARED, "policy")
"""The keys of the section, besides `type`."""
_OF_PRECISION = ("dtype", "torch_dtype")
"""Keys of transformers' configs that the section `precision` decides here."""
AUTO = "Auto"
"""Start of the names of transformers' factories, which find a model's class when they are called."""


def read(reader: Reader, node: Node, typed: Typed) -> sections.OtherModel:
    """Read the keys of a transformers model; report the others, and a model without a config."""
    name = (typed.name or "").rpartition(".")[2]
    _report_two_kernels(reader, node)
    entries = {entry.name: entry for entry in typed.entries if entry.node.value is not None}
    args = {key: value for key, value in _arguments(reader, entries) if value is not None}
    before = len(reader.misreads)
    for entry in typed.entries:
        if entry.name not in KEYS:
            _unknown_key(reader, name, entry)
    declared = [entry for entry in typed.entries if entry.name in _DECLARED]
    is_corrected = len(reader.misreads) > before  # a misspelt `pretrained`, or sizes that belong into `config`
    if name.startswith(AUTO):
        _refuse_factory(reader, typed, args)
    elif not (is_corrected or {"config", "pretrained"} & set(entries) or _is_unknown(reader)):
        hint = f"config=dict(...) with the sizes of {name}; or pretrained='folder'"
        reader.report("CFG104", node.location, "missing key 'config' in model", hint, "model", "model.config")
    return reader.fields(sections.OtherModel, declared, node, "model", "model", target=typed.name, args=args)


def _report_two_kernels(reader: Reader, node: Node) -> None:
    """Report an attn_implementation that stands in the section and in its config."""
    config = node.value.get("config")
    below = config.value.get("attn_implementation") if config is not None and config.is_mapping else None
    own = node.value.get("attn_implementation")
    if own is not None and below is not None and None not in (own.value, below.value):
        both = "model.attn_implementation and model.config.attn_implementation"
        location = reader.config.key_at("model.attn_implementation")
        hint = "leave model.config.attn_implementation out"
        reader.report("CFG110", location, f"{both} are the same key", hint, "model.attn_implementation")


def _arguments(reader: Reader, entries: dict[str, Entry]) -> Iterator[tuple[str, object]]:
    """Yield the arguments that are no fields of the section, `pretrained` as an absolute path."""
    if entry := entries.get("config"):
        yield "config", _config(reader, entry)
    if entry := entries.get("pretrained"):
        folder = reader.scalar(TYPES["Path"], entry.node, "model.pretrained", entry.source_key)
        yield "pretrained", None if folder is None else absolute_path(reader.config.path, folder)
    if entry := entries.get("policy"):
        yield "policy", entry.node.plain()


def _config(reader: Reader, entry: Entry) -> object:
    value = entry.node.plain()
    if entry.node.is_mapping or not isinstance(value, str | int | float | list | tuple | Reference):
        return value
    hint = "config=dict(...), its arguments"
    if isinstance(value, str):
        hint += f"; or pretrained={value!r}, if that is a folder with a config.json and weights"
    message = f"{entry.source_key} is {show(value)}, which is not a dict"
    reader.report("CFG102", entry.node.location, message, hint, entry.source_key, "model.config")
    return None


def _is_unknown(reader: Reader) -> bool:
    return not {"model.config", "model.pretrained"}.isdisjoint(reader.config.unknown)


def _unknown_key(reader: Reader, name: str, entry: Entry) -> None:
    if entry.name in _OF_PRECISION or not _belongs_into_config(name, entry.name):
        reader.unknown_key(entry.name, entry.source_key, ("type", *KEYS))
        return
    message = f"unknown key {entry.name!r} in model: it is an argument of the model's config"
    hint = f"write it into config: config=dict({entry.name}={show(entry.node.plain())})"
    reader.report("CFG101", reader.config.key_at(entry.source_key), message, hint, entry.source_key, "model.config")


def _belongs_into_config(name: str, key: str) -> bool:
    """Return whether the config class of a model has a key; of an unknown class, whether it names a size."""
    from dslpar.schema.transformers_configs import NAMES, TransformersConfig, table  # only a mistake needs it

    config = TransformersConfig(name, {}, None)
    known = {*config.known.get("defaults", ()), *config.other_names} or {
        one for names in NAMES.values() for one in names
    }
    return key in known or key in table()["common"]


def _refuse_factory(reader: Reader, typed: Typed, args: dict[str, object]) -> None:
    from dslpar.schema.transformers_configs import read_config_json  # only a mistake needs it

    folder = args.get("pretrained")
    values = read_config_json(folder).values if isinstance(folder, str) else {}
    classes = values.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    hint = f"write type='transformers.{named}'" if named else "name the class, such as 'transformers.LlamaForCausalLM'"
    message = f"{(typed.name or '').rpartition('.')[2]} is a factory, and not the class of a model"
    reader.report("CFG108", typed.location, message, hint, "model.type", "model")
