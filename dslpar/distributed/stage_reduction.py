"""Reduction of gradients over replicas without ZeRO, a stage at a time, while a rank's other stages go on.

    reduction = StageReduction(ds_engine, groups.axis("data"), late=())
    reduction.start(stage_parameters)      # their gradients are complete
    reduction.finish()                     # before the norm; the gradients are averaged then

A rank that holds several stages has the gradients of its later stages long before those of its first. DeepSpeed reduces
all of them when the last backward is over (`gradient_buffer` is the same for ZeRO 1, where hooks begin it).
Megatron-LM's interleaved schedule overlaps its data-parallel reductions in the same way, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis


class StageReduction:
    """Averages gradients over `axis`, whose ranks must call it in the same order.

    late: ids of parameters whose gradients are not complete with their stage's, such as weights that stages share.
    """

    def __init__(self, ds_engine: Any, axis: Axis, late: Collection[int]) -> None:
        self._engine, self._axis, self._late = ds_engine, axis, frozenset(late)
        self._in_flight: list[Callable[[], None]] = []
        """What waits for each reduction that was begun."""
        self.begun: set[int] = set()
        """Ids of parameters whose reduction was begun."""

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to reduce the gradients of these parameters."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            if p.requires_grad and id(p) not in self._late and p.numel():
                if p.grad is None:  # no replica may send less than the others
                    p.grad = torch.zeros_like(p)
                by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
                self.begun.add(id(p))
        for gradients in by_dtype.values():
            dtype, mean = self._engine.communication_data_type, 1.0 / self._axis.size
            self._in_flight.append(collectives.start_all_reduce_coalesced_(gradients, self._axis, dtype, mean))

    def finish(self) -> None:
        """Wait for all reductions, and put the averages where the gradients were."""
        for finish in self._in_flight:
            finish()
        self._in_flight, self.begun = [], set()
