"""CPUs near a device, from sysfs, and binding a rank to them unless it is bound already."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dslpar.distributed import numa

DEVICE = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


def sysfs(folder: Path, online: str, nodes: dict[int, str], node_of_device: str | None) -> Path:
    """Make a tree as the kernel shows it."""
    files = {f"devices/system/node/node{number}/cpulist": cpus for number, cpus in nodes.items()}
    files["devices/system/cpu/online"] = online
    if node_of_device is not None:
        files["bus/pci/devices/0000:3b:00.0/numa_node"] = node_of_device
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return folder


@pytest.mark.parametrize(
    ("node", "beside"),
    [
        ("1", {4, 5, 6, 7, 12, 13}),
        ("0", {0, 1, 2, 3, 8}),
        ("-1", set()),  # a device on a host without NUMA
        (None, set()),  # a container without the device's folder
        ("7", set()),
    ],
)
def test_cpus_beside_a_device(tmp_path: Path, node: str | None, beside: set[int]) -> None:
    tree = sysfs(tmp_path, "0-8,12-13", {0: "0-3,8", 1: "4-7,12-13"}, node)
    assert numa.cpus_beside(DEVICE, tree) == beside


def test_one_node_is_no_choice(tmp_path: Path) -> None:
    assert not numa.cpus_beside(DEVICE, sysfs(tmp_path, "0-7", {0: "0-7"}, "0"))


def test_threads_are_those_that_a_rank_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [numa.num_threads(ranks) for ranks in (1, 2, 4, 32)] == [8, 8, 4, 1]


def test_a_rank_is_bound_unless_it_was(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this process may run on one CPU alone")
    first = min(before)
    others = ",".join(str(cpu) for cpu in before - {first})
    everywhere = ",".join(map(str, sorted(before)))
    try:
        tree = sysfs(tmp_path / "free", everywhere, {0: str(first), 1: others}, "0")
        assert numa.bind_to_node(DEVICE, tree) == {first}
        assert os.sched_getaffinity(0) == {first}
        tree = sysfs(tmp_path / "bound", everywhere, {0: str(first), 1: others}, "1")
        assert not numa.bind_to_node(DEVICE, tree), "bound by somebody, to one of all CPUs"
        assert os.sched_getaffinity(0) == {first}
    finally:
        os.sched_setaffinity(0, before)
