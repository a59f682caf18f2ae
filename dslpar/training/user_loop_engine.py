"""Engine for a user's own training loop. As in train.py, it saves, resumes, stops on a signal and detects hangs.

    engine, train_data, *_ = dslpar.initialize("config.py", model=model, train_data=images)
    engine.resume()                                  # from the newest checkpoint; without one, from step 0
    while engine.steps_done < 1000:
        for x, y in train_data: ...; engine.step()   # SIGTERM: saves after the step, and the next one ends the program
        engine.save()

`execute_pipeline`, `no_sync` and `sync_grads` are for programs written for ColossalAI (its discussion 4050 has the
design):

    result = engine.execute_pipeline(data_iter, criterion=criterion)     # dict(loss=..., outputs=...); no step yet
    engine.step()

A call of the engine may take `train.step_timeout` seconds, and slow calls (such as the first step, saving, evaluation)
six times as long. Time between calls is not limited. As in DeepSpeed (`save_checkpoint`), saving and loading are
methods of the engine. As in PyTorch Lightning on Slurm's signals, SIGTERM saves at the end of a step, and an exception
then ends the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.visible import visible
from dslpar.distributed.groups import Groups
from dslpar.distributed.stage_manager import PipelineStageManager
from dslpar.engine.engine import Engine, Output
from dslpar.engine.executor import LossFn
from dslpar.engine.host_reads import HostReads
from dslpar.engine.loss_by_chunks import LossByChunks
from dslpar.engine.micro_batches import MicroBatch, take_batch
from dslpar.engine.model import check_criterion, loss_of
from dslpar.engine.stage_layers import held_layers, shared_params
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel
from dslpar.reporting.run_dir import CHECKPOINTS, CONFIG, SOURCES
from dslpar.training.session import SLOW_FACTOR, Session

OWN_OPTIMIZER = object()
"""Default of `optimizer` arguments: the engine's own optimizer."""
_WRITTEN = (CONFIG, SOURCES, CHECKPOINTS)
"""Names in the run folder that dslpar writes; everything else there belongs to the program."""


class ProgramEngine(Engine):
    """An Engine for a program's own loop: checkpoints, time limits and stop signals come from its `session`.

    All ranks must call its methods together.
    """

    stopped: bool
    """True if any rank received SIGTERM or SIGUSR1, and the last step is saved (unless train.save_interval is 0).

    A call that would begin the next step then raises SystemExit(train.requeue_status).
    """

    def __init__(
        self,
        job: Job,
        groups: Groups,
        ds_engine: Any,
        model: LayeredModel,
        all_counted: bool,
        host_reads: HostReads,
        by_chunks: LossByChunks | None = None,
        *,
        session: Session,
    ) -> None:
        super().__init__(job, groups, ds_engine, model, all_counted, host_reads, by_chunks)
        self.session, self.stopped = session, False
        host_reads.local_flags = self._local_flags
        self.in_loop = False
        """True if `dslpar.fit` is running. Its loop sets timeouts and stops after a step by itself."""
        self._first_step = 1

    # ---- checkpoints ----

    def save(self) -> Path:
        """Save a checkpoint below train.output_dir; return its folder.

        The checkpoint holds weights, optimizer state, LR scheduler, position in the data and random states, and any
        layout can resume it. It is complete on return: train.async_save has no effect here, since only a loop such as
        `dslpar.fit` can publish a checkpoint at a later step. A second call after the same step returns the same
        folder. Checkpoints of an earlier run that this run has not resumed are first moved to `earlier/`.

        Raises:
            DslparError: on every rank, if a step is in progress, another run writes there, or a rank cannot write.
        """
        if not self.is_between_steps:
            raise_finding("BAT206", "save() was called in the middle of a step", "call it after step()", self.job.path)
        self.session.lock_folder(self.job)  # may wait for the previous run to end
        with self.session.inside("saving", self.steps_done, SLOW_FACTOR):
            if not self.session.is_prepared:
                self.session.prepare_folder(self.job, self.session.loaded, _WRITTEN)
            self.session.heed_difference(self, self.session.conclude_comparison(self))
            return self.session.save(self)

    def resume(self) -> Path | None:
        """Resume from the checkpoint that checkpoint.resume_from names, by default the newest in train.output_dir.

        Call it before the first step. It restores weights, optimizer, LR scheduler, `steps_done` and the loaders'
        position from a run in any layout. In the same layout the run continues bit-identically.

        Returns:
            The checkpoint's folder; None: there is none, and the run starts at step 0.

        Raises:
            DslparError: on every rank, if the checkpoint is corrupted, or has another model, text, seed or batch.
        """
        if self.steps_done or not self.is_between_steps:
            where = "in the middle of a step" if not self.is_between_steps else f"after step {self.steps_done}"
            raise_finding(
                "BAT206", f"resume() was called {where}", "call it once, before the first step", self.job.path
            )
        self.session.lock_folder(self.job)
        with self.session.inside("verifying", times=SLOW_FACTOR):
            stored = self.session.find_checkpoint(self.job)
            if stored is None:
                return None
            self.session.load(self, stored)
        self._first_step = self.steps_done + 1
        return Path(stored.path)

    # ---- whole batches, and the stages of the pipeline, under ColossalAI's names ----

    def execute_pipeline(
        self,
        data_iter: Iterator[Any] | None,
        model: object = None,
        criterion: LossFn | None = None,
        optimizer: object = OWN_OPTIMIZER,
        return_loss: bool = True,
        return_outputs: bool = True,
    ) -> dict[str, Any]:
        """Run the next batch forward and backward, with or without a pipeline; `step()` must follow.

        With `optimizer=None`, under `torch.no_grad` or after `engine.eval()`, it runs only the forward, in evaluation
        mode.

        data_iter: yields micro-batches (inputs, labels), or batches of accumulation * micro_size samples, which are
            split; None if this rank's stage needs no data.
        criterion: maps (output, label) to the micro-batch's mean loss, as in `dslpar.initialize`; None: the engine's
            own. The label is the second item of each micro-batch.
        model, optimizer: the engine's own, which may be left out.

        Returns:
            "loss": the mean over the global batch, a scalar without a graph. It is the same on every rank, so that all
            ranks decide alike. "outputs": the model's outputs for all of this replica's micro-batches, concatenated
            along the first dim, on the last stage; None on other stages. A value that is not requested is None.

        Raises:
            DslparError: another model or optimizer, a criterion with parameters, or wrong data.
            StopIteration: there is no more data.
        """
        self._check_own(model, optimizer)
        check_criterion(criterion, self.job.path)
        batches = [] if data_iter is None else take_batch(data_iter, self.job, self.steps_done)
        trains = optimizer is not None and torch.is_grad_enabled() and self.deepspeed.module.training
        run = self.forward_backward if trains else self.forward
        loss_fn = None if criterion is None else loss_of(criterion, self._model, self.groups)
        result = run(batches, return_outputs, loss_fn)
        loss = torch.tensor(result.loss, device=self.deepspeed.device) if return_loss else None
        return {"loss": loss, "outputs": result.output}

    def _check_own(self, model: object, optimizer: Any) -> None:
        """Refuse a model or optimizer that is not the engine's: a step with another optimizer would train nothing."""
        models = (None, self, self.deepspeed.module, self.deepspeed)
        # A program's optimizer and DeepSpeed's wrapper around it share their parameter groups.
        groups = getattr(optimizer, "param_groups", [None])
        is_own = optimizer is None or optimizer is OWN_OPTIMIZER
        is_own = is_own or groups[0] is self.deepspeed.optimizer.param_groups[0]
        if is_own and any(model is each for each in models):
            return
        what = "an optimizer" if not is_own else "a model"
        hint = "give both to dslpar.initialize, and leave them out here; optimizer=None runs only the forward"
        raise_finding(
            "PIP210", f"execute_pipeline was called with {what} that is not the engine's", hint, self.job.path
        )

    @property
    def stage_manager(self) -> PipelineStageManager:
        """This rank's place in the pipeline."""
        return PipelineStageManager(self.groups)

    def get_held_layers(self, stage: int | None = None) -> list[str]:
        """Return the module names of all chunks of a stage, by default this rank's, in the order they run.

        Here and in `get_shared_params`, a stage is a rank's place in the pipeline, as in `stage_manager`.
        """
        stage = self.stage_manager.stage if stage is None else stage
        return held_layers(self.deepspeed.module.specs, self.job.stages.counts or (), self.job.chunks, stage)

    def get_shared_params(self) -> list[dict[int, str]]:
        """Return, for each weight that several stages hold, its names: [{0: "embed.weight", 3: "head.weight"}].

        The result has names and not tensors, since no rank has another stage's tensors. The gradients of these weights
        are summed over their stages before each step.
        """
        return shared_params(self.deepspeed.module.specs, self.job.stages.counts or (), self.job.chunks)

    # ---- stop requests ----

    def _local_flags(self) -> tuple[bool, ...]:
        return (self.session.stop_requested,) if self.session.stops_on_signal else ()

    def _compare_replicas(self) -> None:
        if not self.in_loop:
            self.session.heed_difference(self, self.session.compare_replicas(self))

    def _stop_if_told(self) -> None:
        """Save and mark the run stopped if any rank's stop flag was set when the step's numbers were read."""
        if self.in_loop or self.stopped:
            return
        if any(self.host_reads.any_rank):
            saved = str(self.save()) if self.session.train.save_interval != 0 else ""
            self.session.mark_stopped(self.steps_done, saved)
            self.stopped = True
            if self.groups.rank == 0:  # printed, since a program may have no log
                how = f"saved in {saved}" if saved else "not saved"
                print(visible(f"told to stop: step {self.steps_done} is {how}"), file=sys.stderr, flush=True)

    def _leave_if_stopped(self) -> None:
        if self.stopped:
            raise SystemExit(self.session.train.requeue_status)

    # ---- the engine's calls, within their timeouts ----

    def train_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Call Engine.train_batch; first end the program if `stopped`."""
        self._leave_if_stopped()
        with self._step_phase():
            return super().train_batch(micro_batches)

    def forward_backward(
        self, micro_batches: Iterable[MicroBatch], keep_outputs: bool = False, criterion: LossFn | None = None
    ) -> Output:
        """Call Engine.forward_backward; first end the program if `stopped`."""
        self._leave_if_stopped()
        with self._step_phase():
            return super().forward_backward(micro_batches, keep_outputs, criterion)

    def forward(
        self, micro_batches: Iterable[MicroBatch], keep_outputs: bool = False, criterion: LossFn | None = None
    ) -> Output:
        """Call Engine.forward."""
        with nullcontext() if self.in_loop else self.session.inside("evaluating", self.steps_done, SLOW_FACTOR):
            return super().forward(micro_batches, keep_outputs, criterion)

    def sync_grads(self) -> None:
        """Call Engine.sync_grads."""
        with self._step_phase():
            super().sync_grads()

    def __call__(self, *inputs: Any) -> Any:
        """Call the Engine; first end the program if `stopped` and this call would begin a step."""
        if not self.deepspeed.module.training:
            return super().__call__(*inputs)
        if self.is_between_steps:
            self._leave_if_stopped()
        with self._step_phase():
            return super().__call__(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Call Engine.backward."""
        with self._step_phase():
            super().backward(loss)

    def step(self) -> None:
        """Call Engine.step. At the end of a step, save on all ranks if any rank received a stop signal."""
        with self._step_phase():
            super().step()
            if self.is_between_steps:
                self._compare_replicas()
                self._stop_if_told()

    def _step_phase(self) -> Any:
        if self.in_loop:
            return nullcontext()
        step = self.steps_done + 1
        return self.session.inside("step", step, SLOW_FACTOR if step == self._first_step else 1)
