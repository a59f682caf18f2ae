"""Apply a policy to a part of a transformers model: replace modules that hold weights with dslpar's modules.

The rest of transformers' code runs unchanged, on this rank's shards. If neither the policy nor a probe tells how to
shard a module's weights, the model is refused, with a finding for each such parameter.

`apply` changes a part of the model (a block, or a module around the blocks) in this order:

1. Give each region an entrance, which computes the outputs of all its inward linears in one product. The linears become
   slots, which return these outputs.
2. Move parameters with one value per head into modules of their own.
3. Replace every other module that has weights or drops activations, by the first rule that fits (`_replacement`).
4. Divide counts of heads and features that transformers' code reads, such as `num_heads`.
5. Attach the process groups, dropout's hooks, and the shared reduction of vector gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, placement
from dslpar.layers.operand_shardings import Role
from dslpar.layers.parameter import ZEROS, parameter
from dslpar.policies import attention_outside_interface, dropout, experts, probe, tables
from dslpar.policies import replacement_modules as modules
from dslpar.policies.attention import SDPA
from dslpar.policies.coalesced_vector_gradients import coalesce_vector_gradients
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.latent import FromLatent, LatentEntrance
from dslpar.policies.lora import Adapters
from dslpar.schema.policy import Policy, match


class Setting(NamedTuple):
    """Settings for `apply`, which hold for all modules of a part of the model."""

    groups: Groups
    policy: Policy
    hidden_size: int
    """Features of the residual in this part of the model."""
    config: Any
    """transformers' config of the model."""
    adapters: Adapters | None = None
    attention: str = SDPA
    """The config's attn_implementation."""


def apply(part: nn.Module, name: str, cut: Setting) -> nn.Module:
    """Shard the part of a model with the global name `name`. Return it, or its replacement if it has no children.

    Raises:
        DslparError: no rule tells how to shard some parameters (the error lists all), or a size is not divisible.
    """
    return _Application(cut).part(part, name)


def make_whole(groups: Groups, part: nn.Module, name: str, *, recurse: bool = True) -> None:
    """Have every rank hold the full weights of a part, whose code runs unchanged on full activations.

    With `recurse=False`, change only the module's own weights, not those of its children.
    """
    for own, module in part.named_modules() if recurse else [("", part)]:
        full = ".".join(filter(None, (name, own)))
        object.__setattr__(module, "sources", _whole_sources(module, full))
        for each, p in list(module.named_parameters(recurse=False)):
            uncut = placement.Placement(groups.tensor, tuple(p.shape), ((),) * p.dim())
            made = parameter(uncut, ZEROS)
            made.requires_grad_(p.requires_grad)
            module.register_parameter(each, made)


def _whole_sources(module: nn.Module, name: str) -> modules.Sources:
    return {own: (modules.Source(f"{name}.{own}", False),) for own, _ in module.named_parameters(recurse=False)}


class _Application:
    def __init__(self, cut: Setting) -> None:
        self.cut, self.groups = cut, cut.groups
        self.stream = dropout.Stream()
        self.findings: list[Finding] = []
        self.mixtures: set[str] = set()

    def part(self, part: nn.Module, name: str) -> nn.Module:
        holder: Any = nn.Module()
        holder.add_module("part", part)
        full = [".".join(filter(None, (name, own))) for own, _ in part.named_modules()]
        self.mixtures = {each.rpartition(".")[0] for each in full if match(self.cut.policy.experts, each)}
        self._regions(part, name)
        self._head_vectors(part, name)
        for own, module in list(holder.named_modules()):
            if own:
                made = self._replacement(module, (name + own.removeprefix("part")))
                if made is not None:
                    holder.set_submodule(own, made)
        part = holder.part
        self._local_attributes(part, name)
        if self.findings:
            raise DslparError(self.findings)
        for module in part.modules():
            if not isinstance(module, modules.Entrance):
                object.__setattr__(module, "dslpar_groups", self.groups)
                object.__setattr__(module, "dslpar_attention", self.cut.attention)
        dropout.take_functions(part, self.groups, self.stream, self.cut.config)
        if list(part.children()):
            if self.groups.axis("tensor").size > 1:  # on one rank the kind of activation does not matter to dropout
                part.register_forward_pre_hook(self._begin)
            coalesce_vector_gradients(part, self.groups)
        return part

    def _begin(self, *_: object) -> None:
        self.stream.is_inner = False

    def _replacement(self, module: nn.Module, name: str) -> nn.Module | None:
        """Return the replacement of a module, by the first rule that fits; None: the module stays."""
        sources = _sources(module, name)
        policy, groups, hidden = self.cut.policy, self.groups, self.cut.hidden_size
        if name in self.mixtures:
            experts.surround(module, groups)
            return None
        if isinstance(
            module,
            modules.Entrance | modules.Inward | modules.Outward | modules.HeadVector,
        ):
            return None
        if isinstance(module, nn.Dropout):
            return dropout.StreamDropout(groups, module.p, self.stream)
        if dropout.drops_samples(module):
            return dropout.SampleDropout(groups, module, self.stream)
        if match(policy.experts, name):
            made = experts.Experts(groups, module, name)
            if self.cut.adapters:
                made.adapt(self.cut.adapters, name)
            return made
        if match(policy.routers, name):
            return modules.Uncut(groups, module, name, TENSOR_AXES)
        if isinstance(module, nn.Linear) and self._is_in_mixture(name) and (role := self._role(name)):
            return experts.SharedExpertLinear(groups, module, name, role)
        if match(policy.outward, name):
            outputs, inputs = modules.features(module)
            bias = getattr(module, "bias", None) is not None
            outward = modules.Outward(groups, inputs, outputs, bias=bias, sources=sources, stream=self.stream)
            return self._adapted(outward, name)
        if match(policy.inward, name):
            length, inputs = modules.features(module)
            bias, lengths = getattr(module, "bias", None) is not None, self._lengths(name, length)
            inward = modules.Inward(groups, inputs, lengths, bias=bias, sources=sources, stream=self.stream)
            return self._adapted(inward, name)
        if match(policy.head_tables, name):
            return tables.HeadTable(groups, module, sources)
        if match(policy.from_latent, name):
            outputs, inputs = modules.features(module)
            bias = getattr(module, "bias", None) is not None
            return FromLatent(groups, inputs, outputs, bias=bias, sources=sources)
        if match(policy.per_head, name):
            return modules.per_head(groups, module, name)
        if match(policy.inner_norms, name):
            length = sum(p.shape[0] for own, p in module.named_parameters() if own == "weight")
            if inner := probe.norm_of(module, length):
                return modules.InnerNorm(groups, length, inner, sources)
        if not self._is_in_region(name) and (norm := probe.norm_of(module, hidden)):
            return modules.make_norm(groups, hidden, norm, sources)
        if isinstance(module, nn.Embedding) and module.embedding_dim == hidden:
            return tables.Rows(groups, module, sources)
        for each, p in module.named_parameters(recurse=False):
            message = (
                f"{name}.{each} {tuple(p.shape)} of {type(module).__name__}: the policy does not say how to shard it"
            )
            hint = f"name {name!r} in a policy; or {NEEDS_OWN_CODE}"
            self.findings.append(finding("TEN234", message, hint, key="model.policy"))
        return None

    def _adapted(self, linear: Linear, name: str) -> Linear:
        if self.cut.adapters:
            self.cut.adapters.adapt(linear, name)
        return linear

    def _is_in_region(self, name: str) -> bool:
        """Return whether a module is inside a region, so that it works on inner activations.

        A norm inside a region is per head, or over all inner features. Outside, it is over the residual.
        """
        parts = name.split(".")
        return any(match(self.cut.policy.regions, ".".join(parts[:end])) for end in range(1, len(parts)))

    def _is_in_mixture(self, name: str) -> bool:
        return any(name.startswith(f"{mixture}.") for mixture in self.mixtures)

    def _role(self, name: str) -> Role | None:
        """Return the role of a linear in the policy; None: the policy does not name it."""
        region, _, last = name.rpartition(".")
        pattern = match(self.cut.policy.regions, region)
        given = self.cut.policy.regions[pattern] if pattern else ()
        inward = [each for names in given.values() for each in names] if isinstance(given, Mapping) else given
        return "inward" if last in inward else "outward" if match(self.cut.policy.outward, name) else None

    def _regions(self, part: nn.Module, name: str) -> None:
        policy = self.cut.policy
        for own, region in list(part.named_modules()):
            full = ".".join(filter(None, (name, own)))
            if (pattern := match(policy.regions, full)) and not self._is_in_mixture(f"{full}."):
                inward = policy.regions[pattern]
                named = inward if isinstance(inward, Mapping) else {"hidden_states": inward}
                entrances = {argument: self._entrances(region, full, names) for argument, names in named.items()}
                for number, (entrance, _) in enumerate(each for made in entrances.values() for each in made):
                    region.add_module("entrance" if number == 0 else f"entrance_{number}", entrance)
                region.register_forward_pre_hook(modules.entering(entrances, self.stream), with_kwargs=True)
            if own_scores := match(policy.own_attention, full):
                by_head, num_heads = policy.own_attention[own_scores], self.cut.config.num_attention_heads
                attention_outside_interface.fit_arguments(region, self.groups, by_head, num_heads)

    def _head_vectors(self, part: nn.Module, name: str) -> None:
        """Move parameters with one value per head into `HeadVector` modules.

        Hooks set the original attribute to this rank's values during each forward.
        """
        for own, module in list(part.named_modules()):
            for each, p in list(module.named_parameters(recurse=False)):
                full = ".".join(filter(None, (name, own, each)))
                if match(self.cut.policy.head_vectors, full):
                    vector = modules.HeadVector(self.groups, each, tuple(p.shape), full)
                    delattr(module, each)
                    module.add_module(f"{each}_of_heads", vector)
                    module.register_forward_pre_hook(vector.lend)
                    module.register_forward_hook(vector.take_back, always_call=True)

    def _entrances(
        self, region: nn.Module, name: str, names: Sequence[str]
    ) -> list[tuple[modules.Entrance, list[modules.Slot]]]:
        """Make an entrance for linears that compute this rank's features, and one for linears that compute latents."""
        # A policy may name the linears of all variants of a model class, such as T5's wi, or wi_0 and wi_1.
        has = dict(region.named_modules())
        present = [each for each in names if isinstance(has.get(each), nn.Linear | Conv1D)] or list(names)
        latent = [each for each in present if match(self.cut.policy.latent, f"{name}.{each}")]
        plain = [each for each in present if each not in latent]
        made = [(plain, modules.Entrance), (latent, LatentEntrance)]
        return [self._entrance(region, name, of, cls) for of, cls in made if of]

    def _entrance(
        self, region: nn.Module, name: str, names: Sequence[str], cls: type[modules.Entrance]
    ) -> tuple[modules.Entrance, list[modules.Slot]]:
        """Replace the inward linears of a region by slots, and make one entrance that fills them all."""
        linears = [region.get_submodule(each) for each in names]
        lengths: list[int] = []
        shares: list[int] = []
        biased: list[bool] = []
        sources: dict[str, tuple[modules.Source, ...]] = {}
        for each, linear in zip(names, linears, strict=True):
            parts = self._lengths(each, modules.features(linear)[0])
            lengths += parts
            shares.append(len(parts))
            biased += [getattr(linear, "bias", None) is not None] * len(parts)
            for own, found in _sources(linear, f"{name}.{each}").items():
                sources[own] = (*sources.get(own, ()), *found)
        inputs = modules.features(linears[0])[1]
        entrance = cls(self.groups, inputs, lengths, shares, biased=biased, sources=sources)
        ends = list(accumulate(shares))
        for each, begin, end in zip(names, [0, *ends], ends, strict=False):
            if self.cut.adapters:
                self.cut.adapters.adapt(entrance, f"{name}.{each}", each, slice(begin, end))
        slots = [modules.Slot() for _ in names]
        for each, slot in zip(names, slots, strict=True):
            region.set_submodule(each, slot)
        return entrance, slots

    def _lengths(self, name: str, length: int) -> list[int]:
        """Return the output sizes of the linears that are fused in one inward weight; [length] if it is not fused."""
        fused = self.cut.policy.fused.get(name.rpartition(".")[2], 1)
        weights = [1] * fused if isinstance(fused, int) else [getattr(self.cut.config, each) for each in fused]
        return [length * weight // sum(weights) for weight in weights]

    def _local_attributes(self, part: nn.Module, name: str) -> None:
        """Divide counts of heads or features that modules read from themselves or from their config.

        A module gets its own copy of the config, so the user's config stays unchanged.
        """
        _, count = placement.piece(
            self.groups.tensor, self.groups.coord, placement.inner_cuts(self.groups.tensor).features
        )
        for own, module in part.named_modules():
            if pattern := match(self.cut.policy.local, ".".join(filter(None, (name, own)))):
                for attribute in self.cut.policy.local[pattern]:
                    owner: Any = module
                    if attribute.startswith("config."):
                        module.config = copy.copy(module.config)
                        owner = module.config
                    last = attribute.rpartition(".")[2]
                    setattr(owner, last, getattr(owner, last) // count)


def _sources(module: nn.Module, name: str) -> modules.Sources:
    own = [own for own, _ in module.named_parameters(recurse=False)]
    return {each: (modules.Source(f"{name}.{each}", each == "weight" and isinstance(module, Conv1D)),) for each in own}
