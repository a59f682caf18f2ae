"""One gloo device per process: its thread starts once for any number of groups, and all groups work."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.gloo_threads import share_device
from dslpar.distributed.groups import Groups
from tests.support.ranks import on_ranks


def threads(name: str) -> int:
    """Count this process's threads with this name prefix, once names no longer change: a thread names itself."""
    seen, since = list[str](), time.monotonic()
    while time.monotonic() < since + 0.3:
        with suppress(OSError):  # a thread has ended in between
            names = sorted(comm.read_text() for comm in Path("/proc/self/task").glob("*/comm"))
            if names != seen:
                seen, since = names, time.monotonic()
        time.sleep(0.01)
    return sum(each.startswith(name) for each in seen)


def many_groups(rank: int) -> tuple[int, int, list[float]]:
    groups = Groups(Mesh(tensor=TensorMesh(q=2, y=2, mode="2d", residual="hidden")))
    others = [dist.new_group([0, 1, 2, 3]) for _ in range(3)]
    sums = []
    for axis in ("tensor", "q", "y"):
        sums.append(collectives.all_reduce(torch.tensor([float(rank)]), groups.axis(axis)).item())
    peers = (0, 1, 2, 3)
    sums += [collectives.all_reduce(torch.ones(1), Axis(4, rank, peers, group)).item() for group in others]
    return threads("gloo_tcp_loop"), threads("pt_gloo_runloop"), sums


def test_all_groups_of_a_process_share_one_thread_for_sockets() -> None:
    found = on_ranks(4, lambda: many_groups(dist.get_rank()))
    for rank, (loops, runners, sums) in enumerate(found):
        assert loops == 1
        assert runners >= 2 * 7, "those that run a group's collectives are its own"
        q, y = divmod(rank, 2)
        assert sums == [6.0, 2.0 * y + 2.0, 4.0 * q + 1.0, 4.0, 4.0, 4.0]


def before_and_after() -> tuple[bool, bool, list[int]]:
    """Make a world by torch alone, then groups on a gloo device, and a second world on the same device."""
    distributed_c10d.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo.__mro__[1]  # type: ignore[attr-defined, misc]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    counts = [threads("gloo_tcp_loop")]
    share_device()
    share_device()
    of_before = isinstance(world, distributed_c10d.ProcessGroupGloo)
    made = dist.new_group([0])._get_backend(torch.device("cpu"))
    dist.new_group([0])
    counts.append(threads("gloo_tcp_loop"))
    dist.destroy_process_group()
    del world
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counts.append(threads("gloo_tcp_loop"))
    return of_before, isinstance(made, distributed_c10d.ProcessGroupGloo), counts


def of_a_subclass() -> list[bool]:
    share_device()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shared = distributed_c10d.ProcessGroupGloo
    own = type("Own", (shared,), {})
    store = dist.HashStore()
    made = [shared(store, 0, 1), own(dist.PrefixStore("own", store), 0, 1, timedelta(seconds=9))]
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    made.append(shared(dist.PrefixStore("options", store), 0, 1, options))
    return [isinstance(each, own) for each in made]


def test_it_is_made_and_asked_as_torch_s_own() -> None:
    """With a time-out, without, and with options, whose devices are the caller's."""
    assert on_ranks(1, of_a_subclass, init=None) == [[False, True, False]]


def test_a_group_from_before_is_still_one_of_gloo_s() -> None:
    share_device()
    assert on_ranks(1, before_and_after, init=None) == [(True, True, [1, 2, 1])]


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_interfaces_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch, interfaces: str) -> None:
    """There are as many devices as torch would open, and two threads each for a group's collectives."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    count = len(interfaces.split(","))
    for loops, runners, sums in on_ranks(4, lambda: many_groups(dist.get_rank())):
        assert loops == count
        assert runners >= 2 * count * 7
        assert sums[-1] == 4.0


def policies() -> list[int]:
    """Return the Linux scheduling policies of all threads of this process."""
    dist.all_reduce(torch.ones(1))  # noqa: TID251  # not ours is looked at, but gloo's threads
    return [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="of Linux alone")
def test_threads_of_ranks_are_not_preempted_by_those_that_wake() -> None:
    for of_rank in on_ranks(2, policies):
        assert set(of_rank) == {os.SCHED_BATCH}
        assert len(of_rank) > 3
