"""Runs a launcher to its end, and the end of everything that it started; then says who failed first.

    status = supervise.run(command, world_size=8, output_dir="outputs/gpt_3d")

The launcher runs in a session of its own, so that a signal reaches it once, whether from a terminal or by `kill`: this
process passes it to the launcher's whole group, as a terminal would, waits, and kills what is left. What a dead
launcher leaves behind becomes this process's child (Linux's "subreaper"), so nothing can outlive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dslpar import deaths, faults, record
from dslpar.launcher import Command

_LOOK_S = 0.05
_PATIENCE_S = 8.0
"""How long ranks and launcher may take to end after a signal or a death, before they are killed."""
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(command: Command, world_size: int, output_dir: str) -> int:
    """Runs it. Its exit status: 0 if every rank ended in order, 1 if one failed, 128 + n if one was ended by signal n,
    or if this process was told to end by signal n.
    """
    began = time.time()
    _adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="dslpar_reports_") as folder, _signals() as received:
        watch = deaths.Watch(Path(folder))
        launcher = subprocess.Popen(
            command.words,
            env={**os.environ, **command.environ, faults.REPORTS: folder},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        _wait(launcher, watch, received)
        _end_all(watch)
        said, status = _verdict(watch, launcher.returncode, received, world_size, _when(Path(output_dir), began))
        sys.stderr.write(said)
        return status


def _adopt_orphans() -> None:
    """From now on, orphans among our descendants are ours: DeepSpeed's runner, for one, leaves its ranks behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that come meanwhile, in order. One that is ignored (nohup) stays so."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(launcher: subprocess.Popen[bytes], watch: deaths.Watch, received: list[int]) -> None:
    """Until the launcher has ended. After a death or a signal it has _PATIENCE_S; a second signal ends the patience."""
    passed, deadline = 0, float("inf")
    while launcher.poll() is None:
        if watch.look() or received:
            deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        if len(received) > passed == 0:
            passed = 1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGTERM if received[0] == signal.SIGHUP else received[0])
        if len(received) > 1 or time.monotonic() > deadline:
            _kill(descendants(os.getpid()))
        time.sleep(_LOOK_S)
    watch.look()


def _end_all(watch: deaths.Watch) -> None:
    """Ends, at last by SIGKILL, whatever the launcher left."""
    ends = time.monotonic() + _PATIENCE_S
    for pid in _living():
        _send(pid, signal.SIGTERM)
    while left := _living():
        watch.look()
        if time.monotonic() > ends:
            _kill(left)
        time.sleep(_LOOK_S)


def _living() -> list[int]:
    """Our descendants; those that have ended are put to rest."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(os.getpid())


def descendants(root: int) -> list[int]:
    """The living processes below `root`, in sessions of their own too (torchrun's ranks)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = faults.stat(int(entry.name)) if entry.name.isdecimal() else []
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it runs
        found += children.get(pid, ())
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- the last words ----


def _verdict(watch: deaths.Watch, code: int, received: list[int], world_size: int, when: str) -> tuple[str, int]:
    """What to say, and the exit status. `code`: the launcher's own, negative for a signal."""
    told = signal_of(code)
    if received:
        number = received[0]
        return f"dslpar launch: stopped by {signal.Signals(number).name}{when}; no process is left\n", 128 + number
    death = watch.first(told)
    if death is not None:
        return f"dslpar launch: {death.told(when)}", 128 + death.signal if death.signal else 1
    if code:
        how = f"was ended by {signal.Signals(told).name}" if told else f"ended with status {code}"
        said = f"dslpar launch: the launcher {how}{when}; what it and the ranks said stands above\n"
        return said, 128 + told if told else code
    if not watch.all_ended(world_size):
        return f"dslpar launch: the launcher ended with status 0, and not every rank had ended{when}\n", 1
    return "", 0


def signal_of(code: int) -> int | None:
    """The signal that an exit status tells of: mpirun's 128 + n, DeepSpeed's 256 - n, or a launcher's own end by it.

    >>> signal_of(137), signal_of(247), signal_of(-9), signal_of(1)
    (9, 9, 9, None)
    """
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 256 - code if code > 192 else 0
    return number if number in set(signal.Signals) else None


def _when(output_dir: Path, began: float) -> str:
    """After which step, as rank 0 wrote it down; nothing if this run has written none."""
    metrics = output_dir / record.METRICS
    if not metrics.exists() or metrics.stat().st_mtime < began:
        return ""
    lines = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()  # without half a last one: a full disk
    return f", after step {json.loads(lines[-1])['step']}" if lines else ", in the first step"
