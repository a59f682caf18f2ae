"""Host memory that takes a copy of a rank's tensors at each save, and is kept from one save to the next.

    buffers = HostBuffers()
    chunks = buffers.copy([weight, exp_avg])     # bytes, one tensor behind the other: the next step may begin
    writer.write_file(path, chunks)              # by a thread; the next `copy` writes over them

Blocks, and not a buffer for each tensor: what a save copies may grow and be cut otherwise, and a file is written from
one end to the other anyhow. Their size is a power of two, since torch's allocator of pinned memory rounds up to one: a
single buffer of 33 GB would take 64. That pinned memory is kept is torchtitan's `async_with_pinned_mem`: to pin it
costs more than to copy into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

BLOCK_BYTES = 1 << 26


class HostBuffers:
    """The blocks of one rank. One copy is in them at a time: what was copied before is written over.

    `pinned`: whether an accelerator copies into them by itself, while the host goes on.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are set aside."""
        return sum(block.numel() for block in self._blocks)

    def copy(self, tensors: Iterable[Tensor]) -> list[memoryview]:
        """Copy these tensors' bytes, in their order, from any device; return them, in blocks.

        The copy is complete when this returns: what was enqueued before is in it, and what is enqueued after is not.
        """
        free, filled = self._free(), list[Tensor]()
        block, used = next(free), 0
        for tensor in tensors:
            # Bytes, since dtypes follow each other within a block. Nothing but a tensor with gaps is copied for it.
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            done = 0
            while done < data.numel():
                if used == block.numel():
                    filled.append(block)
                    block, used = next(free), 0
                count = min(data.numel() - done, block.numel() - used)
                block[used : used + count].copy_(data[done : done + count], non_blocking=True)
                done, used = done + count, used + count
        if self.pinned:
            get_accelerator().synchronize()  # once: pageable memory would make each copy wait
        filled.append(block[:used])
        return [memoryview(block.numpy()) for block in filled]  # type: ignore[arg-type]

    def _free(self) -> Iterator[Tensor]:
        """Yield the blocks that there are, and then new ones."""
        yield from self._blocks
        while True:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.pinned))
            yield self._blocks[-1]
