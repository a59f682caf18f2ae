"""Host buffers: memory for a copy of a rank's tensors, reused from save to save.

    buffers = HostBuffers()
    chunks = buffers.copy([weight, exp_avg])     # bytes, one tensor behind the other: the next step may begin
    writer.write_file(path, chunks)              # by a thread; the next `copy` writes over them

The memory consists of equal blocks instead of one buffer per tensor. A copy of other tensors, or of more tensors, can
therefore reuse the same memory. The block size is a power of two, since torch's allocator of pinned memory rounds sizes
up to powers of two: a single buffer of 33 GB would take 64 GB. Pinned memory is kept from save to save, since pinning
costs more than copying (as in torchtitan's `async_with_pinned_mem`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

BLOCK_BYTES = 1 << 26


class HostBuffers:
    """Blocks of host memory of one rank. They hold one copy at a time; the next copy overwrites it.

    `pinned`: use page-locked memory, to which an accelerator can copy asynchronously.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return sum(block.numel() for block in self._blocks)

    def copy(self, tensors: Iterable[Tensor]) -> list[memoryview]:
        """Copy these tensors' bytes, in order, from any device; return the filled blocks.

        The copy is complete when this returns. It has the values after all device work that was enqueued before.
        """
        free, filled = self._free(), list[Tensor]()
        block, used = next(free), 0
        for tensor in tensors:
            # Bytes, since a block holds several dtypes. `contiguous` copies only a tensor with gaps.
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
            get_accelerator().synchronize()  # once; with pageable memory each copy waits by itself
        filled.append(block[:used])
        return [memoryview(block.numpy()) for block in filled]  # type: ignore[arg-type]

    def _free(self) -> Iterator[Tensor]:
        """Yield the existing blocks, and then new ones."""
        yield from self._blocks
        while True:
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.pinned))
            yield self._blocks[-1]
