"""Track live tensor memory and its peak: each storage once, as seen by a dispatch mode."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """A mode that tracks live storages while it is active; earlier storages must be passed to `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        """Peak of live bytes after an operation."""
        self.largest = 0
        """Bytes of the largest storage so far."""

    def watch(self, tensors: Iterable[Any]) -> None:
        """Count the storages of floating-point tensors while they are alive."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                known = self._alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())

    def bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Return live bytes, without those of some tensors."""
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            del self._alive[key]
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for key, (_, size) in self._alive.items() if key not in left_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(tree_leaves(result))
        self.peak = max(self.peak, self.bytes())
        return result


def watching() -> LiveStorages:
    """Return a mode that knows all tensors of this process."""
    live = LiveStorages()
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]  # a class may be deprecated
    live.watch(tensors)
    live.watch(each.grad for each in tensors if each.is_leaf and each.grad is not None)
    return live
