"""Ranks of train.py without a launcher, forked from this process, which has imported all that they need.

    job = start_job(8, ["--config", "cfg.py"], Path("said.txt"))    # what the ranks say comes to that file
    job.kill(3)                                                     # as the kernel does it, with no word to anybody
    assert job.wait(60) == [1, 1, 1, -9, 1, 1, 1, 1]

Starting Python, torch and DeepSpeed eight times takes half a minute on two cores; eight forks take a tenth of a second.
The rest is the program itself: `train.main`, with a launcher's environment variables, and sockets between ranks. A
launcher would end the peers of a dead rank. Here they are left to themselves.

    done = train_alone("--config", "cfg.py", "train.steps=2")       # one process, to its end
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from dslpar.cluster.network import free_port
from dslpar.core.fork import fork
from tests.support import warm
from tests.support.runs import ROOT, Finished
from tests.support.waiting import IDLE_S, wait_until


class ForkedJob:
    """The ranks of one job, by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._statuses: dict[int, int] = {}

    def statuses(self) -> list[int | None]:
        """Return each rank's status as subprocess does: -9 if it was killed, None while it runs."""
        for pid in self.pids:
            if pid not in self._statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return [self._statuses.get(pid) for pid in self.pids]

    @property
    def runs(self) -> bool:
        """Return whether all ranks run."""
        return all(status is None for status in self.statuses())

    def kill(self, *ranks: int) -> None:
        """Send SIGKILL to these ranks in this order, or to all if none is given."""
        for rank in ranks or range(len(self.pids)):
            if self.pids[rank] not in self._statuses:  # a finished rank's pid may belong to another process
                os.kill(self.pids[rank], signal.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP to all ranks, which stay as they are until `thaw`."""
        self._send_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT to all remaining ranks."""
        self._send_all(signal.SIGCONT)

    def _send_all(self, number: int) -> None:
        for pid in self.pids:
            if pid not in self._statuses:
                os.kill(pid, number)

    def wait(self, idle_s: float = IDLE_S) -> list[int | None]:
        """Return the statuses when all ranks have ended.

        Raises:
            AssertionError: no rank made progress for `idle_s`. The ranks are killed.
        """
        try:
            wait_until(lambda: None not in self.statuses(), "", idle_s)
        except AssertionError:
            alive = [rank for rank, status in enumerate(self.statuses()) if status is None]
            self.kill()
            raise AssertionError(f"ranks {alive} live, and have made no progress for {idle_s} s") from None
        return self.statuses()


def start_job(ranks: int, argv: Sequence[str], output: Path) -> contextlib.AbstractContextManager[ForkedJob]:
    """Start train.py on that many ranks of this host. At the end of the `with`, remaining ranks are killed."""

    def program() -> int:
        from dslpar.training.main import main

        return main(argv)

    return start_program(ranks, program, output)


@contextlib.contextmanager
def start_program(ranks: int, program: Callable[[], int | None], output: Path) -> Iterator[ForkedJob]:
    """Start any program in this way. Its return value or exception decides its status, as in Python."""
    warm.import_deepspeed()
    sys.stdout.flush()
    sys.stderr.flush()
    port, pids = str(free_port()), list[int]()
    for rank in range(ranks):
        pid = fork()
        if pid == 0:
            _rank(_place(rank, ranks, port) if ranks > 1 else {}, program, output)
        pids.append(pid)
    job = ForkedJob(pids)
    try:
        yield job
    finally:
        job.kill()
        job.wait(30)


def train_alone(*argv: str, idle_s: float = IDLE_S) -> Finished:
    """Run train.py in one process, without a launcher."""
    with tempfile.TemporaryDirectory(prefix="dslpar_alone_") as folder:
        output = Path(folder, "said.txt")
        with start_job(1, argv, output) as job:
            (status,) = job.wait(idle_s)
        return Finished(int(status or 0), output.read_text(encoding="utf-8"))


def _place(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank."""
    world = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **world}


def _rank(variables: dict[str, str], program: Callable[[], int | None], output: Path) -> NoReturn:
    """Run a rank to its end without pytest's state: its files, its warnings, its exit handlers."""
    try:
        _speak_to(output)
        os.chdir(ROOT)
        atexit._clear()
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)  # as Python itself begins
        os.environ.update(variables)
        from dslpar.distributed.bootstrap import exit_process

        try:
            status = program() or 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        exit_process(status)
    except BaseException:  # noqa: BLE001  # at last this, as for the interpreter itself
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _speak_to(output: Path) -> None:
    """Redirect standard output and error, in Python and below it; pytest has replaced them by its own files."""
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
