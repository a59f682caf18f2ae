"""Connections between guards, and from them to `dslpar launch`: lines over TCP, without ever waiting.

    connection = connect("10.0.0.1", 4711, Key(secret, "hub"), rank=3, fields=FROM_HUB, timeout_s=1)
    connection.send({"bye": True})
    for message in connection.receive(): ...

Only as much is taken of a connection at a time as is read in milliseconds, so that none keeps the others waiting. What
cannot be sent now is sent later, at `flush`.
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

from dslpar.watchdog import authentication, messages
from dslpar.watchdog.authentication import STRANGER_BYTES, Answer, Key
from dslpar.watchdog.messages import Fields, Message

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_READ_BYTES = 1 << 16
"""Taken of a connection at a time."""
_UNSENT_BYTES = 2 * messages.MAX_BYTES
"""How much may wait for a peer that reads nothing."""
NONSENSE = "what came is not a message of ours"
_MAX_FILES = 1 << 16


class Connection:
    """An authenticated TCP connection to `rank`'s guard, or from it. It is `open` until the other side has closed it,
    or something went wrong.

    `fields`: of the messages that may come. `received`: what has come already.
    """

    def __init__(self, connection: socket.socket, rank: int, fields: Fields, received: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank, self.open, self.received_s = connection, rank, True, time.monotonic()
        self.sent_nonsense = False
        """Whether it was closed for a line that is no message."""
        self._fields = fields
        self._incoming, self._outgoing = bytearray(received), bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, as far as the other side takes it now."""
        self._outgoing += messages.encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left of earlier messages, as far as the other side takes it now."""
        try:
            while self.open and self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            self.open = len(self._outgoing) < _UNSENT_BYTES
        except OSError:
            self.open = False

    def receive(self) -> list[Message]:
        """Return messages that have come, though perhaps not all; a line that is none closes the connection."""
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
            if (message := messages.decode(line, self._fields)) is None:
                self.open, self.sent_nonsense = False, True
                return found
            found.append(message)
        if len(self._incoming) > messages.MAX_BYTES:
            self.open, self.sent_nonsense = False, True
        return found

    def finish(self, timeout_s: float = 1.0) -> None:
        """Wait until all is sent, and close."""
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
    """Calls back when there is something to read: one thread serves all connections."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, file: FileDescriptorLike, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a file, or connection, can be read; in place of an earlier callback of its."""
        try:
            self._selector.register(file, selectors.EVENT_READ, callback)
        except KeyError:
            self._selector.modify(file, selectors.EVENT_READ, callback)

    def unwatch(self, file: FileDescriptorLike) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def drop(self, connection: Connection | Handshake | socket.socket) -> None:
        """Close a connection, and watch it no longer."""
        self.unwatch(connection)
        connection.close()

    def poll(self, timeout_s: float) -> None:
        """Wait so long for something to read, and make the calls; none for what an earlier call has dropped."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        self._selector.close()


def raise_file_limit() -> None:
    """Let this process have a connection to each rank of a large job: the usual limit is 1,024 files."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(_MAX_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Handshake:
    """The client's side of an authentication, a step at a time: a server on a busy host may take seconds."""

    def __init__(self, connection: socket.socket, key: Key, rank: int, fields: Fields) -> None:
        connection.setblocking(False)
        self.socket, self._key, self._rank, self._fields = connection, key, rank, fields
        self.failed = False
        """Whether it came to nothing: the other side is somebody else, or is gone."""
        self._answer: Answer | None = None
        self._received = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def step(self) -> Connection | None:
        """Take what has come; return the connection when both sides are authenticated."""
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
        """Take all steps, waiting; None where that takes longer, or fails."""
        deadline, poll = time.monotonic() + timeout_s, select.poll()
        poll.register(self, select.POLLIN)
        while not self.failed and (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * left_s) and (connection := self.step()) is not None:
                return connection
        return None

    def close(self) -> None:
        """Give it up."""
        self.socket.close()

    def _connection(self) -> Connection:
        return Connection(self.socket, self._rank, self._fields, self._received)


def dial(address: str, port: int, key: Key, *, rank: int, fields: Fields, timeout_s: float) -> Handshake | None:
    """Connect; None where that fails. The handshake that begins then is for the caller to complete."""
    try:
        return Handshake(socket.create_connection((address, port), timeout_s), key, rank, fields)
    except (OSError, OverflowError, UnicodeError):  # the latter two: no such port, no such name
        return None


def connect(address: str, port: int, key: Key, *, rank: int, fields: Fields, timeout_s: float) -> Connection | None:
    """Connect, and complete the handshake, each within `timeout_s`; None where that fails."""
    handshake = dial(address, port, key, rank=rank, fields=fields, timeout_s=timeout_s)
    connection = handshake.complete(timeout_s) if handshake else None
    if handshake and connection is None:
        handshake.close()
    return connection
