"""Messages between guards, and from them to `dslpar launch`: one line of JSON each, over TCP, without ever waiting.

    server = listen(loopback=False)
    line = Line(connect("10.0.0.1", 4711, timeout_s=1)); line.send({"hello": token})
    for message in line.receive(): ...

Whoever connects says a token first, or is not listened to. A line that cannot be sent now is sent later, at `flush`.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

Message = Mapping[str, Any]
_LONGEST = 16 << 20
"""Bytes of a line: the stacks of all threads of a rank take some tens of thousands."""
_MANY = 1 << 16


class Line:
    """A connection. It is `open` until the other side has closed it, or something went wrong."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.open, self.heard_s = connection, True, time.monotonic()
        self._came, self._goes = bytearray(), bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Now, as far as the other side takes it."""
        self._goes += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what is left of earlier messages, as far as the other side takes it."""
        try:
            while self.open and self._goes:
                del self._goes[: self.socket.send(self._goes)]
        except BlockingIOError:
            self.open = len(self._goes) < _LONGEST
        except OSError:
            self.open = False

    def receive(self) -> Iterator[Message]:
        """What has come; a line that is no JSON closes the connection."""
        try:
            while self.open and (some := self.socket.recv(1 << 16)):
                self._came += some
                self.heard_s = time.monotonic()
                self.open = len(self._came) < _LONGEST
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, rest = bytes(self._came).split(b"\n")
        self._came = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.open = False
                return
            yield message

    def last_words(self, timeout_s: float = 1.0) -> None:
        """Waits until all is sent, and closes."""
        ends = time.monotonic() + timeout_s
        while self.open and self._goes and time.monotonic() < ends:
            time.sleep(0.01)
            self.flush()
        self.close()

    def close(self) -> None:
        """Both ways."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()


def many() -> None:
    """Lets this process have a connection to each rank of a large job: the usual limit is 1,024 files."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if most == resource.RLIM_INFINITY else min(_MANY, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def listen(*, loopback: bool) -> socket.socket:
    """A server at a port that the system chooses, on this host alone or on all its addresses."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel that was started without IPv6
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def connect(address: str, port: int, timeout_s: float) -> socket.socket | None:
    """A connection, or None."""
    try:
        return socket.create_connection((address, port), timeout_s)
    except OSError:
        return None
