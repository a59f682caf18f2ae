"""Compare the gradients of a layout's first step with one process, tensor by tensor, on the job's ranks.

    comparison = compare_gradients(engine, first)     # first: the reference, on rank 0; all ranks together
    loss = engine.train_batch(data)                   # the gradients are looked at within the step
    found = comparison.result()                       # on rank 0; None where the step was skipped

Within the step, for each tensor:

1. Gradients are read where the optimizer would read them: after everything that sums them, before clipping.
2. One holder of each piece, a rank's shard of the gradient, broadcasts it to all ranks. Every other holder compares its
   copy with the received piece.
3. Rank 0 merges the pieces by their placements and compares the whole tensor with the reference.

So no rank holds more than one tensor besides its own, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.engine import Engine
from dslpar.layers import placement_of
from dslpar.layers.placement import Placement
from dslpar.parity.checks import Difference
from dslpar.parity.device_reference import FirstStep, norm_of
from dslpar.parity.explain import FirstDifference, explain_gradient
from dslpar.parity.layout_ranks import Held, at_optimizer_step, full_gradient
from dslpar.parity.whole import Pieces, UnequalCopies, place_of, unequal

EXPLAINED_BYTES = 1 << 32
"""Limit of rank 0's memory for all ranks' pieces of one tensor, which it needs to explain a difference."""


class Piece(NamedTuple):
    """Shape and placement of a rank's piece of a gradient."""

    shape: tuple[int, ...]
    placement: Placement | None


@dataclass
class Found:
    """Results of the comparison, on rank 0."""

    differences: dict[str, Difference] = field(default_factory=dict)
    """Difference by global name: the worse one of the largest element's error and the error's norm."""
    norm: float = 0.0
    """Norm of the gathered gradients."""
    copies: UnequalCopies | None = None
    """The worst unequal copies of one piece; None: all copies are equal."""
    first: FirstDifference | None = None
    """The explained difference nearest to the loss; None: there is none."""


def compare_gradients(engine: Engine, first: FirstStep | None) -> Comparison:
    """Have the engine's next steps compare their gradients. `first` is None on ranks other than 0."""
    comparison = Comparison(engine, first)
    at_optimizer_step(engine, comparison.compare)
    return comparison


class Comparison:
    """The comparison of one step's gradients. All ranks call its methods together."""

    def __init__(self, engine: Engine, first: FirstStep | None) -> None:
        self.engine, self.first = engine, first
        self.world: Axis = engine.groups.axis("pipe", "data", "tensor")
        self.mesh: Mesh = engine.groups.mesh
        self.found: Found | None = None

    def result(self) -> Found | None:
        """Return the results of the last step on rank 0; None on other ranks, and if no gradient was compared."""
        found, self.found = self.found, None
        return found

    def compare(self) -> None:
        """Compare all gradients, within a step. All ranks must call it together."""
        own = {name: p for name, p in self.engine.named_parameters() if p.requires_grad and self._has_gradient(p)}
        pieces = {name: _piece_of(p) for name, p in own.items()}
        by_rank = collectives.gather_objects(pieces, self.world)
        names = list(dict.fromkeys(name for held in by_rank for name in held))
        found, worst, squares = Found(), None, 0.0
        for name in names:
            holders = {rank: held[name] for rank, held in enumerate(by_rank) if name in held}
            whole, copies = self._gather(name, own.get(name), holders)
            worst = _worse(worst, copies)
            if self.first is not None and whole is not None:
                squares += norm_of([whole]) ** 2
                found.differences[name] = _difference(self.first, name, whole)
        if self.first is not None:
            missing = self.first.gradients.keys() - found.differences.keys()
            found.differences |= {name: Difference(math.inf, 0.0) for name in missing}
        found.norm = math.sqrt(squares)
        found.copies = None
        for each in collectives.gather_objects(worst, self.world):
            found.copies = _worse(found.copies, each)
        found.first = self._explained(found, own, by_rank)
        self.found = found if self.world.index == 0 else None

    def _has_gradient(self, p: nn.Parameter) -> bool:
        return self.engine.job.spec.zero.stage > 0 or p.grad is not None

    def _own_piece(self, p: nn.Parameter) -> Tensor:
        """Return this rank's piece of a gradient, unscaled, in float32. Ranks that shard it must call it together."""
        gradient = full_gradient(p, self.engine.job.spec.zero.stage)
        assert gradient is not None, "a rank names those that it has"
        piece = gradient.detach().to(self.engine.deepspeed.device, torch.float32).reshape(_piece_of(p).shape)
        return piece / self._loss_scale()

    def _loss_scale(self) -> float:
        """Return the loss scale of an fp16 engine, by which gradients before the step are multiplied; else 1."""
        if self.engine.job.spec.precision.dtype != "fp16":
            return 1.0
        return float(self.engine.deepspeed.optimizer.loss_scale)

    def _gather(
        self, name: str, p: nn.Parameter | None, holders: Mapping[int, Piece]
    ) -> tuple[Tensor | None, UnequalCopies | None]:
        """Return the whole gradient (on rank 0), and the deviation of this rank's copy from another rank's copy."""
        rank, device = self.world.index, self.engine.deepspeed.device
        own = None if p is None else self._own_piece(p)
        first, copies = min(holders), None
        placement = holders[first].placement
        pieces: dict[tuple[int, ...], Tensor] = {}
        for holder in holders:
            at = self._place(holder, placement)
            if at in pieces:
                continue
            shape = holders[holder].shape
            sent = own if own is not None and holder == rank else torch.empty(shape, device=device)
            received = collectives.broadcast(sent, self.world, holder)
            pieces[at] = received.cpu() if rank == 0 else torch.empty(0)
            if own is not None and at == self._place(rank, placement):
                copies = unequal(name, self.mesh, (holder, rank), received, own)
        if rank:
            return None, copies
        if placement is None:
            return next(iter(pieces.values())), copies
        peers = self.mesh.peers(first, placement.holders)
        return placement.merge([pieces[self._place(each, placement)] for each in peers]), copies

    def _place(self, rank: int, placement: Placement | None) -> tuple[int, ...]:
        """Return a rank's coordinates on the axes that shard the tensor; they identify the rank's piece."""
        return place_of(self.mesh, rank, placement)

    # ---- explanation of a difference ----

    def _explained(
        self, found: Found, own: Mapping[str, nn.Parameter], by_rank: Sequence[Mapping[str, Piece]]
    ) -> FirstDifference | None:
        """Gather all ranks' pieces of the first wrong tensor on rank 0, and explain its difference."""
        name, is_trained_alone = collectives.broadcast_object(self._first_that_is_off(found), self.world)
        if not name:
            return None
        holders = {rank: held[name] for rank, held in enumerate(by_rank) if name in held}
        if not (holders and is_trained_alone):
            where = "only under the layout" if holders else "only on one process"
            return FirstDifference(name, None, None, f"{name} has a gradient {where}")
        if sum(4 * math.prod(piece.shape) for piece in holders.values()) > EXPLAINED_BYTES:
            says = "its shards are too large to gather on rank 0: dslpar prove without --on-devices can explain it"
            return FirstDifference(name, None, None, f"the gradient of {name} is wrong, and {says}")
        piece = self._own_piece(own[name]) if name in own else None
        held: list[dict[str, Held]] = [{} for _ in by_rank]
        for holder, about in holders.items():
            is_own = piece is not None and holder == self.world.index
            sent = piece if is_own else torch.empty(about.shape, device=self.engine.deepspeed.device)
            received = collectives.broadcast(sent, self.world, holder)  # type: ignore[arg-type]
            if self.world.index == 0:
                held[holder][name] = Held(received.cpu(), about.placement)
        if self.first is None:
            return None
        true, bound = self.first.gradients[name].double(), self.first.bounds[name]
        matches = bound.element / max(float(true.abs().max()), 1e-300)
        return explain_gradient(name, Pieces(self.mesh, held), true, matches)

    def _first_that_is_off(self, found: Found) -> tuple[str, bool]:
        """Return the name of the wrong tensor nearest to the loss, or "", and whether the reference has its gradient.

        The result is valid on rank 0 only.
        """
        if self.first is None:
            return "", False
        place = {name: at for at, name in enumerate(self.first.order)}
        off = [name for name, each in found.differences.items() if not each.off <= each.bound]
        name = max(off, key=lambda name: place.get(name, -1), default="")
        return name, name in self.first.gradients


def _piece_of(p: Any) -> Piece:
    placement = placement_of(p)
    shape = placement.local_shape if placement is not None else tuple(getattr(p, "ds_shape", p.shape))
    return Piece(tuple(shape), placement)


def _worse(one: UnequalCopies | None, other: UnequalCopies | None) -> UnequalCopies | None:
    """Return the pair of copies that differ more.

    Tied copies on different stages sum in different orders, so they are returned only if there is no other pair.
    """
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda each: (not each.tied, math.inf if math.isnan(each.off) else each.off))


def _difference(first: FirstStep, name: str, whole: Tensor) -> Difference:
    """Compare a whole gradient with the reference, by elements and by norm; return the worse relative difference."""
    if name not in first.gradients:  # allowed if zero: ZeRO has zeros for parameters that no backward reaches
        return Difference(math.inf if bool(whole.any()) else 0.0, 0.0)
    true, bound = first.gradients[name].double(), first.bounds[name]
    if whole.shape != true.shape or not bool(torch.isfinite(whole).all()):
        return Difference(math.inf, 0.0)
    error = whole.double() - true
    found = (
        _relative(float(error.abs().max()), bound.element, float(true.abs().max())),
        _relative(float(error.norm()), bound.norm, float(true.norm())),
    )
    return max(found, key=lambda each: each.excess)


def _relative(off: float, bound: float, scale: float) -> Difference:
    scale = scale or bound or 1.0  # a zero gradient is scaled by its bound
    return Difference(off / scale, bound / scale)
