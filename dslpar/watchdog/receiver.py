"""Receiver: where the guards of ranks on other hosts bring their marks, into a folder here, as ranks of this host leave
them.

with Receiver(folder, addresses=("10.0.0.1",)) as receiver:
    receiver.variable                   # DSLPAR_REPORTS: tcp://10.0.0.1:4711/TOKEN
    receiver.poll()                     # often: takes what has come
    receiver.send_stop(signal.SIGTERM)  # every guard sends it to its rank
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from dslpar.watchdog import marks, protocol
from dslpar.watchdog.protocol import Connection, Poller

_SILENCE_S = 4.0
"""After which a guard counts no more; they beat once a second."""
_MARK = re.compile(r"\d+\.[a-z]+")


class Receiver:
    """A server without a thread of its own, in use until the end of a `with`."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.folder, self.addresses, self.token = folder, addresses, secrets.token_hex(16)
        protocol.raise_file_limit()
        self._poller = Poller()
        self._server = self._poller.serve(partial(self._receive, known=False), loopback=False)
        self._connections: list[Connection] = []
        self.met: set[int] = set()
        """Ranks whose guards have connected; of others, behind a firewall, nothing is known."""
        self._stop_signal: int | None = None

    @property
    def variable(self) -> str:
        """What DSLPAR_REPORTS is to be on every host."""
        return f"tcp://{','.join(self.addresses)}:{self._server.getsockname()[1]}/{self.token}"

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        for connection in self._connections:
            connection.close()
        self._server.close()
        self._poller.close()

    def poll(self) -> None:
        """Take what has come."""
        self._poller.poll(0)
        for connection in self._connections:
            connection.flush()

    def send_stop(self, number: int) -> None:
        """Have every guard send its rank a signal, also those that connect later."""
        self._stop_signal = number
        for connection in self._connections:
            connection.send({"stop": number})

    @property
    def connected(self) -> int:
        """Count the guards that are there now; one whose host is gone never says good-bye."""
        return sum(time.monotonic() - connection.received_s < _SILENCE_S for connection in self._connections)

    def _receive(self, connection: Connection, *, known: bool) -> None:
        for message in connection.receive():
            if not known and message.get("hello") != self.token:
                connection.close()
            elif not known:
                known = True
                self.met.add(int(message.get("rank", -1)))
                self._connections.append(connection)
                self._poller.watch(connection, partial(self._receive, connection, known=True))
                if self._stop_signal is not None:
                    connection.send({"stop": self._stop_signal})
            elif "mark" in message and _MARK.fullmatch(name := str(message["mark"])):  # in the folder, nowhere else
                marks.write(self.folder, name, str(message["text"]))
        if not connection.open:
            self._connections = [other for other in self._connections if other is not connection]
            self._poller.drop(connection)
