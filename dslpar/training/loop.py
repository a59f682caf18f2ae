"""The training loop: samples in; metrics, monitors and checkpoints out."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TextIO

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.data.order import Samples, micro_batches
from dslpar.data.prefetch import Prefetcher
from dslpar.data.source import Part, Source, make_samples
from dslpar.distributed import collectives
from dslpar.engine import nonfinite
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import MicroBatch
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.policies.data_types import inputs_of
from dslpar.reporting import logging, monitors
from dslpar.reporting.logging import log
from dslpar.reporting.run_dir import METRICS, is_in_place, truncate_csv, write_record
from dslpar.training.metrics import device_name, loss_scale, progress, throughput, unit_of
from dslpar.training.session import SLOW_FACTOR, Session, any_rank

_MAX_SKIPPED = 3
_SCALE_EXHAUSTED = "loss scale already at minimum"
"""What DeepSpeed raises when a gradient overflows even then."""

Record = dict[str, int | float]
"""A line of metrics.jsonl."""


class Trainer:
    """The steps of a run, from where the engine stands.

    All ranks call its methods together. `folder` is the run folder on rank 0, which writes there; None on other ranks.
    """

    def __init__(self, job: Job, engine: Engine, source: Source, folder: Path | None, session: Session) -> None:
        self.job, self.engine, self.source, self.folder, self.session = job, engine, source, folder, session
        self.stopped = False
        """Whether the run was told to stop, and has."""
        self.last_checkpoint = ""
        """The checkpoint of the last step done, if there is one."""
        self._write_error: OSError | None = None
        self._folder_gone = False
        """Whether the run folder was deleted or moved; after `_sync_ranks`, all ranks know."""
        self._num_skipped = 0
        """Steps in a row, up to the last, without a finite loss and gradient."""
        self._first_step = engine.steps_done + 1
        self._device = device_name(engine)
        size = job.batch.global_size
        self._prefetcher = Prefetcher(self._train_batches, size, end=job.spec.train.steps * size)

    # ---- train, evaluate, save ----

    def train(self) -> None:
        """Take all steps that are left, or stop after the step in which a rank was told to.

        Evaluates before the first step and after the last too, if the config asks for evaluation.

        Raises:
            DslparError: on every rank, if one cannot write, the run folder is gone, or the loss or the gradient is no
                longer finite.
        """
        train, engine = self.job.spec.train, self.engine
        loss_before = self.evaluate() if train.eval_interval is not None and engine.steps_done == 0 else None
        if loss_before is not None:
            log.info("held-out loss before: %.4f", loss_before)
        self._open_monitors()
        record: Record = {}
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(_open_to_append(self.folder / METRICS)) if self.folder else None
            bar = stack.enter_context(logging.progress_bar(train.steps, engine.steps_done, shown=bool(metrics)))
            stack.callback(self._prefetcher.close)
            self.stopped = self._sync_ranks()  # SIGTERM may have come while the engine was built
            while engine.steps_done < train.steps and not self.stopped:
                record = self.train_step()
                if metrics is not None:
                    self._write(metrics, record)
                self.stopped = self._sync_ranks()
                # After the last step and every save_interval steps; also when told to stop; never if that is 0.
                if train.save_interval != 0 and (self.stopped or self._is_due(train.save_interval)):
                    self.save_checkpoint(metrics)
                self._check_finite(record)
                bar.update()
        monitors.close(engine.deepspeed.monitor)
        if self._folder_gone:
            raise self._run_folder_gone()
        if loss_before is not None and "eval_loss" in record:
            log.info("held-out loss before: %.4f, after: %.4f", loss_before, record["eval_loss"])

    def train_step(self) -> Record:
        """Take a step, and evaluate if that is due; return its line in metrics.jsonl."""
        engine, job = self.engine, self.job
        scale = loss_scale(job, engine)  # before the step, which may change it
        step = engine.steps_done + 1
        self.session.enter("step", step, SLOW_FACTOR if step == self._first_step else 1)
        self.last_checkpoint = ""
        consumed, began = engine.consumed_samples, time.perf_counter()
        try:
            loss = engine.train_batch(self._prefetcher.step(consumed))
        except Exception as error:
            if _SCALE_EXHAUSTED not in str(error):  # DeepSpeed has no class for it
                raise
            raise self._not_finite(consumed, "at the smallest loss scale") from None
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
        eval_interval = job.spec.train.eval_interval
        if eval_interval is not None and self._is_due(eval_interval):
            record["eval_loss"] = self.evaluate()
        return record

    def evaluate(self) -> float:
        """Return the loss over `eval_steps` global batches of held-out text, the same ones each time."""
        steps, losses = self.job.spec.train.eval_steps, []
        for step in range(steps):
            self.session.enter("evaluating", self.engine.steps_done, SLOW_FACTOR)
            batches = self._micro_batches(self._held_out_samples, step * self.job.batch.global_size)
            losses.append(self.engine.eval_batch(batches))
        return sum(losses) / steps

    def save_checkpoint(self, metrics: TextIO | None) -> None:
        """Save a checkpoint; the lines of its steps in metrics.jsonl are on disk before."""
        self.session.enter("saving", self.engine.steps_done, SLOW_FACTOR)
        if metrics is not None:
            try:
                os.fsync(metrics.fileno())
            except OSError as error:
                self._write_error = error
        self._sync_ranks()  # a disk that is full on one rank ends all before any of them begins a checkpoint
        self.last_checkpoint = str(self.session.save(self.engine))

    def _is_due(self, interval: int | None) -> bool:
        """Return whether the step that is done is one of every `interval`, or the last."""
        done = self.engine.steps_done
        return done == self.job.spec.train.steps or (interval is not None and done % interval == 0)

    # ---- ranks together ----

    def _sync_ranks(self) -> bool:
        """Return whether any rank was told to stop, or the run folder is gone: all ranks know it at the same step, and
        stop after it.

        Raises:
            DslparError: on every rank, if one could not write.
        """
        flags = (self.session.stop_requested, self._write_error is not None, self._folder_gone)
        stopping, write_failed, self._folder_gone = any_rank(self.engine, *flags)
        if write_failed:
            raise self._disk_full()
        return stopping or self._folder_gone

    # ---- metrics ----

    def _open_monitors(self) -> None:
        monitor = self.engine.deepspeed.monitor
        monitors.silence_engine(monitor)
        if self.engine.steps_done:
            for path in monitors.csv_files(monitor):
                truncate_csv(path, self.engine.steps_done)

    def _write(self, metrics: TextIO, record: Record) -> None:
        """Write and log a step's line; an error is kept for `_sync_ranks`: all ranks know of it before one ends."""
        train = self.job.spec.train
        try:
            write_record(metrics, record)
            self._folder_gone = not is_in_place(metrics)
            monitors.write(self.engine.deepspeed.monitor, record)
            if self._is_due(train.log_interval) or "eval_loss" in record:
                held_out = f"  held-out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
                unit = unit_of(self.job)
                log.info(
                    "step %d/%d  loss %.4f  norm %.3f  lr %.3g  %.0f %s/s%s",
                    *(record["step"], train.steps, record["loss"], record["grad_norm"], record["lr"]),
                    *(record[f"{unit}_per_s"], unit, held_out),
                )
        except OSError as error:
            self._write_error = error

    # ---- failures ----

    def _check_finite(self, record: Mapping[str, float]) -> None:
        """End the run when too many steps in a row have given no finite loss and gradient."""
        finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        self._num_skipped = 0 if finite else self._num_skipped + 1
        if self._num_skipped > max_skipped(self.job):
            consumed = self.engine.consumed_samples - self.job.batch.global_size
            raise self._not_finite(consumed, f"for {self._num_skipped} steps in a row")

    def _not_finite(self, consumed: int, how: str) -> DslparError:
        """Return the finding of the step after `consumed` samples; it names the first value that is not finite."""
        step = consumed // self.job.batch.global_size + 1
        if self.engine.is_between_steps:
            first = nonfinite.find_first_nonfinite(self.engine, self._train_batches(consumed))
        else:  # another forward would need the step to be over, on all ranks
            first = f"not looked for, in the middle of a step; {self.engine.rank_description}"
        message = f"the loss or the gradient is not finite {how}, the last time in step {step}; first of all: {first}"
        hint = "a smaller lr, train.clip_grad_norm=1.0, precision='bf16' or 'fp32'; --resume from before it diverged"
        return DslparError([finding("PRE230", message, hint, self.job.path)])

    def _disk_full(self) -> DslparError:
        error = self._write_error
        where = f": {self.engine.rank_description}: {error}" if error else f" in step {self.engine.steps_done}"
        message = f"cannot write to {self.job.output_dir}{where}"
        hint = "free space on that file system, or name another train.output_dir"
        hint += "; --resume continues the last checkpoint"
        return DslparError([finding("CKP230", message, hint, self.job.path)])

    def _run_folder_gone(self) -> DslparError:
        folder, step = self.job.output_dir, self.engine.steps_done
        message = (
            f"{folder} was deleted or moved while the run wrote to it, and with it metrics and earlier checkpoints"
        )
        saved = f"; step {step} is saved in {self.last_checkpoint}" if self.last_checkpoint else "; nothing is saved"
        hint = "move what was there back, or --resume from that step" if self.last_checkpoint else "start again"
        return DslparError([finding("CKP231", message + saved, hint, self.job.path)])

    # ---- samples ----

    @cached_property
    def _train_samples(self) -> Samples | None:
        return self._read(self.source.train)

    @cached_property
    def _held_out_samples(self) -> Samples | None:
        return self._read(self.source.held_out)

    def _read(self, part: Part) -> Samples | None:
        """Return the samples, where this rank needs them. All ranks together, since what is wrong is told on all."""
        samples: Samples | None = None
        findings: Sequence[Finding] = ()
        if self.engine.needs_data:
            try:
                samples = make_samples(self.job, part, inputs_of(self.job))
            except DslparError as error:
                findings = error.findings
        if found := next(filter(None, collectives.gather_objects(findings, self.session.world)), None):
            raise DslparError(found)
        return samples

    def _train_batches(self, consumed: int) -> Iterator[MicroBatch]:
        return self._micro_batches(self._train_samples, consumed)

    def _micro_batches(self, samples: Samples | None, consumed: int) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches of the step that begins after `consumed` samples."""
        if samples is None:
            return iter(())
        data, coord = self.job.mesh.data, self.engine.groups.coord
        return micro_batches(samples, self.job.batch, self.job.spec.train.seed, consumed, data, coord["data"])


@contextlib.contextmanager
def _open_to_append(path: Path) -> Iterator[TextIO]:
    """Open a file to append to; an error of closing it is known by then, as one of writing, and is not raised again."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def max_skipped(job: Job) -> int:
    """Return how many steps in a row may be skipped.

    With fp16's dynamic loss scale that is as many as the scale takes to fall to its smallest.
    """
    if job.spec.train.max_skipped is not None:
        return job.spec.train.max_skipped
    fp16 = ds_config(job).get("fp16", {})
    if not fp16.get("enabled") or fp16.get("loss_scale", 0):
        return _MAX_SKIPPED
    return max(_MAX_SKIPPED, int(fp16.get("initial_scale_power", 16)) + int(fp16.get("hysteresis", 2)) - 2)
