"""Count the work of an accelerator (kernels, collectives, waits) on a CPU, without an accelerator.

    with count_kernels() as counts: block(x).backward(...)
    with count_waits() as waits: engine.train_batch(batches)

Collectives are those of torch's fake process group. Kernels are operations of torch's dispatcher that compute or move
elements; views and allocations do not count. The host waits for the device when it reads a tensor's value, copies its
own value to the device without pinned memory, or calls `synchronize`. A value is the host's own if it was made only
from Python numbers or from other values of the host.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ALLOCATIONS = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
    "promote_types",
)
COPIES = ("clone", "copy_", "_to_copy", "contiguous", "cat", "stack")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
PICKS = ("gather", "scatter_", "scatter_add_")
"""Of the large tensor they touch as many elements as there are indices."""
PRODUCT_PREFIXES = ("_scaled_dot_product", "_flash_attention")


@dataclass
class Kernels:
    """Work that the device was asked to do."""

    kernels: int = 0
    layout_copies: int = 0
    """Kernels that move elements and compute nothing, but for changes of type."""
    num_bytes: int = 0
    """Read and written by all kernels, each of which reads its inputs and writes its outputs once."""
    collectives: int = 0
    exposed: int = 0
    """Collectives that are waited for with no product enqueued since they began."""
    by_name: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Kernels) -> Kernels:
        """Return what both asked for."""
        return Kernels(**{name: getattr(self, name) + getattr(other, name) for name in self.__dict__})

    def __sub__(self, before: Kernels) -> Kernels:
        """Return what was asked since `before`, a copy of these counts."""
        return Kernels(**{name: getattr(self, name) - getattr(before, name) for name in self.__dict__})


class _KernelMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Kernels()
        self._under_way: dict[int, tuple[object, int]] = {}
        """By id, what each collective not waited for is waited by, and how many products were enqueued when it began.

        Held, so that no other gets its id. A collective may be waited for in another linear than it was started in.
        """
        self._products = 0
        self._cast: Tensor | None = None
        """What the last operation has made, if that changed a type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name.rpartition("::")[2]
        if namespace in ("c10d", "_c10d_functional"):
            if name == "wait_tensor":
                self.wait(args[0])
            elif name != "barrier":
                self.counts.collectives += 1
                begun = _waited_by(result)
                self._under_way[id(begun)] = begun, self._products
                values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
                if not values.get("asyncOp", True):
                    self.wait(begun)
            return result
        if func.is_view or name in ALLOCATIONS:
            # An allocation's contents are what a collective that never runs leaves: zeros, not what was in memory.
            if name.startswith(("empty", "new_empty")) and isinstance(result, Tensor):
                result.zero_()
            return result
        inputs = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # which is the result
        tensors = [leaf for leaf in tree_flatten((args, inputs, result))[0] if isinstance(leaf, Tensor)]
        if result is None:  # as of fused optimizers, which write into what they were given
            tensors += _written(func, args)
        if not tensors:  # a question about the processor, a mark for a profiler
            return result
        if name in PICKS:
            tensors = [each for each in tensors if each.numel() <= args[2].numel()] * 2
        self.counts.kernels += 1
        self.counts.by_name[name] += 1
        self.counts.num_bytes += sum(map(_num_bytes, tensors))
        if name == "_softmax" and self._cast is not None and args[0] is self._cast:
            # Of float16 softmax(x, dtype=torch.float32) upcasts by a kernel of its own on a CPU alone; of bfloat16 on a
            # GPU too, as a profile of an H200 has shown.
            self.counts.kernels -= 1
            self.counts.num_bytes -= 2 * _num_bytes(self._cast)
        self._cast = result if name == "_to_copy" and args[0].dtype == torch.float16 else None
        if name in COPIES and len({each.dtype for each in tensors}) == 1:
            self.counts.layout_copies += 1
        self._products += name in PRODUCTS or name.startswith(PRODUCT_PREFIXES)
        return result

    def wait(self, begun: object) -> None:
        """The collective is waited for, by its Work or, a functional one, by its tensor; a second time is none."""
        _, products = self._under_way.pop(id(begun), (None, -1))
        self.counts.exposed += products == self._products


def _waited_by(result: Any) -> object:
    """Return the Work that a collective's operation has made, as Python gets it; of a functional one, its tensor."""
    leaves = tree_flatten(result)[0]
    boxed = next((leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)), None)
    return leaves[0] if boxed is None else Work.unbox(boxed)


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, Tensor)]


@contextmanager
def count_kernels() -> Iterator[Kernels]:
    """Count what is asked of the device within the context."""
    mode, work = _KernelMode(), cast("Any", FakeWork)
    original = work.wait

    def wait(self: Any, *args: Any) -> Any:
        mode.wait(self)
        return original(self, *args)

    work.wait = wait
    try:
        with mode:
            yield mode.counts
    finally:
        work.wait = original


# ---- waits of the host ----

CHECKS_OF_CPUS = "check_range"
"""Reads on a CPU; on an accelerator the device itself looks at the ids, and nobody waits."""
_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "is_nonzero", "nonzero")


@dataclass
class Waits:
    """Number of times that the host waited for the device, with the places in the code."""

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    """Of values of the host's own to the device."""
    synchronizations: list[str] = field(default_factory=list)


class _WaitMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits = Waits()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        on_host = all(getattr(each, "is_of_host", False) for each in tensors)
        to_device = kwargs.get("device") is not None or any(isinstance(each, torch.device) for each in args)
        to_device &= not _is_counter_of_steps()
        if name in _READS and tensors and not on_host and not _place_in(CHECKS_OF_CPUS):
            self.waits.reads.append(_place())
        if to_device and ((func is torch.tensor) or (tensors and on_host and name == "to")):
            self.waits.copies.append(_place())
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not to_device and (tensors or func is torch.tensor) and on_host:
            result.is_of_host = True  # type: ignore[attr-defined]
        return result


@contextmanager
def count_waits() -> Iterator[Waits]:
    """Count where the host waits for the device within the context."""
    mode, accelerator = _WaitMode(), get_accelerator()
    synchronize = accelerator.synchronize

    def counted(*args: Any, **kwargs: Any) -> Any:
        mode.waits.synchronizations.append(_place())
        return synchronize(*args, **kwargs)

    accelerator.synchronize = counted
    try:
        with mode:
            yield mode.waits
    finally:
        accelerator.synchronize = synchronize


def _is_counter_of_steps() -> bool:
    """Return whether a torch optimizer is running: its step counters are on the host, and their device shows it."""
    return "/torch/optim/" in sys._getframe(2).f_code.co_filename


def _place_in(function: str) -> bool:
    return any(frame.name == function for frame in traceback.extract_stack(limit=4))


def _place() -> str:
    """Return the line of code that is at work, of this project or of DeepSpeed."""
    for frame in reversed(traceback.extract_stack()):
        if "torch" not in frame.filename.split("/") and not frame.filename.endswith("device_counter.py"):
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
    return "?"
