"""The guards of a job among themselves: rank 0's is the hub, to which all others connect once their ranks have met."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from dslpar.watchdog import protocol
from dslpar.watchdog.protocol import Connection, Message, Poller
from dslpar.watchdog.status_page import Progress

SILENCE_S = 6.0
"""After which a host is taken for gone; beats come once a second."""
BEAT_S = 1.0


class Peer:
    """Another rank's guard, as the hub knows it."""

    def __init__(self, connection: Connection, rank: int, host: str, now: float) -> None:
        self.connection, self.rank, self.host, self.received_s = connection, rank, host, now
        self.progress, self.left = Progress(), False
        self.stacks: str | None = None


class Hub:
    """Rank 0's side. `greet`: the message that answers a guard's hello; `handle`: what a guard's message asks for."""

    def __init__(
        self, poller: Poller, token: str, greet: Callable[[], Message], handle: Callable[[Message], None]
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self._poller, self._token, self._greet, self._handle = poller, token, greet, handle

    def listen(self, *, loopback: bool) -> int:
        """Open the server; return its port."""
        port: int = self._poller.serve(self._receive_hello, loopback=loopback).getsockname()[1]
        return port

    def broadcast(self, message: Message) -> None:
        """Send a message to all guards."""
        for peer in self.peers.values():
            peer.connection.send(message)

    def silent_host(self, now: float) -> str:
        """Return the host of the peer that has been silent for longest, if that is too long; else empty."""
        late = [peer for peer in self.peers.values() if not peer.left and now - peer.received_s > SILENCE_S]
        return min(late, key=lambda peer: peer.received_s).host if late else ""

    def _receive_hello(self, connection: Connection) -> None:
        """The first message must hold the token; a guard may have sent more by then, and have gone."""
        messages = list(connection.receive())
        if messages and messages[0].get("hello") == self._token:
            peer = self._welcome(connection, messages[0])
            self._receive(peer, messages[1:])
        elif messages or not connection.open:
            self._poller.drop(connection)

    def _welcome(self, connection: Connection, hello: Message) -> Peer:
        peer = Peer(connection, hello["rank"], hello["host"], time.monotonic())
        peer.progress = Progress(*hello["at"])
        if (old := self.peers.get(peer.rank)) is not None:  # it has lost its connection, and is here again
            self._poller.drop(old.connection)
        self.peers[peer.rank] = peer
        self._poller.watch(connection, lambda: self._receive(peer, list(connection.receive())))
        connection.send(self._greet())
        return peer

    def _receive(self, peer: Peer, messages: list[Message]) -> None:
        for message in messages:
            peer.received_s = time.monotonic()
            peer.progress = Progress(*message.get("at", peer.progress))
            peer.left |= "bye" in message
            peer.stacks = message.get("stacks", peer.stacks)
            self._handle(message)
        if not peer.connection.open:  # it may come again; if not, its silence tells
            self._poller.drop(peer.connection)


class HubLink:
    """The other ranks' side: the connection to rank 0's guard, made again where it is lost."""

    def __init__(self, poller: Poller, handle: Callable[[Message], None]) -> None:
        self.connection: Connection | None = None
        self.received_s = 0.0
        """0: never."""
        self.tried_s = self.wanted_s = 0.0
        """When it was last tried to connect, and first."""
        self.unreachable = False
        """Whether it was given up, but for a try now and then."""
        self.left = False
        self.progress, self.name, self.host = Progress(), "", ""
        self._poller, self._handle = poller, handle

    def connect(self, hub: str, hello: Message, now: float) -> None:
        """Connect to `hub`, address:port:token, if that is needed and was not tried just now."""
        is_open = self.connection is not None and self.connection.open
        pause_s = SILENCE_S if self.unreachable else BEAT_S
        if self.left or is_open or not hub or now - self.tried_s < pause_s:
            return
        self.tried_s, self.wanted_s = now, self.wanted_s or now
        address, port, token = hub.rsplit(":", 2)
        if (connection := protocol.connect(address, int(port), BEAT_S)) is not None:
            self.connection = connection
            self._poller.watch(connection, partial(self._receive, connection))
            connection.send({"hello": token, **hello})

    def is_silent(self, now: float) -> bool:
        """Whether the hub was met, has not left, and says nothing any more."""
        return bool(self.received_s) and not self.left and now - self.received_s > SILENCE_S

    def was_never_met(self, now: float) -> bool:
        """Whether the hub could not be reached for as long, ever."""
        return not self.received_s and bool(self.wanted_s) and now - self.wanted_s > SILENCE_S

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            self.received_s = time.monotonic()
            self.progress = Progress(*message.get("at", self.progress))
            self.name, self.host = message.get("who", self.name), message.get("host", self.host)
            self.left |= "bye" in message
            self._handle(message)
        if not connection.open:
            self._poller.drop(connection)
