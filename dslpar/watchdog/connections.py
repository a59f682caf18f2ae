"""Connections of guards to each other and to `dslpar launch`: lines over non-blocking TCP, and a poller for them.

    connection = connect("10.0.0.1", 4711, Key(secret, "hub"), rank=3, fields=FROM_HUB, timeout_s=1)
    connection.send({"bye": True})
    for message in connection.receive(): ...

A guard is the watchdog process beside each rank, and the hub is rank 0's guard. Here rank 3's guard connects to it.
Each line is one message as JSON (guard_messages.py). guard_server.py has the other side of the handshake.
Each read takes at most _READ_BYTES, so that one connection cannot keep the others waiting. Bytes that cannot be sent
now are sent at a later `flush`.
"""

from __future__ import annotations

import contextlib
import resource
import select
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dslpar.watchdog import authentication, guard_messages
from dslpar.watchdog.authentication import STRANGER_BYTES, Answer, Key
from dslpar.watchdog.guard_messages import Fields, Message

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_READ_BYTES = 1 << 16
"""The most bytes that one call reads from a connection."""
_UNSENT_BYTES = 2 * guard_messages.MAX_BYTES
"""The most unsent bytes that may wait for a peer that reads nothing."""
NONSENSE = "an invalid message came"
"""The reason, in messages, for closing a connection whose other side breaks the protocol."""
_MAX_FILES = 1 << 16


class Connection:
    """An authenticated TCP connection between a guard and its server, which is the hub or `dslpar launch`.

    `rank`: the rank whose guard is the client, on both sides of the connection. `fields`: the fields that incoming
    messages may have. `received`: bytes that arrived during the handshake. The attribute `open` is True until the other
    side closes the connection or an error occurs.
    """

    def __init__(self, connection: socket.socket, rank: int, fields: Fields, received: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank, self.open, self.received_s = connection, rank, True, time.monotonic()
        self.sent_nonsense = False
        """Whether the connection was closed because the other side sent an invalid message."""
        self._fields = fields
        self._incoming, self._outgoing = bytearray(received), bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Queue a message, and send as much as the other side accepts now."""
        self._outgoing += guard_messages.encode(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of the queued messages as the other side accepts now."""
        try:
            while self.open and self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            self.open = len(self._outgoing) < _UNSENT_BYTES
        except OSError:
            self.open = False

    def receive(self) -> list[Message]:
        """Return messages that have arrived, from at most _READ_BYTES. An invalid line closes the connection."""
        try:
            data = self.socket.recv(_READ_BYTES) if self.open else b""
            self.open = bool(data)
            self.received_s = time.monotonic()
        except BlockingIOError:
            data = b""
        except OSError:
            data, self.open = b"", False
        self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        found: list[Message] = []
        for line in lines:
            if (message := guard_messages.decode(line, self._fields)) is None:
                self.open, self.sent_nonsense = False, True
                return found
            found.append(message)
        if len(self._incoming) > guard_messages.MAX_BYTES:
            self.open, self.sent_nonsense = False, True
        return found

    def finish(self, timeout_s: float = 1.0) -> None:
        """Wait until all queued messages are sent, at most `timeout_s`; then close."""
        deadline = time.monotonic() + timeout_s
        while self.open and self._outgoing and time.monotonic() < deadline:
            time.sleep(0.01)
            self.flush()
        self.close()

    def close(self) -> None:
        """Close both directions."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()


class Poller:
    """Calls callbacks when there is something to read: one thread serves all connections."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, file: FileDescriptorLike, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a file or connection can be read. A second callback for it replaces the first."""
        try:
            self._selector.register(file, selectors.EVENT_READ, callback)
        except KeyError:
            self._selector.modify(file, selectors.EVENT_READ, callback)

    def unwatch(self, file: FileDescriptorLike) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def drop(self, connection: Connection | Handshake | socket.socket) -> None:
        """Close a connection and stop watching it."""
        self.unwatch(connection)
        connection.close()

    def poll(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for something to read; call the callbacks of all files that no earlier one dropped."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        self._selector.close()


def raise_file_limit() -> None:
    """Raise the limit of open files, usually 1,024, so that each rank of a large job can connect."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(_MAX_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Handshake:
    """The client's side of the authentication of a connection (authentication.py).

    The caller calls `step` whenever bytes have arrived, and never waits: a server on a busy host may take seconds.
    """

    def __init__(self, connection: socket.socket, key: Key, rank: int, fields: Fields) -> None:
        connection.setblocking(False)
        self.socket, self._key, self._rank, self._fields = connection, key, rank, fields
        self.failed = False
        """Whether the authentication failed: the other side does not belong to the job, or is gone."""
        self._answer: Answer | None = None
        self._received = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def step(self) -> Connection | None:
        """Process the bytes that have arrived. Return the connection when both sides are authenticated."""
        try:
            data = self.socket.recv(STRANGER_BYTES)
            self._received += data
            self.failed = not data or (b"\n" not in self._received and len(self._received) > STRANGER_BYTES)
            while b"\n" in self._received and not self.failed:
                line, _, self._received = self._received.partition(b"\n")
                if self._answer is not None:
                    self.failed = line != self._answer.proof
                    return None if self.failed else self._connection()
                self._answer = authentication.answer(self._key, self._rank, line)
                self.failed = self._answer is None or not self.socket.send(self._answer.line)
        except BlockingIOError:
            pass
        except OSError:
            self.failed = True
        return None

    def complete(self, timeout_s: float) -> Connection | None:
        """Wait for all steps and return the connection; None if they fail or take longer than `timeout_s`."""
        deadline, poll = time.monotonic() + timeout_s, select.poll()
        poll.register(self, select.POLLIN)
        while not self.failed and (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * left_s) and (connection := self.step()) is not None:
                return connection
        return None

    def close(self) -> None:
        """Close the socket; the handshake fails."""
        self.socket.close()

    def _connection(self) -> Connection:
        return Connection(self.socket, self._rank, self._fields, self._received)


def dial(address: str, port: int, key: Key, *, rank: int, fields: Fields, timeout_s: float) -> Handshake | None:
    """Connect a guard to a server. Return the handshake, which the caller must complete; None if connecting fails.

    `rank`: the rank of this guard. `fields`: the fields that the server's messages may have.
    """
    try:
        return Handshake(socket.create_connection((address, port), timeout_s), key, rank, fields)
    except (OSError, OverflowError, UnicodeError):  # OverflowError: no such port; UnicodeError: no such name
        return None


def connect(address: str, port: int, key: Key, *, rank: int, fields: Fields, timeout_s: float) -> Connection | None:
    """Connect like `dial`, and complete the handshake, each within `timeout_s`; None if one of the two fails."""
    handshake = dial(address, port, key, rank=rank, fields=fields, timeout_s=timeout_s)
    connection = handshake.complete(timeout_s) if handshake else None
    if handshake and connection is None:
        handshake.close()
    return connection
