"""Links between a job's guards, and from each guard to `dslpar launch` on another host.

Rank 0's guard is the hub (guard.py). All other guards connect to it once the ranks are connected. `Hub` is the hub's
side of these connections, `HubLink` is the other guards' side, and `LaunchLink` is a guard's side of its connection to
`dslpar launch`. Protocol and messages: connections.py, guard_messages.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

from dslpar.watchdog import connections, guard_messages
from dslpar.watchdog.authentication import Key
from dslpar.watchdog.connections import Connection, Handshake, Poller
from dslpar.watchdog.guard_messages import Message
from dslpar.watchdog.guard_server import Server
from dslpar.watchdog.status_page import Progress

SILENCE_S = 6.0
"""Time without a message after which a host counts as gone. Guards send a beat every BEAT_S."""
BEAT_S = 1.0
HELD_BACK_S = SILENCE_S + BEAT_S
"""Time for which a guard waits for a better cause before it reports an abort of its rank.

NCCL's watchdog aborts ranks that lost a peer, so the cause may be a lost host. The hub reports a lost host SILENCE_S
after its last beat, and the abort comes after that beat. BEAT_S is added for messages under way.
"""
_HUB = re.compile(r"(.+):(\d{1,5}):([0-9a-f]*)")
HUB, LAUNCH = "hub", "launch"
"""The two services that a guard may connect to with the job's secret (authentication.py)."""


class Peer:
    """Another rank's guard, as the hub knows it."""

    def __init__(self, connection: Connection, rank: int, host: str, now: float) -> None:
        self.connection, self.rank, self.host, self.received_s = connection, rank, host, now
        self.is_connected = True
        """Whether the connection is open. The peer may be silent all the same."""
        self.progress, self.left = Progress(), False
        self.stacks: str | None = None


class Hub:
    """The hub's side of its connections to all other guards, which are called peers here.

    `greet` returns the hub's answer to a peer's first message. `handle` is called with each peer's rank and
    message. `log` prints a line.
    """

    def __init__(
        self,
        poller: Poller,
        greet: Callable[[], Message],
        handle: Callable[[int, Message], None],
        log: Callable[[str], None],
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.server: Server | None = None
        self._told: set[int] = set()
        """Ranks whose guards were already reported for invalid messages."""
        self._poller, self._greet, self._handle, self._log = poller, greet, handle, log

    def listen(self, secret: str, world_size: int, *, loopback: bool, port: int = 0) -> int:
        """Open the server; return its port."""
        ranks = range(1, world_size)
        args = (self._poller, Key(secret, HUB), ranks, guard_messages.TO_HUB, self._join, self._refuse)
        self.server = Server(*args, loopback=loopback, port=port)
        return self.server.port

    def broadcast(self, message: Message) -> None:
        """Send a message to all guards."""
        for peer in self.peers.values():
            peer.connection.send(message)

    def silent_host(self, now: float, closed_s: float = SILENCE_S) -> str:
        """Return the host of the peer that has been silent the longest; empty if no peer is silent for too long.

        A peer with an open connection may be silent for SILENCE_S. `closed_s`: the same for a peer with a closed
        connection. Its guard is gone, but perhaps not its host.
        """
        peers = [peer for peer in self.peers.values() if not peer.left]
        late = [peer for peer in peers if now - peer.received_s > (SILENCE_S if peer.is_connected else closed_s)]
        return min(late, key=lambda peer: peer.received_s).host if late else ""

    def _refuse(self, address: str) -> None:
        self._log(f"its guard refuses a connection from {address}, which does not know this job's secret")

    def _join(self, connection: Connection) -> None:
        if (peer := self.peers.get(connection.rank)) is not None:
            # The authentication counts as a message: the peer may lose this connection before it sends one.
            peer.received_s = time.monotonic()
        self._poller.watch(connection, partial(self._receive, connection))

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            peer = self.peers.get(connection.rank)
            if peer is None or peer.connection is not connection:
                if "host" not in message:  # a peer's first message must have its name and host
                    connection.open, connection.sent_nonsense = False, True
                    break
                peer = self.peers[connection.rank] = Peer(
                    connection, connection.rank, message["host"], time.monotonic()
                )
                connection.send(self._greet())
            peer.received_s = time.monotonic()
            peer.progress = Progress(*message.get("at", peer.progress))
            peer.left |= message.get("bye", False)
            peer.stacks = message.get("stacks", peer.stacks)
            self._handle(connection.rank, message)
        if not connection.open:  # the peer may connect again; if it does not, `silent_host` notices
            self._poller.drop(connection)
            if (peer := self.peers.get(connection.rank)) is not None and peer.connection is connection:
                peer.is_connected = False
            if connection.sent_nonsense and connection.rank not in self._told:
                self._told.add(connection.rank)
                self._log(f"its guard closes the connection to that of rank {connection.rank}: {connections.NONSENSE}")


class HubLink:
    """A guard's connection to the hub, which is made again when it is lost."""

    def __init__(self, poller: Poller, secret: str, rank: int, handle: Callable[[Message], None]) -> None:
        self.connection: Connection | None = None
        self.received_s = 0.0
        """Time of the hub's last message; 0 before the first connection."""
        self.tried_s = self.wanted_s = 0.0
        """Times of the last and of the first attempt to connect."""
        self.unreachable = False
        """Whether the hub counts as unreachable: then this guard tries every SILENCE_S instead of every BEAT_S."""
        self.left = False
        """Whether the hub has left in order."""
        self.progress, self.name, self.host = Progress(), "", ""
        self._poller, self._secret, self._rank, self._handle = poller, secret, rank, handle
        self._handshake: Handshake | None = None
        self._hello: Message = {}

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection that neither side has closed."""
        return self.connection is not None and self.connection.open

    def connect(self, hub: str, hello: Message, now: float) -> None:
        """Begin to connect to `hub` (address:port:secret), unless connected, or the last attempt was just now.

        `hello`: the guard's first message. If `hub` has no secret, the job's secret from `dslpar launch` is used.
        """
        pause_s = SILENCE_S if self._handshake or self.unreachable else BEAT_S
        if self.left or self.is_open or not hub or now - self.tried_s < pause_s:
            return
        self.give_up()
        self.tried_s, self.wanted_s = now, self.wanted_s or now
        if (match := _HUB.fullmatch(hub)) is None:  # anybody who can reach torch's store may write to it
            return
        key, fields = Key(match[3] or self._secret, HUB), guard_messages.FROM_HUB
        self._hello = hello
        self._handshake = connections.dial(
            match[1], int(match[2]), key, rank=self._rank, fields=fields, timeout_s=BEAT_S
        )
        if (handshake := self._handshake) is not None:
            self._poller.watch(handshake, lambda: self._join(handshake.step()))

    def complete(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a connection that `connect` has begun."""
        if self._handshake is not None:
            self._join(self._handshake.complete(timeout_s))

    def give_up(self) -> None:
        """Drop the handshake, if one has begun."""
        if self._handshake is not None:
            self._poller.drop(self._handshake)
        self._handshake = None

    def _join(self, connection: Connection | None) -> None:
        """Handle a handshake step's result: use the connection, drop a failed handshake, or wait for the next step."""
        if connection is not None and self._handshake is not None:
            self._poller.unwatch(self._handshake)
            self._handshake, self.connection = None, connection
            self.received_s = time.monotonic()  # the proof shows that the hub lives, whatever happens to the connection
            self._poller.watch(connection, partial(self._receive, connection))
            connection.send(self._hello)
            self._receive(connection)  # messages that arrived with the server's proof
        elif self._handshake is not None and self._handshake.failed:
            self.give_up()

    def is_silent(self, now: float, closed_s: float = SILENCE_S) -> bool:
        """Return whether the hub, once connected, is silent for too long and has not left in order.

        `closed_s`: as in `Hub.silent_host`.
        """
        patience_s = SILENCE_S if self.is_open else closed_s
        return bool(self.received_s) and not self.left and now - self.received_s > patience_s

    def was_never_met(self, now: float) -> bool:
        """Return whether no attempt to connect has succeeded, and the first one was more than SILENCE_S ago."""
        return not self.received_s and bool(self.wanted_s) and now - self.wanted_s > SILENCE_S

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            self.received_s = time.monotonic()
            self.progress = Progress(*message.get("at", self.progress))
            self.name, self.host = message.get("who", self.name), message.get("host", self.host)
            self.left |= message.get("bye", False)
            self._handle(message)
        if not connection.open:
            self._poller.drop(connection)


class LaunchLink:
    """A guard's connection to `dslpar launch` on another host.

    `destination`: addresses:port; empty if there is no such process. `handle` is called with each message. If no
    address answers at first, a firewall probably blocks the connection, and the guard does not try again. If the
    connection is lost later and cannot be made again within SILENCE_S / 2, `dslpar launch` counts as gone.
    """

    def __init__(
        self, poller: Poller, destination: str, secret: str, rank: int, handle: Callable[[Message], None]
    ) -> None:
        addresses, _, port = destination.rpartition(":")
        self.connection: Connection | None = None
        """None if no address has answered, or `dslpar launch` is gone."""
        self._addresses, self._port = list(filter(None, addresses.split(","))), int(port or 0)
        self._lost_s = self._tried_s = 0.0
        self._marks: dict[str, str] = {}
        """All marks (marks.py) that were sent, by name. A new connection sends them again, since some may be lost."""
        self._poller, self._key, self._rank, self._handle = poller, Key(secret, LAUNCH), rank, handle

    def connect(self) -> None:
        """Connect to the first address that answers. Later calls try only this address."""
        for address in self._addresses:
            connection = connections.connect(
                address, self._port, self._key, rank=self._rank, fields=guard_messages.FROM_LAUNCH, timeout_s=2 * BEAT_S
            )
            if connection is not None:
                self.connection, self._addresses = connection, [address]
                self._poller.watch(connection, partial(self._receive, connection))
                for name, text in self._marks.items():
                    connection.send({"mark": name, "text": text})
                self._receive(connection)
                return

    def send_mark(self, name: str, text: str) -> None:
        """Send a mark if there is a connection. Keep the mark, so that later connections send it too."""
        self._marks[name] = text
        if self.connection is not None:
            self.connection.send({"mark": name, "text": text})

    def is_lost(self, now: float) -> bool:
        """Return True once, when `dslpar launch` counts as gone. Until then, try to connect again at each call."""
        if not self._is_closed():
            return False
        if now - self._tried_s > BEAT_S / 2:
            self._tried_s = now
            self.connect()
        if not self._is_closed() or now - self._lost_s < SILENCE_S / 2:
            return False
        self.connection = None
        return True

    def _is_closed(self) -> bool:
        return self.connection is not None and not self.connection.open

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            self._handle(message)
        if not connection.open:
            self._lost_s = time.monotonic()
            self._poller.drop(connection)
