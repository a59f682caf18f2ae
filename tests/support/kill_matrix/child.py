"""Call a function in a silent child process, and kill the child and its descendants after a time limit."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from dslpar.core.fork import fork
from dslpar.watchdog import processes

Value = TypeVar("Value")


class ChildError(RuntimeError):
    """The child raised or died; the text is its error, in one line."""


class ChildTimeoutError(ChildError):
    """The child exceeded its time limit."""


def in_child(fn: Callable[[], Value], seconds: float) -> Value:
    """Return `fn()`, called in a fork of this process, without side effects here.

    Raises:
        ChildTimeoutError: it took longer than `seconds`.
        ChildError: it raised, or ended without a value.
    """
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(reader)
        _run(fn, writer)
    os.close(writer)
    try:
        found = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        _end(pid)
    if found is None:
        raise ChildTimeoutError(f"it took more than {seconds:g} s")
    if not found:
        raise ChildError("it ended without a value")
    is_error, value = pickle.loads(found)
    if is_error:
        raise ChildError(value)
    return value  # type: ignore[no-any-return]


def _run(fn: Callable[[], object], writer: int) -> None:
    """Run the child to its end."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    try:
        try:
            value = pickle.dumps((False, fn()))
        except BaseException as error:  # noqa: BLE001 (a mutant may fail in any way; the parent raises it)
            reason = getattr(error, "reason", None) or str(error).partition("\n")[0]
            value = pickle.dumps((True, f"{type(error).__name__}: {reason}"))
        with os.fdopen(writer, "wb") as file:
            file.write(value)
    finally:
        os._exit(0)


def _read(reader: int, ends: float) -> bytes | None:
    """Return everything that is written until the end, or None if the time is over first."""
    found = b""
    while (left := ends - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            return found
        found += part
    return None


def _end(pid: int) -> None:
    """Kill a child and the ranks that it has started."""
    for each in [*processes.descendants(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    os.waitpid(pid, 0)
