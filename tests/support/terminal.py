"""A terminal of a fixed size for a program with a screen: what it draws is kept by pyte, a terminal emulator.

terminal = Terminal(rows=24, columns=100)
process = terminal.start(["nvim", "cfg.py"], env)
terminal.wait("4:")                # until this is on the screen, and the program draws no more
terminal.lines                     # the rows as text
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence

import pyte

from tests.support.waiting import wait_until

_QUIET_S = 0.6
"""A screen on which nothing changed for so long is drawn."""


class Terminal:
    """A terminal with one program."""

    def __init__(self, rows: int, columns: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self._drawn = time.monotonic()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a program, which has the terminal as its own."""
        own, of_program = pty.openpty()
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(of_program, termios.TIOCSWINSZ, size)
        environment = {**env, "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command, stdin=of_program, stdout=of_program, stderr=of_program, env=environment, start_new_session=True
        )
        os.close(of_program)
        threading.Thread(target=self._read, args=(own,), daemon=True).start()
        return process

    def _read(self, own: int) -> None:
        with os.fdopen(own, "rb", buffering=0) as file:
            while True:
                try:
                    drawn = file.read(1 << 16)
                except OSError:
                    return  # Linux's end of a terminal whose program has ended
                if not drawn:
                    return
                with self._lock:
                    self._stream.feed(drawn)
                    self._drawn = time.monotonic()

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, without blanks at their ends."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display]

    def wait(self, text: str) -> None:
        """Wait until a text is on the screen, and the screen is drawn."""
        wait_until(lambda: self._shows(text), lambda: "\n".join([f"no {text!r} on the screen:", *self.lines]))

    def _shows(self, text: str) -> bool:
        return time.monotonic() - self._drawn > _QUIET_S and any(text in line for line in self.lines)
