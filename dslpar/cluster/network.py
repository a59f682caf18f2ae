"""By which of its interfaces and addresses this machine reaches another; the kernel is asked, and nothing is sent.

    >>> source_towards("127.0.0.1"), interface_to("127.0.0.1")
    ('127.0.0.1', '')

gloo and NCCL need the name of an interface where a machine's own name means a loopback address, as Debian sets it up:
gloo would tell the others 127.0.0.1. Each machine looks for itself, since names of interfaces may differ.
"""

from __future__ import annotations

import contextlib
import os
import socket

_ANY_PORT = 9
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_OUTSIDE = "192.0.2.1"
"""An address for documentation (RFC 5737): as far away as any."""
_EPHEMERAL_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
_IANA_EPHEMERAL_PORT = 49152
_FIRST_PORT = 10_000
"""Well-known services listen below."""
_TRIES = 100


def source_towards(host: str) -> str:
    """Return the address of ours from which packets to `host` leave, so the one at which `host` can answer.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: the route is looked up, no packet leaves
        found: str = probe.getsockname()[0]
        return found


def interface_to(host: str) -> str:
    """Return the interface towards `host`; of an own address, the one that has it. Empty for a loopback address.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    return interface_of(source_towards(host))


def interface_outwards() -> str:
    """Return the interface towards other machines, whichever they are: the default route's, else the only one that has
    an address; empty where neither tells.
    """
    with contextlib.suppress(OSError):
        return interface_to(_OUTSIDE)
    names = [name for name, addresses in _addresses().items() if any("." in address for address in addresses)]
    return names[0] if len(names) == 1 else ""


def is_known(host: str) -> bool:
    """Whether this machine can turn the name into an address."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def interface_of(address: str) -> str:
    """Return the interface that has this address, unless it is the loopback; empty where none has it."""
    return next((name for name, addresses in _addresses().items() if address in addresses), "")


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface but the loopback."""
    import psutil  # not at the head: most commands that import this module need no interface, and start sooner

    found: dict[str, list[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is another address of eth0, which gloo and NCCL know by that name alone
        if name != "lo":
            # Without the scope of a link-local address (fe80::1%eth0): a socket's own address has none.
            addresses = [entry.address.partition("%")[0] for entry in entries if entry.family in _FAMILIES]
            found.setdefault(name, []).extend(addresses)
    return found


def is_here(host: str) -> bool:
    """Whether a host is this machine: it has the name, or the address. (That an address can be bound to says nothing
    where the kernel binds to any, as on hosts that keepalived or IPVS serve.)
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

    Ranks listen there seconds later, when they have imported torch. Meanwhile the kernel gives ephemeral ports to every
    connection of this machine, so one is taken below them: by chance, for two jobs that start at once.
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
    """Return the lowest port that the kernel gives away by itself."""
    try:
        with open(_EPHEMERAL_PORTS, encoding="ascii") as file:
            return int(file.read().split()[0])
    except FileNotFoundError:  # no Linux
        return _IANA_EPHEMERAL_PORT


def listen(port: int, backlog: int | None = None) -> socket.socket:
    """Open a server at this port of all addresses of this machine, as torch's store is; 0: a free one.

    Raises:
        OSError: somebody listens there.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel that was started without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def is_free(port: int) -> bool:
    """Whether a server could listen at this port of all interfaces."""
    with socket.socket() as probe:
        # As torch's store does: old connections are no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
