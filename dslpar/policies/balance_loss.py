"""Load-balancing loss of transformers' mixtures: `output_router_logits=True` and `router_aux_loss_coef`.

    balance = balance_of(model, config, policy)              # None: the config does not enable the loss
    balance.watch(block, names, groups)                      # hooks on this block's routers
    with collecting(block, x, mask) as found: block(x)       # sums of this rank's tokens
    loss = balance.added_to(groups, of_logits)               # coefficient * loss, added to the cross-entropy

transformers records the router logits of all blocks and passes them to its `load_balancing_loss_func`. Here hooks on
the same routers sum the statistics (`layers.balance_loss`). Blocks pass the sums on with the residual
(`policies.chain`).

Several ranks of a tensor group may run the router on the same tokens. Each rank then counts its own part of them only:
the tokens of its stored residual, divided over the ranks that store the same tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.balance_loss import balance_loss, router_sums
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.token_ids import local_tokens
from dslpar.models.layered import Loss
from dslpar.models.router_losses import BalancedLoss, no_sums
from dslpar.policies import probe
from dslpar.policies.experts import sharing_axes
from dslpar.schema.policy import DECODER_INPUTS, Policy

SETTING = "output_router_logits"
"""Field of transformers' configs that enables the loss."""
_ATTRIBUTE = "router_sums"
"""Attribute of a block with its `_RouterSums`."""


class Balance(NamedTuple):
    """Settings of a model's load-balancing loss."""

    router: type[nn.Module]
    """Class of the routers whose logits transformers records. The first value that they return is the logits."""
    num_experts: int
    top_k: int
    """Number of experts per token."""
    coefficient: float
    """Factor of the loss in the sum with the cross-entropy."""

    def routers(self, block: nn.Module) -> list[str]:
        """Return the names of the routers in a block of transformers."""
        return [name for name, module in block.named_modules() if isinstance(module, self.router)]

    def watch(self, block: nn.Module, names: Sequence[str], groups: Groups) -> None:
        """Have the routers with these names, or their replacements, add to the sums of their block."""
        if names:
            sums = _RouterSums(groups, self.top_k)
            object.__setattr__(block, _ATTRIBUTE, sums)
            for name in names:
                block.get_submodule(name).register_forward_hook(sums.add)

    def zeros(self, device: torch.device) -> Tensor:
        """Return the sums before the first block, [2, E]."""
        return no_sums((2, self.num_experts), device)

    def loss(self, groups: Groups, sums: Tensor) -> Tensor:
        """Return this data rank's share of the loss, without the coefficient (see `layers.balance_loss`)."""
        return balance_loss(groups, sums, self.top_k)

    def added_to(self, groups: Groups, of_logits: Loss) -> BalancedLoss:
        """Return the loss of the logits with this loss added, as in transformers' forward."""
        return BalancedLoss(groups, of_logits, coefficient=self.coefficient, top_k=self.top_k)


def balance_of(model: Any, config: Any, policy: Policy) -> Balance | None:
    """Return the load-balancing loss that a config enables; None: it enables none.

    Raises:
        DslparError: transformers has no such loss for the class, or its loss is not the one that dslpar computes.
    """
    if not (policy.experts and getattr(config, SETTING, False)):
        return None
    name = type(model).__name__
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    recorded = (getattr(type(model), "_can_record_outputs", None) or {}).get("router_logits")
    router, index = getattr(recorded, "target_class", recorded), getattr(recorded, "index", 0)
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    sizes: list[Any] = [getattr(model, each, None) for each in names]
    if function is None or router is None or None in sizes:
        _refuse(f"{name} with {SETTING}=True: transformers has no load-balancing loss for this class")
    if index != 0 or policy.inputs != DECODER_INPUTS or not _is_known(function, *sizes[:2]):
        _refuse(f"{name} with {SETTING}=True: its load-balancing loss is not the one of transformers' decoders")
    return Balance(router, *sizes)


def _refuse(message: str) -> NoReturn:
    raise_finding("TEN234", message, f"{SETTING}=False", key="model.config")


@probe.on_cpu
def _is_known(function: Any, num_experts: int, top_k: int) -> bool:
    """Return whether a loss function of transformers returns what `layers.balance_loss` does, on random logits."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(6, num_experts, generator=generator, dtype=torch.float32) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    sums = [router_sums(each, top_k, mask.flatten()) for each in logits]
    choices, probabilities = torch.stack(sums).sum(0) / (2 * mask.sum())
    own, found = num_experts * (choices * probabilities).sum(), function(tuple(logits), num_experts, top_k, mask)
    return math.isclose(float(found), float(own), rel_tol=1e-5)


# ---- the sums of one block ----


@contextmanager
def collecting(block: nn.Module, x: Tensor, mask: Tensor | None) -> Iterator[list[Tensor]]:
    """Yield a list to which the block's routers append their sums, [2, E] each, while the block runs on `x`.

    x: the residual as this rank stores it. mask: the padding mask of the whole micro-batch; None: all tokens count.
    """
    sums: _RouterSums | None = getattr(block, _ATTRIBUTE, None)
    if sums is None:
        yield []
        return
    sums.begin(x.shape, mask)
    try:
        yield sums.found
    finally:
        # A recomputation may end in the middle of the block. Sums that nobody takes would keep its activations alive.
        sums.found = []


class _RouterSums:
    """Sums over this rank's own tokens in the routers of one block."""

    def __init__(self, groups: Groups, top_k: int) -> None:
        self.groups, self.top_k, self.split = groups, top_k, DistinctTokens(groups)
        self.cuts = placement.residual_cuts(groups.tensor)
        gathered = () if groups.tensor.exchanges_tokens else sharing_axes(groups)
        self.pieces = [
            placement.piece(groups.tensor, groups.coord, tuple(each for each in letters if each in gathered))
            for letters in (self.cuts.batch, self.cuts.sequence)
        ]
        """(index, count) of this rank's samples, and of its part of each sequence, among the tokens that it routes."""
        self.found: list[Tensor] = []
        self.shape: Sequence[int] = ()
        """Shape of the stored residual."""
        self.counted: Tensor | None = None
        """Which of this rank's own tokens count; None: all."""

    def begin(self, shape: Sequence[int], mask: Tensor | None) -> None:
        self.found, self.shape, self.counted = [], shape, None
        if mask is not None:
            self.counted = self.split.part(local_tokens(self.groups, mask, self.cuts).flatten())

    def add(self, _: nn.Module, __: Any, output: Any) -> None:
        """Add a router's sums; a forward hook, whose `output` begins with the logits [tokens, E]."""
        logits = output[0] if isinstance(output, tuple) else output
        self.found.append(router_sums(self._own(logits.flatten(0, -2)), self.top_k, self.counted))

    def _own(self, logits: Tensor) -> Tensor:
        """Return the logits of this rank's own tokens [n, E], of all tokens that it routes."""
        if self.groups.tensor.exchanges_tokens:
            return logits
        lengths = [length * count for length, (_, count) in zip(self.shape, self.pieces, strict=False)]
        by_sample = torch.unflatten(logits, 0, lengths)
        for dim, (index, count) in enumerate(self.pieces):
            by_sample = by_sample.chunk(count, dim)[index]
        return self.split.part(by_sample.flatten(0, 1))
