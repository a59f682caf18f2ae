"""Receiver: in `dslpar launch`, collect the marks of ranks on other hosts from their guards, into a local folder.

    with Receiver(folder, range(8), ("10.0.0.1",), Path("/shared/run/.secret")) as receiver:
        receiver.variable                   # DSLPAR_REPORTS: tcp://10.0.0.1:4711/shared/run/.secret
        receiver.poll()                     # often: takes what has come
        receiver.send_stop(signal.SIGTERM)  # every guard sends it to its rank

Marks are small files in which ranks and guards report how a rank ended (marks.py). The environment variable
DSLPAR_REPORTS gives ranks the server's address and the path of a file with the job's secret. Only the job's user may
read this file, and it exists as long as the receiver. The secret itself is in no environment variable, because a
variable would pass through launchers, ssh and shells, whose arguments every user of a host can see.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

from dslpar.core.visible import visible
from dslpar.watchdog import authentication, connections, guard_messages, marks
from dslpar.watchdog.authentication import Key
from dslpar.watchdog.connections import Connection, Poller
from dslpar.watchdog.guard_server import Server
from dslpar.watchdog.peers import LAUNCH

_VARIABLE = re.compile(r"tcp://([^/]+:\d{1,5})(/.*)")
_SILENCE_S = 4.0
"""Time without a message after which a guard no longer counts as connected. Guards send one beat per second."""


class Receiver:
    """Server for the connections of all ranks' guards, and a context manager. It has no thread, and reads in `poll`.

    `folder`: the folder for the marks. `ranks`: the ranks whose guards may connect. `addresses`: this host's addresses,
    which the guards try in order. `secret_file`: the file for the secret, on a file system that all hosts share.
    `loopback`: whether all ranks are on this host.

    Raises:
        OSError: the secret cannot be written.
    """

    def __init__(
        self, folder: Path, ranks: range, addresses: Sequence[str], secret_file: Path, *, loopback: bool = False
    ) -> None:
        self.folder, self.addresses = folder, addresses
        self.met: set[int] = set()
        """Ranks whose guards have connected. Nothing is known about other ranks, for example behind a firewall."""
        self._told: set[int] = set()
        """Ranks whose guards were already reported for invalid messages."""
        self._secret_file = secret_file.absolute()
        secret = authentication.new_secret()
        authentication.write_secret(self._secret_file, secret)
        connections.raise_file_limit()
        self._poller = Poller()
        args = (self._poller, Key(secret, LAUNCH), ranks, guard_messages.TO_LAUNCH, self._join, _refuse)
        self._server = Server(*args, loopback=loopback)
        self._stop_signal: int | None = None

    @property
    def variable(self) -> str:
        """The value of DSLPAR_REPORTS for every host."""
        return f"tcp://{','.join(self.addresses)}:{self._server.port}{quote(str(self._secret_file))}"

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self._server.close()
        self._poller.close()
        with contextlib.suppress(OSError):  # the folder may be gone
            self._secret_file.unlink()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process all messages and connections that have arrived, or that arrive within `timeout_s`.

        It continues until then, because all guards of a large job connect at the same time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._poller.poll(max(0.0, deadline - time.monotonic()))
            self._server.maintain()
            if time.monotonic() >= deadline:
                break
        for connection in self._server.connections.values():
            connection.flush()

    def send_stop(self, number: int) -> None:
        """Make every guard send its rank this signal, also guards that connect later."""
        self._stop_signal = number
        for connection in self._server.connections.values():
            connection.send({"stop": number})

    @property
    def connected(self) -> int:
        """Count the guards that are connected and not silent. If a host is gone, its connections stay open."""
        here = [connection for connection in self._server.connections.values() if connection.open]
        return sum(time.monotonic() - connection.received_s < _SILENCE_S for connection in here)

    def _join(self, connection: Connection) -> None:
        self.met.add(connection.rank)
        self._poller.watch(connection, partial(self._receive, connection))
        if self._stop_signal is not None:
            connection.send({"stop": self._stop_signal})

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            if "mark" in message and not self._keep(connection.rank, message["mark"], message.get("text", "")):
                connection.open, connection.sent_nonsense = False, True
                break
        if not connection.open:
            self._poller.drop(connection)
            if connection.sent_nonsense and connection.rank not in self._told:
                self._told.add(connection.rank)
                _log(f"closes the connection to the guard of rank {connection.rank}: {connections.NONSENSE}")

    def _keep(self, rank: int, name: str, text: str) -> bool:
        """Write a mark to the folder; return False if the mark is invalid, or if `rank`'s guard may not send it."""
        number, _, kind = name.partition(".")
        mark = marks.parse(kind, text)
        own = int(number) == rank or kind == "verdict"  # a guard may send a verdict about another rank
        if mark is None or not own or marks.rank_of(mark) not in (int(number), None):
            return False
        with contextlib.suppress(OSError):  # a cleaner has deleted the folder
            marks.write(self.folder, f"{int(number)}.{kind}", text)
        return True


def read_variable(text: str) -> tuple[str, str] | None:
    """Return addresses:port and the secret that a value of DSLPAR_REPORTS names; None if the value is a folder's path.

    >>> read_variable("tcp://10.0.0.1,10.1.0.1:4711/no/such/file")
    ('10.0.0.1,10.1.0.1:4711', '')
    """
    match = _VARIABLE.fullmatch(text)
    return (match[1], authentication.read_secret(unquote(match[2]))) if match else None


def _refuse(address: str) -> None:
    _log(f"refuses a connection from {address}, which does not know this job's secret")


def _log(text: str) -> None:
    sys.stderr.write(visible(f"dslpar launch: {text}") + "\n")
