"""A model as a list of layers: what a pipeline cuts, and what without one makes a plain module of the same names.

Between layers travels exactly one floating tensor, of one shape, the stored residual; ids enter the first layer, logits
leave the last. A layer's name is its global name ("blocks.0"): its parameters are drawn by it, so the weights depend
neither on the layout nor on the stage that builds them. Tied weights exist once, under the name of the layer that owns
them; the tied module holds nothing else, since DeepSpeed ties exactly one attribute (FACTS 2.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dslpar.groups import Groups
from dslpar.layers import initialize, mark_owners

Labels = Tensor | tuple[Tensor, Tensor]
"""Labels [micro, sequence]; or they and the scalar to divide the sum of token losses by."""
Loss = Callable[[Tensor, Labels], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer, not built yet."""

    name: str
    """Its global name: "embedding.tokens", "blocks.0", "norm", "head"."""
    build: Callable[[], nn.Module]
    """Makes the module, its parameters uninitialised. A tied layer's makes the same as its owner's."""
    tied: str | None = None
    """Name of the layer whose module this one is, used a second time."""
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None
    """How that module is applied here; None: called."""

    @property
    def owner(self) -> str:
        """Name of the layer that owns the weights."""
        return self.tied or self.name

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """The layer's output."""
        y: Tensor = module(x) if self.forward is None else self.forward(module, x)
        return y


class LayeredModel(ABC):
    """A model that can be cut into pipeline stages."""

    @abstractmethod
    def layers(self, groups: Groups) -> list[LayerSpec]:
        """All layers, in order; an owner stands before the layers tied to it."""

    @abstractmethod
    def loss(self, groups: Groups) -> Loss:
        """(logits, labels) to a scalar that is equal on all ranks of the tensor group."""


class LayeredModule(nn.Module):
    """All layers in one module, under their global names: `forward(ids)` gives the stored logits.

    Layers named in `recompute` keep only their input, and run again in the backward.
    """

    def __init__(self, specs: list[LayerSpec], recompute: Collection[str] = ()) -> None:
        super().__init__()
        self.specs, self.recompute = specs, frozenset(recompute)
        for spec in specs:
            if spec.tied is None:
                _place(self, spec.name, spec.build())

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for spec in self.specs:
            module = self.get_submodule(spec.owner)
            if spec.name in self.recompute and self.training:
                x = checkpoint(spec.apply, module, x, use_reentrant=False)
            else:
                x = spec.apply(module, x)
        return x


def build_module(model: LayeredModel, groups: Groups, seed: int, recompute: Collection[str] = ()) -> LayeredModule:
    """The whole model in one module: initialised, owners marked."""
    module = LayeredModule(model.layers(groups), recompute)
    initialize(module, groups, seed)
    mark_owners(module, groups)
    return module


def build_layer(spec: LayerSpec, groups: Groups, seed: int) -> nn.Module:
    """One layer of a pipeline stage: the same weights as in `build_module`, owners marked."""
    module = spec.build()
    initialize(module, groups, seed, prefix=f"{spec.owner}.")
    mark_owners(module, groups)
    return module


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Adds `module` at a dotted name, with the empty modules on the way there."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
