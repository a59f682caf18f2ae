"""Loss of a model whose layers pass on the sums of their routers: the routers' losses are added to the model's own.

    BalancedLoss(groups, of_logits, coefficient=0.01, top_k=2)((logits, sums), labels)

The load-balancing loss and the z-loss are defined in `dslpar.layers.balance_loss`. How layers pass the sums on is the
model's own matter: with the residual, from the first block to the last layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers.balance_loss import balance_loss, z_loss
from dslpar.models.layered import Loss


def no_sums(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return the sums before the first block, [2, E], or [3, E] with a z-loss."""
    # It requires a gradient, since DeepSpeed's pipeline sends one for each float.
    return torch.zeros(shape, device=device, requires_grad=torch.is_grad_enabled())


class BalancedLoss:
    """The loss of the logits, plus the load-balancing loss and the z-loss times their coefficients."""

    def __init__(
        self, groups: Groups, of_logits: Loss, *, coefficient: float, top_k: int, z_coefficient: float = 0.0
    ) -> None:
        self.groups, self.of_logits = groups, of_logits
        self.coefficient, self.top_k, self.z_coefficient = coefficient, top_k, z_coefficient
        self.num_labels: int = getattr(of_logits, "num_labels", 1)
        """Number of label tensors of a micro-batch."""

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """Return the loss. `output`: the value of which `of_logits` computes its loss, and the routers' sums."""
        of_logits, sums = output
        loss = self.of_logits(of_logits, labels)
        if self.coefficient:
            loss = loss + self.coefficient * balance_loss(self.groups, sums[:2], self.top_k)
        if self.z_coefficient:
            loss = loss + self.z_coefficient * z_loss(self.groups, sums, self.top_k)
        return loss
