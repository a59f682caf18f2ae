"""Prefetcher: a thread makes the micro-batches of the next step while this step computes.

    prefetcher = Prefetcher(make=lambda consumed: micro_batches(samples, ..., consumed, ...), step_size=global_size)
    engine.train_batch(prefetcher.step(consumed_samples))
    prefetcher.wait_s                                     # how long that step waited for them

torch's DataLoader prefetches with worker processes. A thread is enough here: reading and decoding take the time, and
they release the GIL. Nothing is copied between processes. `make` determines the order from the position. For an
accelerator the thread also pins the micro-batches, as torch's DataLoader does, so that copies to it are asynchronous.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

MicroBatches = list[tuple[Any, Any]]
Make = Callable[[int], Iterable[tuple[Any, Any]]]
"""Returns the micro-batches of the step after this number of samples."""
Pin = Callable[[MicroBatches], MicroBatches]
"""Copies micro-batches to pinned memory."""


class Prefetcher:
    """Prefetching source of micro-batches; `make(consumed)` returns those of the step after `consumed` samples.

    `step_size` is the number of samples per step. Steps that start at or after `end` are not prefetched. Prefetched
    micro-batches go through `pin` in the thread.
    """

    def __init__(self, make: Make, step_size: int, end: float = math.inf, pin: Pin | None = None) -> None:
        self.make, self.step_size, self.end, self.pin = make, step_size, end, pin
        self.wait_s = 0.0
        """Seconds for which the last step waited for its micro-batches."""
        self._next: _Step | None = None

    def step(self, consumed: int) -> MicroBatches:
        """Return the micro-batches of the step after `consumed` samples, as a list that must not be changed.

        Raises:
            Exception: `make` raised it, in the thread or here.
        """
        began = time.perf_counter()
        ahead, self._next = self._next, None
        # The position differs from the prefetched one if the run was resumed or a program went back.
        batches = ahead.result() if ahead is not None and ahead.consumed == consumed else list(self.make(consumed))
        self.wait_s = time.perf_counter() - began
        if consumed + self.step_size < self.end:
            self._next = _Step(self.make, consumed + self.step_size, self.pin)
            self._next.start()
        return batches

    def wait(self) -> None:
        """Wait until the next step's micro-batches are made, and no thread reads the data."""
        if self._next is not None:
            self._next.join()

    def close(self) -> None:
        """Wait for the thread, and discard its result."""
        if self._next is not None:
            self._next.join()
            self._next = None


class _Step(threading.Thread):
    """Thread that makes one step's micro-batches."""

    def __init__(self, make: Make, consumed: int, pin: Pin | None) -> None:
        # A daemon thread, since a disk that hangs must not keep the process from exiting.
        super().__init__(name="prefetch", daemon=True)
        self.make, self.consumed, self.pin = make, consumed, pin
        self._batches: MicroBatches = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the micro-batches; `result` raises the error, if there is one."""
        try:
            batches = list(self.make(self.consumed))
            self._batches = batches if self.pin is None else self.pin(batches)
        except BaseException as error:  # noqa: BLE001  # result() raises it, in the step to which it belongs
            self._error = error

    def result(self) -> MicroBatches:
        """Wait for the thread, and return the micro-batches. Raises: the exception of `make`."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._batches
