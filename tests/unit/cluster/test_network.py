"""Interfaces by their addresses, as psutil tells them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest

from dslpar.cluster import network


def told(*addresses: str) -> Sequence[object]:
    """Addresses of an interface; what has a colon is IPv6."""
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
