"""Models of other people's layers: an nn.Sequential, a list of layers in a config, or a model split by hand.

    Sequential.of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    Layers([dict(type="Linear", in_features=8, out_features=16), dict(type="ReLU"), ...])       # a layers_cfg
    class MyNet(ModelFromConfig): ...                # sets self.layers_cfg, as ColossalAI's does
    Stage(module)                                    # this rank's stage, whatever the others hold

What passes from layer to layer is a floating tensor or a tuple of tensors, each floating one with a gradient, of equal
shape for each micro-batch: what DeepSpeed's pipeline can send (FACTS 2.1). A layer's place in the cut is its index, or
the `layer_idx` that it has (LiBai's name; -1 is the last).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Finding, Location
from dslpar.distributed.groups import Groups
from dslpar.language.lazy import instantiate, locate
from dslpar.language.tree import TARGET
from dslpar.models.criterion import cross_entropy
from dslpar.models.layered import LayeredModel, LayerSpec, Loss
from dslpar.schema.registry import LAYERS

Entry = Mapping[str, Any]
"""A layer of a layers_cfg: its `type`, its keyword arguments, and perhaps a `layer_idx`."""


class PlainModel(LayeredModel):
    """A model whose loss is the cross-entropy over its output's last dim."""

    def loss(self, groups: Groups) -> Loss:
        """The sum over counted labels, over their number or over `labels[1]`."""
        return cross_entropy


class Sequential(PlainModel):
    """Modules that are built already, one after the other; they keep their weights and their names."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.modules = modules

    @classmethod
    def of(cls, module: nn.Sequential) -> Sequential:
        """The children of an nn.Sequential; one that stands twice is two layers."""
        return cls([(name, child) for name, child in module._modules.items() if child is not None])

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """One layer a module."""
        own = [getattr(module, "layer_idx", None) for _, module in self.modules]
        return [
            LayerSpec(name=name, build=partial(_itself, module), layer_idx=layer_idx, recomputable=True)
            for (name, module), layer_idx in zip(self.modules, places(own), strict=True)
        ]


class Layers(PlainModel):
    """Layers as a config lists them, each built on its own stage alone.

    A `type` is a name of LAYERS, of torch.nn, or a class's full name; a class that takes `groups` is given them: layers
    of dslpar.layers may stand here.
    """

    layers_cfg: Sequence[Entry]

    def __init__(self, layers_cfg: Sequence[Entry], path: str = "<program>") -> None:
        self.layers_cfg, self.path = layers_cfg, path

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """One layer an entry, named by its index.

        Raises:
            DslparError: an entry names no class, or gives it arguments that it does not take; all of them.
        """
        findings: list[Finding] = []
        builds = [self._build(index, groups, findings) for index in range(len(self.layers_cfg))]
        if findings:
            raise DslparError(findings)
        own = [entry.get("layer_idx") for entry in self.layers_cfg]
        return [
            LayerSpec(name=str(index), build=build, layer_idx=layer_idx, recomputable=True)
            for index, (build, layer_idx) in enumerate(zip(builds, places(own), strict=True))
        ]

    def _build(self, index: int, groups: Groups, findings: list[Finding]) -> Callable[[], nn.Module]:
        key = f"model.layers_cfg.{index}"
        try:
            made: Callable[..., Any] = layer_class(self.layers_cfg[index], self._place())
            return partial(made, **_arguments(made, self.layers_cfg[index], groups, key, self._place()))
        except DslparError as error:
            findings += [
                finding._replace(key=key, message=f"layer {index}: {finding.message}") for finding in error.findings
            ]
            return nn.Identity

    def _place(self) -> Location:
        return Location(getattr(self, "path", "<program>"))


class ModelFromConfig(Layers):
    """Base of a model that makes its list of layers itself: `__init__` sets `layers_cfg`, as ColossalAI has it.

    @MODELS.register_module
    class Net(ModelFromConfig):
        def __init__(self, width): self.layers_cfg = [dict(type='Linear', in_features=8, out_features=width), ...]
    """

    def __init__(self) -> None:
        super().__init__(())


class Stage(PlainModel):
    """A model split by hand: this rank's stage of it, built already.

    Its input is the first stage's micro-batch, or what the stage before gave; a tuple is unpacked, but for an
    nn.Sequential, whose layers take one argument. `dslpar.start` tells a program its stage before it builds.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """One layer a stage: "stages.0", ..."""
        here = groups.coord["pipe"]
        forward = forward_of(self.module)
        return [
            LayerSpec(
                name=f"stages.{stage}",
                build=partial(_itself, self.module) if stage == here else _elsewhere,
                forward=forward,
                layer_idx=stage,
            )
            for stage in range(groups.mesh.pipe)
        ]


class Whole(PlainModel):
    """A module of someone else's as a model of one layer, named "model": not to be cut."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """The one layer."""
        return [LayerSpec(name="model", build=self.build, forward=_unpacked)]


def is_chain(cls: type) -> bool:
    """Whether it is nn.Sequential in all that counts: a subclass with a forward of its own is no chain of layers."""
    return issubclass(cls, nn.Sequential) and cls.forward is nn.Sequential.forward


def forward_of(module: nn.Module) -> Callable[[nn.Module, Any], Any] | None:
    """How a module takes its input: called with it, or with its items where that is a tuple."""
    return None if isinstance(module, nn.Sequential) else _unpacked


def places(own: Sequence[int | None]) -> Sequence[int | None]:
    """Each layer's layer_idx: its own where any layer has one, else its index."""
    return own if any(index is not None for index in own) else range(len(own))


def layer_class(entry: Entry, place: Location) -> type[Any]:
    """The class that an entry of a layers_cfg names."""
    name = str(entry.get("type", entry.get(TARGET, "")))
    if not name:
        message, hint = "no type", "write dict(type='Linear', in_features=..., out_features=...)"
        raise_finding("CFG223", message, hint, place)
    made = LAYERS.find(name) or (locate(name, place) if "." in name else LAYERS.get(name, place))
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        hint = "name a class of layers, such as 'Linear' or 'my_package.MyLayer'"
        raise_finding("CFG201", f"{name!r} is not a torch.nn.Module", hint, place)
    return made


def bind(made: Callable[..., Any], arguments: Mapping[str, Any], place: Location, key: str = "model") -> None:
    """Check that `made` takes the arguments, without calling it. Raises DslparError."""
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        name = getattr(made, "__name__", str(made))
        hint = f"{name} takes {inspect.signature(made)}"
        raise_finding("CFG223", f"{name}: {error}", hint, place, key)


def _arguments(made: Callable[..., Any], entry: Entry, groups: Groups, key: str, place: Location) -> dict[str, Any]:
    given = {name: value for name, value in entry.items() if name not in ("type", TARGET, "layer_idx")}
    arguments = dict(instantiate(given))
    parameters = inspect.signature(made).parameters
    if "groups" in parameters and parameters["groups"].default is inspect.Parameter.empty:
        arguments.setdefault("groups", groups)  # of dslpar.layers; torch.nn's `groups` of a convolution is a number
    bind(made, arguments, place, key)
    return arguments


def _itself(module: nn.Module) -> nn.Module:
    return module


def _elsewhere() -> NoReturn:
    raise AssertionError("another stage's module")


def _unpacked(module: nn.Module, x: Any) -> Any:
    return module(*x) if isinstance(x, tuple) else module(x)
