"""The micro-batches of the next step, made in a thread while this step computes.

    prefetcher = Prefetcher(make=lambda consumed: micro_batches(samples, ..., consumed, ...), step_size=global_size)
    engine.train_batch(prefetcher.step(consumed_samples))
    prefetcher.wait_s                                     # how long that step waited for them

torch's DataLoader prefetches with worker processes. A thread is enough here: what is slow is reading and decoding,
which let other threads run, and nothing is copied between processes. The order is what `make` gives for a position.
For an accelerator the thread also pins them, as torch's does, so that their copies to it wait for nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

MicroBatches = list[tuple[Any, Any]]
Make = Callable[[int], Iterable[tuple[Any, Any]]]
Pin = Callable[[MicroBatches], MicroBatches]


class Prefetcher:
    """Steps of micro-batches by position; `make` gives those of the step that begins after so many samples.

    `step_size` are the samples of a step; none is made ahead that would begin at or after `end`. What is made ahead
    goes through `pin`, in the thread.
    """

    def __init__(self, make: Make, step_size: int, end: float = math.inf, pin: Pin | None = None) -> None:
        self.make, self.step_size, self.end, self.pin = make, step_size, end, pin
        self.wait_s = 0.0
        """Seconds that the last step waited for its micro-batches."""
        self._next: _Step | None = None

    def step(self, consumed: int) -> MicroBatches:
        """Return the micro-batches of the step that begins after `consumed` samples: a list, which nobody writes to.

        Raises:
            Exception: what making them raised, in the thread or here.
        """
        began = time.perf_counter()
        ahead, self._next = self._next, None
        # Another position than the next one: the run was resumed, or a program went back.
        batches = ahead.result() if ahead is not None and ahead.consumed == consumed else list(self.make(consumed))
        self.wait_s = time.perf_counter() - began
        if consumed + self.step_size < self.end:
            self._next = _Step(self.make, consumed + self.step_size, self.pin)
            self._next.start()
        return batches

    def close(self) -> None:
        """Wait for the thread, whose result nobody will ask for."""
        if self._next is not None:
            self._next.join()
            self._next = None


class _Step(threading.Thread):
    """Makes one step's micro-batches."""

    def __init__(self, make: Make, consumed: int, pin: Pin | None) -> None:
        # A daemon: a disk that never answers must not keep a rank that has ended from ending.
        super().__init__(name="prefetch", daemon=True)
        self.make, self.consumed, self.pin = make, consumed, pin
        self._batches: MicroBatches = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make them; an error is kept for whoever asks for the result."""
        try:
            batches = list(self.make(self.consumed))
            self._batches = batches if self.pin is None else self.pin(batches)
        except BaseException as error:  # noqa: BLE001  # raised by result(), in the step that it belongs to
            self._error = error

    def result(self) -> MicroBatches:
        """Wait, and return the micro-batches. Raises: what making them raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._batches
