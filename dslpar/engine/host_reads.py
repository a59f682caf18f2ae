"""What the host learns of a step: the loss, the gradient's norms and all ranks' flags, in one copy from the device.

    reads.defer(loss)             # before the optimizer's step, which calls `read` with the norms
    reads.finish(); reads.loss, reads.any_rank

An accelerator runs behind the host, which enqueues work for it. Each number that the host asks for makes it wait until
all of that is done, and leaves the device without work until the host has enqueued more. Megatron-LM, torchtitan and
DeepSpeed read the loss, the norm, the overflow and what ends a run one by one; here they are read once, where the host
must know whether to step at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups


class HostReads:
    """The numbers of one step after another. All ranks call its methods together."""

    loss: float
    """What was deferred for the last step."""
    any_rank: list[bool]
    """For each flag of the last step, whether any rank had set it: the same on every rank."""
    replicas_differ: bool
    """What `check` gave, where a step has read it."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.local_flags: Callable[[], Sequence[bool]] = tuple
        """Asked once a step, before the host waits; of one length on all ranks. What is set later, the next step
        tells."""
        self.check: Callable[[], Tensor] | None = None
        """Gives a verdict on the device, equal on all ranks, of a comparison that an earlier step has begun; the next
        step reads it, once."""
        self._groups, self._device = groups, device
        self._deferred: Tensor | None = None
        self._has_read = False

    def defer(self, loss: Tensor) -> None:
        """Have the step that follows read this scalar."""
        self._deferred, self._has_read = loss, False

    def read(self, norms: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return scalars on the host, in their dtypes; all else that the step is to tell is read with them."""
        flags = self.local_flags()
        counts = torch.zeros(len(flags), dtype=torch.float64, device=self._device)
        for index, flag in enumerate(flags):
            if flag:
                counts[index].fill_(1)  # a kernel: a tensor of the flags would be copied from the host, which waits
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
        """Read what is left, where the optimizer has told no norms."""
        if not self._has_read:
            self.read()
        self._has_read = False
