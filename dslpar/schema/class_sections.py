"""Read the sections that name a class: model and its layers, optimizer, LR scheduler, gradient handlers.

A config names a class in one of three ways: by its short name in dslpar, torch or DeepSpeed; by its full dotted name;
or by a name that the process has registered (as in ColossalAI's registries). The tables of torch's and DeepSpeed's
names are imported only if a config uses one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dslpar.core.errors import Location
from dslpar.core.suggest import did_you_mean
from dslpar.language.tree import Node
from dslpar.schema import families, sections
from dslpar.schema.datasets import absolute_path
from dslpar.schema.known_keys import Entry, arguments
from dslpar.schema.reader import Reader, Registered, Typed
from dslpar.schema.types import SEQUENCE, TYPES

MODEL_HELP = "model = dict(type='GPT', num_layers=8, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=128)"
_HANDLER_HELP = "gradient_handler = [dict(type='my_package.my_module.MyHandler')]"
_LAYERS_HELP = "layers_cfg=[dict(type='Linear', in_features=8, out_features=8), ...]"
OWN_NAME = " (a class of your own goes by its full name, such as 'my_package.my_module.{}'{})"
_TORCH = "torch.nn."
_OF_EVERY_FAMILY = {
    "num_layers": TYPES["LayerCount"],
    "vocab_size": TYPES["PositiveInt"],
    "max_seq_len": TYPES["PositiveInt"],
}
"""Sizes that are checked even if the model's `type` is unknown."""
_REGISTERED = "; one that is registered is known only in the process that registers it"


def optimizer(reader: Reader, node: Node, registered: Registered) -> sections.Optimizer | None:
    """Read one of dslpar's optimizers, one of torch's or DeepSpeed's by name, or the author's own class."""
    typed = mapping(reader, node, "optimizer", "torch.optim.", "AdamW")
    if typed is None:
        return None
    if typed.name is not None and typed.name in sections.OPTIMIZERS:
        return reader.fields(sections.OPTIMIZERS[typed.name], typed.entries, node, "optimizer", "optimizer")
    # Imported here, as below: the module reads a table, and most configs name none of its classes.
    from dslpar.schema.torch_optimizers import OPTIMIZERS, short

    name = short(typed.name or "")
    # DeepSpeed ignores the case of its names: its own tutorials write OnebitAdam.
    name = next((known for known, row in OPTIMIZERS.items() if row.refused and known.lower() == name.lower()), name)
    row = OPTIMIZERS.get(name)
    if row is None and "." not in name:
        names = [*sections.OPTIMIZERS, *(name for name, row in OPTIMIZERS.items() if not row.refused)]
        own = OWN_NAME.format("MyOptimizer", "")
        meant = reader.unknown_type("optimizer", typed.name, typed.location, names, own)
        if meant is None:
            # Every optimizer has these two keys, so they can be checked although the class is unknown.
            shared = [entry for entry in typed.entries if entry.name in ("lr", "weight_decay")]
            reader.fields(sections.OtherOptimizer, shared, node, "optimizer", "optimizer", target=name)
            return None
        if meant in sections.OPTIMIZERS:
            return reader.fields(sections.OPTIMIZERS[meant], typed.entries, node, "optimizer", "optimizer")
        name, row = meant, OPTIMIZERS[meant]
    if row is not None and row.refused:
        _refuse(reader, "optimizer", name, typed, row.refused, "such as 'AdamW'")
        return None
    known = None if row is None else {"lr": "PositiveFloat", **row.args}
    return _other_optimizer(reader, name, typed.entries, node, known)


def _other_optimizer(
    reader: Reader, name: str, entries: list[Entry], node: Node, known: Mapping[str, str] | None
) -> sections.OtherOptimizer:
    """Read lr and weight_decay as fields and the rest as arguments, which are checked if the optimizer is known."""
    ours = {"lr", "weight_decay"} & set(known or ("lr", "weight_decay"))
    fields = [entry for entry in entries if entry.name in ours]
    rest = [entry for entry in entries if entry.name not in ours]
    args = plain(rest) if known is None else reader.values(arguments(known), rest, "optimizer")
    made = reader.fields(sections.OtherOptimizer, fields, node, "optimizer", "optimizer", target=name)
    return replace(made, args=args)


def lr_scheduler(
    reader: Reader, node: Node, registered: Registered
) -> sections.LRScheduler | sections.OtherLRScheduler | None:
    """Read one of dslpar's LR schedulers, or one of DeepSpeed's or torch's by name."""
    typed = mapping(reader, node, "lr_scheduler", "torch.optim.lr_scheduler.", "constant")
    if typed is None:
        return None
    if typed.name is None or typed.name in sections.LR_SCHEDULERS:
        return reader.section(sections.LRScheduler, node, "lr_scheduler", "lr_scheduler")
    from dslpar.schema.torch_schedulers import LR_SCHEDULERS, short

    name = short(typed.name)
    row = LR_SCHEDULERS.get(name)
    if row is None:
        known = [*sections.LR_SCHEDULERS, *(name for name, row in LR_SCHEDULERS.items() if not row.refused)]
        meant = reader.unknown_type("lr_scheduler", typed.name, typed.location, known)
        if meant is None:
            return None
        if meant in sections.LR_SCHEDULERS:
            return reader.fields(sections.LRScheduler, typed.entries, node, "lr_scheduler", "lr_scheduler", type=meant)
        name, row = meant, LR_SCHEDULERS[meant]
    if row.refused:
        _refuse(reader, "lr_scheduler", name, typed, row.refused, "such as 'cosine'")
        return None
    args = reader.values(arguments(row.args), typed.entries, "lr_scheduler")
    _demand(reader, "lr_scheduler", row.required, typed, node)
    return sections.OtherLRScheduler(target=name, args=args)


def _demand(reader: Reader, source_key: str, required: Iterable[str], typed: Typed, node: Node) -> None:
    """Report each argument in `required` that the section `typed` lacks."""
    given = {entry.name for entry in typed.entries if entry.node.value is not None}
    for name in required:
        key = f"{source_key}.{name}"
        # Do not build the union of the two sets: a list of layers may have thousands.
        if name not in given and key not in reader.config.unknown and key not in reader.invalid:
            reader.missing_key(name, source_key, node.location, key, f", which {typed.name} needs")


def _refuse(reader: Reader, source_key: str, name: str, typed: Typed, why: str, hint: str) -> None:
    reader.report(
        "CFG108", typed.location, f"{source_key} cannot be {name!r}: {why}", hint, f"{source_key}.type", source_key
    )


# Models and their layers ------------------------------------------------------------------------------------------


def model(reader: Reader, node: Node, registered: Registered) -> sections.Model | sections.OtherModel | None:
    """Read one of dslpar's models, 'Sequential', a registered model, or the author's own class."""
    if not node.is_mapping:
        reader.report("CFG102", node.location, "model must be a dict with a type", MODEL_HELP, "model")
        return None
    typed = reader.typed(node, "model", "dslpar.models.")
    if typed.name is None:
        reader.missing_type("model", node.location, MODEL_HELP)
        return None
    name = "Sequential" if typed.name == "torch.nn.Sequential" else typed.name
    if "." not in name and name not in (*families.FAMILIES, "Sequential", *registered.get("models", ())):
        meant = _model_by_another_name(reader, typed)
        if meant is None:
            for entry in typed.entries:
                if entry.name in _OF_EVERY_FAMILY and entry.node.value is not None:
                    reader.scalar(_OF_EVERY_FAMILY[entry.name], entry.node, entry.source_key, entry.source_key)
        name = meant or name
    if name in families.FAMILIES:
        family: type[sections.Model] = families.class_of(name, "section")
        made: sections.Model | None = reader.fields(family, typed.entries, node, "model", "model")
        folder = getattr(made, "pretrained", None)
        return replace(made, pretrained=absolute_path(reader.config.path, folder)) if made and folder else made
    if name.startswith("transformers."):
        from dslpar.schema import transformers_section  # most configs have one of dslpar's models

        return transformers_section.read(reader, node, typed)
    if name == "Sequential":
        for entry in typed.entries:
            if entry.name != "layers_cfg":
                reader.unknown_key(entry.name, entry.source_key, ("type", "layers_cfg"))
        _demand(reader, "model", ("layers_cfg",), typed, node)
    elif name.startswith(_TORCH):
        _check_layer_arguments(reader, name.removeprefix(_TORCH), typed, node, "model")
    for entry in typed.entries:
        if entry.name == "layers_cfg" and entry.node.value is not None:
            _layers(reader, entry, registered)
    return sections.OtherModel(target=name, args=plain(typed.entries))


def _model_by_another_name(reader: Reader, typed: Typed) -> str | None:
    """Report an unknown model name; return the dslpar family that it must mean, or None."""
    name = typed.name or ""
    family, fields = families.known_as(name)
    if not family or name.lower() == family.lower():
        more = OWN_NAME.format("MyModel", _REGISTERED)
        return reader.unknown_type("model", name, typed.location, (*families.FAMILIES, "Sequential"), more)
    hint = f"write type={family!r}" + (f", {fields}: {name} is {family} with these fields" if fields else "")
    reader.report("CFG108", typed.location, f"unknown model {name!r}", hint, "model.type", "model", meant=family)
    return family


def _layers(reader: Reader, entry: Entry, registered: Registered) -> None:
    """Check the list of layers, which stays in the model's arguments as written."""
    reader.written[entry.source_key] = entry.source_key
    layers = entry.node.value
    if not isinstance(layers, SEQUENCE) or not layers:
        message = f"{entry.source_key} must be a list of dicts, at least one"
        reader.report("CFG102", entry.node.location, message, _LAYERS_HELP, entry.source_key)
        return
    before = len(reader.misreads)
    placed = [_layer(reader, layer, f"{entry.source_key}.{number}", registered) for number, layer in enumerate(layers)]
    if len(reader.misreads) > before:
        reader.invalid.add(entry.source_key)
    else:
        _check_rise(reader, entry, placed)


def _layer(reader: Reader, node: Node, source_key: str, registered: Registered) -> int | None:
    """Check one layer of a layers_cfg; return its layer_idx, or None if it has none."""
    if not node.is_mapping:
        reader.report("CFG102", node.location, f"{source_key} must be a dict", _LAYERS_HELP, source_key)
        return None
    typed = reader.typed(node, source_key, "torch.nn.")
    if typed.name is None:
        reader.missing_type(source_key, node.location, _LAYERS_HELP)
        return None
    if "." not in typed.name and typed.name not in registered.get("layers", ()):
        _check_layer_name(reader, typed.name, typed.location, source_key)
        _check_layer_arguments(reader, typed.name, typed, node, source_key)
    index = node.value.get("layer_idx")
    if index is None or index.value is None:
        return None
    placed: int | None = reader.scalar(TYPES["LayerIndex"], index, f"{source_key}.layer_idx", f"{source_key}.layer_idx")
    return placed


def _check_layer_name(reader: Reader, name: str, location: Location, source_key: str) -> None:
    from dslpar.schema.torch_layers import LAYERS

    if name not in LAYERS:
        hint = did_you_mean(name, LAYERS) or "a name of torch.nn's, such as 'Linear'"
        hint += OWN_NAME.format("MyLayer", _REGISTERED)
        reader.report("CFG108", location, f"unknown type {name!r} in {source_key}", hint, f"{source_key}.type")


def _check_layer_arguments(reader: Reader, name: str, typed: Typed, node: Node, source_key: str) -> None:
    """Check that a torch layer has all required arguments, and no unknown ones."""
    from dslpar.schema.torch_layers import LAYERS

    layer = LAYERS.get(name)
    if layer is None or layer.required is None:
        return
    known = (*layer.required, *layer.optional, "layer_idx")
    for entry in typed.entries:
        if entry.name not in known:
            reader.unknown_key(entry.name, entry.source_key, known)
    _demand(reader, source_key, layer.required, typed, node)


def _check_rise(reader: Reader, entry: Entry, placed: list[int | None]) -> None:
    """Check that the layers' indices count up from 0 without gaps. -1 means the largest index, None no index."""
    known = [(number, index) for number, index in enumerate(placed) if index is not None]
    last = max((index for _, index in known), default=0)
    expected = {0}
    for number, index in known:
        position = max(last, 0) if index == -1 else index
        if position not in expected:
            message = f"layer_idx is {index}: it counts layers from 0, up, without gaps"
            source_key = f"{entry.source_key}.{number}.layer_idx"
            hint = f"{' or '.join(map(str, sorted(expected)))}, or leave it out"
            reader.report("PIP111", reader.config.at(source_key), message, hint, source_key, entry.source_key)
            return
        expected = {position, position + 1}


# Gradient handlers ------------------------------------------------------------------------------------------------


def gradient_handlers(reader: Reader, node: Node, registered: Registered) -> tuple[sections.GradientHandler, ...]:
    """Read one handler or a list of handlers; report and leave out ColossalAI's handlers in IDLE_HANDLERS."""
    items = [(node, "gradient_handler")]
    if isinstance(node.value, SEQUENCE):
        items = [(item, f"gradient_handler.{index}") for index, item in enumerate(node.value)]
    made = [_handler(reader, item, source_key, registered) for item, source_key in items]
    return tuple(handler for handler in made if handler is not None)


def _handler(reader: Reader, node: Node, source_key: str, registered: Registered) -> sections.GradientHandler | None:
    if not node.is_mapping:
        reader.report("CFG102", node.location, f"{source_key} must be a dict", _HANDLER_HELP, source_key)
        return None
    typed = reader.typed(node, source_key, "colossalai.")
    if typed.name is None:
        reader.missing_type(source_key, node.location, _HANDLER_HELP)
        return None
    if typed.name in IDLE_HANDLERS:
        message = f"{typed.name} has nothing to do: {IDLE_HANDLERS[typed.name]}"
        reader.report("DEAD103", typed.location, message, f"leave {source_key} out", f"{source_key}.type")
        return None
    if typed.name == "MoeGradientHandler":
        why = "no layer here has experts"
        reader.report(
            "CFG108", typed.location, f"{source_key} cannot be {typed.name!r}: {why}", "leave it out", source_key
        )
        return None
    if "." not in typed.name and typed.name not in registered.get("gradient_handlers", ()):
        hint = did_you_mean(typed.name, registered.get("gradient_handlers", ())) or _HANDLER_HELP
        message = f"unknown gradient handler {typed.name!r}"
        reader.report(
            "CFG108", typed.location, message, hint + OWN_NAME.format("MyHandler", _REGISTERED), f"{source_key}.type"
        )
        return None
    return sections.GradientHandler(target=typed.name, args=plain(typed.entries))


IDLE_HANDLERS: Mapping[str, str] = {
    "DataParallelGradientHandler": "DeepSpeed averages gradients over replicas",
    "ZeROGradientHandler": "DeepSpeed's ZeRO reduces what it shards",
    "PipelineSharedModuleGradientHandler": "DeepSpeed sums the gradients of tied layers over stages",
    "SequenceParallelGradientHandler": "dslpar's layers sum over what splits the sequence",
}
"""ColossalAI's own handlers -> the part of DeepSpeed or dslpar that does their work."""


# Shared helpers ---------------------------------------------------------------------------------------------------


def mapping(reader: Reader, node: Node, key: str, package: str, default: str) -> Typed | None:
    """Split a section into the class that it names and its other keys; report and return None if it is not a dict."""
    if node.is_mapping:
        return reader.typed(node, key, package, default)
    written = node.value if isinstance(node.value, str) else ""
    made = f"dict(type={written if written.isidentifier() else default!r})"  # optimizer = 'RMSprop'
    hint = f"write {key} = {written if written.startswith('dict(') else made}"
    reader.report("CFG102", node.location, f"{key} must be a dict", hint, key)
    return None


def plain(entries: Iterable[Entry]) -> dict[str, object]:
    """Return name -> plain Python value of the entries."""
    return {entry.name: entry.node.plain() for entry in entries}
