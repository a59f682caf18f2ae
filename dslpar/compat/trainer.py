"""ColossalAI's Trainer: epochs over a loader, with hooks.

    trainer = Trainer(engine, timer=MultiTimer(), logger=get_dist_logger())
    trainer.fit(train_dataloader, epochs=10, test_dataloader=test_dataloader, hooks=[LossHook(), ...])

`dslpar.fit` is dslpar's own loop, which saves, resumes and stops on signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from dslpar.compat.dist_logger import DistributedLogger
from dslpar.compat.engine import ColossalaiEngine
from dslpar.compat.hooks import BaseHook, by_priority
from dslpar.compat.ranks import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from dslpar.compat.schedules import Schedule
from dslpar.compat.timers import MultiTimer


class Trainer:
    """Trains an engine's model over epochs.

    timer: times steps and epochs. logger: logs the hooks. schedule: replaces the engine's.
    """

    cur_epoch: int
    """Number of completed epochs; set it before `fit` to go on from there."""

    def __init__(
        self,
        engine: ColossalaiEngine,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.engine, self.timer, self.logger = engine, timer, logger
        if schedule is not None:
            engine.schedule = schedule
        self.cur_epoch, self.cur_step = 0, 0
        self.max_epochs, self.steps_per_epoch = 0, 0
        self.max_steps: int | None = None
        self.states: dict[str, Any] = {}
        self.hooks: list[BaseHook] = []

    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train until `epochs` epochs, or `max_steps` batches, are done; evaluate every `test_interval` epochs.

        display_progress: show a bar, on one rank. return_output_label: pass outputs and labels to hooks.
        """
        self.steps_per_epoch, self.max_steps, self.max_epochs = len(train_dataloader), max_steps, epochs
        self.cur_step = self.cur_epoch * self.steps_per_epoch
        shows = display_progress and _shows_progress()
        self._attach(hooks)
        self.engine.train()
        self._call("before_train")
        for epoch in range(self.cur_epoch, epochs):
            self._train_epoch(train_dataloader, epoch, shows, return_output_label)
            if test_dataloader is not None and epoch % test_interval == 0:
                self._evaluate(test_dataloader, f"[Epoch {epoch} / Test]", shows, return_output_label)
            self.cur_epoch += 1
            if self._is_at_max_steps():
                self._log(f"Max number of steps {max_steps} has been reached, training is stopped automatically")
                break
        self._call("after_train")

    def evaluate(
        self,
        test_dataloader: Any,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluate the model; the hooks keep and log the metrics."""
        self._attach(hooks)
        shows = display_progress and _shows_progress()
        self._evaluate(test_dataloader, "Evaluation", shows, return_output_label)

    def predict(self, data: Any) -> Any:
        """Return the model's output for one batch of inputs; in a pipeline, on the last stage."""
        self.engine.eval()
        with torch.no_grad():
            output, *_ = self.engine.execute_schedule(iter([(data, None)]), forward_only=True, return_loss=False)
        return output

    # ---- loops ----

    def _train_epoch(self, loader: Any, epoch: int, shows: bool, return_output_label: bool) -> None:
        self.engine.train()
        batches = iter(loader)
        self._call("before_train_epoch")
        self._time("start", "Train-epoch")
        for _ in (steps := _progress(self.steps_per_epoch, f"[Epoch {epoch} / Train]", shows)):
            self._call("before_train_iter")
            self._time("start", "Train-step")
            self.engine.zero_grad()
            result = self.engine.execute_schedule(batches, return_output_label=return_output_label)
            self.engine.step()
            self._time("stop", "Train-step", keep_in_history=True)
            self._call("after_train_iter", *result)
            self.cur_step += 1
            self._show(steps)
            if self._is_at_max_steps():
                break
        self._time("stop", "Train-epoch", keep_in_history=True)
        self._call("after_train_epoch")
        self._time("reset", "Train-epoch")

    def _evaluate(self, loader: Any, title: str, shows: bool, return_output_label: bool) -> None:
        self.engine.eval()
        batches = iter(loader)
        self._call("before_test")
        self._call("before_test_epoch")
        self._time("start", "Test-epoch")
        with torch.no_grad():
            for _ in (steps := _progress(len(loader), title, shows)):
                self._call("before_test_iter")
                self._time("start", "Test-step")
                result = self.engine.execute_schedule(
                    batches, forward_only=True, return_output_label=return_output_label
                )
                self._time("stop", "Test-step", keep_in_history=True)
                self._call("after_test_iter", *result)
                self._show(steps)
        self._time("stop", "Test-epoch", keep_in_history=True)
        self._call("after_test_epoch")
        self._call("after_test")
        self._time("reset", "Test-step")
        self._time("reset", "Test-epoch")

    def _is_at_max_steps(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    # ---- hooks, timers, logs ----

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise TypeError(f"a hook is a {type(hook).__name__}: derive its class from BaseHook")
        self.states, self.hooks = {}, by_priority(hooks or ())
        for hook in self.hooks:
            self._log(f"Using {type(hook).__name__} for training, priority = {hook.priority}")
        self._log("Lower value means higher priority for calling hook function")
        self._call("after_hook_is_attached")

    def _call(self, name: str, *values: Any) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *values)

    def _time(self, action: str, name: str, **options: Any) -> None:
        if self.timer is not None:
            getattr(self.timer, action)(name, **options)

    def _log(self, message: str) -> None:
        if self.logger is not None:
            self.logger.info(message, ranks=[0])

    def _show(self, steps: Any) -> None:
        if isinstance(steps, tqdm) and "step_metrics" in self.states:
            steps.set_postfix(**self.states["step_metrics"])


def _progress(steps: int, title: str, shows: bool) -> Any:
    return tqdm(range(steps), desc=title) if shows else range(steps)


def _shows_progress() -> bool:
    return is_dp_rank_0() and is_tp_rank_0() and is_no_pp_or_last_stage()
