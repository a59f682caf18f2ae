"""Life of a rank, from its environment to its end: `RankSession` for commands, `ProgramRank` for programs.

    with RankSession(os.environ) as rank:
        job = rank.prepare(lambda dist_env: ...)          # load and lint; no torch, no process group
        rank.meet(job)                                    # torch.distributed, DeepSpeed, the job's determinism
        rank.agree(job, {"command line": request})        # every rank runs the same
        ...
    return rank.status

`RankSession` handles three kinds of failure:

- Before the ranks have met, a rank cannot run. It reports the reason, and ends the ranks that wait for it on other
  hosts.
- After that, every rank raises the same DslparError. Rank 0 prints it and ends first.
- Any other exception is uncaught. The rank's monitor ends the job (dslpar/watchdog).
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from dslpar.cluster import launcher_env
from dslpar.core.errors import DslparError
from dslpar.core.visible import visible_lines
from dslpar.distributed import bootstrap, determinism, rendezvous
from dslpar.distributed.device_environment import device_environment
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter.report import text as report_text
from dslpar.reporting import logging
from dslpar.reporting.logging import log
from dslpar.watchdog.rank_monitor import RankMonitor

if TYPE_CHECKING:
    from dslpar.distributed.collectives import Axis

Value = TypeVar("Value")

SLOW_FACTOR = 6
"""Factor on train.step_timeout for the first step (it may compile), an evaluation, verifying, loading and saving a
checkpoint, and the end of a rank."""
_BEFORE_START_WAIT_S = 10
"""Seconds that a rank above 0 that cannot run waits for the launcher to end it, before it reports the reason."""
_UNKNOWN_RANK_WAIT_S = 2
"""The same for a process whose rank is unknown, since its launcher's variables contradict each other."""
_AFTER_START_WAIT_S = 3
"""The wait for rank 0 once all ranks have started. It is short: on another host, no launcher may end this rank."""


class RankExit(Exception):  # noqa: N818  # as SystemExit: a way to end, not an error
    """Raised within a RankSession to end this rank with `status`; the reason has been printed already.

    `is_result`: the status is the command's result and not a failure, so the rank's guard does not report it.
    """

    def __init__(self, status: int = 1, *, is_result: bool = False) -> None:
        super().__init__(status)
        self.status, self.is_result = status, is_result


class RankSession:
    """Context manager for a rank of a command that a launcher may start; `status` is its exit status afterwards.

    `refused`: how a rank ends with a DslparError; by default with status 1.
    `watch_one`: a single process (world size 1) also starts a guard and torch.distributed; by default it does not.
    """

    dist_env: DistributedEnv
    """This process's place in its job; set by `prepare`."""

    def __init__(
        self, environ: MutableMapping[str, str], *, watch_one: bool = False, refused: RankExit | None = None
    ) -> None:
        self.environ, self.status = environ, 0
        self.ending_s = 0.0
        """Limit of the rank's end, in seconds; 0: none."""
        self.monitor: RankMonitor | None = None
        self.config: Config | None = None
        """The author's config, for the locations of findings; set by the code that loads it."""
        self._watch_one = watch_one
        self._refused = refused or RankExit()
        self._muted = ""
        self._has_met = self._logs = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RankSession:
        return self

    def prepare(self, act: Callable[[DistributedEnv], Value]) -> Value:
        """Read this process's place in its job, and return `act(place)`. Only rank 0 prints. No rank waits for another.

        If `act` raises a DslparError, it is printed. `act` raises RankExit if it has printed the reason itself.
        """
        try:
            self.dist_env = bootstrap.read_distributed_env(self.environ)
        except DslparError as error:
            if not launcher_env.is_first_process(self.environ):
                time.sleep(
                    _UNKNOWN_RANK_WAIT_S
                )  # the first one usually reports the same, and the launcher ends this one
            self.print_findings(error)
            raise self._refused from error
        if self.dist_env.world_size > 1 or self._watch_one:
            self.monitor = bootstrap.monitor_rank(self.dist_env, self.environ)
        with logging.muted_unless_rank_0(self.dist_env.rank) as muted:
            try:
                return act(self.dist_env)
            except DslparError as error:
                self.print_findings(error)
                raise self._refused from error
            finally:
                self._muted = muted.getvalue()

    def meet(self, job: Job | None, environ: Mapping[str, str] | None = None) -> None:
        """Set up torch.distributed and DeepSpeed for the job. All ranks must call it together.

        `environ`: further environment variables, which must be set before torch is imported.
        """
        self.environ.update(environ or {})
        if job is not None:
            self.environ.update(device_environment(job, self.environ))
        if self.monitor is not None:
            self.monitor.page.enter("starting")
        if self.dist_env.world_size > 1 or self._watch_one:
            bootstrap.setup_distributed(self.dist_env, self.environ, self.monitor)
        self._has_met = True
        if job is not None:
            determinism.use_deterministic_algorithms(job)

    def agree(self, job: Job, facts: Mapping[str, object]) -> None:
        """Check that all ranks run the same job and have the same `facts`. All ranks must call it together.

        Raises:
            DslparError: on every rank, if a rank differs from rank 0.
        """
        from dslpar.distributed.consistency import check_consistency

        check_consistency(job, self.world, facts)

    @property
    def world(self) -> Axis:
        """The axis of all ranks; imports torch."""
        from dslpar.distributed.collectives import Axis

        world_size = self.dist_env.world_size
        return Axis(world_size, self.dist_env.rank, tuple(range(world_size)))

    def log_to_run_folder(self, folder: Path | None) -> None:
        """Log to the terminal and, on rank 0, to the folder's log.txt, until the rank ends.

        Findings that end the run are logged there, too.
        """
        self._stack.enter_context(logging.log_to_run_folder(folder, self.dist_env.rank))
        self._logs = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._stack:
            return self._end(error)

    def _end(self, error: BaseException | None) -> bool:
        if isinstance(error, DslparError) and self._has_met:
            if self._logs:
                log.error(self._text(error).rstrip())
            elif self.dist_env.rank == 0:
                self.print_findings(error)
            self._end_after_rank_0(self._refused)
        elif isinstance(error, RankExit):
            self._end_after_rank_0(error) if self._has_met else self._end_before_start(error)
        elif error is not None:
            return False
        elif self.monitor is not None and self._has_met:
            self.monitor.enter_ending(self.ending_s)
            bootstrap.teardown_distributed()
        return True

    def print_findings(self, error: DslparError) -> None:
        """Print an error's findings to stderr, with the locations of their keys in the config."""
        sys.stderr.write(self._text(error))

    def _text(self, error: DslparError) -> str:
        if self.config is None:
            return report_text.text(error.findings, logging.NO_SOURCES)
        return report_text.text(self.config.at_keys(error.findings), self.config.sources)

    def _end_before_start(self, end: RankExit) -> None:
        """Report why this rank cannot run, unless rank 0 reports it; end the ranks that wait for it on other hosts."""
        self.status = end.status
        if self.monitor is None or not end.status:
            return
        if end.is_result:
            self.monitor.mark_result(end.status)
        began = time.monotonic()
        met = rendezvous.announce_failure(self.dist_env, self.environ, self.monitor)
        if self.dist_env.rank:
            if not met:  # rank 0 usually reports the same, and the launcher ends this rank
                time.sleep(max(0, began + _BEFORE_START_WAIT_S - time.monotonic()))
            sys.stderr.write(visible_lines(f"{self.monitor.location} cannot run:\n{self._muted}"))
        if met:
            self.monitor.mark_failed("cannot run", self._muted or "what it has said above\n")
            time.sleep(_AFTER_START_WAIT_S)  # until the guard has sent the mark and ends this rank, too

    def _end_after_rank_0(self, end: RankExit) -> None:
        """End this rank with a status that is the same on every rank, after rank 0, which reports the reason.

        A launcher ends all ranks when the first one ends, so rank 0 must end first, or its report may be lost.
        """
        self.status = end.status
        if self.monitor is None:
            return
        if end.is_result:
            self.monitor.mark_result(end.status)
        self.monitor.enter_ending(self.ending_s)
        bootstrap.teardown_distributed(together=False)
        if self.dist_env.rank:
            self.monitor.wait_for_rank_0(_AFTER_START_WAIT_S)


# ---- programs ----


_program_monitor: list[RankMonitor] = []
"""The monitor of a program's rank, if it was started. One is enough: a process is one rank."""


class ProgramRank:
    """A rank of a program that calls dslpar: errors are raised to the program, and the process's exit ends the rank.

    If the program has set up torch.distributed itself, rank and world size come from torch.distributed, and the program
    handles failures.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.environ = environ

    @contextlib.contextmanager
    def preparing(self) -> Iterator[tuple[int, int]]:
        """Yield the rank and the world size. An exception inside ends the ranks on all hosts."""
        import torch.distributed as dist

        if dist.is_initialized():
            yield dist.get_rank(), dist.get_world_size()
            return
        dist_env = bootstrap.read_distributed_env(self.environ)
        monitor = self._make_monitor(dist_env) if dist_env.world_size > 1 else None
        try:
            yield dist_env.rank, dist_env.world_size
        except Exception:
            if monitor is not None:
                rendezvous.announce_failure(dist_env, self.environ, monitor)  # the monitor's excepthook marks the rank
            raise

    def meet(self, job: Job) -> RankMonitor | None:
        """Set up torch.distributed and DeepSpeed, unless the program has done so, until the process exits.

        Returns:
            This rank's monitor; None: the program has set up torch.distributed itself, or handles errors itself.
        """
        self.environ.update(device_environment(job, self.environ))
        import deepspeed
        import torch.distributed as dist

        def teardown() -> None:
            if dist.is_initialized():
                bootstrap.teardown_distributed(together=False)  # a rank that ends early must not wait for the others

        if not dist.is_initialized():
            dist_env = bootstrap.read_distributed_env(self.environ)
            bootstrap.setup_distributed(dist_env, self.environ, self._make_monitor(dist_env))
            atexit.register(teardown)
        elif not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        determinism.use_deterministic_algorithms(job)
        return _program_monitor[-1] if _program_monitor else None

    def _make_monitor(self, dist_env: DistributedEnv) -> RankMonitor | None:
        """Return the monitor, started at the first call; None: the program handles errors itself."""
        if not _program_monitor and sys.excepthook is sys.__excepthook__:
            _program_monitor.append(bootstrap.monitor_rank(dist_env, self.environ))
        return _program_monitor[-1] if _program_monitor else None
