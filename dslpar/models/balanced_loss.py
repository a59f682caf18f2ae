"""Loss of a model whose layers pass on the sums of their routers: the load-balancing loss is added to the model's own.

    BalancedLoss(groups, of_logits, coefficient=0.01, top_k=2)((logits, sums), labels)

The load-balancing loss is defined in `dslpar.layers.balance_loss`. How layers pass the sums on is the model's own
matter: with the residual, from the first block to the last layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers.balance_loss import balance_loss
from dslpar.models.layered import Loss


def no_sums(num_experts: int, device: torch.device) -> Tensor:
    """Return the sums before the first block, [2, E]."""
    # It requires a gradient, since DeepSpeed's pipeline sends one for each float.
    return torch.zeros(2, num_experts, device=device, requires_grad=torch.is_grad_enabled())


class BalancedLoss:
    """The loss of the logits, plus the load-balancing loss times its coefficient."""

    def __init__(self, groups: Groups, of_logits: Loss, *, coefficient: float, top_k: int) -> None:
        self.groups, self.of_logits = groups, of_logits
        self.coefficient, self.top_k = coefficient, top_k
        self.num_labels: int = getattr(of_logits, "num_labels", 1)
        """Number of label tensors of a micro-batch."""

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """Return the loss. `output`: the value of which `of_logits` computes its loss, and the routers' sums."""
        of_logits, sums = output
        return self.of_logits(of_logits, labels) + self.coefficient * balance_loss(self.groups, sums, self.top_k)
