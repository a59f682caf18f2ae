"""The micro-batches of the next step, made in a thread while this step computes.

    prefetcher = Prefetcher(make=lambda consumed: micro_batches(samples, ..., consumed, ...), step_size=global_size)
    engine.train_batch(prefetcher.step(consumed_samples))
    prefetcher.wait_s                                     # how long that step waited for them

torch's DataLoader prefetches with worker processes. A thread is enough here: what is slow is reading and decoding,
which let other threads run, and nothing is copied between processes. The order is what `make` gives for a position.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MicroBatches = list[tuple[Any, Any]]


class Prefetcher:
    """Steps of micro-batches by position; `make` gives those of the step that begins after so many samples.

    `step_size` are the samples of a step; none is made ahead that would begin at or after `end`.
    """

    def __init__(self, make: Callable[[int], Iterable[tuple[Any, Any]]], step_size: int, end: float = math.inf) -> None:
        self.make, self.step_size, self.end = make, step_size, end
        self.wait_s = 0.0
        """Seconds that the last step waited for its micro-batches."""
        self._next: _Step | None = None

    def step(self, consumed: int) -> Iterator[tuple[Any, Any]]:
        """Return the micro-batches of the step that begins after `consumed` samples.

        Raises:
            Exception: what making them raised, in the thread or here.
        """
        began = time.perf_counter()
        ahead, self._next = self._next, None
        # Another position than the next one: the run was resumed, or a program went back.
        batches = ahead.result() if ahead is not None and ahead.consumed == consumed else list(self.make(consumed))
        self.wait_s = time.perf_counter() - began
        if consumed + self.step_size < self.end:
            self._next = _Step(self.make, consumed + self.step_size)
            self._next.start()
        return iter(batches)

    def close(self) -> None:
        """Wait for the thread, whose result nobody will ask for."""
        if self._next is not None:
            self._next.join()
            self._next = None


class _Step(threading.Thread):
    """Makes one step's micro-batches."""

    def __init__(self, make: Callable[[int], Iterable[tuple[Any, Any]]], consumed: int) -> None:
        # A daemon: a disk that never answers must not keep a rank that has ended from ending.
        super().__init__(name="prefetch", daemon=True)
        self.make, self.consumed = make, consumed
        self._batches: MicroBatches = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make them; an error is kept for whoever asks for the result."""
        try:
            self._batches = list(self.make(self.consumed))
        except BaseException as error:  # noqa: BLE001  # raised by result(), in the step that it belongs to
            self._error = error

    def result(self) -> MicroBatches:
        """Wait, and return the micro-batches. Raises: what making them raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._batches
