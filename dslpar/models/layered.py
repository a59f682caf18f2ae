"""Model as a list of layers: a pipeline cuts the list, otherwise it becomes one module with the same names.

Layers pass on exactly one floating tensor of one shape, the stored residual. The first layer takes ids, and the last
layer returns logits. A layer's name is its global name ("blocks.0"). Its parameters are drawn by this name, so weights
depend neither on the layout nor on the stage that builds them. Tied weights exist once, under the name of the layer
that owns them. A tied module has no other weights, since DeepSpeed ties exactly one attribute of a module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.distributed.parameter_gather import ParameterGather
from dslpar.layers import mark_owners
from dslpar.layers.dropout import seed_generators
from dslpar.layers.initial_values import skip_init
from dslpar.layers.parameter import initialize_built, stable_hash
from dslpar.models.recompute import Step, run_layers

Labels = Tensor | tuple[Tensor, Tensor]
"""Labels [batch, sequence], whole on every rank; or (labels, scalar by which the sum of token losses is divided)."""
Loss = Callable[[Tensor, Labels], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Specification of one layer that is not built yet."""

    name: str
    """Global name: "embedding.tokens", "blocks.0", "norm", "head"."""
    build: Callable[[], nn.Module]
    """Builds the module. A tied layer has the same `build` as its owner."""
    skips_init: bool = False
    """Whether `build` neither reads nor writes weights. Then they are drawn only once, by name, after `build`."""
    tied: str | None = None
    """Name of the layer whose module this layer uses again; None: the layer is not tied."""
    forward: Callable[[nn.Module, Any], Any] | None = None
    """Function that applies the module to a tensor or a tuple of tensors; None: the module is called."""
    layer_idx: int | None = None
    """Index among the layers that a pipeline cuts, from 0; -1 is the last (as in LiBai). None: it stays with the layer
    before it or, at the model's beginning, with the layer after it.
    """
    recomputable: bool = False
    """Whether activation checkpointing may run it again in the backward."""

    modules: tuple[str, ...] | None = None
    """Names of the model's modules in this layer; None: the layer's own name."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the model's modules in this layer, as in the model's own code."""
        return (self.name,) if self.modules is None else self.modules

    @property
    def owner(self) -> str:
        """Name of the layer that owns the weights."""
        return self.tied or self.name

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's output for ids or stored activations [batch, sequence, features]."""
        y: Tensor = module(x) if self.forward is None else self.forward(module, x)
        return y

    def step(self, module: nn.Module, gather: ParameterGather | None = None, seed: int | None = None) -> Step:
        """Return the layer, built as `module`, as a step of a forward.

        The step first waits for the weights that `gather` gathers. Its random numbers, such as dropout masks, depend on
        `seed` alone, also in a recomputation.
        """
        if gather is None and seed is None:
            return Step(partial(self.apply, module), self.recomputable)

        def apply(x: Any) -> Tensor:
            if gather is not None:
                gather.wait_for(module)
            if seed is not None:
                seed_generators(seed, (x[0] if isinstance(x, tuple) else x).device)
            return self.apply(module, x)

        return Step(apply, self.recomputable)


BuiltLayer = tuple[int, LayerSpec, nn.Module]
"""(Position among all layers of the model, the layer, its module)."""


def forward_steps(layers: Iterable[BuiltLayer], gather: ParameterGather | None, seed: int | None) -> list[Step]:
    """Return the layers as steps of a micro-batch's forward; with a `seed`, each layer draws from its own seed.

    So dropout masks are the same in every schedule, partition and recomputation. A generator seeded once per step would
    draw in the order of the schedule.
    """
    return [
        spec.step(module, gather, None if seed is None else stable_hash(seed, position))
        for position, spec, module in layers
    ]


Finish = Callable[[nn.Module], nn.Module]
"""Hook for a layer that has just been initialized: ZeRO 3 shards it before the next layer takes memory."""


class VocabularyHead(NamedTuple):
    """A model's last layers, if they are a head over a vocabulary with cross-entropy as the loss."""

    layer: str
    """Name of the head's first layer. The layers after it compute each token's logits separately."""
    vocab_size: int
    complete: Callable[[Groups, Loss], Loss] = lambda groups, loss: loss
    """Returns the model's loss, given the cross-entropy of its logits: some models add another loss."""


class LayeredModel(ABC):
    """Base of models as lists of layers, which can be cut into pipeline stages."""

    vocabulary_head: VocabularyHead | None = None
    """The model's head; None if it has none, or another output too."""

    @abstractmethod
    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return all layers in order; an owner comes before the layers tied to it."""

    @abstractmethod
    def loss(self, groups: Groups) -> Loss:
        """Return the loss, a function of (logits, labels) to a scalar that is equal on all ranks of a tensor group."""

    takes_statistics = False
    """Whether the loss is no mean over samples, but takes statistics of each global micro-batch: the micro-batches of
    all data ranks at one place of a step. It then depends on the accumulation, in every layout in the same way.
    """

    def complete_criterion(self, groups: Groups, criterion: Loss) -> Loss:
        """Return a program's criterion of the output, with the model's other losses added; by default it has none."""
        return criterion

    @property
    def completes_criteria(self) -> bool:
        """Return whether the class overrides `complete_criterion`."""
        return type(self).complete_criterion is not LayeredModel.complete_criterion

    built_everywhere = False
    """Whether every rank of a pipeline has built all modules of `built`, not only those of its stages."""

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return the modules that are already built, by global name; by default none, since specs build the layers."""
        return {}

    def for_inference(self) -> LayeredModel:
        """Return the model whose output is its predictions alone, without values that only its loss needs."""
        return self

    def after_step(self, module: nn.Module, progress: float) -> None:
        """Change state that has no gradient after an optimizer step; `progress` is the share of all steps done.

        `module` is this rank's part of the model. By default it does nothing.
        """
        return

    @property
    def changes_after_step(self) -> bool:
        """Return whether the class overrides `after_step`."""
        return type(self).after_step is not LayeredModel.after_step

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Convert the last layer's output to the input of a program's own criterion; by default it is unchanged."""
        return output


class LayeredModule(nn.Module):
    """All layers in one module, under their global names; `forward(ids)` returns the stored logits.

    Every `interval` recomputable layers in a row store only their input (see `recompute`); 0: everything is stored.
    """

    parameter_gather: ParameterGather | None = None
    """Gather of the updated weights that may still run when a forward starts; layers wait for their own weights."""
    micro_batch_seed: int | None = None
    """Seed of a forward in training mode; None: torch's generator is not seeded."""
    offloads_inputs: bool = False
    """Whether the stored input of recomputed layers is offloaded to host memory."""

    def __init__(self, specs: list[LayerSpec], interval: int = 0) -> None:
        super().__init__()
        self.specs, self.interval = specs, interval
        for spec in specs:
            if spec.tied is None:
                _add_at(self, spec.name, spec.build())

    def forward(self, x: Tensor) -> Tensor:
        """Map ids [batch, sequence] to the stored logits [batch, sequence, V]."""
        layers = ((position, spec, layer) for position, (spec, layer) in enumerate(self.built_layers()))
        seed = self.micro_batch_seed if self.training else None
        steps = forward_steps(layers, self.parameter_gather, seed)
        y: Tensor = run_layers(steps, x, self.interval, self.offloads_inputs)
        return y

    def built_layers(self) -> list[tuple[LayerSpec, nn.Module]]:
        """Return the layers in order, each with its module; a tied layer has its owner's module."""
        return [(spec, self.get_submodule(spec.owner)) for spec in self.specs]


def build_module(model: LayeredModel, groups: Groups, seed: int, interval: int = 0) -> LayeredModule:
    """Build the whole model as one module, initialize it, and mark owners."""
    return assemble(model.layers(groups), groups, seed, interval)


def assemble(
    layers: list[LayerSpec], groups: Groups, seed: int, interval: int = 0, finish: Finish = lambda layer: layer
) -> LayeredModule:
    """Build layers as one module, initialize them, and mark owners; apply `finish` to each before building the next."""

    def build(spec: LayerSpec) -> nn.Module:
        return finish(build_layer(spec, groups, seed))

    return LayeredModule([replace(spec, build=partial(build, spec)) for spec in layers], interval)


def build_layer(spec: LayerSpec, groups: Groups, seed: int) -> nn.Module:
    """Build one layer of a pipeline stage, with the same weights as in `build_module`, and mark owners.

    It keeps weights that were written before or by `build`.
    """
    with torch.random.fork_rng(devices=[]):
        # So weights that a layer draws itself, as torch.nn's layers do, depend on the run's seed and its name alone.
        _seed_all(stable_hash(seed, spec.owner))
        with skip_init() if spec.skips_init else nullcontext():
            module = spec.build()
    initialize_built(module, groups, seed, prefix=f"{spec.owner}.")
    mark_owners(module, groups)
    return module


def _seed_all(seed: int) -> None:
    """Seed like torch.manual_seed, which would record a stack for each kind of accelerator that is absent."""
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is None or accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _add_at(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add `module` at a dotted name, and make the empty modules on the path."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
