"""ColossalAI's timers: named stopwatches with a history. They wait for the device, so that they time its work too.

timer = MultiTimer()
timer.start("step"); ...; timer.stop("step", keep_in_history=True)
timer.get_timer("step").get_history_mean()
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from deepspeed.accelerator import get_accelerator


def synchronize() -> None:
    """Wait until the device has done all work so far."""
    get_accelerator().synchronize()


class Timer:
    """A stopwatch; times are in seconds."""

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._elapsed, self._history = 0.0, list[float]()

    @property
    def has_history(self) -> bool:
        """True if a time was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """Seconds since the epoch, after waiting for the device."""
        synchronize()
        return time.time()

    def start(self) -> None:
        """Start anew."""
        self._elapsed, self._started_at = 0.0, self.current_time

    def lap(self) -> float:
        """Return the time since the start, without stopping."""
        return self.current_time - self._begin("lap")

    def stop(self, keep_in_history: bool = False) -> float:
        """Stop, and return the time since the start."""
        self._elapsed, self._started_at = self.current_time - self._begin("stop"), None
        self._history += [self._elapsed] if keep_in_history else []
        return self._elapsed

    def _begin(self, call: str) -> float:
        if self._started_at is None:
            raise RuntimeError(f"{call}() of a timer that was not started: call start() before")
        return self._started_at

    def get_history_mean(self) -> float:
        """Return the mean of the times that were kept."""
        if not self._history:
            raise RuntimeError("the timer has no history: call stop(keep_in_history=True)")
        return self.get_history_sum() / len(self._history)

    def get_history_sum(self) -> float:
        """Return the sum of the times that were kept."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """Return the last time between start and stop."""
        if self._started_at is not None:
            raise RuntimeError("the timer is running: call stop() before")
        return self._elapsed

    def reset(self) -> None:
        """Forget all times."""
        self.__init__()  # type: ignore[misc]

    def drop_first(self, number: int) -> None:
        """Forget the first times of the history, such as those of a warm-up."""
        del self._history[:number]


class MultiTimer:
    """Timers by name; switched off, it does nothing."""

    def __init__(self, on: bool = True) -> None:
        self._on, self._timers = on, dict[str, Timer]()

    def start(self, name: str) -> None:
        """Start a timer, and make it if there is none."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stop a timer, and return its time."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Return a timer that was started."""
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset a timer; default: all."""
        if self._on:
            for timer in self._timers.values() if name is None else [self._timers[name]]:
                timer.reset()

    def is_on(self) -> bool:
        """Return whether it is switched on."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Switch it on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()
