"""Load of a mixture's experts: how many tokens have chosen each expert since the load was last read.

    self.expert_load = ExpertLoad(num_experts)      # in a mixture; the training loop finds it by this name
    self.expert_load.add(index)                     # in each forward: the experts that this rank's tokens have chosen
    counts = self.expert_load.take()                # now and then; counting starts again

Letters: E experts, n tokens, k experts per token. Choices that a capacity drops (`dslpar.layers.expert_capacity`) count
as choices, and beside these as dropped.

Counts stay on the device, so a forward waits for nothing. A layer that is recomputed counts its tokens twice. Every
expert's count is then doubled, so shares stay right. `dslpar.training.expert_loads` sums counts over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExpertLoad:
    """Tokens per expert of one mixture, counted on this rank."""

    def __init__(self, num_experts: int, *, drops: bool = False) -> None:
        self.num_experts = num_experts
        self.drops = drops
        """Whether the mixture may drop choices."""
        self._counts: Tensor | None = None

    def add(self, index: Tensor, kept: Tensor | None = None) -> None:
        """Count the experts that tokens have chosen, [n, k]; kept: which choices are not dropped, bool [n, k]."""
        chosen = index.detach().flatten()
        if self._counts is None:
            self._counts = torch.zeros(self.num_experts + 2, dtype=torch.int64, device=chosen.device)
        # Not bincount, for whose size a host waits.
        self._counts[: self.num_experts].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))
        self._counts[-1] += len(index)
        if kept is not None:
            self._counts[-2] += (~kept).sum()

    def take(self) -> Tensor:
        """Return the tokens of each expert since the last call, the dropped choices, and the number of tokens: [E + 2].

        The result is on the device of the tokens; without any, on the CPU.
        """
        counts, self._counts = self._counts, None
        return torch.zeros(self.num_experts + 2, dtype=torch.int64) if counts is None else counts


def loads_of(module: nn.Module) -> dict[str, ExpertLoad]:
    """Return the loads of all mixtures within a module, by the mixture's name."""
    found = ((name, getattr(part, "expert_load", None)) for name, part in module.named_modules())
    return {name: load for name, load in found if isinstance(load, ExpertLoad)}
