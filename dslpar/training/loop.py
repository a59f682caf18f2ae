"""The steps of a run: samples in, metrics, monitors and checkpoints out."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch
from deepspeed.accelerator import get_accelerator

from dslpar import checkpoint
from dslpar.checkpoint import text_identity
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.data.corpus import Corpus, FileSlice
from dslpar.data.order import micro_batches
from dslpar.data.text import TextSamples
from dslpar.distributed import collectives
from dslpar.engine import nonfinite
from dslpar.engine.engine import Engine
from dslpar.forecast import flops
from dslpar.forecast.family import costs_of
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.reporting import logging, monitors
from dslpar.reporting.logging import log
from dslpar.reporting.run_dir import METRICS, truncate_csv, write_record
from dslpar.schema import sections
from dslpar.watchdog.rank_monitor import RankMonitor

SLOW = 6
"""The first step, which may compile, and a checkpoint may take so many times as long as a step."""
_SKIPS = 3
_AT_LEAST = "loss scale already at minimum"
"""What DeepSpeed raises when a gradient overflows even then."""


class Steps:
    """The steps of a run; it holds no more than the position of the engine, and what has gone wrong so far.

    All ranks call its methods together. `folder` is where rank 0 writes; None on other ranks. `monitor`: whether this
    was told to stop, and where it shows how far it is; None: nobody asks.
    """

    def __init__(
        self, job: Job, engine: Engine, corpus: Corpus, folder: Path | None, monitor: RankMonitor | None = None
    ) -> None:
        self.job, self.engine, self.corpus, self.folder, self.monitor = job, engine, corpus, folder, monitor
        self.stopped = False
        """Whether the run was told to stop, and has."""
        self.saved = ""
        """The checkpoint of the last step done, if there is one."""
        self._unwritten: OSError | None = None
        self._skipped = 0
        self._first = engine.steps_done

    def train(self) -> None:
        """All steps that are left, or up to the one after which the run is to stop; the held-out loss before the first
        and after the last, if it is asked for.

        Raises:
            DslparError: on every rank, if one cannot write, or the loss is not finite any more.
        """
        before = self.held_out_loss() if self._evaluates and self.engine.steps_done == 0 else None
        if before is not None:
            log.info("held-out loss before: %.4f", before)
        monitors.silence_engine(self.engine.deepspeed.monitor)
        if self.engine.steps_done:
            for path in monitors.csv_files(self.engine.deepspeed.monitor):
                truncate_csv(path, self.engine.steps_done)
        after = self._all()
        monitors.close(self.engine.deepspeed.monitor)
        if before is not None and after is not None:
            log.info("held-out loss before: %.4f, after: %.4f", before, after)

    def held_out_loss(self) -> float:
        """The loss over the same `eval_steps` global batches of held-out text each time."""
        steps = self.job.spec.train.eval_steps
        return sum(self._held_out_loss(step) for step in range(steps)) / steps

    def _held_out_loss(self, step: int) -> float:
        self._move("evaluating", self.engine.steps_done, SLOW)
        return self.engine.eval_batch(self._batches(self._held_out, step * self.job.batch.global_size))

    def _all(self) -> float | None:
        """Trains to the last step. Returns the held-out loss after it, if it is asked for."""
        train = self.job.spec.train
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(_appended(self.folder / METRICS)) if self.folder else None
            bar = stack.enter_context(logging.progress_bar(train.steps, self.engine.steps_done, shown=bool(metrics)))
            record: dict[str, Any] = {}
            self.stopped = self._agree()
            while self.engine.steps_done < train.steps and not self.stopped:
                record = self._step()
                if metrics is not None:
                    self._write(metrics, record)
                self.stopped = self._agree()
                if self._saves or (self.stopped and train.save_interval != 0):
                    self._save(metrics)
                self._demand_finite(record)
                bar.update()
        return record.get("eval_loss")

    def _agree(self) -> bool:
        """Whether a rank was told to stop, or cannot write: known to all of them at the same step."""
        flags = [self.monitor is not None and self.monitor.stop_requested, self._unwritten is not None]
        axis = self.engine.groups.axis("pipe", "data", "tensor")
        seen = collectives.all_reduce(torch.tensor(flags, dtype=torch.int32, device=self.engine.deepspeed.device), axis)
        stopped, unwritten = seen.tolist()
        if unwritten:
            raise self._disk_full()
        return bool(stopped)

    def _step(self) -> dict[str, Any]:
        """One step; its line in metrics.jsonl."""
        engine = self.engine
        scale = _loss_scale(self.job, engine)
        self._move("step", engine.steps_done + 1, SLOW if engine.steps_done == self._first else 1)
        self.saved = ""
        began = time.perf_counter()
        loss = self._train_batch()
        step_s = time.perf_counter() - began
        tokens = self.job.batch.global_size * self.job.seq_len
        record: dict[str, Any] = {
            "step": engine.steps_done,
            "loss": loss,
            "grad_norm": engine.grad_norm,
            "lr": engine.lr,
            "tokens": engine.consumed_samples * self.job.seq_len,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            **throughput(self.job, self._device, tokens / step_s),
            **scale,
        }
        if self._evaluates and self._at(self.job.spec.train.eval_interval):
            record["eval_loss"] = self.held_out_loss()
        return record

    def _train_batch(self) -> float:
        """The loss of one step."""
        engine, position = self.engine, self.engine.consumed_samples
        try:
            return engine.train_batch(self._batches(self._samples, position))
        except Exception as error:
            if _AT_LEAST not in str(error):
                raise
            raise self._not_finite(position, "at the least loss scale") from None

    def _write(self, metrics: TextIO, record: Mapping[str, Any]) -> None:
        """What the step gave; that it cannot be written is told to all ranks before any of them ends."""
        try:
            self._report(metrics, record)
        except OSError as error:
            self._unwritten = error

    def _report(self, metrics: TextIO, record: Mapping[str, Any]) -> None:
        write_record(metrics, record)
        monitors.write(self.engine.deepspeed.monitor, record)
        train = self.job.spec.train
        if self._at(train.log_interval) or "eval_loss" in record:
            held_out = f"  held-out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
            log.info(
                "step %d/%d  loss %.4f  norm %.3f  lr %.3g  %.0f tokens/s%s",
                *(record["step"], train.steps, record["loss"], record["grad_norm"], record["lr"]),
                *(record["tokens_per_s"], held_out),
            )

    # ---- what goes wrong ----

    def _move(self, phase: str, step: int, times: int) -> None:
        """Shows where this rank is; it may stay there for `times` as long as a step."""
        if self.monitor is not None:
            bound = self.job.spec.train.step_timeout
            self.monitor.page.enter(phase, step, bound and bound * times)

    def _demand_finite(self, record: Mapping[str, Any]) -> None:
        """Ends the run when too many steps in a row have given no finite loss and gradient."""
        finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped > max_skipped(self.job):
            position = self.engine.consumed_samples - self.job.batch.global_size
            raise self._not_finite(position, f"for {self._skipped} steps in a row")

    def _not_finite(self, position: int, how: str) -> DslparError:
        step = position // self.job.batch.global_size + 1
        if self.engine.is_between_steps:
            place = nonfinite.find_first_nonfinite(self.engine, self._batches(self._samples, position))
        else:
            place = f"not looked for, in the middle of a step; {self.engine.rank_description}"
        message = f"the loss or the gradient is not finite {how}, the last time in step {step}; first of all: {place}"
        hint = "a smaller lr, train.clip_grad_norm=1.0, precision='bf16' or 'fp32'; --resume from before it diverged"
        return DslparError([finding("PRE230", message, hint, self.job.path)])

    def _disk_full(self) -> DslparError:
        message = f"cannot write to {self.job.output_dir}"
        message += (
            f": {self.engine.rank_description}: {self._unwritten}"
            if self._unwritten
            else f" in step {self.engine.steps_done}"
        )
        hint = "room on that file system, or another train.output_dir; --resume goes on from the last checkpoint"
        return DslparError([finding("CKP230", message, hint, self.job.path)])

    # ---- when ----

    @property
    def _evaluates(self) -> bool:
        return self.job.spec.train.eval_interval is not None

    @property
    def _saves(self) -> bool:
        """Whether a checkpoint is due: every `save_interval` steps, and after the last, unless that is 0."""
        interval = self.job.spec.train.save_interval
        return interval != 0 and self._at(interval)

    def _at(self, interval: int | None) -> bool:
        """Whether the step that is done is one of every `interval`, or the last."""
        done = self.engine.steps_done
        return done == self.job.spec.train.steps or (interval is not None and done % interval == 0)

    def _save(self, metrics: TextIO | None) -> None:
        """A checkpoint, and before it on disk the lines of the steps that it holds."""
        self._move("saving", self.engine.steps_done, SLOW)
        if metrics is not None:
            self._flush(metrics)
        self._agree()
        saved = checkpoint.save(self.engine, text_identity(self.corpus.train))
        self.saved = str(saved)
        log.info("checkpoint of step %d in %s", self.engine.steps_done, saved)

    def _flush(self, metrics: TextIO) -> None:
        try:
            os.fsync(metrics.fileno())
        except OSError as error:
            self._unwritten = error

    # ---- samples ----

    @cached_property
    def _samples(self) -> TextSamples | None:
        return self._read(self.corpus.train)

    @cached_property
    def _held_out(self) -> TextSamples | None:
        return self._read(self.corpus.held_out)

    def _read(self, pieces: Sequence[FileSlice]) -> TextSamples | None:
        return TextSamples.from_files(pieces, self.job.seq_len) if self.engine.needs_data else None

    def _batches(self, samples: TextSamples | None, consumed: int) -> Iterator[Any]:
        """This rank's micro-batches of the step that begins after `consumed` samples."""
        if samples is None:
            return iter(())
        data, coord = self.job.mesh.data, self.engine.groups.coord
        return micro_batches(samples, self.job.batch, self.job.spec.train.seed, consumed, data, coord["data"])

    @cached_property
    def _device(self) -> str:
        return device_name(self.engine)


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[TextIO]:
    """A file to append to; what could not be written is known by then, and closing it does not say so again."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def max_skipped(job: Job) -> int:
    """Steps in a row that may be skipped; with fp16's dynamic loss scale, as many as it takes to fall to its least."""
    if job.spec.train.max_skipped is not None:
        return job.spec.train.max_skipped
    fp16 = ds_config(job).get("fp16", {})
    if not fp16.get("enabled") or fp16.get("loss_scale", 0):
        return _SKIPS
    return max(_SKIPS, int(fp16.get("initial_scale_power", 16)) + int(fp16.get("hysteresis", 2)) - 2)


def throughput(job: Job, device: str, tokens_per_s: float) -> dict[str, float]:
    """`tflops_per_s` of each device by the count of `mfu_causal`, and the MFUs; what is not known is left out."""
    model = job.spec.model
    if not isinstance(model, sections.Model):
        return {}
    counted = costs_of(model).flops_per_token(model, job.seq_len)
    per_device = {name: count * tokens_per_s / job.mesh.world_size for name, count in counted._asdict().items()}
    peak = flops.peak_flops_per_s(device, job.spec.precision.dtype)
    mfus = {name: rate / peak for name, rate in per_device.items()} if peak else {}
    return {"tflops_per_s": per_device["mfu_causal"] / 1e12, **mfus}


def num_parameters(engine: Engine) -> tuple[int, int]:
    """Distinct parameters of the whole model, and of those what this rank works on; padding included. All together."""
    parameters: list[Any] = list(engine.module.parameters())
    held = [getattr(p, "ds_numel", None) or p.numel() for p in parameters]
    owned = sum(number for number, p in zip(held, parameters, strict=True) if p.tensor_model_parallel)
    everywhere = collectives.all_reduce(
        torch.tensor(owned, device=engine.deepspeed.device), engine.groups.axis("model")
    )
    return int(everywhere), sum(held)


def device_name(engine: Engine) -> str:
    """The name by which the driver knows this rank's device; of a CPU, "cpu"."""
    device = engine.deepspeed.device
    if device.type == "cpu":
        return "cpu"
    return str(get_accelerator().get_device_properties(device.index).name)


def _loss_scale(job: Job, engine: Engine) -> dict[str, float]:
    """The scale that the next step's loss is multiplied by; only with fp16 is there one."""
    return {"loss_scale": float(engine.deepspeed.optimizer.loss_scale)} if job.spec.precision.dtype == "fp16" else {}
