"""Models from arbitrary modules: an nn.Sequential, a list of layers in a config, or a model split by hand.

    Sequential.of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    Layers([dict(type="Linear", in_features=8, out_features=16), dict(type="ReLU"), ...])       # a layers_cfg
    class MyNet(ModelFromConfig): ...                # sets self.layers_cfg, as ColossalAI's does
    Stage(module)                                    # this rank's stage, whatever the others hold
    Stage(module_0, module_1)                        # its stages, where the schedule has two chunks a rank

Layers pass on a floating tensor or a tuple of tensors, with equal shapes in all micro-batches. Each floating tensor
needs a gradient. DeepSpeed's pipeline can send no other values. Pipelines cut the list by the layers' indices, or by
their `layer_idx` if they have one (LiBai's name; -1 is the last).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Finding, Location
from dslpar.distributed.groups import Groups
from dslpar.language.lazy import instantiate, locate
from dslpar.language.tree import TARGET
from dslpar.layers import IGNORE_INDEX
from dslpar.layers.upcast import upcast
from dslpar.layout.chunks import Chunks
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss
from dslpar.schema.class_registry import LAYERS

Entry = Mapping[str, Any]
"""A layer of a layers_cfg: its `type`, its keyword arguments, and optionally a `layer_idx`."""


class PlainModel(LayeredModel):
    """Base of models whose loss is the cross-entropy over the last dim of the output."""

    def loss(self, groups: Groups) -> Loss:
        """Return cross-entropy over classes or tokens."""
        return cross_entropy


def cross_entropy(logits: Tensor, labels: Labels) -> Tensor:
    """Return the sum of the losses of counted labels, divided by their number or by `labels[1]`; -100 is not counted.

    `logits` are [batch, classes] with labels [batch], or [batch, sequence, vocabulary] with [batch, sequence].
    """
    labels, denominator = labels if isinstance(labels, tuple) else (labels, (labels != IGNORE_INDEX).sum().clamp(min=1))
    # A sum with an explicit denominator, since torch's mean is nan without any counted label.
    flat = upcast(logits.flatten(0, -2))
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / denominator


class Sequential(PlainModel):
    """Built modules, one after the other; they keep their weights and names.

    Layers of dslpar.layers are the exception: their unwritten weights are drawn anew, by name.
    """

    built_everywhere = True

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.modules = modules

    @classmethod
    def of(cls, module: nn.Sequential) -> Sequential:
        """Take the children of an nn.Sequential. A child that occurs twice is two layers; named_children() hides it."""
        return cls([(name, child) for name, child in module._modules.items() if child is not None])

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return all modules."""
        return dict(self.modules)

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return one layer per module."""
        own = [getattr(module, "layer_idx", None) for _, module in self.modules]
        return [
            LayerSpec(name=name, build=partial(_itself, module), layer_idx=layer_idx, recomputable=True)
            for (name, module), layer_idx in zip(self.modules, layer_indices(own), strict=True)
        ]


class Layers(PlainModel):
    """Layers from a config's list; each is built only on its own stage.

    A `type` is a name in LAYERS or torch.nn, or the full name of a class. A class with a parameter `groups` gets the
    process groups, so layers of dslpar.layers may be listed too.
    """

    layers_cfg: Sequence[Entry]
    path: str = "<program>"
    trusted: tuple[str, ...] = ()
    """Packages that calls in the layers' arguments may use (`dslpar.core.trust`)."""

    def __init__(self, layers_cfg: Sequence[Entry], path: str = "<program>", trusted: tuple[str, ...] = ()) -> None:
        self.layers_cfg, self.path, self.trusted = layers_cfg, path, trusted

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return one layer per entry, named by its index.

        Raises:
            DslparError: an entry names no class, or has arguments that the class does not take; lists all such entries.
        """
        findings: list[Finding] = []
        builds = [self._build(index, groups, findings) for index in range(len(self.layers_cfg))]
        if findings:
            raise DslparError(findings)
        own = [entry.get("layer_idx") for entry in self.layers_cfg]
        return [
            LayerSpec(name=str(index), build=build, layer_idx=layer_idx, recomputable=True)
            for index, (build, layer_idx) in enumerate(zip(builds, layer_indices(own), strict=True))
        ]

    def _build(self, index: int, groups: Groups, findings: list[Finding]) -> Callable[[], nn.Module]:
        key, entry, location = f"model.layers_cfg.{index}", self.layers_cfg[index], Location(self.path)
        try:
            cls: Callable[..., nn.Module] = layer_class(entry, location)
            return partial(cls, **_arguments(cls, entry, groups, key, location, self.trusted))
        except DslparError as error:
            findings += [
                finding._replace(key=key, message=f"layer {index}: {finding.message}") for finding in error.findings
            ]
            return nn.Identity


class ModelFromConfig(Layers):
    """Base of a model that makes its list of layers itself: `__init__` sets `layers_cfg`, as in ColossalAI.

    Registered like this, a config uses it as `model = dict(type='Net', width=16)`:

        @MODELS.register_module
        class Net(ModelFromConfig):
            def __init__(self, width):
                self.layers_cfg = [dict(type='Linear', in_features=8, out_features=width), ...]
    """

    def __init__(self) -> None:
        super().__init__(())


class Stage(PlainModel):
    """Model split by hand: this rank's stages, each a built module.

    `schedule.num_model_chunks` is the number of stages per rank, by default one. The first stage takes the micro-batch,
    and each other stage the output of the stage before. A tuple is unpacked, except for an nn.Sequential, whose layers
    take one argument. `dslpar.start` returns a run that knows its stages before they are built:

        run = dslpar.start("interleaved.py")
        first, second = run.stages
        model = dslpar.Stage(part(first), part(second))
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return one layer per stage: "stages.0", ..."""
        chunks = Chunks(groups.mesh.pipe, len(self.modules))
        own = self._by_stage(groups)
        return [
            LayerSpec(
                name=f"stages.{stage}",
                build=partial(own.__getitem__, stage),  # never called for another rank's stage
                forward=forward_of(own[stage]) if stage in own else None,
                layer_idx=stage,
            )
            for stage in range(chunks.stages)
        ]

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return the modules of this rank's stages."""
        return {f"stages.{stage}": module for stage, module in self._by_stage(groups).items()}

    def _by_stage(self, groups: Groups) -> dict[int, nn.Module]:
        chunks = Chunks(groups.mesh.pipe, len(self.modules))
        return dict(zip(chunks.held_by(groups.coord["pipe"]), self.modules, strict=True))


class SingleModule(PlainModel):
    """Any module as a model of one layer, named "model", which cannot be cut."""

    def __init__(self, build: Callable[[], nn.Module], module: nn.Module | None = None) -> None:
        self.build, self.module = build, module

    @classmethod
    def of(cls, module: nn.Module) -> SingleModule:
        """Make the model from a built module."""
        return cls(partial(_itself, module), module)

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return the module, if there is one."""
        return {} if self.module is None else {"model": self.module}

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the single layer."""
        return [LayerSpec(name="model", build=self.build, forward=_unpacked)]


def is_plain_sequential(cls: type) -> bool:
    """Return whether the class is an nn.Sequential without a forward of its own."""
    return issubclass(cls, nn.Sequential) and cls.forward is nn.Sequential.forward


def forward_of(module: nn.Module) -> Callable[[nn.Module, Any], Any] | None:
    """Return a `LayerSpec.forward`: None for an nn.Sequential; for others, one that unpacks a tuple."""
    return None if isinstance(module, nn.Sequential) else _unpacked


def layer_indices(own: Sequence[int | None]) -> Sequence[int | None]:
    """Return each layer's layer_idx: the layers' own if any has one, else their indices."""
    return own if any(index is not None for index in own) else range(len(own))


def layer_class(entry: Entry, location: Location) -> type[nn.Module]:
    """Return the class that an entry of a layers_cfg names."""
    name = str(entry.get("type", entry.get(TARGET, "")))
    if not name:
        message, hint = "no type", "write dict(type='Linear', in_features=..., out_features=...)"
        raise_finding("CFG223", message, hint, location)
    cls = LAYERS.find(name) or (locate(name, location) if "." in name else LAYERS.get(name, location))
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        hint = "name a class of layers, such as 'Linear' or 'my_package.MyLayer'"
        raise_finding("CFG201", f"{name!r} is not a torch.nn.Module", hint, location)
    return cls


def check_arguments(
    cls: Callable[..., object], arguments: Mapping[str, object], location: Location, key: str = "model"
) -> None:
    """Check that `cls` takes the arguments, without calling it. Raises DslparError."""
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        name = getattr(cls, "__name__", str(cls))
        hint = f"{name} takes {inspect.signature(cls)}"
        raise_finding("CFG223", f"{name}: {error}", hint, location, key)


def _arguments(
    cls: Callable[..., nn.Module],
    entry: Entry,
    groups: Groups,
    key: str,
    location: Location,
    trusted: tuple[str, ...],
) -> dict[str, object]:
    given = {name: value for name, value in entry.items() if name not in ("type", TARGET, "layer_idx")}
    arguments = dict(instantiate(given, trusted))
    parameters = inspect.signature(cls).parameters
    if "layer_idx" in parameters and "layer_idx" in entry:
        arguments["layer_idx"] = entry["layer_idx"]  # as LiBai's layers take it
    if "groups" in parameters and parameters["groups"].default is inspect.Parameter.empty:
        # A required `groups` is that of dslpar.layers. The `groups` of torch.nn's convolutions, a number, has a
        # default.
        arguments.setdefault("groups", groups)
    check_arguments(cls, arguments, location, key)
    return arguments


def _unpacked(module: nn.Module, x: Any) -> Any:
    return module(*x) if isinstance(x, tuple) else module(x)


def _itself(module: nn.Module) -> nn.Module:
    return module
