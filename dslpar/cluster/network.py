"""Network: this machine's interfaces, addresses and ports. The kernel looks routes up, and no packet is sent.

    >>> source_towards("127.0.0.1"), interface_to("127.0.0.1")
    ('127.0.0.1', '')

On Debian, for example, a machine's own name resolves to a loopback address. Then gloo and NCCL must be given the name
of an interface, because gloo would otherwise announce 127.0.0.1 to its peers. Each machine looks its own interface up,
since names may differ between machines.
"""

from __future__ import annotations

import contextlib
import os
import socket

_ANY_PORT = 9
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_OUTSIDE = "192.0.2.1"
"""An address for documentation (RFC 5737), which is on no local network."""
_EPHEMERAL_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
_IANA_EPHEMERAL_PORT = 49152
_FIRST_PORT = 10_000
"""The lowest port that `free_port` chooses. Well-known services listen below it."""
_TRIES = 100


def source_towards(host: str) -> str:
    """Return this machine's address from which packets to `host` leave, and at which `host` can answer.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # on a datagram socket this only looks the route up; no packet leaves
        found: str = probe.getsockname()[0]
        return found


def interface_to(host: str) -> str:
    """Return the interface towards `host`; empty for loopback. If `host` is this machine, return its own interface.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    return interface_of(source_towards(host))


def interface_outwards() -> str:
    """Return the interface towards other machines in general.

    This is the interface of the default route, or else the only interface with an IPv4 address. Empty if neither
    exists.
    """
    with contextlib.suppress(OSError):
        return interface_to(_OUTSIDE)
    names = [name for name, addresses in _addresses().items() if any("." in address for address in addresses)]
    return names[0] if len(names) == 1 else ""


def is_known(host: str) -> bool:
    """Return whether this machine can resolve the name to an address."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def interface_of(address: str) -> str:
    """Return the interface that has this address; empty if no interface except the loopback has it."""
    return next((name for name, addresses in _addresses().items() if address in addresses), "")


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface but the loopback."""
    import psutil  # imported here: most commands that import this module need no interface, and start faster

    found: dict[str, list[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0, the only name gloo and NCCL know
        if name != "lo":
            # Without the scope of a link-local address (fe80::1%eth0): a socket's own address has none.
            addresses = [entry.address.partition("%")[0] for entry in entries if entry.family in _FAMILIES]
            found.setdefault(name, []).extend(addresses)
    return found


def is_here(host: str) -> bool:
    """Return whether a host is this machine, by its name or its address.

    Binding to the address would be no test: on hosts with keepalived or IPVS the kernel may bind to any address.
    """
    mine = socket.gethostname()
    if host in ("localhost", mine, mine.partition(".")[0]):
        return True
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0])
        return address.startswith("127.") or address == "::1" or source_towards(address) == address
    return False


def free_port() -> int:
    """Return a port of this machine at which nobody listens now.

    Rank 0 listens at this port seconds later, when it has imported torch. Meanwhile the kernel gives ephemeral ports to
    this machine's connections, so the port is chosen below the ephemeral ones. It is random, since two jobs may start
    at the same time.
    """
    ports = range(_FIRST_PORT, _first_ephemeral_port())
    for _ in range(_TRIES if ports else 0):
        port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    """Return the lowest ephemeral port, which the kernel may assign to a connection."""
    try:
        with open(_EPHEMERAL_PORTS, encoding="ascii") as file:
            return int(file.read().split()[0])
    except FileNotFoundError:  # not Linux
        return _IANA_EPHEMERAL_PORT


def listen(port: int, backlog: int | None = None) -> socket.socket:
    """Open a server socket at a port (0: a free one) on all addresses of this machine, like torch's store.

    Raises:
        OSError: another server listens there.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel that was started without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def is_free(port: int) -> bool:
    """Return whether a server could listen at this port on all interfaces."""
    with socket.socket() as probe:
        # As in torch's store: closed connections that the kernel still remembers do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
