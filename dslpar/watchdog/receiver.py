"""Where the guards of ranks on other hosts bring their marks: into a folder here, as ranks of this host leave them.

with Receiver(folder, addresses=("10.0.0.1",)) as receiver:
    receiver.variable                   # DSLPAR_REPORTS: tcp://10.0.0.1:4711/TOKEN
    receiver.look()                     # often: takes what has come
    receiver.stop(signal.SIGTERM)       # every guard sends it to its rank
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from dslpar.watchdog import protocol
from dslpar.watchdog.protocol import Line

_SILENCE_S = 4.0
"""After which a guard counts no more; they beat once a second."""
_NAME = re.compile(r"\d+\.[a-z]+")


class Receiver:
    """A server that is asked, never waits, and ends with `with`."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.folder, self.addresses, self.token = folder, addresses, secrets.token_hex(16)
        protocol.many()
        self._server = protocol.listen(loopback=False)
        self._server.setblocking(False)
        self._waits = selectors.DefaultSelector()
        self._lines: list[Line] = []
        self.met: set[int] = set()
        """Ranks whose guards have come; of others, behind a firewall, nothing is known."""
        self._stop: int | None = None
        self._on(self._server, self._accept)

    @property
    def variable(self) -> str:
        """What DSLPAR_REPORTS is to be on every host."""
        return f"tcp://{','.join(self.addresses)}:{self._server.getsockname()[1]}/{self.token}"

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        for line in self._lines:
            line.close()
        self._server.close()
        self._waits.close()

    def look(self) -> None:
        """Takes what has come."""
        for key, _ in self._waits.select(0):
            key.data()
        for line in self._lines:
            line.flush()

    def stop(self, number: int) -> None:
        """Has every rank told to stop, also those that connect later."""
        self._stop = number
        for line in self._lines:
            line.send({"stop": number})

    @property
    def connected(self) -> int:
        """Guards that are there now; one whose host is gone never says good-bye."""
        return sum(time.monotonic() - line.heard_s < _SILENCE_S for line in self._lines)

    def _on(self, file: object, then: Callable[[], None]) -> None:
        self._waits.register(file, selectors.EVENT_READ, then)  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = Line(self._server.accept()[0])
            self._on(line, lambda: self._hear(line, known=False))

    def _hear(self, line: Line, *, known: bool) -> None:
        for message in line.receive():
            if not known and message.get("hello") != self.token:
                line.close()
            elif not known:
                known = True
                self.met.add(int(message.get("rank", -1)))
                self._lines.append(line)
                self._waits.modify(line, selectors.EVENT_READ, lambda: self._hear(line, known=True))
                if self._stop is not None:
                    line.send({"stop": self._stop})
            elif "mark" in message:
                self._keep(str(message["mark"]), str(message["text"]))
        if not line.open:
            self._waits.unregister(line)
            self._lines = [other for other in self._lines if other is not line]
            line.close()

    def _keep(self, name: str, text: str) -> None:
        """A mark in the folder, whole or not there: and nowhere else, whoever sends it."""
        if _NAME.fullmatch(name):
            part = self.folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / name)
