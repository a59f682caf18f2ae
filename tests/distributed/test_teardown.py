"""Teardown of a program's rank: groups are destroyed once the device is idle, and nothing waits forever."""

from __future__ import annotations

import time
from collections.abc import Callable

import deepspeed.accelerator
import pytest
import torch.distributed as dist

from dslpar.distributed import bootstrap
from tests.support.ranks import on_ranks


class Device:
    """An accelerator whose stream gives this answer."""

    def __init__(self, query: Callable[[], bool]) -> None:
        self.query = query

    def is_synchronized_device(self) -> bool:
        """Return CUDA's value."""
        return False

    def current_stream(self) -> Device:
        """Return its only stream."""
        return self


def _failed() -> bool:
    raise RuntimeError("CUDA error: device-side assert triggered")


DEVICES: dict[str, tuple[Callable[[], bool], bool]] = {
    # name: (the stream's answer, whether the groups are destroyed)
    "idle": (lambda: True, True),
    "soon idle": (iter([False, False, True]).__next__, True),
    "a collective whose peer never comes": (lambda: False, False),
    "failed": (_failed, False),
}


def _torn_down(name: str) -> tuple[bool, float]:
    """Return whether the groups are gone, and the seconds that it took."""
    device = Device(DEVICES[name][0])
    bootstrap._LAST_KERNELS_S = 0.5
    deepspeed.accelerator.get_accelerator = lambda: device
    began = time.monotonic()
    bootstrap.teardown_distributed(together=False)
    return not dist.is_initialized(), time.monotonic() - began


@pytest.mark.parametrize("name", DEVICES)
def test_a_rank_that_ends_by_itself_does_not_wait_for_ever(name: str) -> None:
    (found,) = on_ranks(1, _torn_down, name)
    gone, seconds = found
    assert gone == DEVICES[name][1]
    assert seconds < 60, "half a second is what it may wait"
