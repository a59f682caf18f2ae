"""Send tensors of any shapes to one rank, which knows nothing of them: a header goes before them.

That a header says dtypes and shapes is how DeepSpeed's pipeline sends what it has not sent before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.distributed.collectives import Axis

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_HEADER = 64
"""Numbers of a header, which says what `send` sends: how many tensors, and of each its dtype and shape."""


def send(values: Sequence[Tensor], axis: Axis, target: int) -> None:
    """Send tensors of any shapes to the axis's `target`-th rank, which calls `receive`."""
    header = [len(values)]
    for value in values:
        header += [_DTYPES.index(value.dtype), value.dim(), *value.shape]
    padded = torch.tensor(header + [0] * (_HEADER - len(header)), device=values[0].device)
    for value in (padded, *values):
        dist.send(value.contiguous(), axis.peers[target], group=axis.group)


def receive(axis: Axis, source: int, device: torch.device) -> list[Tensor]:
    """Receive what the axis's `source`-th rank sends."""
    padded = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(padded, axis.peers[source], group=axis.group)
    num_tensors, *numbers = padded.tolist()
    received = []
    for _ in range(num_tensors):
        dtype, dims, *numbers = numbers
        value = torch.empty(numbers[:dims], dtype=_DTYPES[dtype], device=device)
        dist.recv(value, axis.peers[source], group=axis.group)
        received.append(value)
        numbers = numbers[dims:]
    return received
