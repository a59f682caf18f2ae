"""Network interfaces by address, as psutil lists them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest

from dslpar.cluster import network


def told(*addresses: str) -> Sequence[object]:
    """Return an interface's addresses; an address with a colon is IPv6."""
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    return [SimpleNamespace(family=family[":" in address], address=address) for address in addresses]


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"lo": told("127.0.0.1"), "eth0": told("10.0.0.1", "fe80::1%eth0"), "eth0:1": told("10.0.0.2")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(network, "interface_to", lambda host: (_ for _ in ()).throw(OSError("no route")))


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.2", "fe80::1"])
def test_an_address_is_its_interfaces_also_by_an_alias_and_without_a_scope(address: str) -> None:
    assert network.interface_of(address) == "eth0"


def test_the_loopback_and_others_addresses_have_no_interface() -> None:
    assert [network.interface_of(address) for address in ("127.0.0.1", "10.9.9.9")] == ["", ""]


def test_an_alias_is_no_second_interface() -> None:
    assert network.interface_outwards() == "eth0"


def test_a_free_port_is_one_that_the_kernel_gives_to_nobody_else() -> None:
    """Ranks listen on it after importing torch, which takes seconds; other connections start meanwhile."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_ephemeral = int(file.read().split()[0])
    ports = {network.free_port() for _ in range(20)}
    assert 10_000 <= min(ports) <= max(ports) < first_ephemeral
    assert len(ports) > 10, "two jobs that start at once take different ones"


@pytest.mark.parametrize("first_ephemeral", [1024, 10_001])
def test_where_all_ports_are_ephemeral_or_taken_the_kernel_gives_one(
    monkeypatch: pytest.MonkeyPatch, first_ephemeral: int
) -> None:
    monkeypatch.setattr(network, "_first_ephemeral_port", lambda: first_ephemeral)
    with socket.socket() as taken:
        if first_ephemeral > 10_000:
            taken.bind(("", 10_000))
            taken.listen()
        assert network.is_free(port := network.free_port())
        assert port > 10_000
