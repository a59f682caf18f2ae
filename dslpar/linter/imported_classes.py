"""List what a run would import and call: the classes that a config's sections name, and the calls in their arguments.

A class or function that a run would import is a target. `dslpar lint --targets` lists all targets, and the rule CFG122
rejects those that `dslpar.core.trust` does not allow. Only the sections in `KINDS` have targets: a run never calls
values of other sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dslpar.core import trust
from dslpar.core.errors import Location
from dslpar.language.tree import Node, Reference
from dslpar.schema import datasets, families, sections
from dslpar.schema.class_sections import IDLE_HANDLERS

KINDS = {
    "model": "a torch.nn.Module or dslpar.models.LayeredModel",
    "layer": "a torch.nn.Module",
    "data": "a class with __len__ and __getitem__",
    "optimizer": "a torch.optim.Optimizer",
    "lr_scheduler": "an LR scheduler",
    "gradient_handler": "a dslpar.BaseGradientHandler",
}
"""Section (or "layer", for a model's layers) -> the kind of its class, which a run checks before it calls the class."""


class Target(NamedTuple):
    """A class or function that a run would import, by its full name."""

    name: str
    location: Location
    key: str
    """The key whose value the target makes, as the author wrote it."""
    purpose: str
    """The target's use: "model", "layer", "data", "optimizer", "lr_scheduler", "gradient_handler", or "argument"."""
    allowed_by: str
    """The reason why the target is allowed; empty if it is not."""
    message: str = ""
    """The error message if the target is not allowed."""
    hint: str = ""


def targets_of(root: Node, trusted: tuple[str, ...]) -> Iterator[Target]:
    """Yield all targets of a config, section by section; `trusted` are the trusted packages."""
    for purpose in ("model", "data", "optimizer", "lr_scheduler", "gradient_handler"):
        node = root.value.get(purpose)
        if node is not None and isinstance(node.value, (list, tuple)):  # several gradient handlers
            for index, item in enumerate(node.value):
                yield from _of_section(item, purpose, f"{purpose}.{index}", trusted)
        elif node is not None:
            yield from _of_section(node, purpose, purpose, trusted)


def _of_section(node: Node, purpose: str, key: str, trusted: tuple[str, ...]) -> Iterator[Target]:
    """Yield the class of a section, or of a layer, and the calls in its arguments."""
    if not node.is_mapping:
        return
    written, location = _class_of(node)
    name = _FULL_NAMES[purpose](written)
    if name:
        yield _own_class(name, location, key, purpose)
    if purpose == "model" and name.startswith("dslpar.models.") and name.rpartition(".")[2] in families.FAMILIES:
        return  # the keys of a family are numbers and strings, never calls
    for argument, value in node.value.items():
        if argument == "layers_cfg" and isinstance(value.value, (list, tuple)):
            for index, layer in enumerate(value.value):
                yield from _of_section(layer, "layer", f"{key}.{argument}.{index}", trusted)
        elif purpose == "data" and argument == "parts" and isinstance(value.value, (list, tuple)):
            for index, part in enumerate(value.value):
                yield from _of_section(part, "data", f"{key}.{argument}.{index}", trusted)
        elif purpose == "data" and argument == "eval":
            yield from _of_section(value, "data", f"{key}.{argument}", trusted)
        elif argument != "type":
            yield from _calls(value, f"{key}.{argument}", trusted)


def _class_of(node: Node) -> tuple[str, Location]:
    """Return the class that a section names, as written, and its location; the name is empty if there is none."""
    if node.target is not None:
        return node.target.name, node.target_location or node.location
    written = node.value.get("type")
    if written is None or not isinstance(written.value, (str, Reference)):
        return "", node.location
    return str(written.value), written.location


def _own_class(name: str, location: Location, key: str, purpose: str) -> Target:
    if trust.is_standard_library(name):
        message = f"{key} cannot be {name!r}: Python's standard library has no {purpose.replace('_', ' ')}"
        return Target(name, location, key, purpose, "", message, f"name {KINDS[purpose]}")
    package = trust.known_package(name)
    allowed_by = f"known: {package}" if package else f"its section: imported, and called only if it is {KINDS[purpose]}"
    return Target(name, location, key, purpose, allowed_by)


def _calls(node: Node, key: str, trusted: tuple[str, ...]) -> Iterator[Target]:
    """Yield the calls that a value describes."""
    if node.target is not None:
        name = node.target.name
        package, entry = trust.known_package(name), trust.trusted_entry(name, trusted)
        allowed_by = f"known: {package}" if package else f"trusted: {entry}" if entry else ""
        refused = trust.why_name_refused(name, trusted) or ("", "")
        yield Target(name, node.target_location or node.location, key, "argument", allowed_by, *refused)
    if node.is_mapping or isinstance(node.value, (list, tuple)):
        children = node.value.items() if node.is_mapping else enumerate(node.value)
        for part, child in children:
            yield from _calls(child, f"{key}.{part}", trusted)


# ---- full name of a class that a section names; empty if a run imports nothing for that name ----


def _model(name: str) -> str:
    if name == "Sequential":
        return "torch.nn.Sequential"
    return f"dslpar.models.{name}" if name in families.FAMILIES else _full(name)


def _layer(name: str) -> str:
    from dslpar.schema.torch_layers import LAYERS  # imported here, as below: the module reads a table

    return f"torch.nn.{name}" if name in LAYERS else _full(name)


def _data(name: str) -> str:
    return "" if name.rpartition(".")[2] in datasets.DATASETS else _full(name)


def _optimizer(name: str) -> str:
    if name in sections.OPTIMIZERS:
        return f"torch.optim.{name}"
    from dslpar.schema import torch_optimizers

    row = torch_optimizers.named(name)
    return row.dotted if row else _full(name)


def _lr_scheduler(name: str) -> str:
    if name in sections.LR_SCHEDULERS:
        return ""  # dslpar's own schedules are functions of the step
    from dslpar.schema import torch_schedulers

    row = torch_schedulers.named(name)
    return row.dotted if row else _full(name)


def _gradient_handler(name: str) -> str:
    return "" if name.rpartition(".")[2] in IDLE_HANDLERS else _full(name)


def _full(name: str) -> str:
    """Return a dotted name; a name without dots is registered, and its program has already imported the class."""
    return name if "." in name else ""


_FULL_NAMES: Mapping[str, Callable[[str], str]] = {
    "model": _model,
    "layer": _layer,
    "data": _data,
    "optimizer": _optimizer,
    "lr_scheduler": _lr_scheduler,
    "gradient_handler": _gradient_handler,
}
