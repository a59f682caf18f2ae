"""What stands in place of transformers' own modules: the same mathematics on this rank's piece.

Letters as in dslpar.layers: H residual features, F inner features, y and x what cuts them and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

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


def call_with(module: nn.Module, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a module, which reads `values` in place of its own parameters and buffers of these names.

    torch.func.functional_call does so for whole trees of modules, and looks for tied ones at each call.
    """
    attributes = vars(module)  # which Python reads before it asks torch for a parameter
    attributes.update(values)
    try:
        return module(*args, **kwargs)
    finally:
        for name in values:
            del attributes[name]


class Slot(nn.Module):
    """Where transformers' code calls an inward linear: hands out what the region's entrance has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[Tensor] = []  # a list: each new attribute of a module is looked up among its parameters

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features [batch/x, sequence, F/y], once; `x` is the region's own input, and not read."""
        assert self.ready, "a region's forward has called one of its linears twice, or not through its own entrance"
        return self.ready.pop()


class Entrance(Linear):
    """All inward linears of a region that read the same input, as one product: one gather, one message.

    `lengths` are their features, `shares` to how many of these each slot is entitled, `biased` which of these have a
    bias: SwinV2's key has none.
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
        """Return what is computed with in place of a parameter: of the bias, with zeros for linears without one."""
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
        """Compute all from the stored residual [batch/x, sequence, H/z] and fill the slots; return the first part."""
        y = self(x)
        # One part is not split: the backward would copy its gradient.
        parts = y.split_with_sizes(self.local, -1) if len(slots) > 1 else (y,)
        for slot, part in zip(slots, parts, strict=True):
            slot.ready[:] = (part,)
        return parts[0]


class Outward(Linear):
    """The linear that ends a region: inner [batch/x, sequence, F/y] to the stored residual."""

    def __init__(
        self, groups: Groups, in_features: int, out_features: int, *, bias: bool, sources: Sources, stream: Stream
    ) -> None:
        super().__init__(groups, in_features, out_features, role="outward", bias=bias)
        self.sources, self.stream = sources, stream

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """[batch/x, sequence, F/y] to [batch/x, sequence, H/z]."""
        self.stream.is_inner = False
        return super().forward(x, shared)


class Inward(Linear):
    """An inward linear that a block's own forward calls: a region begins with it, and no module is around it."""

    def __init__(
        self, groups: Groups, in_features: int, lengths: Sequence[int], *, bias: bool, sources: Sources, stream: Stream
    ) -> None:
        blocks = lengths if len(lengths) > 1 else lengths[0]
        super().__init__(groups, in_features, blocks, role="inward", bias=bias)
        self.sources, self.stream = sources, stream

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Return [batch/x, sequence, F/y] of [batch/x, sequence, H/z]; also of tokens in one dim."""
        self.stream.is_inner = True
        return super().forward(x, shared)


def make_norm(groups: Groups, hidden_size: int, norm: Norm, sources: Sources) -> nn.Module:
    """Make a norm over the stored residual, [..., H/z] to the same."""
    made: LayerNorm | RMSNorm
    if not norm.weight:
        return PlainNorm(groups, norm)
    if norm.centred:
        made = LayerNorm(groups, hidden_size, eps=norm.eps, bias=norm.bias)
    else:
        made = RMSNorm(groups, hidden_size, eps=norm.eps)
    return _OnePlus(made, sources) if norm.one_plus else _with_sources(made, sources)


class PlainNorm(nn.Module):
    """A norm over the stored residual, [..., H/z] to the same, without a gain."""

    def __init__(self, groups: Groups, norm: Norm) -> None:
        super().__init__()
        self.norm, self.axis = norm, groups.axis(*placement.residual_cuts(groups.tensor).features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H/z] to the same."""
        gain = x.new_ones(x.shape[-1])
        return normalize(x, gain, None, axis=self.axis, eps=self.norm.eps, centred=self.norm.centred)


class InnerNorm(Layer):
    """A norm over the features of a region: [.., F/y] to the same, its statistics over all F."""

    def __init__(self, groups: Groups, features: int, norm: Norm, sources: Sources) -> None:
        super().__init__(groups)
        vector = placement.inner_vector(groups.tensor, features)
        self.weight = parameter(vector, ZEROS)
        self.bias = parameter(vector, ZEROS) if norm.bias else None
        self.norm, self.sources = norm, sources
        self.axis = groups.axis(*placement.inner_cuts(groups.tensor).features)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """[.., F/y] to the same."""
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        assert weight is not None
        weight = 1 + weight if self.norm.one_plus else weight
        return normalize(x, weight, bias, axis=self.axis, eps=self.norm.eps, centred=self.norm.centred)


def _with_sources(made: nn.Module, sources: Sources) -> nn.Module:
    made.sources = sources  # type: ignore[assignment]
    return made


class _OnePlus(Layer):
    """A norm whose gain is 1 + weight: Gemma's."""

    def __init__(self, norm: LayerNorm | RMSNorm, sources: Sources) -> None:
        super().__init__(norm.groups)
        self.weight, self.bias = norm.weight, norm.bias
        self.norm = [norm]  # in a list: its parameters are this module's
        self.sources = sources

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        shared = self.share() if shared is None else shared
        weight, bias = self.stand_in(self.weight, shared), self.stand_in(self.bias, shared)
        assert weight is not None
        norm = self.norm[0]
        return normalize(x, 1 + weight, bias, axis=norm.axis, eps=norm.eps, centred=norm.centred)


class Uncut(Layer):
    """A module of transformers' own, called as it is, with parameters that are whole on every rank.

    `partial`: the axes whose ranks each see a part of what it is called with, or of what becomes of its output.
    """

    def __init__(self, groups: Groups, module: nn.Module, name: str, partial: Sequence[str]) -> None:
        super().__init__(groups)
        self.module = [module]  # in a list: its parameters are not this model's
        for own, p in module.named_parameters(recurse=False):
            uncut = Placement(groups.tensor, tuple(p.shape), ((),) * p.dim(), partial=tuple(partial))
            self.register_parameter(own, parameter(uncut, ZEROS))
        for own, buffer in module.named_buffers(recurse=False):
            self.register_buffer(own, buffer, persistent=own not in module._non_persistent_buffers_set)
        self.sources = {own: (Source(f"{name}.{own}"),) for own, _ in module.named_parameters(recurse=False)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of its arguments."""
        shared = self.share()
        given = {name: shared.get(p, p) for name, p in self.named_parameters(recurse=False)}
        given |= dict(self.named_buffers(recurse=False))
        return call_with(self.module[0], given, *args, **kwargs)


def per_head(groups: Groups, module: nn.Module, name: str) -> Uncut:
    """Make a module on [.., heads/y, D], with vectors that every head shares."""
    cuts = placement.inner_cuts(groups.tensor)
    letters = [each for each in TENSOR_AXES if each in (*cuts.tokens, *cuts.features)]
    return Uncut(groups, module, name, letters)


class HeadVector(Layer):
    """A number for each head, [heads/y, ...], which the code around reads as its attribute `name`."""

    def __init__(self, groups: Groups, name: str, shape: tuple[int, ...], source: str) -> None:
        super().__init__(groups)
        self.name = name
        cuts = placement.inner_cuts(groups.tensor)
        of_heads = (cuts.features, *[()] * (len(shape) - 1))
        self.vector = parameter(Placement(groups.tensor, shape, of_heads, partial=cuts.tokens), ZEROS)
        self.sources = {"vector": (Source(source),)}

    def lend(self, around: nn.Module, *_: object) -> None:
        """Hook before the forward of the module around: give it what it reads."""
        object.__setattr__(around, self.name, self.stand_in(self.vector, self.share()))

    def take_back(self, around: nn.Module, *_: object) -> None:
        """Hook after it: else the graph would live on."""
        object.__setattr__(around, self.name, None)


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def entering(entrances: Mapping[str, Sequence[tuple[Entrance, Sequence[Slot]]]], stream: Stream) -> Hook:
    """Return the pre-hook of a region: it replaces the arguments by what their linears make of them."""
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
