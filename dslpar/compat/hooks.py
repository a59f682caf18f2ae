"""Hooks of ColossalAI's trainer, under its names and at its points in time.

    hooks = [LossHook(), AccuracyHook(Accuracy()), LRSchedulerHook(lr_scheduler, by_epoch=True),
             LogMetricByEpochHook(logger), SaveCheckpointHook(1, "vit.pt", model)]
    trainer.fit(train_dataloader, epochs=10, hooks=hooks)

Your own hook derives from BaseHook and overrides some of its methods. Hooks of lower `priority` are called first.
Metrics lie in `trainer.states["metrics"]["train"]` and `["test"]`; only the last stage of a pipeline has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from deepspeed.accelerator import get_accelerator
from torch import nn

from dslpar.compat.checkpointing import save_checkpoint
from dslpar.compat.context import ParallelMode, global_context
from dslpar.compat.dist_logger import DistributedLogger, get_dist_logger
from dslpar.compat.metrics import (
    AccuracyMetric,
    LearningRateMetric,
    LossMetric,
    Metric,
    ThroughputMetric,
    format_number,
)
from dslpar.compat.ranks import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from dslpar.compat.timers import MultiTimer


class BaseHook:
    """Base of hooks: each method is called at one point of a training or an evaluation, and does nothing here."""

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Called before anything else."""

    def before_train(self, trainer: Any) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Any) -> None:
        """Called after the last epoch."""

    def before_train_iter(self, trainer: Any) -> None:
        """Called before each training batch."""

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Called after each training batch and its step."""

    def before_train_epoch(self, trainer: Any) -> None:
        """Called before each epoch."""

    def after_train_epoch(self, trainer: Any) -> None:
        """Called after each epoch."""

    def before_test(self, trainer: Any) -> None:
        """Called before each evaluation."""

    def after_test(self, trainer: Any) -> None:
        """Called after each evaluation."""

    def before_test_epoch(self, trainer: Any) -> None:
        """Called before each evaluation, after `before_test`."""

    def after_test_epoch(self, trainer: Any) -> None:
        """Called after each evaluation, before `after_test`."""

    def before_test_iter(self, trainer: Any) -> None:
        """Called before each batch of an evaluation."""

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Called after each batch of an evaluation."""

    def init_runner_states(self, trainer: Any, key: str, val: Any) -> None:
        """Set a state of the trainer, unless it has one of this name."""
        trainer.states.setdefault(key, val)


# ---- metrics ----


class MetricHook(BaseHook):
    """Base of hooks that keep a metric."""

    def __init__(self, priority: int) -> None:
        super().__init__(priority)
        self._is_stage_to_compute = is_no_pp_or_last_stage()

    def _check_metric_states_initialization(self, trainer: Any) -> None:
        self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})

    def _register(self, trainer: Any, name: str, train: Metric | None, test: Metric | None) -> None:
        self._check_metric_states_initialization(trainer)
        for mode, metric in (("train", train), ("test", test)):
            if metric is not None and self._is_stage_to_compute:
                trainer.states["metrics"][mode][name] = metric


class LossHook(MetricHook):
    """Keeps the mean loss of an epoch."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Register "Loss"."""
        self.train_loss, self.test_loss = LossMetric(epoch_only=False), LossMetric(epoch_only=True)
        self._register(trainer, "Loss", self.train_loss, self.test_loss)

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew."""
        self.train_loss.reset()

    def after_train_iter(self, trainer: Any, logits: Any, label: Any, loss: Any) -> None:
        """Count the loss."""
        if self._is_stage_to_compute:
            self.train_loss.update(loss)

    def before_test_epoch(self, trainer: Any) -> None:
        """Begin anew."""
        self.test_loss.reset()

    def after_test_iter(self, trainer: Any, logits: Any, label: Any, loss: Any) -> None:
        """Count the loss."""
        if self._is_stage_to_compute:
            self.test_loss.update(loss)


class AccuracyHook(MetricHook):
    """Keeps the accuracy of an evaluation; `accuracy_func(logits, labels)` counts correct predictions."""

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Register "Accuracy"."""
        self.metric = AccuracyMetric(epoch_only=True, accuracy_func=self.accuracy_func)
        self._register(trainer, "Accuracy", None, self.metric)

    def before_test(self, trainer: Any) -> None:
        """Begin anew."""
        self.metric.reset()

    def after_test_iter(self, trainer: Any, logits: Any, targets: Any, *_: Any) -> None:
        """Count the predictions."""
        if self._is_stage_to_compute:
            self.metric.update(logits, targets, trainer.engine.schedule.batch_size)


class ThroughputHook(MetricHook):
    """Keeps the samples per second; the trainer needs a timer."""

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(priority)
        self._arguments = (ignored_steps, tflop_per_step, use_local)

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Register "Throughput"."""
        if trainer.timer is None:
            raise ValueError(
                "ThroughputHook measures with the trainer's timer: write Trainer(engine, timer=MultiTimer())"
            )
        self.metric = ThroughputMetric(True, *self._arguments)
        self._register(trainer, "Throughput", self.metric, self.metric)

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew."""
        self.metric.reset()

    def after_train_iter(self, trainer: Any, *_: Any) -> None:
        """Count the batch."""
        self._count(trainer, "Train-step")

    def before_test(self, trainer: Any) -> None:
        """Begin anew."""
        self.metric.reset()

    def after_test_iter(self, trainer: Any, *_: Any) -> None:
        """Count the batch."""
        self._count(trainer, "Test-step")

    def _count(self, trainer: Any, timer: str) -> None:
        assert trainer.timer is not None
        self.metric.update(trainer.engine.schedule.batch_size, trainer.timer.get_timer(timer).get_elapsed_time())


class LRSchedulerHook(MetricHook):
    """Steps the LR scheduler after each epoch, or after each batch, and keeps the learning rate."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
        self.lr_scheduler, self.by_epoch, self.store_lr_in_state = lr_scheduler, by_epoch, store_lr_in_state

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Register "LR"."""
        self._check_metric_states_initialization(trainer)
        self.metric = LearningRateMetric(self.by_epoch, self.lr_scheduler.get_last_lr()[0])
        trainer.states["metrics"]["train"]["LR"] = self.metric

    def after_train_epoch(self, trainer: Any) -> None:
        """Step, if `by_epoch`."""
        if self.by_epoch:
            self._step()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Step, unless `by_epoch`."""
        if not self.by_epoch:
            self._step()

    def _step(self) -> None:
        self.lr_scheduler.step()
        self.metric.update(self.lr_scheduler.get_last_lr()[0])


# ---- logs ----


class LogByEpochHook(BaseHook):
    """Base of hooks that log every `interval` epochs."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 1) -> None:
        super().__init__(priority)
        self.logger, self._interval = logger, interval

    def _is_epoch_to_log(self, trainer: Any) -> bool:
        return bool(trainer.cur_epoch % self._interval == 0)


class LogMetricByStepHook(BaseHook):
    """Shows the metrics of each batch in the progress bar: `trainer.states["step_metrics"]`."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Any, *_: Any) -> None:
        """Read the metrics."""
        self._read(trainer, "train")

    def after_test_iter(self, trainer: Any, *_: Any) -> None:
        """Read the metrics."""
        self._read(trainer, "test")

    def _read(self, trainer: Any, mode: str) -> None:
        metrics = trainer.states["metrics"][mode].items()
        trainer.states["step_metrics"] = {
            name.lower(): each.get_last_step_info()
            if isinstance(each, ThroughputMetric)
            else each.get_last_step_value()
            for name, each in metrics
        }


class LogMetricByEpochHook(LogByEpochHook):
    """Logs the metrics of each epoch: `[Epoch 0 / Train]: Loss = 2.3 | LR = 0.1`."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(logger, interval, priority)
        self._is_rank_to_log = _is_rank_to_log()

    def after_train_epoch(self, trainer: Any) -> None:
        """Log the training."""
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Any) -> None:
        """Log the evaluation."""
        self._log(trainer, "test")

    def _log(self, trainer: Any, mode: str) -> None:
        if self._is_epoch_to_log(trainer):
            # On every rank: values are sums over data ranks.
            values = {name: each.get_accumulated_value() for name, each in trainer.states["metrics"][mode].items()}
            text = " | ".join(f"{name} = {format_number(value)}" for name, value in values.items())
            if self._is_rank_to_log:
                self.logger.info(f"[Epoch {trainer.cur_epoch} / {mode.title()}]: {text}")


class LogTimingByEpochHook(LogByEpochHook):
    """Logs the times of each epoch."""

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._timer, self._log_eval, self._to_ignore = timer, log_eval, ignore_num_train_steps
        self._is_rank_to_log = _is_rank_to_log()

    def after_train_epoch(self, trainer: Any) -> None:
        """Log the training's times."""
        if self._is_epoch_to_log(trainer) and self._is_rank_to_log:
            if self._to_ignore:
                self._timer.get_timer("Train-step").drop_first(self._to_ignore)
                self._to_ignore = 0
            steps = f"#steps/epoch = {trainer.steps_per_epoch}"
            self.logger.info(f"[Epoch {trainer.cur_epoch} / Train]: {self._times('Train')} | {steps}")

    def after_test_epoch(self, trainer: Any) -> None:
        """Log the evaluation's times."""
        if self._is_epoch_to_log(trainer) and self._is_rank_to_log and self._log_eval:
            self.logger.info(f"[Epoch {trainer.cur_epoch} / Test]: {self._times('Test')}")

    def _times(self, mode: str) -> str:
        parts = []
        for name, timer in self._timer:
            if name.startswith(mode):
                mean = f", mean = {format_number(timer.get_history_mean())} s" if timer.has_history else ""
                parts.append(f"{name}: last = {format_number(timer.get_elapsed_time())} s{mean}")
        return " | ".join(parts)


class LogMemoryByEpochHook(LogByEpochHook):
    """Logs the device's memory after each epoch, and of the process, if `report_cpu`."""

    def __init__(
        self,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._log_eval, self._report_cpu = log_eval, report_cpu
        self._is_rank_to_log = is_dp_rank_0() and is_tp_rank_0()

    def before_train(self, trainer: Any) -> None:
        """Log the memory before the training."""
        self._log(trainer, "Before-train")

    def after_train_epoch(self, trainer: Any) -> None:
        """Log the memory after an epoch."""
        self._log(trainer, f"[Epoch {trainer.cur_epoch} / Train]")

    def after_test(self, trainer: Any) -> None:
        """Log the memory after an evaluation."""
        if self._log_eval:
            self._log(trainer, f"[Epoch {trainer.cur_epoch} / Test]")

    def _log(self, trainer: Any, when: str) -> None:
        if self._is_epoch_to_log(trainer) and self._is_rank_to_log:
            report_memory_usage(when, self.logger, self._report_cpu)


def report_memory_usage(message: str, logger: DistributedLogger | None = None, report_cpu: bool = False) -> None:
    """Log this rank's memory in MB: allocated now, and at most since the last report."""
    accelerator, mib = get_accelerator(), 2**20
    now, peak = accelerator.memory_allocated() / mib, accelerator.max_memory_allocated() / mib
    text = f"{message}: {accelerator.device_name()} memory: allocated {now:.2f} MB, peak {peak:.2f} MB"
    if report_cpu:
        text += f", the process {psutil.Process().memory_info().rss / mib:.2f} MB"
    (logger or get_dist_logger()).info(text)
    accelerator.reset_peak_memory_stats()


class TensorboardHook(BaseHook):
    """Writes the metrics for TensorBoard, which the package `tensorboard` needs."""

    def __init__(
        self,
        log_dir: str,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        rank = global_context.get_local_rank(parallel_mode)
        self.writer = None
        if is_no_pp_or_last_stage() and (ranks is None or rank in ranks):
            folder = Path(log_dir, f"{parallel_mode}_rank_{rank}")
            self.writer = SummaryWriter(log_dir=str(folder), filename_suffix=f"_rank_{rank}")

    def after_train_iter(self, trainer: Any, *_: Any) -> None:
        """Write the batch's metrics."""
        self._write(trainer, "train", of_epoch=False)

    def after_train_epoch(self, trainer: Any) -> None:
        """Write the epoch's metrics."""
        self._write(trainer, "train", of_epoch=True)

    def after_test_iter(self, trainer: Any, *_: Any) -> None:
        """Write the batch's metrics."""
        self._write(trainer, "test", of_epoch=False)

    def after_test_epoch(self, trainer: Any) -> None:
        """Write the evaluation's metrics."""
        self._write(trainer, "test", of_epoch=True)

    def after_train(self, trainer: Any) -> None:
        """Write what is still in memory."""
        if self.writer is not None:
            self.writer.flush()

    def _write(self, trainer: Any, mode: str, of_epoch: bool) -> None:
        for name, metric in trainer.states["metrics"][mode].items():
            if metric.epoch_only == of_epoch:
                value = metric.get_accumulated_value() if of_epoch else metric.get_last_step_value()
                if self.writer is not None:
                    self.writer.add_scalar(f"{name}/{mode}", value, trainer.cur_step)


def _is_rank_to_log() -> bool:
    return is_dp_rank_0() and is_tp_rank_0() and is_no_pp_or_last_stage()


# ---- checkpoints ----


class SaveCheckpointHook(BaseHook):
    """Saves the weights every `interval` epochs, or steps, to one file; see `save_checkpoint`."""

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None:
            raise ValueError("SaveCheckpointHook needs checkpoint_dir, the name of the file")
        self.interval, self.checkpoint_dir, self.model, self.save_by_iter = (
            interval,
            checkpoint_dir,
            model,
            save_by_iter,
        )
        self.logger = get_dist_logger()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Save, if `save_by_iter`."""
        if self.save_by_iter and trainer.cur_step % self.interval == 0:
            self._save(trainer, f"iteration {trainer.cur_step}")

    def after_train_epoch(self, trainer: Any) -> None:
        """Save."""
        if not self.save_by_iter and trainer.cur_epoch % self.interval == 0:
            self._save(trainer, f"epoch {trainer.cur_epoch}")

    def _save(self, trainer: Any, what: str) -> None:
        save_checkpoint(self.checkpoint_dir, trainer.cur_epoch, self.model or trainer.engine.model)
        self.logger.info(f"checkpoint for {what} is saved to {self.checkpoint_dir}", ranks=[0])


def by_priority(hooks: Iterable[BaseHook]) -> list[BaseHook]:
    """Return hooks in the order in which they are called."""
    return sorted(hooks, key=lambda hook: hook.priority)
