"""The steps of a run: samples in, metrics, monitors and checkpoints out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch
from deepspeed.accelerator import get_accelerator

from dslpar import checkpoint, comm, flops, monitor, spec, voice
from dslpar.checkpoint import text_identity
from dslpar.data.corpus import Corpus, Piece
from dslpar.data.order import micro_batches
from dslpar.data.text import Text
from dslpar.engine import Engine
from dslpar.job import Job
from dslpar.record import METRICS, cut_rows, write_line
from dslpar.voice import log


class Steps:
    """The steps of a run; it holds no more than the position of the engine. All ranks call its methods together.

    `folder` is where rank 0 writes; None on other ranks.
    """

    def __init__(self, job: Job, engine: Engine, corpus: Corpus, folder: Path | None) -> None:
        self.job, self.engine, self.corpus, self.folder = job, engine, corpus, folder

    def train(self) -> None:
        """All steps that are left; the held-out loss before the first and after the last, if it is asked for."""
        before = self.held_out_loss() if self._evaluates and self.engine.steps_done == 0 else None
        if before is not None:
            log.info("held-out loss before: %.4f", before)
        monitor.take_over(self.engine.deepspeed.monitor)
        if self.engine.steps_done:
            for path in monitor.csv_files(self.engine.deepspeed.monitor):
                cut_rows(path, self.engine.steps_done)
        after = self._all()
        monitor.close(self.engine.deepspeed.monitor)
        if before is not None and after is not None:
            log.info("held-out loss before: %.4f, after: %.4f", before, after)

    def held_out_loss(self) -> float:
        """The loss over the same `eval_steps` global batches of held-out text each time."""
        size, steps = self.job.batch.global_size, self.job.spec.train.eval_steps
        return sum(self.engine.eval_batch(self._batches(self._held_out, step * size)) for step in range(steps)) / steps

    def _all(self) -> float | None:
        """Trains to the last step. Returns the held-out loss after it, if it is asked for."""
        train = self.job.spec.train
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(open(self.folder / METRICS, "a", encoding="utf-8")) if self.folder else None
            bar = stack.enter_context(voice.progress(train.steps, self.engine.steps_done, shown=bool(metrics)))
            record: dict[str, Any] = {}
            while self.engine.steps_done < train.steps:
                record = self._step()
                if metrics is not None:
                    self._report(metrics, record)
                if self._saves:
                    self._save(metrics)
                bar.update()
        return record.get("eval_loss")

    def _step(self) -> dict[str, Any]:
        """One step; its line in metrics.jsonl."""
        engine = self.engine
        scale = _loss_scale(self.job, engine)
        began = time.perf_counter()
        loss = engine.train_batch(self._batches(self._samples, engine.consumed_samples))
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

    def _report(self, metrics: TextIO, record: Mapping[str, Any]) -> None:
        write_line(metrics, record)
        monitor.write(self.engine.deepspeed.monitor, record)
        train = self.job.spec.train
        if self._at(train.log_interval) or "eval_loss" in record:
            held_out = f"  held-out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
            log.info(
                "step %d/%d  loss %.4f  norm %.3f  lr %.3g  %.0f tokens/s%s",
                *(record["step"], train.steps, record["loss"], record["grad_norm"], record["lr"]),
                *(record["tokens_per_s"], held_out),
            )

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
        if metrics is not None:
            os.fsync(metrics.fileno())
        saved = checkpoint.save(self.engine, text_identity(self.corpus.train))
        log.info("checkpoint of step %d in %s", self.engine.steps_done, saved)

    # ---- samples ----

    @cached_property
    def _samples(self) -> Text | None:
        return self._read(self.corpus.train)

    @cached_property
    def _held_out(self) -> Text | None:
        return self._read(self.corpus.held_out)

    def _read(self, pieces: Sequence[Piece]) -> Text | None:
        return Text.of(pieces, self.job.seq_len) if self.engine.feeds else None

    def _batches(self, samples: Text | None, consumed: int) -> Iterator[Any]:
        """This rank's micro-batches of the step that begins after `consumed` samples."""
        if samples is None:
            return iter(())
        data, coord = self.job.mesh.data, self.engine.groups.coord
        return micro_batches(samples, self.job.batch, self.job.spec.train.seed, consumed, data, coord["data"])

    @cached_property
    def _device(self) -> str:
        return device_name(self.engine)


def throughput(job: Job, device: str, tokens_per_s: float) -> dict[str, float]:
    """`tflops_per_s` of each device by the count of `mfu_causal`, and the MFUs; what is not known is left out."""
    model = job.spec.model
    if not isinstance(model, spec.GPT):
        return {}
    counted = flops.flops_per_token(model, job.seq_len)
    per_device = {name: count * tokens_per_s / job.mesh.world_size for name, count in counted._asdict().items()}
    peak = flops.peak_flops_per_s(device, job.spec.precision.dtype)
    mfus = {name: rate / peak for name, rate in per_device.items()} if peak else {}
    return {"tflops_per_s": per_device["mfu_causal"] / 1e12, **mfus}


def num_parameters(engine: Engine) -> tuple[int, int]:
    """Distinct parameters of the whole model, and of those what this rank works on; padding included. All together."""
    parameters: list[Any] = list(engine.module.parameters())
    held = [getattr(p, "ds_numel", None) or p.numel() for p in parameters]
    owned = sum(number for number, p in zip(held, parameters, strict=True) if p.tensor_model_parallel)
    everywhere = comm.all_reduce(torch.tensor(owned, device=engine.deepspeed.device), engine.groups.axis("model"))
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
