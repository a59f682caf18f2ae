"""The training loop: micro-batches in; metrics, monitors, checkpoints and events out.

train.py and `dslpar.fit` both run it, each with its own data and engine.

After each step, ranks exchange flags: a stop was requested, a write failed, the run folder is gone, a checkpoint is
still being written. All ranks therefore act on them at the same step.

With `train.async_save`, a due checkpoint is copied, and a thread writes the copy while training continues. After the
first step in which no rank is still writing, all ranks publish the checkpoint together. If the run ends before, by a
stop request, at its last step or for non-finite numbers, ranks first wait for the writing and publish the checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TextIO

from dslpar.checkpoint import PendingSave
from dslpar.checkpoint import folder as checkpoints
from dslpar.core.errors import DslparError
from dslpar.data.loader import StepData
from dslpar.data.prefetch import Prefetcher
from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import pin
from dslpar.reporting import expert_loads, logging, monitors, run_dir
from dslpar.reporting.logging import log
from dslpar.reporting.run_dir import METRICS, is_in_place, truncate_csv, write_record
from dslpar.training import failures
from dslpar.training.events import Event, Hook, hook_name
from dslpar.training.expert_loads import ExpertLoads
from dslpar.training.metrics import (
    device_name,
    log_memory,
    log_step,
    loss_scale,
    progress,
    sample_size,
    seconds_left,
    throughput,
    unit_of,
)
from dslpar.training.replica_check import Difference
from dslpar.training.session import NO_LIMIT, SLOW_FACTOR, Session, any_rank
from dslpar.training.step_data import IterableData, PartData, num_samples

_SCALE_EXHAUSTED = "loss scale already at minimum"
"""Text of DeepSpeed's error when a gradient overflows at the minimum loss scale."""

Record = dict[str, int | float]
"""A line of metrics.jsonl."""


class Trainer:
    """Takes the steps of a run, from the engine's current step.

    All ranks call its methods together. `eval_data` is None, on all ranks, if the run does not evaluate. `folder` is
    the run folder on rank 0, which writes metrics, and None on other ranks. `hooks` receive events on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        train_data: StepData,
        eval_data: StepData | None,
        folder: Path | None,
        session: Session,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.job, self.engine, self.folder, self.session, self.hooks = engine.job, engine, folder, session, hooks
        self.train_data, self.eval_data = train_data, eval_data
        self.stopped = False
        """True if the run has stopped on a signal, or because the run folder is gone."""
        self.last_checkpoint = ""
        """Checkpoint of the last completed step, or "" if there is none."""
        self._pending: tuple[Record, PendingSave] | None = None
        """The checkpoint that is being written, with its step's line of metrics.jsonl."""
        self._write_error: OSError | None = None
        """This rank's last failure to write, which the next exchange of flags reports to all ranks."""
        self._folder_gone = False
        """True if the run folder was deleted or moved: rank 0 notices, and `_heed` informs all ranks."""
        self._difference: Difference | None = None
        """Difference between replicas found since the previous step; None: no comparison has found one."""
        self._noted_step: int | None = None
        """The step after which replicas differed, until a line of metrics.jsonl reports it."""
        self._has_checked_repeats = False
        """Whether the first evaluation has compared its samples with the held-out ones."""
        self._best_loss: float | None = None
        """Lowest held-out loss among this run's checkpoints; None: not looked up yet."""
        self._num_skipped = 0
        """Number of consecutive steps, up to the last, without a finite loss and gradient."""
        self._first_step = engine.steps_done + 1
        self._began_s = math.nan
        """Start time of the second step of this start; the first step may compile and is not representative."""
        self._device = device_name(engine)
        self._expert_loads = ExpertLoads(engine)
        size = engine.job.batch.global_size
        # A program's own data may draw from torch's generator. A prefetch thread would draw between a step's dropouts.
        end = self.job.spec.train.steps * size if isinstance(train_data, PartData) else 0
        on_cpu = engine.deepspeed.device.type == "cpu"
        self._prefetcher = Prefetcher(train_data.step, size, end=end, pin=None if on_cpu else pin)

    # ---- train, evaluate, save ----

    def train(self) -> Record:
        """Take all remaining steps, or stop after the step in which any rank received a stop signal.

        Each step: train, write metrics, act on a difference between replicas, notify hooks, read all ranks' flags,
        publish a written checkpoint, save if due, and check for non-finite numbers. If there is evaluation data, the
        loop also evaluates before the first and after the last step.

        Returns:
            The last step's line of metrics.jsonl; empty if no step was left.

        Raises:
            DslparError: on every rank, if a rank cannot write, the run folder is gone, the loss or the gradient is no
                longer finite, or replicas differ.
        """
        train, engine = self.job.spec.train, self.engine
        loss_before = self.evaluate() if self._eval_interval is not None and engine.steps_done == 0 else None
        if loss_before is not None:
            log.info("held-out loss before: %.4f", loss_before)
            self._notify("eval", {"step": 0, "eval_loss": loss_before})
        self._open_monitors()
        record: Record = {}
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(_open_to_append(self.folder / METRICS)) if self.folder else None
            bar = stack.enter_context(logging.progress_bar(train.steps, engine.steps_done, shown=bool(metrics)))
            stack.callback(self._prefetcher.close)
            stack.callback(setattr, engine.host_reads, "local_flags", engine.host_reads.local_flags)
            engine.host_reads.local_flags = self._local_flags
            stack.callback(self.session.abandon_save)  # a checkpoint is still pending only if this rank fails alone
            self.stopped = self._sync_ranks()  # SIGTERM may have come while the engine was built
            while engine.steps_done < train.steps and not self.stopped:
                record = self.train_step()
                if metrics is not None:
                    self._write(metrics, record)
                self._heed_difference()
                self._after_step(record)
                self.stopped = self._heed(engine.host_reads.any_rank)
                self._publish_if_written(engine.host_reads.any_rank)
                # Save after the last step, every save_interval steps, on a stop, and after the best evaluation so far;
                # never if save_interval is 0.
                is_best = self._is_best(record)
                if train.save_interval != 0 and (self.stopped or is_best or self._is_due(train.save_interval)):
                    self.save_checkpoint(metrics, record)
                self._check_finite(record)
                bar.update()
            self._sync_ranks()  # to learn of events after the last step
        monitors.close(engine.deepspeed.monitor)
        if self._folder_gone:
            raise failures.run_folder_gone(engine, self.last_checkpoint)
        if loss_before is not None and "eval_loss" in record:
            log.info("held-out loss before: %.4f, after: %.4f", loss_before, record["eval_loss"])
        if record and engine.steps_done == train.steps:
            self._notify("end", record)
        return record

    def train_step(self) -> Record:
        """Take a step, and evaluate if due; return its line of metrics.jsonl."""
        engine, job = self.engine, self.job
        scale = loss_scale(job, engine)  # before the step, which may change it
        step = engine.steps_done + 1
        self.session.enter("step", step, SLOW_FACTOR if step == self._first_step else 1)
        self.last_checkpoint = ""
        consumed, began = engine.consumed_samples, time.perf_counter()
        try:
            loss = engine.train_batch(self._prefetcher.step(consumed))
        except Exception as error:
            if _SCALE_EXHAUSTED not in str(error):  # DeepSpeed has no exception class for it
                raise
            self._publish_before_end()
            how = "at the smallest loss scale"
            raise failures.not_finite(engine, self.train_data, consumed, how, self._num_skipped) from None
        self._note_difference(self.session.compare_replicas(engine))
        step_s = time.perf_counter() - began
        record: Record = {
            "step": engine.steps_done,
            "loss": loss,
            "grad_norm": engine.grad_norm,
            "lr": engine.lr,
            **progress(job, engine.consumed_samples, step_s),
            "data_s": self._prefetcher.wait_s,
            **throughput(job, self._device, job.batch.global_size * job.seq_len / step_s),
            **scale,
        }
        if self._expert_loads and self._is_due(self.job.spec.train.log_interval):
            record |= self._measure_expert_loads()
        if self._noted_step is not None:
            record["replicas_differ"], self._noted_step = self._noted_step, None
        if self._eval_interval is not None and self._is_due(self._eval_interval):
            record["eval_loss"] = self.evaluate()
            self.session.note_eval_loss(engine.steps_done, record["eval_loss"])
            if job.spec.train.eval_train and self._can_read_again:
                self._prefetcher.wait()  # its thread reads the same data
                record["train_eval_loss"] = self._evaluate_on(self.train_data)
        return record

    def _measure_expert_loads(self) -> Record:
        """Return the fields of metrics.jsonl about the experts' loads; on rank 0, also write them by layer and warn."""
        loads = self._expert_loads.measure()
        if self.folder is not None:
            try:
                expert_loads.write(self.folder, self.engine.steps_done, loads)
            except OSError as error:
                self._write_error = error
            self._expert_loads.warn_of_collapse(loads)
        return expert_loads.figures(loads)

    def evaluate(self) -> float:
        """Return the mean loss over `eval_steps` global batches of held-out data, the same batches each time."""
        assert self.eval_data is not None
        self._warn_of_repeats(self.eval_data)
        return self._evaluate_on(self.eval_data)

    def _warn_of_repeats(self, data: StepData) -> None:
        """Warn, once, if an evaluation reads more samples than there are: some then count more often than others."""
        if self._has_checked_repeats:
            return
        self._has_checked_repeats = True
        size, there = self.job.batch.global_size, num_samples(data)
        read = self.job.spec.train.eval_steps * size
        if there is None or read <= there:
            return
        fits = f"train.eval_steps={there // size}" if there >= size else f"at least {size} of them"
        log.warning(
            "an evaluation reads %d held-out samples, but there are %d, so some count more often than others: %s",
            *(read, there, fits),
        )

    def _evaluate_on(self, data: StepData) -> float:
        """Return the mean loss over the first `eval_steps` global batches of `data`."""
        steps, losses = self.job.spec.train.eval_steps, []
        for step in range(steps):
            self.session.enter("evaluating", self.engine.steps_done, SLOW_FACTOR)
            losses.append(self.engine.eval_batch(data.step(step * self.job.batch.global_size)))
        return sum(losses) / steps

    @cached_property
    def _can_read_again(self) -> bool:
        """Return whether the run's first samples can be read again; a program's iterable only goes forward."""
        (is_stream,) = any_rank(self.engine, isinstance(self.train_data, IterableData))
        if is_stream:
            log.warning("train.eval_train has no effect: the program's training data can be read only once")
        return not is_stream

    def _is_best(self, record: Record) -> bool:
        """Return whether the step's held-out loss is the lowest of the run, if checkpoint.keep_best asks for it.

        All ranks must call it together. Rank 0 knows the losses of the checkpoints up to the step from which the run
        was resumed: the best is among them, since each best one was saved.
        """
        if not self.job.spec.checkpoint.keep_best or "eval_loss" not in record:
            return False
        world, loss = self.engine.groups.axis("pipe", "data", "tensor"), float(record["eval_loss"])
        if self._best_loss is None:
            self._best_loss = collectives.broadcast_object(
                self._lowest_saved() if world.index == 0 else math.inf, world
            )
        if not loss < self._best_loss:
            return False
        self._best_loss = loss
        return True

    def _lowest_saved(self) -> float:
        root, first = Path(self.job.output_dir, run_dir.CHECKPOINTS), self._first_step
        there = (each for each in checkpoints.scan(root).checkpoints if each.step < first)
        best = checkpoints.best_of(each for each in there if checkpoints.is_complete(each))
        return math.inf if best is None or best.eval_loss is None else best.eval_loss

    def evaluate_alone(self) -> Record:
        """Only evaluate: write the held-out loss to the log and to eval.jsonl; return its line of eval.jsonl."""
        job, engine = self.job, self.engine
        loss = self.evaluate()
        unit, seen = unit_of(job), job.spec.train.eval_steps * job.batch.global_size * sample_size(job)
        log.info("held-out loss at step %d: %.4f, over %d %s", engine.steps_done, loss, seen, unit)
        record: Record = {"step": engine.steps_done, "eval_loss": loss, unit: seen}
        if engine.groups.rank == 0:
            with open(Path(job.output_dir, run_dir.EVAL), "a", encoding="utf-8") as file:
                write_record(file, record)
        return record

    def save_checkpoint(self, metrics: TextIO | None, record: Record) -> None:
        """Save a checkpoint, or start saving it. First flush the lines of metrics.jsonl up to its step to disk.

        If no step follows, tensors are saved without a copy, and the checkpoint is complete on return.
        """
        train, step = self.job.spec.train, self.engine.steps_done
        self.session.enter("saving", step, SLOW_FACTOR)
        if metrics is not None:
            try:
                os.fsync(metrics.fileno())
            except OSError as error:
                self._write_error = error
        self._sync_ranks()  # a full disk on one rank ends all ranks before any of them starts a checkpoint
        self._note_difference(self.session.conclude_comparison(self.engine))
        self._heed_difference()
        self._publish()
        goes_on = step < train.steps and not (self.stopped or self._folder_gone)
        if goes_on and train.async_save and not self.session.has_saved(step):
            self._pending = record, self.session.begin_save(self.engine)
            return
        saved = self.session.save(self.engine)
        self.last_checkpoint = str(saved)
        self._notify("save", record, saved)

    def _publish_if_written(self, flags: Sequence[bool]) -> None:
        """Publish the pending checkpoint if, by the step's flags, no rank is still writing it."""
        *_, still_written = flags
        # A hook may have called engine.save(), which first publishes the pending checkpoint. Hooks are then notified.
        if self._pending is not None and (not still_written or self._pending[1].saved is not None):
            self._sync_ranks()  # to learn of events after the flags were read
            self._publish()

    def _publish(self) -> None:
        """Wait until all ranks have written the pending checkpoint, if any; publish it and notify hooks."""
        if self._pending is None:
            return
        (record, pending), self._pending = self._pending, None
        if self._folder_gone:
            self.session.abandon_save()  # the pending checkpoint was in the run folder
            return
        self.session.finish_save(self.engine)
        self._notify("save", record, pending.saved)

    def _publish_before_end(self) -> None:
        """Publish the pending checkpoint before all ranks raise the error that ends the run; only log a failure."""
        try:
            self._publish()
        except DslparError as error:
            log.warning("the last checkpoint is not written: %s", "; ".join(found.message for found in error.findings))

    @property
    def _eval_interval(self) -> int | None:
        return None if self.eval_data is None else self.job.spec.train.eval_interval

    def _is_due(self, interval: int | None) -> bool:
        """Return whether the completed step is a multiple of `interval` or the run's last."""
        done = self.engine.steps_done
        return done == self.job.spec.train.steps or (interval is not None and done % interval == 0)

    def _after_step(self, record: Record) -> None:
        """Notify hooks of a step; after the first step of this start, log the memory it took."""
        if self.engine.steps_done == self._first_step:
            self._began_s = time.perf_counter()
            log_memory(self.engine, "after the first step")
        self._notify("step", record)
        if "eval_loss" in record:
            self._notify("eval", record)

    def _notify(self, name: Literal["step", "eval", "save", "end"], record: Record, saved: Path | None = None) -> None:
        """Call each hook. An exception from a hook propagates, and the session reports which hook was running."""
        metrics: Mapping[str, Any] = MappingProxyType(record)
        event = Event(name=name, step=int(record["step"]), metrics=metrics, engine=self.engine, checkpoint=saved)
        for hook in self.hooks:
            self.session.enter(f"in hook {hook_name(hook)}", self.engine.steps_done, NO_LIMIT)
            hook(event)

    # ---- ranks together ----

    def _local_flags(self) -> tuple[bool, bool, bool, bool]:
        """Return this rank's flags: stop requested, could not write, folder gone, still writing a checkpoint."""
        session = self.session
        return session.stop_requested, self._write_error is not None, self._folder_gone, session.is_writing

    def _sync_ranks(self) -> bool:
        """Exchange flags now, outside of a step; return whether to stop, as `_heed` does."""
        return self._heed(any_rank(self.engine, *self._local_flags()))

    def _heed(self, flags: Sequence[bool]) -> bool:
        """Act on the flags of all ranks, as `_local_flags` orders them; return whether to stop.

        Raises:
            DslparError: on every rank, if a rank could not write.
        """
        told, write_failed, folder_gone, _ = flags
        self._folder_gone |= folder_gone
        if write_failed:
            self._publish_before_end()
            raise failures.disk_full(self.engine, self._write_error)
        return told or folder_gone

    def _note_difference(self, difference: Difference | None) -> None:
        self._difference = difference
        if difference is not None:
            self._noted_step = difference.step

    def _heed_difference(self) -> None:
        """Act on the result of a comparison of replicas that is known by this step.

        Raises:
            DslparError: on every rank, if replicas differ and the config ends the run then.
        """
        if self._difference is not None and self.job.spec.train.on_replica_difference == "stop":
            self._publish_before_end()  # so that the pending checkpoint is marked as suspect, too
        self.session.heed_difference(self.engine, self._difference)

    # ---- metrics ----

    def _open_monitors(self) -> None:
        monitor = self.engine.deepspeed.monitor
        monitors.silence_engine(monitor)
        if self.engine.steps_done:
            for path in monitors.csv_files(monitor):
                truncate_csv(path, self.engine.steps_done)

    def _write(self, metrics: TextIO, record: Record) -> None:
        """Write and log a step's line. An error becomes a flag, so that all ranks end together."""
        try:
            write_record(metrics, record)
            self._folder_gone = not is_in_place(metrics)
            monitors.write(self.engine.deepspeed.monitor, record)
            if self._is_due(self.job.spec.train.log_interval) or "eval_loss" in record:
                since = time.perf_counter() - self._began_s
                log_step(self.job, record, seconds_left(self.job, record, since, self._first_step))
        except OSError as error:
            self._write_error = error

    def _check_finite(self, record: Mapping[str, float]) -> None:
        """End the run when too many consecutive steps had no finite loss and gradient."""
        finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        self._num_skipped = 0 if finite else self._num_skipped + 1
        if self._num_skipped > failures.max_skipped(self.job):
            consumed = self.engine.consumed_samples - self.job.batch.global_size
            how = f"for {self._num_skipped} steps in a row"
            self._publish_before_end()
            raise failures.not_finite(self.engine, self.train_data, consumed, how, self._num_skipped)


@contextlib.contextmanager
def _open_to_append(path: Path) -> Iterator[TextIO]:
    """Open a file to append to. An error on close is ignored: the write that caused it has already reported it."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()
