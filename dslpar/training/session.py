"""State of a run besides its engine: run folder, checkpoints, time limits, stop requests, comparisons of replicas.

    session = Session(job, config, world, rank_monitor, text)
    session.lock_folder(job)                                 # one run at a time writes there
    stored = session.find_checkpoint(job)                    # verifies every byte; None: nothing to resume
    session.prepare_folder(job, stored)                      # archives the files of another run
    session.load(engine, stored); session.save(engine)
    session.begin_save(engine); ...; session.finish_save(engine)   # save while training continues
    (stopping,) = any_rank(engine, session.stop_requested)   # the same on every rank, at the same step

train.py's loop and the engine for a user's own loop (user_loop_engine.py) both use it. SIGTERM, hangs and two runs in
one folder therefore end in the same way in both. The rank's guard (dslpar/watchdog) reads the phase and the time limit
that `enter` sets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from dslpar import checkpoint
from dslpar.checkpoint import Checkpoint, HostBuffers, PendingSave, writer
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed import bootstrap, collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.distributed.rank_session import SLOW_FACTOR as SLOW_FACTOR
from dslpar.engine.engine import Engine
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter.report import text as report_text
from dslpar.reporting import logging, run_dir
from dslpar.reporting.logging import log
from dslpar.training.replica_check import Difference, ReplicaCheck
from dslpar.watchdog.rank_monitor import RankMonitor

Value = TypeVar("Value")

NO_LIMIT = 0


class Session:
    """One run, on this rank. All ranks call its methods together, except `enter`.

    A *pending* checkpoint is one that `begin_save` has started and `finish_save` has not published yet.

    config: the config as written.
    world: all ranks.
    monitor: this rank's monitor; None: the program set up torch.distributed or handles errors itself, without a guard.
    text: the identity of the training data (`dslpar.data.source`), which a resume must not change.
    """

    def __init__(self, job: Job, config: Config, world: Axis, monitor: RankMonitor | None, text: str = "") -> None:
        self.config, self.world, self.monitor, self.text = config, world, monitor, text
        self.train = job.spec.train
        self.is_prepared = False
        """True if the folder is this run's, and the files of an earlier run there are archived."""
        self.loaded: Checkpoint | None = None
        """The checkpoint from which the run continues; None: it started at step 0."""
        self._locked = False
        self._saved_step, self._saved = -1, Path()
        self._evaluated = -1, math.nan
        """Step of the last evaluation, and its held-out loss."""
        self._check: ReplicaCheck | None = None
        """Created at an engine's first step or save."""
        self._confirmed_step: int | None = None
        """The step of the last comparison of replicas without a difference, or of this start; None: replicas are not
        compared.
        """
        self._unconfirmed: list[Path] = []
        """Checkpoints of steps after `_confirmed_step`."""
        self._difference: Difference | None = None
        """The difference found by the last comparison; checkpoints saved after it are marked as suspect."""
        self._is_reported = False
        self._pending: PendingSave | None = None
        """The checkpoint that a thread is writing, or that all ranks have yet to publish."""
        self._buffers: HostBuffers | None = None

    # ---- phases, time limits and stops ----

    def locate(self, groups: Groups) -> None:
        """Show this rank's stage to its guard, for reports."""
        if self.monitor is not None:
            self.monitor.page.location = groups.stage_name

    def enter(self, phase: str, step: int = 0, times: int = 1) -> None:
        """Enter a phase, and show it to this rank's guard. Its limit is `times` * train.step_timeout; 0: no limit."""
        if self.monitor is not None:
            self.monitor.page.enter(phase, step, (self.train.step_timeout or 0) * times)

    @contextlib.contextmanager
    def inside(self, phase: str, step: int = 0, times: int = 1) -> Iterator[None]:
        """Enter a phase for a `with` block, and the program's own code after it, which has no limit."""
        self.enter(phase, step, times)
        try:
            yield
        except BaseException:
            self.enter(phase, step, NO_LIMIT)  # a report of the error names this phase; the program may catch it
            raise
        self.enter("in the program", step, NO_LIMIT)

    def enter_ending(self) -> None:
        """Enter the rank's last phase: process groups are destroyed, monitors close, and threads are joined."""
        if self.monitor is not None:
            self.monitor.enter_ending(SLOW_FACTOR * (self.train.step_timeout or 0))

    def extend_timeouts(self) -> None:
        """Extend torch's timeouts beyond the limits of all phases, so that the guards report a hang first."""
        step_timeout = self.train.step_timeout
        bootstrap.extend_timeouts(step_timeout and SLOW_FACTOR * step_timeout)

    @property
    def stops_on_signal(self) -> bool:
        """Return whether SIGTERM and SIGUSR1 request a stop; the same on all ranks."""
        return self.monitor is not None and self.monitor.stops_on_signal

    @property
    def stop_requested(self) -> bool:
        """Return whether this rank has received a stop signal."""
        return self.monitor is not None and self.monitor.stop_requested

    def mark_stopped(self, step: int, saved: str) -> int:
        """Mark this rank as ended by a request to stop; return the status to exit with."""
        if self.monitor is not None:
            self.monitor.mark_stopped(step, saved)
        return self.train.requeue_status

    # ---- the folder ----

    def lock_folder(self, job: Job) -> None:
        """Lock the run folder, until rank 0's process ends, so that no other run writes there.

        Raises:
            DslparError: on every rank, if another run keeps writing there, or rank 0 cannot write there.
        """
        if not self._locked:
            self._on_rank_0(lambda: run_dir.lock_run_folder(job, self.config))
            self._locked = True

    def find_checkpoint(self, job: Job) -> Checkpoint | None:
        """Return the checkpoint to resume from, after verifying it; None: there is no checkpoint.

        Raises:
            DslparError: on every rank, if the checkpoint is corrupted, is not visible to some rank, or belongs to
                another run.
        """
        self.enter("verifying", times=SLOW_FACTOR)
        stored = checkpoint.find_checkpoint(job, self.world)
        if stored is not None:
            checkpoint.check(stored, job, self.text)
        return stored

    def prepare_folder(
        self, job: Job, stored: Checkpoint | None, names: Sequence[str] = run_dir.FILES_OF_A_RUN
    ) -> None:
        """Write the config to the run folder; first archive files with these `names` if another run left them.

        Raises:
            DslparError: on every rank, if rank 0 cannot write there.
        """
        # If the checkpoint comes from another folder, this run does not continue the files in its own folder.
        archived = () if stored is not None and _is_in_its_folder(job, stored) else names
        self._on_rank_0(lambda: run_dir.prepare_run_folder(job, self.config, archived))
        self.is_prepared = True

    def prune(self, job: Job, stored: Checkpoint) -> None:
        """Remove old checkpoints that are left if a run was killed after it published one and before it removed one."""
        if self.world.index == 0 and _is_in_its_folder(job, stored):
            kept = job.spec.checkpoint
            writer.prune(Path(stored.path).parent, kept.keep, stored.step, keep_best=kept.keep_best)

    def _on_rank_0(self, action: Callable[[], Value]) -> None:
        """Run `action` on rank 0; its findings are raised on every rank."""
        findings: Sequence[Finding] = ()
        if self.world.index == 0:
            try:
                action()
            except DslparError as error:
                findings = error.findings
        if findings := collectives.broadcast_object(findings, self.world):
            raise DslparError(findings)

    # ---- checkpoints ----

    def load(self, engine: Engine, stored: Checkpoint, folder: Path | None = None) -> None:
        """Load a checkpoint that `find_checkpoint` returned into a newly built engine.

        folder: DeepSpeed's prints go to its log.txt; None: they are dropped.
        """
        self.enter("loading", times=SLOW_FACTOR)
        with logging.prints_to_log(folder):
            checkpoint.load(engine, stored)
        self.loaded = stored
        log.info("%s is loaded: step %d, sample %d", stored.path, engine.steps_done, engine.consumed_samples)
        for line in checkpoint.changes(stored, engine.job):  # changes of the layout, and of keys that matter
            log.info("%s", line)

    def save(self, engine: Engine) -> Path:
        """Save a checkpoint of the last step; return its folder. A second call after a step returns the same folder.

        First wait for the pending checkpoint, if there is one, and publish it.
        """
        self.finish_save(engine)
        if self._saved_step != engine.steps_done:
            self.enter("saving", engine.steps_done, SLOW_FACTOR)
            self._note_saved(engine.steps_done, self._save(engine))
        return self._saved

    def _save(self, engine: Engine) -> Path:
        return checkpoint.save(engine, self.text, self._confirmed_step, self._eval_loss_of(engine.steps_done))

    def note_eval_loss(self, step: int, loss: float) -> None:
        """Remember the held-out loss after a step, for the checkpoint of that step."""
        self._evaluated = step, loss

    def _eval_loss_of(self, step: int) -> float | None:
        return self._evaluated[1] if self._evaluated[0] == step else None

    def begin_save(self, engine: Engine) -> PendingSave:
        """Start saving a checkpoint of the last step: a thread writes a copy, until `finish_save`.

        First wait for the pending checkpoint, if there is one, and publish it.
        """
        self.finish_save(engine)
        self.enter("saving", engine.steps_done, SLOW_FACTOR)
        if self._buffers is None:
            self._buffers = HostBuffers(pinned=engine.deepspeed.device.type != "cpu")
        self._pending = checkpoint.begin_save(engine, self._buffers, self.text, self._eval_loss_of(engine.steps_done))
        return self._pending

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is still writing the pending checkpoint."""
        return self._pending is not None and not self._pending.is_written

    def has_saved(self, step: int) -> bool:
        """Return whether the last checkpoint that this start saved is of that step."""
        return self._saved_step == step

    def finish_save(self, engine: Engine) -> None:
        """Publish the pending checkpoint, if there is one, once all ranks have written it.

        Raises:
            DslparError: on every rank, if a rank could not write its part.
        """
        if self._pending is None:
            return
        self.enter("saving", engine.steps_done, SLOW_FACTOR)
        try:
            self._note_saved(self._pending.step, self._pending.publish(self._confirmed_step))
        except DslparError:
            self._pending = None  # all ranks have given it up
            raise
        self._pending = None

    def abandon_save(self) -> None:
        """Abandon the pending checkpoint, if there is one. Not collective: this rank is about to fail alone."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            reason = pending.abandon()
            log.warning(
                "the checkpoint of step %d was being written and is incomplete%s",
                *(pending.step, f": {reason}" if reason else ""),
            )

    def _note_saved(self, step: int, saved: Path) -> None:
        self._saved_step, self._saved = step, saved
        log.info("checkpoint of step %d in %s", step, saved)
        if self._confirmed_step is not None and step > self._confirmed_step:
            self._unconfirmed.append(saved)
        if self._difference is not None:
            self._mark_unconfirmed(self._difference)

    # ---- replicas ----

    def compare_replicas(self, engine: Engine) -> Difference | None:
        """Return the difference that a comparison of replicas has found by this step; start the next one if due.

        Call it after each step, and pass its result to `heed_difference`.
        """
        return self._replicas(engine).after_step()

    def conclude_comparison(self, engine: Engine) -> Difference | None:
        """Conclude the pending comparison, if there is one, and return its difference. Call it before a save.

        `heed_difference` must follow.
        """
        return self._replicas(engine).finish()

    def heed_difference(self, engine: Engine, difference: Difference | None) -> None:
        """Act on the result of a comparison of replicas.

        If there is a difference, mark the checkpoints saved since replicas were last equal as suspect; then end the
        run, or log the first difference. Without a difference, earlier checkpoints are confirmed.

        Raises:
            DslparError: on every rank, if replicas differ and train.on_replica_difference is 'stop'.
        """
        if difference is None:
            equal_step = self._replicas(engine).last_equal_step
            if equal_step is not None and equal_step != self._confirmed_step:
                self._confirmed_step, self._unconfirmed, self._difference = equal_step, [], None
            return
        self._difference = difference
        found = difference.finding(engine.job, self._mark_unconfirmed(difference))
        if self.train.on_replica_difference == "stop":
            raise DslparError([found])
        if not self._is_reported and self.world.index == 0:
            findings = self.at_keys([found._replace(severity="warning")])
            log.warning(report_text.text(findings, self.config.sources).rstrip())
        self._is_reported = True

    def _replicas(self, engine: Engine) -> ReplicaCheck:
        if self._check is None:
            self._check = ReplicaCheck(engine)
            # All replicas drew or loaded the same state before the step that has just been taken.
            self._confirmed_step = max(engine.steps_done - 1, 0) if self._check.interval else None
        return self._check

    def _mark_unconfirmed(self, difference: Difference) -> list[str]:
        """Mark checkpoints saved since the last comparison without a difference; return their names, on all ranks."""
        paths, self._unconfirmed = self._unconfirmed, []
        for path in paths if self.world.index == 0 else ():
            writer.mark_suspect(path, difference.message)
        return [path.name for path in paths]

    # ---- findings ----

    def at_keys(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return findings at their keys' locations in the config. The code that raises them knows at most the file."""
        return self.config.at_keys(findings)


def _is_in_its_folder(job: Job, stored: Checkpoint) -> bool:
    """Return whether a checkpoint is in this run's folder, not in that of another run from which this one starts."""
    return Path(stored.path).parent.resolve() == Path(job.output_dir, run_dir.CHECKPOINTS).resolve()


def any_rank(engine: Engine, *flags: bool) -> list[bool]:
    """Return for each flag whether any rank has set it. All ranks must call it together, with the same result."""
    local = torch.tensor(flags, dtype=torch.int32, device=engine.deepspeed.device)
    counts = collectives.all_reduce(local, engine.groups.axis("pipe", "data", "tensor"))
    return [bool(count) for count in counts.tolist()]
