"""Server for guards' connections: a guard is the process beside each rank; the hub is rank 0's guard.

The hub and `dslpar launch` run such a server. All other guards connect to the hub, and guards on other hosts than
`dslpar launch` connect to it too.

    server = Server(poller, Key(secret, "hub"), range(1, 8), TO_HUB, on_join, on_stranger, loopback=False)
    poller.poll(0.1); server.maintain()             # again and again
    server.connections[3].send({"show": True})      # to rank 3's guard, once it has joined

Each client must first authenticate itself (authentication.py), and is called a stranger until then. The number of
strangers is limited: if there are too many, the oldest is disconnected. A stranger has STRANGER_S to authenticate
itself. Afterwards each rank's guard has one connection, and a new one replaces it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial

from dslpar.cluster import network
from dslpar.watchdog import authentication
from dslpar.watchdog.authentication import STRANGER_BYTES, STRANGER_S, Key
from dslpar.watchdog.connections import Connection, Poller
from dslpar.watchdog.guard_messages import Fields

_MAX_STRANGERS = 64
"""The limit of strangers is this plus the number of ranks, because all ranks' guards may connect at once."""
_MAX_ACCEPTED = 16
"""The most connections that one call of `_accept` accepts."""


class _Stranger:
    """A client that is not authenticated yet."""

    def __init__(self, connection: socket.socket, address: str, now: float) -> None:
        self.socket, self.address, self.since_s = connection, address, now
        self.nonce, self.said = authentication.new_secret(), b""


class Server:
    """Accepts and authenticates guards' connections, whenever the poller is polled.

    `key`: the job's secret. `ranks`: the ranks whose guards may connect. `fields`: the fields that their messages may
    have. `on_join` is called with each authenticated connection. `on_stranger` is called once, with the address of the
    first client that sent a wrong answer. `port`: 0 for any free port.
    """

    def __init__(
        self,
        poller: Poller,
        key: Key,
        ranks: range,
        fields: Fields,
        on_join: Callable[[Connection], None],
        on_stranger: Callable[[str], None],
        *,
        loopback: bool,
        port: int = 0,
    ) -> None:
        self.connections: dict[int, Connection] = {}
        """Connections by rank, including closed ones."""
        self._poller, self._key, self._ranks, self._fields = poller, key, ranks, fields
        self._on_join, self._on_stranger = on_join, on_stranger
        self._strangers: dict[socket.socket, _Stranger] = {}
        """Strangers, the oldest first."""
        self._told_stranger = False
        self._socket = _listen(port, loopback=loopback)
        self._poller.watch(self._socket, self._accept)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Close the server and all connections."""
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        for connection in self.connections.values():
            self._poller.drop(connection)
        self._poller.drop(self._socket)

    def maintain(self) -> None:
        """Disconnect strangers whose time is up, and accept connections again. Call this after each poll."""
        now = time.monotonic()
        for file in [file for file, one in self._strangers.items() if now - one.since_s > STRANGER_S]:
            self._dismiss(file)
        self._poller.watch(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                file, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # for example, no file descriptors are left: accept none until the next `maintain`
                self._dismiss_oldest()
                self._poller.unwatch(self._socket)
                return
            if len(self._strangers) >= _MAX_STRANGERS + len(self._ranks):
                self._dismiss_oldest()
            self._greet(file, str(address[0]))

    def _greet(self, file: socket.socket, address: str) -> None:
        stranger = _Stranger(file, address.removeprefix("::ffff:"), time.monotonic())
        self._strangers[file] = stranger
        file.setblocking(False)
        self._poller.watch(file, partial(self._hear, stranger))
        with contextlib.suppress(OSError):
            file.send(authentication.greeting(stranger.nonce))

    def _hear(self, stranger: _Stranger) -> None:
        """Read a stranger's answer, up to the end of a line."""
        try:
            data = stranger.socket.recv(STRANGER_BYTES - len(stranger.said))
        except OSError:
            data = b""
        stranger.said += data
        line, ends, rest = stranger.said.partition(b"\n")
        if not data and not ends:
            self._dismiss(stranger.socket)
        elif ends or len(stranger.said) >= STRANGER_BYTES:
            verified = authentication.verify(self._key, stranger.nonce, line) if ends and not rest else None
            if verified is not None and verified[0] in self._ranks:
                self._admit(stranger, *verified)
            else:
                self._dismiss(stranger.socket)
                if not self._told_stranger:
                    self._told_stranger = True
                    self._on_stranger(stranger.address)

    def _admit(self, stranger: _Stranger, rank: int, proof: bytes) -> None:
        del self._strangers[stranger.socket]
        self._poller.unwatch(stranger.socket)
        with contextlib.suppress(OSError):
            stranger.socket.send(proof)
        if (old := self.connections.get(rank)) is not None:  # the guard has lost that connection, or was replaced
            self._poller.drop(old)
        self.connections[rank] = connection = Connection(stranger.socket, rank, self._fields)
        self._on_join(connection)

    def _dismiss(self, file: socket.socket) -> None:
        del self._strangers[file]
        self._poller.drop(file)

    def _dismiss_oldest(self) -> None:
        if self._strangers:
            self._dismiss(next(iter(self._strangers)))


def _listen(port: int, *, loopback: bool) -> socket.socket:
    """Open a server at a port (0: the system chooses one), at the loopback address or at all addresses of this host."""
    backlog = 1024  # all guards of a large job connect within a second, and the default queue holds only 128
    local = ("127.0.0.1", port)
    server = socket.create_server(local, backlog=backlog) if loopback else network.listen(port, backlog=backlog)
    server.setblocking(False)
    return server
