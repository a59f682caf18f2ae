"""Data-parallel gradient averaging without ZeRO, started per stage and overlapped with the rank's other stages.

    reduction = StageReduction(ds_engine, groups.axis("data"), groups.expert_data_axis, late=())
    reduction.start(stage_parameters)      # their gradients are complete
    reduction.finish()                     # before the norm; the gradients are averaged then

A rank with several stages completes the gradients of its later stages long before the gradients of its first stage.
DeepSpeed reduces the gradients of all stages after the last backward. For ZeRO 1, `gradient_buffer` overlaps in the
same way, and starts reductions from gradient hooks. Megatron-LM's interleaved schedule also overlaps its data-parallel
reductions one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis


class StageReduction:
    """Averages gradients over `axis`, and those of experts over `expert_axis`, the data ranks that hold the same ones.

    The ranks of `axis` must call the methods in the same order.

    late: ids of parameters whose gradients are not complete with their stage, such as weights that stages share.
    """

    def __init__(self, ds_engine: Any, axis: Axis, expert_axis: Axis, late: Collection[int]) -> None:
        self._engine, self._axis, self._expert_axis, self._late = ds_engine, axis, expert_axis, frozenset(late)
        self._in_flight: list[Callable[[], None]] = []
        """Functions that wait for each reduction in flight."""
        self.begun: set[int] = set()
        """Ids of parameters whose reduction has begun."""

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin reducing the gradients of these parameters."""
        by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for p in parameters:
            if p.requires_grad and id(p) not in self._late and p.numel():
                if p.grad is None:  # all replicas must send tensors of the same size
                    p.grad = torch.zeros_like(p)
                by_kind.setdefault((p.grad.dtype, not getattr(p, "allreduce", True)), []).append(p.grad)
                self.begun.add(id(p))
        dtype, mean = self._engine.communication_data_type, 1.0 / self._axis.size
        for (_, is_expert), gradients in by_kind.items():
            axis = self._expert_axis if is_expert else self._axis
            self._in_flight.append(collectives.start_all_reduce_coalesced_(gradients, axis, dtype, mean))

    def finish(self) -> None:
        """Wait for all reductions, and write the averages to the gradients."""
        for finish in self._in_flight:
            finish()
        self._in_flight, self.begun = [], set()
