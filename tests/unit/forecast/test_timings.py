"""Timings: recover the constants behind the times, and keep those that no timing determines."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from dslpar.costs.work import Product, Work
from dslpar.forecast.constants import BOUNDS, DEFAULT, Constants
from dslpar.forecast.device import Device, device_hint, device_named, find_device
from dslpar.forecast.kernels import kernels_of, products_s
from dslpar.forecast.links import Group, Nodes, transfer
from dslpar.forecast.timings import Timed, TimedSum, Timings, constants_of

SIZES = [(rows, depth, 4096) for rows in (2048, 8192) for depth in (512, 1024, 4096, 8192)]
OTHER = replace(
    DEFAULT,
    product_efficiency=0.55,
    product_depth=900.0,
    link_efficiency=0.4,
    link_latency_s=40e-6,
    nic_efficiency=0.3,
    nic_latency_s=150e-6,
)


def products(device: Device, constants: Constants) -> tuple[Timed, ...]:
    found = []
    for size in SIZES:
        work = Work(products=(Product(*map(float, size)),))
        part = kernels_of(work, device, fused=True).forward[0]
        found.append(Timed(size, products_s([part], constants, device.tile[1] > 128)))
    return tuple(found)


def sums(device: Device, nodes: Nodes, constants: Constants, world_size: int) -> tuple[TimedSum, ...]:
    group = Group(world_size, min(world_size, nodes.per_node), 1.0)
    found = []
    for power in range(12, 29, 2):
        sent = 2 * (world_size - 1) / world_size * 2**power
        found.append(TimedSum(2**power, transfer("all_reduce", group, device, nodes, sent).seconds(constants)))
    return tuple(found)


def changed(constants: Constants) -> set[str]:
    return {item.name for item in fields(constants) if getattr(constants, item.name) != getattr(DEFAULT, item.name)}


@pytest.mark.parametrize("name", ["a100-80g", "h100-80g"])
def test_products_tell_their_efficiency(name: str) -> None:
    device = device_named(name)
    made = constants_of(Timings(products=products(device, OTHER)), device, Nodes.usual(device))
    assert changed(made) == {"product_efficiency", "product_depth"}
    assert made.product_efficiency == pytest.approx(OTHER.product_efficiency, rel=0.02)
    assert made.product_depth == pytest.approx(OTHER.product_depth, rel=0.05)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(8, ("link_efficiency", "link_latency_s")), (32, ("nic_efficiency", "nic_latency_s")), (1, ())],
)
def test_all_reduces_tell_of_the_slowest_link(world_size: int, names: tuple[str, ...]) -> None:
    device = device_named("a100-80g")
    nodes = Nodes.usual(device)
    timings = Timings(sums=sums(device, nodes, OTHER, world_size), world_size=world_size)
    made = constants_of(timings, device, nodes)
    assert changed(made) == set(names)
    for name in names:
        assert getattr(made, name) == pytest.approx(getattr(OTHER, name), rel=0.25 if "nic" in name else 0.03)


def test_no_timings_change_nothing() -> None:
    device = device_named("a100-80g")
    assert constants_of(Timings(), device, Nodes.usual(device)) == DEFAULT


def test_impossible_times_stay_within_bounds() -> None:
    device = device_named("a100-80g")
    fast = tuple(each._replace(seconds=each.seconds / 1000) for each in products(device, DEFAULT))
    made = constants_of(Timings(products=fast), device, Nodes.usual(device))
    low, high = BOUNDS["product_efficiency"]
    assert low <= made.product_efficiency <= high


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h200", "h200-141g"),
        ("H200-141G", "h200-141g"),
        ("a10", "a10-24g"),
        ("h100", None),  # of 80 or 96 GiB, or PCIe
        ("gh200", None),
        ("a100-80g", "a100-80g"),
        ("h", None),
        ("", None),
    ],
)
def test_a_family_with_one_device_stands_for_it(name: str, device: str | None) -> None:
    found = find_device(name)
    assert (found.name if found else None) == device


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "did you mean 'h100-80g'?"),
        ("A100", "did you mean 'a100-80g'?"),
        ("h200-140g", "did you mean 'h200-141g'?"),
        ("tpu", "choose one of h100-80g,"),
        ("", "choose one of h100-80g,"),
    ],
)
def test_what_was_meant_by_a_device(name: str, hint: str) -> None:
    assert device_hint(name).startswith(hint)
