"""Reasons why ranks cannot access each other's memory, as far as they are known in advance."""

from __future__ import annotations

import pytest

from dslpar.distributed.symmetric_memory import ALLOW_SHARED, Place, why_apart

ALL = (0, 1, 2, 3)


def place(number: int, host: str = "a", reached: tuple[int, ...] = ALL, uuid: str = "", lacks: str = "") -> Place:
    return Place(host, number, uuid or f"{host}{number}", reached, lacks)


ALONE = (place(0, uuid="x", reached=(0,)), place(0, uuid="y", reached=(0,)))
CASES = {
    "all of a host": ([place(0), place(1), place(2)], ""),
    "one by one": ([place(3), place(0)], ""),
    "two hosts": ([place(0), place(1, "b")], "ranks 0 and 1 are on several hosts: a, b"),
    "no module": ([place(0), place(1, lacks="torch 2.4 has none")], "rank 1: torch 2.4 has none"),
    "not connected": ([place(0, reached=(0, 1)), place(1), place(2)], "on a, device 0 does not reach device 2"),
    "one device": ([place(0), place(0)], "ranks 0 and 1 share a device"),
    "each sees its own": (
        ALONE,
        "ranks 0 and 1 see only their own device, both as number 0: let each rank see all devices of its host, or set "
        f"{ALLOW_SHARED}=1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_why_ranks_are_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_SHARED, raising=False)
    places, expected = CASES[name]
    assert why_apart(range(len(places)), dict(enumerate(places))) == expected


def test_peers_are_ranks_of_the_world() -> None:
    places = {5: place(1), 7: place(1, "b"), 9: place(2)}
    assert why_apart((5, 9), places) == ""
    assert why_apart((5, 7, 9), places) == "ranks 5, 7 and 9 are on several hosts: a, b"


@pytest.mark.parametrize("name", ["one device", "each sees its own"])
def test_devices_of_one_number_are_left_to_torch_where_it_is_told_to_take_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_SHARED, "1")
    places, _ = CASES[name]
    assert why_apart(range(len(places)), dict(enumerate(places))) == ""
