"""A model as a list of layers: a pipeline cuts the list; without one it makes a plain module of the same names.

Between layers travels exactly one floating tensor, of one shape, the stored residual; ids enter the first layer, logits
leave the last. A layer's name is its global name ("blocks.0"): its parameters are drawn by it, so the weights depend
neither on the layout nor on the stage that builds them. Tied weights exist once, under the name of the layer that owns
them; the tied module holds nothing else, since DeepSpeed ties exactly one attribute of a module.
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
"""Labels [batch, sequence], whole on every rank; or these and the scalar to divide the sum of token losses by."""
Loss = Callable[[Tensor, Labels], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer, not built yet."""

    name: str
    """Its global name: "embedding.tokens", "blocks.0", "norm", "head"."""
    build: Callable[[], nn.Module]
    """Makes the module. A tied layer's makes the same as its owner's."""
    skips_init: bool = False
    """Whether `build` neither reads nor writes weights: these are then drawn once, by name, after it."""
    tied: str | None = None
    """Name of the layer whose module this one is, used a second time."""
    forward: Callable[[nn.Module, Any], Any] | None = None
    """How the module is applied here, to a tensor or a tuple of them; None: it is called."""
    layer_idx: int | None = None
    """Its index among the layers that a pipeline cuts, from 0; -1 is the last (as in LiBai). None: it goes with the
    layer before it, or at the model's beginning with the one after.
    """
    recomputable: bool = False
    """Whether activation checkpointing may run it again in the backward."""

    modules: tuple[str, ...] | None = None
    """Names of the model's modules that it is made of, where that is not its own name."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the model's modules that it is made of, as their authors know them."""
        return (self.name,) if self.modules is None else self.modules

    @property
    def owner(self) -> str:
        """Name of the layer that owns the weights."""
        return self.tied or self.name

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's output, of ids or of the stored activations [batch, sequence, features] before it."""
        y: Tensor = module(x) if self.forward is None else self.forward(module, x)
        return y

    def step(self, module: nn.Module, gather: ParameterGather | None = None, seed: int | None = None) -> Step:
        """Return the layer, built as `module`, as a step of a forward.

        It waits first for what `gather` brings; what it draws, such as masks of dropout, depends on `seed` alone, also
        where it runs again in the backward.
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
"""A layer's position among all of the model, the layer, and its module."""


def forward_steps(layers: Iterable[BuiltLayer], gather: ParameterGather | None, seed: int | None) -> list[Step]:
    """Return layers as steps of the forward of a micro-batch, whose seed may be None: each draws from one of its own.

    So masks are the same in every schedule, partition and recomputation. (A generator that is seeded once a step draws
    in the order of the schedule.)
    """
    return [
        spec.step(module, gather, None if seed is None else stable_hash(seed, position))
        for position, spec, module in layers
    ]


Finish = Callable[[nn.Module], nn.Module]
"""What is done to a layer as soon as it is initialized: ZeRO 3 shards it before the next one takes memory."""


class VocabularyHead(NamedTuple):
    """The head over a vocabulary, which a model's last layers are, and whose loss is cross-entropy."""

    layer: str
    """Name of the first layer of it; those after it take a token's logits by themselves."""
    vocab_size: int


class LayeredModel(ABC):
    """A model that can be cut into pipeline stages."""

    vocabulary_head: VocabularyHead | None = None
    """Its head, where it has one and no other output."""

    @abstractmethod
    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return all layers, in order; an owner stands before the layers tied to it."""

    @abstractmethod
    def loss(self, groups: Groups) -> Loss:
        """Return a function of logits and labels to a scalar that is equal on all ranks of the tensor group."""

    built_everywhere = False
    """Whether every rank of a pipeline has built all modules of `built`, and not those of its stages alone."""

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return modules that are built already, by their global names; by default none: layers are built by specs."""
        return {}

    def after_step(self, module: nn.Module, progress: float) -> None:
        """Change what no gradient changes, after a step of the optimizer; `progress` is the share of all steps done.

        `module` is this rank's part of the model. By default nothing.
        """
        return

    @property
    def changes_after_step(self) -> bool:
        """Whether `after_step` does anything."""
        return type(self).after_step is not LayeredModel.after_step

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Return what a program's own criterion is given, of what the last layer gives."""
        return output


class LayeredModule(nn.Module):
    """All layers in one module, under their global names: `forward(ids)` gives the stored logits.

    `interval` recomputable layers in a row keep only their input (see `recompute`); 0: everything is kept.
    """

    parameter_gather: ParameterGather | None = None
    """What brings the weights of the last step, where a forward begins before all are there."""
    micro_batch_seed: int | None = None
    """What a forward in training mode draws from; None: torch's generator as it stands."""
    offloads_inputs: bool = False
    """Whether the stored input of recomputed layers waits in the host's memory."""

    def __init__(self, specs: list[LayerSpec], interval: int = 0) -> None:
        super().__init__()
        self.specs, self.interval = specs, interval
        for spec in specs:
            if spec.tied is None:
                _add_at(self, spec.name, spec.build())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence] ids to the logits [batch, sequence, V], as each rank stores them."""
        layers = ((position, spec, layer) for position, (spec, layer) in enumerate(self.built_layers()))
        seed = self.micro_batch_seed if self.training else None
        steps = forward_steps(layers, self.parameter_gather, seed)
        return run_layers(steps, x, self.interval, self.offloads_inputs)

    def built_layers(self) -> list[tuple[LayerSpec, nn.Module]]:
        """Return the layers in their order, each with its module; a tied one with its owner's."""
        return [(spec, self.get_submodule(spec.owner)) for spec in self.specs]


def build_module(model: LayeredModel, groups: Groups, seed: int, interval: int = 0) -> LayeredModule:
    """Build the whole model as one module: initialized, owners marked."""
    return assemble(model.layers(groups), groups, seed, interval)


def assemble(
    layers: list[LayerSpec], groups: Groups, seed: int, interval: int = 0, finish: Finish = lambda layer: layer
) -> LayeredModule:
    """Build layers as one module: initialized, owners marked; `finish` is done to each before the next one is built."""

    def build(spec: LayerSpec) -> nn.Module:
        return finish(build_layer(spec, groups, seed))

    return LayeredModule([replace(spec, build=partial(build, spec)) for spec in layers], interval)


def build_layer(spec: LayerSpec, groups: Groups, seed: int) -> nn.Module:
    """Build one layer of a pipeline stage: the same weights as in `build_module`, owners marked.

    What a module that was built before, or its `build`, has written into its weights stays.
    """
    with torch.random.fork_rng(devices=[]):
        # What a layer draws by itself, as torch.nn's do, depends on the run's seed and on its name alone.
        _seed_all(stable_hash(seed, spec.owner))
        with skip_init() if spec.skips_init else nullcontext():
            module = spec.build()
    initialize_built(module, groups, seed, prefix=f"{spec.owner}.")
    mark_owners(module, groups)
    return module


def _seed_all(seed: int) -> None:
    """Seed as torch.manual_seed does, without a stack recorded for each kind of accelerator that is not there."""
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is None or accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _add_at(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add `module` at a dotted name, with the empty modules on the way there."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
