"""Replacements of transformers' modules that compute the same on this rank's piece of activations and weights.

Letters are as in dslpar.layers: H residual features, F inner features, D features of a head. Axis x splits tokens,
y splits inner features, and z splits residual features (docs/architecture.md, "The cuboid").

The inward linears of a region (attention or MLP) read the same input. An `Entrance` computes all of them in one matrix
product, when the region's forward begins. Each linear's place in the region has a `Slot`, which returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dslpar.core.mesh import TENSOR_AXES
from dslpar.distributed.groups import Groups
from dslpar.layers import LayerNorm, Linear, RMSNorm, placement
from dslpar.layers.norm import normalize
from dslpar.layers.parameter import ZEROS, Layer, Shared, parameter
from dslpar.layers.placement import Placement
from dslpar.models.pretrained import Source as Source
from dslpar.models.pretrained import Sources as Sources
from dslpar.policies.dropout import Stream
from dslpar.policies.probe import Norm


def features(linear: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear, or of transformers' Conv1D, which stores its weight transposed."""
    outputs, inputs = linear.weight.shape
    return (inputs, outputs) if isinstance(linear, Conv1D) else (outputs, inputs)


def call_with(module: nn.Module, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a module with `values` in place of its own parameters and buffers of these names.

    torch.func.functional_call does the same for nested modules, but it is slower: it searches for tied weights in each
    call.
    """
    attributes = vars(module)  # Python looks here before it calls torch's __getattr__ for a parameter
    attributes.update(values)
    try:
        return module(*args, **kwargs)
    finally:
        for name in values:
            del attributes[name]


class Slot(nn.Module):
    """Replacement of an inward linear: returns the output that the region's `Entrance` has computed for it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[Tensor] = []  # a list: nn.Module's __setattr__ would be slow in each forward

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features [batch/x, sequence, F/y], once per `fill`; `x` is not read."""
        assert self.ready, "a region's forward has called one of its linears twice, or not through its own entrance"
        return self.ready.pop()


class Entrance(Linear):
    """All inward linears of a region that read the same input, as one linear: one matrix product with one gather.

    A fused inward linear counts as several linears. `lengths`: output features of each linear. `shares`: number of
    linears per slot. `biased`: whether each linear has a bias (SwinV2's key linear has none).
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        lengths: Sequence[int],
        shares: Sequence[int],
        *,
        biased: Sequence[bool],
        sources: Sources,
    ) -> None:
        blocks = lengths if len(lengths) > 1 else lengths[0]
        super().__init__(groups, hidden_size, blocks, role="inward", bias=all(biased))
        self.sources, self.biased = sources, biased
        if any(biased) and not all(biased):
            vector = placement.inner_vector(groups.tensor, [*compress(lengths, biased)])
            self.bias = parameter(vector, ZEROS)
        count = placement.piece(groups.tensor, groups.coord, placement.inner_cuts(groups.tensor).features)[1]
        self.parts = [length // count for length in lengths]
        rest = iter(self.parts)
        self.local = [sum(next(rest) for _ in range(share)) for share in shares]

    def stand_in(self, p: nn.Parameter | None, shared: Shared) -> Tensor | None:
        """Return the stand-in of a parameter (`Layer.stand_in`). The bias's has zeros for linears without a bias."""
        found = super().stand_in(p, shared)
        if found is None or p is not self.bias or all(self.biased):
            return found
        own = iter(torch.split(found, [*compress(self.parts, self.biased)]))
        return torch.cat(
            [
                next(own) if has_bias else found.new_zeros(length)
                for has_bias, length in zip(self.biased, self.parts, strict=True)
            ]
        )

    def fill(self, x: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Compute all outputs from the stored residual [batch/x, sequence, H/z]; fill the slots; return the first."""
        y = self(x)
        # A single output is not split, since the backward of a split would copy its gradient. An unsafe split is one
        # whose parts may change in place (OLMo's clip_qkv), which is safe if nothing reads `y` itself.
        parts = y.unsafe_split_with_sizes(self.local, -1) if len(slots) > 1 else (y,)
        for slot, part in zip(slots, parts, strict=True):
            slot.ready[:] = (part,)
        return parts[0]


class Outward(Linear):
    """Linear that ends a region: inner [batch/x, sequence, F/y] to the stored residual."""

    def __init__(
        self, groups: Groups, in_features: int, out_features: int, *, bias: bool, sources: Sources, stream: Stream
    ) -> None:
        super().__init__(groups, in_features, out_features, role="outward", bias=bias)
        self.sources, self.stream = sources, stream

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [batch/x, sequence, F/y] to [batch/x, sequence, H/z]."""
        self.stream.is_inner = False
        return super().forward(x, shared)


class Inward(Linear):
    """An inward linear that a block's own forward calls, without a region's module around it (OPT's fc1)."""

    def __init__(
        self, groups: Groups, in_features: int, lengths: Sequence[int], *, bias: bool, sources: Sources, stream: Stream
    ) -> None:
        blocks = lengths if len(lengths) > 1 else lengths[0]
        super().__init__(groups, in_features, blocks, role="inward", bias=bias)
        self.sources, self.stream = sources, stream

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map [batch/x, sequence, H/z] to [batch/x, sequence, F/y]; batch and sequence may also be one dim."""
        self.stream.is_inner = True
        return super().forward(x, shared)


def make_norm(groups: Groups, hidden_size: int, norm: Norm, sources: Sources) -> nn.Module:
    """Return a norm over the stored residual: [..., H/z] to the same shape."""
    made: LayerNorm | RMSNorm
    if not norm.weight:
        return PlainNorm(groups, norm)
    if norm.centred:
        made = LayerNorm(groups, hidden_size, eps=norm.eps, bias=norm.bias)
    else:
        made = RMSNorm(groups, hidden_size, eps=norm.eps)
    return _OnePlus(made, sources) if norm.one_plus else _with_sources(made, sources)


class PlainNorm(nn.Module):
    """A norm over the stored residual without a gain."""

    def __init__(self, groups: Groups, norm: Norm) -> None:
        super().__init__()
        self.norm, self.axis = norm, groups.axis(*placement.residual_cuts(groups.tensor).features)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., H/z]; the shape does not change."""
        gain = x.new_ones(x.shape[-1])
        return normalize(x, gain, None, axis=self.axis, eps=self.norm.eps, centred=self.norm.centred)


class InnerNorm(Layer):
    """A norm over all F inner features of a region, whose statistics are reduced over the ranks."""

    def __init__(self, groups: Groups, features: int, norm: Norm, sources: Sources) -> None:
        super().__init__(groups)
        vector = placement.inner_vector(groups.tensor, features)
        self.weight = parameter(vector, ZEROS)
        self.bias = parameter(vector, ZEROS) if norm.bias else None
        self.norm, self.sources = norm, sources
        self.axis = groups.axis(*placement.inner_cuts(groups.tensor).features)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Normalize [.., F/y]; the shape does not change."""
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        assert weight is not None
        weight = 1 + weight if self.norm.one_plus else weight
        return normalize(x, weight, bias, axis=self.axis, eps=self.norm.eps, centred=self.norm.centred)


def _with_sources(made: nn.Module, sources: Sources) -> nn.Module:
    made.sources = sources  # type: ignore[assignment]
    return made


class _OnePlus(Layer):
    """A norm with gain 1 + weight, as in Gemma."""

    def __init__(self, norm: LayerNorm | RMSNorm, sources: Sources) -> None:
        super().__init__(norm.groups)
        self.weight, self.bias = norm.weight, norm.bias
        self.norm = [norm]  # in a list, so that its parameters are not registered twice
        self.sources = sources

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        assert weight is not None
        norm = self.norm[0]
        return normalize(x, 1 + weight, bias, axis=norm.axis, eps=norm.eps, centred=norm.centred)


class Uncut(Layer):
    """A transformers module that runs unchanged, with full parameters on every rank.

    `partial`: axes over which the parameters' gradients must be summed, since each rank has only a part of the input or
    uses only a part of the output.
    """

    def __init__(self, groups: Groups, module: nn.Module, name: str, partial: Sequence[str]) -> None:
        super().__init__(groups)
        self.module = [module]  # in a list, so that its parameters are not registered here
        for own, p in module.named_parameters(recurse=False):
            uncut = Placement(groups.tensor, tuple(p.shape), ((),) * p.dim(), partial=tuple(partial))
            self.register_parameter(own, parameter(uncut, ZEROS))
        for own, buffer in module.named_buffers(recurse=False):
            self.register_buffer(own, buffer, persistent=own not in module._non_persistent_buffers_set)
        self.sources = {own: (Source(f"{name}.{own}"),) for own, _ in module.named_parameters(recurse=False)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on its arguments."""
        shared = self.share()
        given = {name: shared.get(p, p) for name, p in self.named_parameters(recurse=False)}
        given |= dict(self.named_buffers(recurse=False))
        return call_with(self.module[0], given, *args, **kwargs)


def per_head(groups: Groups, module: nn.Module, name: str) -> Uncut:
    """Return a replacement of a module on [.., heads/y, D] whose parameters all heads share."""
    cuts = placement.inner_cuts(groups.tensor)
    letters = [each for each in TENSOR_AXES if each in (*cuts.tokens, *cuts.features)]
    return Uncut(groups, module, name, letters)


class HeadVector(Layer):
    """A parameter with one value per head, [heads/y, ...], which the module around reads as its attribute `name`."""

    def __init__(self, groups: Groups, name: str, shape: tuple[int, ...], source: str) -> None:
        super().__init__(groups)
        self.name = name
        cuts = placement.inner_cuts(groups.tensor)
        of_heads = (cuts.features, *[()] * (len(shape) - 1))
        self.vector = parameter(Placement(groups.tensor, shape, of_heads, partial=cuts.tokens), ZEROS)
        self.sources = {"vector": (Source(source),)}

    def lend(self, around: nn.Module, *_: object) -> None:
        """Set the attribute. This is a pre-forward hook of the module around."""
        object.__setattr__(around, self.name, self.stand_in(self.vector, self.share()))

    def take_back(self, around: nn.Module, *_: object) -> None:
        """Clear the attribute, which would keep the graph alive. This is a forward hook of the module around."""
        object.__setattr__(around, self.name, None)


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def entering(entrances: Mapping[str, Sequence[tuple[Entrance, Sequence[Slot]]]], stream: Stream) -> Hook:
    """Return the pre-forward hook of a region: it fills the slots, and passes the first output on as the argument.

    `entrances`: argument of the region's forward -> the entrances that read it, with their slots.
    """
    first = next(iter(entrances))

    def filled(argument: str, x: Tensor) -> Tensor:
        (entrance, slots), *others = entrances[argument]
        first_part = entrance.fill(x, slots)
        for other, its_slots in others:
            other.fill(x, its_slots)
        return first_part

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stream.is_inner = True
        kwargs = dict(kwargs)
        for argument in entrances:
            if kwargs.get(argument) is not None:
                kwargs[argument] = filled(argument, kwargs[argument])
            elif argument == first:
                args = (filled(argument, args[0]), *args[1:])
        return args, kwargs

    return hook
