"""Read a step's numbers on the host in one device copy: loss, gradient norms and all ranks' flags.

    reads.defer(loss)             # before the optimizer's step, which calls `read` with the norms
    reads.finish(); reads.loss, reads.any_rank

The host enqueues work for an accelerator, which runs behind it. Each number that the host reads makes it wait until all
queued work is done, and the device then idles until the host has enqueued more. Megatron-LM, torchtitan and DeepSpeed
read the loss, the norm, the overflow flag and the end-of-run flag one by one. Here they are read once, at the point
where the host must know whether to step at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups


class HostReads:
    """Numbers of the newest step. All ranks call its methods together."""

    loss: float
    """The loss that was deferred in the last step."""
    any_rank: list[bool]
    """For each flag of the last step, whether any rank set it; the same on every rank."""
    replicas_differ: bool
    """Result of `check`, once a step has read it."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.local_flags: Callable[[], Sequence[bool]] = tuple
        """Returns this rank's flags; the length is the same on all ranks. It is called once per step, before the host
        waits. A flag that is set later is read in the next step.
        """
        self.check: Callable[[], Tensor] | None = None
        """Returns the verdict of a comparison that an earlier step began, on the device and equal on all ranks. The
        next step reads it, once.
        """
        self._groups, self._device = groups, device
        self._deferred: Tensor | None = None
        self._has_read = False

    def defer(self, loss: Tensor) -> None:
        """Have the next step read this scalar."""
        self._deferred, self._has_read = loss, False

    def read(self, norms: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return scalars on the host, in their dtypes; read the step's loss, flags and check in the same copy."""
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
