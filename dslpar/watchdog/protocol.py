"""Messages between guards, and from them to `dslpar launch`: one line of JSON each, over TCP, without ever waiting.

    server = listen(loopback=False)
    connection = connect("10.0.0.1", 4711, timeout_s=1); connection.send({"hello": token})
    for message in connection.receive(): ...

Whoever connects sends a token first, or is not listened to. What cannot be sent now is sent later, at `flush`.

    guard to hub        hello (token), rank, who, host, at | at | failed | stuck (reason) | stacks, at | bye
    hub to guard        who, host, at | at | end, host_lost | show | bye
    guard to launch     hello (token), rank | at | mark (name), text
    launch to guard     stop (signal)

`at` is the beat: location, phase and step of the sender's rank.
"""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dslpar.cluster import network

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Message = Mapping[str, Any]
_MAX_BYTES = 16 << 20
"""Of a message: the stacks of all threads of a rank take some tens of thousands."""
_MAX_FILES = 1 << 16


class Connection:
    """A TCP connection. It is `open` until the other side has closed it, or something went wrong."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.open, self.received_s = connection, True, time.monotonic()
        self._incoming, self._outgoing = bytearray(), bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, as far as the other side takes it now."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left of earlier messages, as far as the other side takes it now."""
        try:
            while self.open and self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            self.open = len(self._outgoing) < _MAX_BYTES
        except OSError:
            self.open = False

    def receive(self) -> Iterator[Message]:
        """Return the messages that have come; a line that is no JSON closes the connection."""
        try:
            while self.open and (data := self.socket.recv(1 << 16)):
                self._incoming += data
                self.received_s = time.monotonic()
                self.open = len(self._incoming) < _MAX_BYTES
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.open = False
                return
            yield message

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

    def serve(self, receive: Callable[[Connection], None], *, loopback: bool) -> socket.socket:
        """Open a server, and call `receive` whenever somebody who has connected to it can be read."""
        server = listen(loopback=loopback)

        def accept() -> None:
            with contextlib.suppress(OSError):
                connection = Connection(server.accept()[0])
                self.watch(connection, partial(receive, connection))

        self.watch(server, accept)
        return server

    def unwatch(self, file: FileDescriptorLike) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def drop(self, connection: Connection) -> None:
        """Close a connection, and watch it no longer."""
        self.unwatch(connection)
        connection.close()

    def poll(self, timeout_s: float) -> None:
        """Wait so long for something to read, and make the calls."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def close(self) -> None:
        self._selector.close()


def raise_file_limit() -> None:
    """Let this process have a connection to each rank of a large job: the usual limit is 1,024 files."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(_MAX_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def listen(*, loopback: bool) -> socket.socket:
    """Open a server at a port that the system chooses, on this host alone or on all its addresses."""
    # All guards of a large job connect within a second: the default queue holds 128.
    server = socket.create_server(("127.0.0.1", 0), backlog=1024) if loopback else network.listen(0, backlog=1024)
    server.setblocking(False)
    return server


def connect(address: str, port: int, timeout_s: float) -> Connection | None:
    """Connect; None where that fails."""
    try:
        return Connection(socket.create_connection((address, port), timeout_s))
    except OSError:
        return None
