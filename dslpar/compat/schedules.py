"""ColossalAI's schedules: run the micro-batches of an optimizer step, and return their output, label and loss.

The order of the micro-batches in a pipeline (1F1B, interleaved, ...) depends only on the config's section `schedule`.

    schedule = PipelineSchedule(num_microbatches=4)
    engine.zero_grad()
    output, label, loss = schedule.forward_backward_step(engine, data_iter)
    engine.step()

The last stage returns output, label and loss, and other stages return None. Without a pipeline every rank returns them.
The loss is the mean over micro-batches and replicas.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from dslpar.core.catalog import raise_finding
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import next_item, take_batch
from dslpar.layout.resolve import Job

OutputLabelLoss = tuple[Any, Any, torch.Tensor | None]
"""Output, label, loss."""
_LEFT_OUT = (
    "engine.step() is missing after forward_backward_step(): each step is therefore taken when the next one begins"
)


class PipelineSchedule:
    """Runs all micro-batches of an optimizer step, with or without a pipeline."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any] | None,
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> OutputLabelLoss:
        """Run the forwards and backwards of a step. The program must then call `engine.step()`, unless `forward_only`.

        The loop in ColossalAI's documentation leaves `engine.step()` out, so that nothing would be trained. Such a
        program gets a warning, and the optimizer step is taken when the next call begins.

        `data_iter` yields micro-batches, or batches of num_microbatches * micro_size samples, which are split. It may
        be None on stages between the first and the last. `forward_only` runs only forwards, in evaluation mode.

        Raises:
            DslparError: num_microbatches is not the job's accumulation, or the data end in the middle of a step.
            StopIteration: there are no more data.
        """
        self._check(engine.job)
        if not forward_only and not engine.is_between_steps and not engine.has_unreduced_gradients:
            if engine.groups.rank == 0:
                warnings.warn(_LEFT_OUT, stacklevel=2)
            engine.step()
        micro_batches = [] if data_iter is None else take_batch(data_iter, engine.job, engine.steps_done)
        run = engine.forward if forward_only else engine.forward_backward
        result = run(micro_batches, keep_outputs=return_output_label)
        loss = None
        if return_loss and engine.is_last_stage:
            loss = torch.tensor(result.loss, device=engine.deepspeed.device)
        return result.output, result.label, loss

    def _check(self, job: Job) -> None:
        wanted = job.batch.accumulation
        if self.num_microbatches != wanted:
            message = f"num_microbatches is {self.num_microbatches}, but the job's accumulation is {wanted}"
            hint = f"write batch = dict(accumulation={self.num_microbatches}, ...), or num_microbatches={wanted}"
            raise_finding("PIP207", message, hint, job.path, "schedule")


class InterleavedPipelineSchedule(PipelineSchedule):
    """PipelineSchedule for a job with several model chunks per rank. Without a pipeline, num_model_chunks is ignored.

    Each step raises the errors of PipelineSchedule, and:

    Raises:
        DslparError: num_model_chunks is not the job's number of chunks per rank.
    """

    def __init__(self, num_microbatches: int, num_model_chunks: int) -> None:
        super().__init__(num_microbatches)
        self.num_model_chunks = num_model_chunks

    def _check(self, job: Job) -> None:
        super()._check(job)
        wanted, asked = job.chunks.num, self.num_model_chunks
        if job.mesh.pipe > 1 and asked != wanted:
            message = f"num_model_chunks is {asked}, but each rank of the job has {wanted}"
            other = f"InterleavedPipelineSchedule(..., num_model_chunks={wanted})" if wanted > 1 else "PipelineSchedule"
            hint = f"write schedule = dict(type='interleaved', num_model_chunks={asked}), or {other}"
            raise_finding("PIP212", message, hint, job.path, "schedule")


class NonPipelineSchedule:
    """Runs one micro-batch per call, without a pipeline.

    The program calls `engine.step()` after each call. The engine updates the weights after the last micro-batch of an
    optimizer step.
    """

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> OutputLabelLoss:
        """Run the forward and backward of one micro-batch. The returned loss is the mean over replicas."""
        inputs, label = next_item(data_iter, engine.job, engine.steps_done)
        with torch.set_grad_enabled(not forward_only):
            output = engine(*inputs) if isinstance(inputs, tuple | list) else engine(inputs)
            loss = engine.criterion(output, label)
        if not forward_only:
            engine.backward(loss)
        outputs = (output, label) if return_output_label else (None, None)
        return *outputs, engine.mean_over_replicas(loss) if return_loss else None
