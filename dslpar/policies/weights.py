"""Weights of transformers' own, by their names, into the pieces that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of
from dslpar.policies.modules import Source, Sources, merged


def parameters_with_sources(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, tuple[Source, ...]]]:
    """Yield (global name, parameter, the tensors of transformers' that it is) of all that policies have put there."""
    for name, owner in module.named_modules():
        sources: Sources = getattr(owner, "sources", {})
        for own, of in sources.items():
            p = owner.get_parameter(own)
            yield (f"{name}.{own}" if name else own), p, of


@torch.no_grad()
def load(module: nn.Module, read: Callable[[str], Tensor], groups: Groups) -> None:
    """Fill a module's parameters; `read` gives a full tensor of the model by transformers' name."""
    for _, p, sources in parameters_with_sources(module):
        placement = placement_of(p)
        assert placement is not None
        p.copy_(placement.cut(merged(sources, read), groups.coord))
