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

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dslpar.core.catalog import raise_finding
from dslpar.engine.engine import Engine
from dslpar.engine.executor import first_tensor
from dslpar.engine.micro_batches import next_item, take_batch
from dslpar.layout.resolve import Job

OutputLabelLoss = tuple[Any, Any, torch.Tensor | None]
"""Output, label, loss."""
_LEFT_OUT = (
    "engine.step() is missing after forward_backward_step(): each step is therefore taken when the next one begins"
)


class Schedule(Protocol):
    """Interface of an engine's schedule."""

    batch_size: int
    """Samples in the batch that it read last, on this data rank."""

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Any,
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> OutputLabelLoss:
        """Run the next batch."""
        ...


class PipelineSchedule:
    """Runs all micro-batches of an optimizer step, with or without a pipeline.

    data_process_func: converts what the data iterator yields to (inputs, label). Its earlier name is
        batch_data_process_func.
    tensor_shape, scatter_gather_tensors: without effect; stages send shapes along with their tensors.
    """

    batch_size = 0
    """Samples in the batch that was read last, on this data rank."""

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
        batch_data_process_func: Callable[..., Any] | None = None,
    ) -> None:
        data_process_func = data_process_func or batch_data_process_func
        if data_process_func is not None and len(inspect.signature(data_process_func).parameters) != 1:
            raise TypeError(
                "data_process_func takes one argument, what the data iterator yields, and returns (inputs, label): "
                "dslpar passes a stage's output to the next stage itself"
            )
        self.num_microbatches, self.data_process_func = num_microbatches, data_process_func

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
        if data_iter is not None and self.data_process_func is not None:
            data_iter = map(self.data_process_func, data_iter)
        micro_batches = [] if data_iter is None else take_batch(data_iter, engine.job, engine.steps_done)
        self.batch_size = sum(len(first_tensor(inputs)) for inputs, _ in micro_batches)
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

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, data_process_func)
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

    data_process_func: converts what the data iterator yields to (inputs, label). Inputs may be a tensor, a list of
        arguments of the model, or a dict of them, and so may labels for the criterion. A subclass may override
        `_call_engine` and `_call_engine_criterion`, as in ColossalAI.
    """

    batch_size = 0
    """Samples in the micro-batch that was read last."""

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func

    def forward_backward_step(
        self,
        engine: Engine,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> OutputLabelLoss:
        """Run the forward and backward of one micro-batch. The returned loss is the mean over replicas."""
        batch = next_item(data_iter, engine.job, engine.steps_done)
        inputs, label = batch if self.data_process_func is None else self.data_process_func(batch)
        self.batch_size = _num_samples(inputs)
        with torch.set_grad_enabled(not forward_only):
            output = self._call_engine(engine, inputs)
            loss = self._call_engine_criterion(engine, output, label) if return_loss or not forward_only else None
        if loss is not None and not forward_only:
            engine.backward(loss)
        outputs = (output, label) if return_output_label else (None, None)
        return *outputs, engine.mean_over_replicas(loss) if return_loss and loss is not None else None

    @staticmethod
    def _call_engine(engine: Any, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return engine(**inputs)
        return engine(*inputs) if isinstance(inputs, tuple | list) else engine(inputs)

    @staticmethod
    def _call_engine_criterion(engine: Any, outputs: Any, labels: Any) -> Any:
        if isinstance(outputs, Mapping) and isinstance(labels, Mapping):
            return engine.criterion(**outputs, **labels)
        values = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        if isinstance(labels, Mapping):
            return engine.criterion(*values, **labels)
        return engine.criterion(*values, *(labels if isinstance(labels, tuple | list) else [labels]))


def _num_samples(inputs: Any) -> int:
    """Return the number of samples of a micro-batch: the length of its first tensor."""
    if isinstance(inputs, Mapping | tuple | list):
        values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
        return _num_samples(values[0]) if values else 0
    return len(inputs) if isinstance(inputs, torch.Tensor) and inputs.dim() else 0
