"""Read a step's numbers on the host in one device copy: loss, gradient norms and all ranks' flags.

    reads.defer(loss)             # before the optimizer's step, which calls `read` with the norms
    reads.finish(); reads.loss, reads.any_rank

The host enqueues work for an accelerator, which executes it later. Each number that the host reads makes the host wait
until all queued work is done, and the device then idles until the host has enqueued more. Megatron-LM, torchtitan and
DeepSpeed read the loss, the norm, the overflow flag and the end-of-run flag one by one. Here all are read at once, when
the host must know whether the optimizer may step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups


class HostReads:
    """Loss, gradient norms and flags of the newest step, on the host. All ranks must call the methods together."""

    loss: float
    """The last step's loss, which the step passed to `defer`."""
    any_rank: list[bool]
    """For each flag of the last step, whether any rank set it; the same on every rank."""
    replicas_differ: bool
    """Whether the last `check` that a step read was not zero."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.local_flags: Callable[[], Sequence[bool]] = tuple
        """Returns this rank's flags, such as a request to stop; their number is the same on all ranks. It is called
        once per step, before the host waits for the device. A flag that is set later is read in the next step.
        """
        self.check: Callable[[], Tensor] | None = None
        """Returns the result of a comparison of replicas that an earlier step began: a scalar on the device, equal on
        all ranks, 0 if replicas agree. The next step reads it, and clears this field.
        """
        self._groups, self._device = groups, device
        self._deferred: Tensor | None = None
        self._has_read = False

    def defer(self, loss: Tensor) -> None:
        """Have this step's `read` return the loss too."""
        self._deferred, self._has_read = loss, False

    def read(self, norms: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the norms on the host, in their dtypes; set loss, flags and `replicas_differ` from the same copy."""
        flags = self.local_flags()
        counts = torch.zeros(len(flags), dtype=torch.float64, device=self._device)
        for index, flag in enumerate(flags):
            if flag:
                counts[index].fill_(1)  # a kernel: torch.tensor(flags) would be a copy from the host, which blocks
        if flags:
            counts = collectives.all_reduce(counts, self._groups.axis("pipe", "data", "tensor"))
        scalars = [*norms] if self._deferred is None else [*norms, self._deferred]
        check, self.check = self.check, None
        scalars += [] if check is None else [check()]
        wide = [scalar.detach().to(self._device, torch.float64).reshape(1) for scalar in scalars]
        values = torch.cat([counts, *wide]).tolist()
        self.any_rank = [bool(count) for count in values[: len(flags)]]
        if check is not None:
            self.replicas_differ = bool(values.pop())
        if self._deferred is not None:
            self.loss = values.pop()
        self._deferred, self._has_read = None, True
        return [torch.tensor(value, dtype=norm.dtype) for value, norm in zip(values[len(flags) :], norms, strict=True)]

    def finish(self) -> None:
        """Read the rest of the step's numbers if the optimizer has not called `read`."""
        if not self._has_read:
            self.read()
        self._has_read = False
