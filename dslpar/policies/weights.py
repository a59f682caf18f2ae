"""Map transformers' tensors to dslpar's parameters: load this rank's shards, and locate a tensor in a parameter.

Several transformers tensors may be fused in one parameter, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of
from dslpar.models.pretrained import Source, Sources, merged


def parameters_with_sources(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, tuple[Source, ...]]]:
    """Yield (global name, parameter, the transformers tensors in it) of all parameters that policies have made."""
    for name, owner in module.named_modules():
        sources: Sources = getattr(owner, "sources", {})
        for own, of in sources.items():
            p = owner.get_parameter(own)
            yield (f"{name}.{own}" if name else own), p, of


@torch.no_grad()
def load(module: nn.Module, read: Callable[[str], Tensor], groups: Groups) -> None:
    """Fill this rank's shards of a module's parameters; `read` returns a full tensor by transformers' name."""
    for _, p, sources in parameters_with_sources(module):
        placement = placement_of(p)
        assert placement is not None
        p.copy_(placement.cut(merged(sources, read), groups.coord))


class Part(NamedTuple):
    """Place of a transformers tensor in a full, unsharded parameter."""

    parameter: str
    """Global name of the parameter."""
    shape: tuple[int, ...]
    """Full shape of the parameter."""
    row: int = 0
    """Row of the parameter at which the tensor begins."""
    transposed: bool = False
    """Whether the tensor is [in, out], and the parameter [out, in]."""

    def read(self, full: Callable[[str], Tensor], shape: Sequence[int]) -> Tensor:
        """Return the transformers tensor, of shape `shape`; `full` returns a full parameter by name."""
        rows = full(self.parameter)
        if shape:
            rows = rows[self.row : self.row + (shape[-1] if self.transposed else shape[0])]
        return rows.t() if self.transposed else rows


def parts(named: Iterable[tuple[str, tuple[Source, ...]]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Return the place of each transformers tensor by name; the inverse of `merged`.

    `named`: (global name, sources) of parameters; `shapes`: shapes of transformers' tensors by name.
    """
    found: dict[str, Part] = {}
    for name, sources in named:
        own = [shapes[source.name][::-1] if source.transposed else shapes[source.name] for source in sources]
        rows = list(accumulate((shape[0] for shape in own if shape), initial=0))
        full = (rows[-1], *own[0][1:]) if own[0] else ()
        for source, row in zip(sources, rows, strict=False):
            found[source.name] = Part(name, full, row, source.transposed)
    return found
