"""How a rank dies, and what it leaves to say who was first.

A rank (`end_at_errors`, called by `bootstrap`) ends at once at an exception that nobody catches, and ends itself when
the launcher that started it is gone. It tells causes from consequences: a rank that fails because a peer is gone says
nothing while the launcher ends it, so that the first rank's traceback stays in sight.

Where the environment names a folder (DSLPAR_REPORTS, which `dslpar launch` sets), each rank leaves its marks there:

    3.born    JSON: rank, world_size, host, pid
    3.stack   what the C level of Python wrote at a deadly signal: empty after SIGKILL, which nothing can catch
    3.error   JSON of a Report
    3.ended   the rank came to its end in order

dslpar/deaths.py reads them. torchrun's TORCHELASTIC_ERROR_FILE is written too, by causes alone, in torchrun's own
JSON format.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, TextIO

REPORTS = "DSLPAR_REPORTS"

_PATIENCE_S = 5.0
"""How long a rank that lost a peer waits to be ended. Launchers look once a second, at the longest."""
_LAUNCHER_CHECK_S = 1.0

Kind = Literal["cause", "consequence", "interrupt", "orphan"]


class Rank(NamedTuple):
    """Who: a rank, and where it runs."""

    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.host}"


class Report(NamedTuple):
    """What a rank that failed has to say."""

    who: Rank
    kind: Kind
    time_s: float
    """Since the epoch."""
    error: str
    """The exception, in one line."""
    text: str
    """Its traceback."""

    def spoken(self) -> str:
        """What goes to the terminal: a cause whole, anything else in one line."""
        if self.kind == "cause":
            return f"[{self.who}] {self.text}"
        said = {
            "consequence": f"ends because a peer is gone ({self.error})",
            "interrupt": "interrupted",
            "orphan": "ends because its launcher is gone",
        }
        return f"[{self.who}] {said[self.kind]}\n"


# ---- in a rank ----


def end_at_errors(who: Rank, environ: Mapping[str, str]) -> None:
    """From now on an exception that nobody catches ends the process at once, and with it, by the launcher, the job.

    At once: without atexit hooks and destructors, some of which wait for peers that wait for us.
    """
    folder = Path(environ.get(REPORTS, ""))
    asked = REPORTS in environ and folder.is_dir()  # the folder is on the host of `dslpar launch` alone
    if asked:
        _enrol(who, folder)
    else:
        faulthandler.enable()

    def end(report: Report) -> NoReturn:
        if asked:
            _write(folder / f"{who.rank}.error", json.dumps(report))
        if report.kind == "cause" and "TORCHELASTIC_ERROR_FILE" in environ:
            _write(Path(environ["TORCHELASTIC_ERROR_FILE"]), _elastic(report))
        if report.kind == "consequence":
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_PATIENCE_S)
        # Not by sys.stderr: torch.distributed puts a buffer in its place while this runs, to print it afterwards.
        with contextlib.suppress(OSError):  # a launcher that is gone has closed the pipe
            os.write(2, report.spoken().encode())
        os._exit(130 if report.kind == "interrupt" else 1)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        end(_report(who, error, trace))

    sys.excepthook = hook
    _watch_launchers(lambda: end(Report(who, "orphan", time.time(), "", "")))


def _enrol(who: Rank, folder: Path) -> None:
    """The marks of a living rank; the C level of Python writes the stack at signals, without waiting for the GIL."""
    stack: TextIO = open(folder / f"{who.rank}.stack", "w", encoding="utf-8")  # noqa: SIM115  # for as long as we live
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)  # chain: it ends the process, as ever
    _write(folder / f"{who.rank}.born", json.dumps(who))
    atexit.register(_write, folder / f"{who.rank}.ended", "")


def _report(who: Rank, error: BaseException, trace: TracebackType | None) -> Report:
    kind: Kind = "consequence" if lost_a_peer(error) else "cause"
    if isinstance(error, KeyboardInterrupt):  # it may have come while a peer went, for the same reason
        kind = "interrupt"
    line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return Report(who, kind, time.time(), line, "".join(traceback.format_exception(type(error), error, trace)))


_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Read error|Write error|Socket Timeout|Timed out|timed out"
    r"|wait timeout|connectFullMesh|Application timeout|recv, got 0 bytes|remote process (has )?exited"
    r"|ncclRemoteError|failed to connect|peer (closed|rank)"
)
_GLOO = re.compile(r"\[[^\]]*gloo/|Gloo ")


def lost_a_peer(error: BaseException) -> bool:
    """Whether torch.distributed raised it because a peer went away; what it was raised from counts as well.

    By the words, since gloo's errors are plain RuntimeErrors; and by who says them, since a data set on a network may
    say the same.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _of_distributed(link) and _LOST.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def _of_distributed(error: BaseException) -> bool:
    """torch.distributed's own errors (DistBackendError, DistNetworkError, ...), and gloo's."""
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}
    return "DistError" in names or (type(error) is RuntimeError and bool(_GLOO.search(str(error))))


def _elastic(report: Report) -> str:
    """What torchrun reads to name the root cause."""
    extra = {"py_callstack": report.text, "timestamp": str(int(report.time_s))}
    return json.dumps({"message": {"message": report.text, "extraInfo": extra}})


def _write(path: Path, text: str) -> None:
    """Whole or not at all. A folder that is gone is a launcher that is gone: nobody reads it."""
    part = path.with_name(path.name + ".part")
    with contextlib.suppress(OSError):
        part.write_text(text, encoding="utf-8")
        part.replace(path)


# ---- a launcher that is gone ----

_LAUNCHERS = frozenset(
    (
        *("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("mpirun", "mpiexec", "orterun", "prterun", "prted", "orted", "mpiexec.hydra", "hydra_pmi_proxy"),
        *("dslpar", "dslpar.cli"),
    )
)


def _watch_launchers(end: Callable[[], NoReturn]) -> None:
    """Ends this rank when a launcher above it is gone: SIGKILL of `mpirun`, or SIGTERM to `deepspeed` alone, would
    leave ranks that train on with nobody to end them.
    """
    chain = launchers_above(os.getpid())

    def watch() -> None:
        while all(_parent(pid) == parent for pid, parent in chain):
            time.sleep(_LAUNCHER_CHECK_S)
        end()

    if chain:
        threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def launchers_above(pid: int) -> list[tuple[int, int]]:
    """(process, its parent), from `pid` up to the highest launcher among its ancestors; none without a launcher."""
    chain: list[tuple[int, int]] = []
    known = 0
    while (parent := _parent(pid)) > 1:
        chain.append((pid, parent))
        if program(_words(parent)) in _LAUNCHERS:
            known = len(chain)
        pid = parent
    return chain[:known]


def program(words: Sequence[str]) -> str:
    """What a command line runs, whatever the interpreter.

    >>> program(["/usr/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30"])
    'deepspeed.launcher.launch'
    """
    if not words:
        return ""
    name = os.path.basename(words[0])
    if not name.startswith("python"):
        return name
    for word, following in zip_longest(words[1:], words[2:], fillvalue=""):
        if word == "-m":
            return following
        if not word.startswith("-"):
            return os.path.basename(word)
    return name


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    return []


def _parent(pid: int) -> int:
    """0 where it is gone, or where there is no /proc."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def stat(pid: int) -> list[str]:
    """Of /proc/PID/stat, the fields from the third on: state, parent, ...; the last is the exit status of a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
