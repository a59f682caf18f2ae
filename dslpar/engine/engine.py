"""Engine of a Job: one interface over DeepSpeed's pipeline engine and its plain engine.

    engine = build_engine(job, Groups(job.mesh))  # dslpar.engine.build
    loss = engine.train_batch(micro_batches)      # the mean over the global batch, before the update, on every rank
    engine.grad_norm, engine.lr                   # of that step
    engine.eval_batch(held_out)

`train_batch` is `forward_backward` followed by `step`. Without a pipeline a program may also train on single
micro-batches:

    loss = engine.criterion(engine(x), y); engine.backward(loss); engine.step()  # steps at each `accumulation`th call

DeepSpeed executes the step: gradient accumulation, the pipeline's schedule, ZeRO, mixed precision. A micro-batch is
(inputs, labels), each a tensor or a tuple of tensors whose first dim is micro_size. All ranks of a replica pass the
same micro-batches, and the layers take their slices.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.distributed.parameter_gather import finish_gathers
from dslpar.engine import executor, pipeline_module
from dslpar.engine.executor import LossFn, concatenate
from dslpar.engine.host_reads import HostReads
from dslpar.engine.loss_by_chunks import LossByChunks
from dslpar.engine.micro_batches import MicroBatch, check_sizes, step_of, to_device, with_denominator
from dslpar.engine.pipeline_executor import PipelineExecutor
from dslpar.engine.replica_samples import ReplicaSamples
from dslpar.layers.dropout import seed_generators
from dslpar.layers.gradient_accumulation_fusion import fused_accumulation
from dslpar.layers.loss import compiled_losses
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel
from dslpar.watchdog.status_page import join_location, rank_name


class Output(NamedTuple):
    """The results of one step's micro-batches."""

    loss: float
    """Mean over the global batch, equal on every rank."""
    output: Any = None
    """The model's outputs, concatenated along the first dim. None if not requested, and on all but the last stage."""
    label: Any = None
    """The labels, concatenated like `output`; None if `output` is."""


class Engine:
    """Training engine of a job, on top of DeepSpeed's engine. All ranks must call its methods together.

    `all_counted`: no label is ever IGNORE_INDEX, or the loss is a mean over micro-batches regardless of the labels. The
    engine then saves the all-reduce per step that counts the labels.
    """

    grad_norm: float
    """Gradient norm of the last step: the 2-norm over all distinct elements, unscaled, before clipping."""
    lr: float
    """The learning rate that the last step used."""
    skipped: bool
    """True if the last step was skipped because its gradient was not finite. The weights are then unchanged."""

    def __init__(
        self,
        job: Job,
        groups: Groups,
        ds_engine: Any,
        model: LayeredModel,
        all_counted: bool,
        host_reads: HostReads,
        by_chunks: LossByChunks | None = None,
    ) -> None:
        self.job, self.groups, self.deepspeed, self._model = job, groups, ds_engine, model
        self.host_reads, self._by_chunks = host_reads, by_chunks
        self._loss_fn, self._all_counted = model.loss(groups), all_counted
        self.grad_norm, self.lr, self.skipped = math.nan, math.nan, False
        self._step_pending = False
        """True if a backward ran and its step() has not been called yet."""
        self._num_batches = 0
        """Number of whole batches whose gradients are accumulated and wait for step()."""
        self._in_no_sync, self._unreduced = False, False
        self.replica_samples: ReplicaSamples | None = None
        """Compares the first step's samples of the replicas; None: dslpar loads the data, or nobody asked."""
        self._pipeline = PipelineExecutor(ds_engine, groups, job.schedule) if self._has_pipeline else None

    @property
    def needs_data(self) -> bool:
        """True if this rank reads micro-batches: ranks with the first or the last stage. Other ranks may pass none."""
        return self.groups.coord["pipe"] in (0, self.groups.mesh.pipe - 1)

    @property
    def is_between_steps(self) -> bool:
        """True if no step is in progress, so that a new one may begin."""
        return not self._step_pending and self._at_step_start

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if gradients accumulated under `no_sync` have not been averaged over replicas yet."""
        return self._unreduced

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the model's output."""
        return self.groups.coord["pipe"] == self.groups.mesh.pipe - 1

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, with the weights of the last step.

        With zero.overlap_param_gather, weights may still be in transit after a step, and this property waits for them.
        Code that keeps the module or a parameter across a step must call `wait_for_weights` before it reads weights.
        """
        self.wait_for_weights()
        return self.deepspeed.module  # type: ignore[no-any-return]

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights. Layers, saving and `state_dict()` wait by themselves."""
        finish_gathers(self.deepspeed.module)

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps since the beginning of the run, including skipped steps."""
        return self.deepspeed.global_steps  # type: ignore[no-any-return]

    @property
    def rank_description(self) -> str:
        """This rank and its last step: 'rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12'."""
        groups = self.groups
        who = rank_name(groups.rank, groups.mesh.world_size, socket.gethostname())
        return join_location(who, groups.stage_name, f"step {self.steps_done}")

    @property
    def consumed_samples(self) -> int:
        """Number of samples in all completed steps' global batches: the position in the data."""
        return self.deepspeed.global_samples  # type: ignore[no-any-return]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (global name, parameter) for this rank's part of the model. Names are the same in every layout."""
        return pipeline_module.named_parameters(self.module)

    def train(self, mode: bool = True) -> Engine:
        """Set the module's mode, as `torch.nn.Module.train` does."""
        self.deepspeed.module.train(mode)  # no need to wait for weights
        return self

    def eval(self) -> Engine:
        """Set evaluation mode, as `torch.nn.Module.eval` does."""
        return self.train(False)

    # ---- whole steps ----

    def train_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Take an optimizer step on `accumulation` micro-batches per rank; return the loss before the step, averaged
        over the global batch.

        micro_batches: a list of them, or an iterator, from which a step's are taken, as in DeepSpeed.
        """
        loss, *_ = self._forward_backward(micro_batches, keep_outputs=False, criterion=None)
        self.host_reads.defer(loss)
        self.step()
        return self.host_reads.loss

    def eval_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Return the mean loss over the global batch, without a step."""
        return self.forward(micro_batches).loss

    def forward_backward(
        self, micro_batches: Iterable[MicroBatch], keep_outputs: bool = False, criterion: LossFn | None = None
    ) -> Output:
        """Run a step's micro-batches forward and backward; `step()` must follow.

        Within or after `no_sync`, gradients are added to the accumulated ones.

        keep_outputs: return the model's outputs and the labels too.
        criterion: maps (output, label) to the micro-batch's mean loss, for this call only; None: the engine's own.
        """
        loss, output, label = self._forward_backward(micro_batches, keep_outputs, criterion)
        return Output(loss.item(), output, label)

    def _forward_backward(
        self, micro_batches: Iterable[MicroBatch], keep_outputs: bool, criterion: LossFn | None
    ) -> tuple[Tensor, Any, Any]:
        """Run `forward_backward`; return the fields of `Output`, with the loss still on the device."""
        adds = self._unreduced and self._num_batches > 0
        if not adds:
            self._check_order("forward_backward", step_pending=False)
            if not self._at_step_start:
                raise self._out_of_order("forward_backward() was called in the middle of a step that backward() began")
        batches = self._prepare_batches(micro_batches)
        self._compare_replica_samples(batches)
        counted = self._with_denominator(batches, criterion is not None)
        self._step_pending, self._unreduced = True, self._in_no_sync
        first, self._num_batches = self._num_batches * self.job.batch.accumulation, self._num_batches + 1
        reduce = not self._in_no_sync

        def seed(index: int) -> None:
            self._seed_micro_batch(first + index)

        with self._loss(criterion, keep_outputs) as loss_fn:
            if self._pipeline is not None:
                result = self._pipeline.forward_backward(loss_fn, counted, seed, keep_outputs, reduce)
            else:
                result = executor.forward_backward(
                    self.deepspeed, loss_fn, counted, seed, keep_outputs, reduce, not adds
                )
        return self._results(result, batches, keep_outputs)

    @contextmanager
    def _loss(self, criterion: LossFn | None, keep_outputs: bool) -> Iterator[LossFn]:
        """Yield the loss function for this call: by chunks of tokens if configured and nobody reads the logits."""
        with compiled_losses(self._compile_backend):
            if self._by_chunks is None or criterion is not None or keep_outputs:
                yield criterion or self._loss_fn
                return
            with self._by_chunks.in_use() as loss_fn:
                yield loss_fn

    @property
    def _compile_backend(self) -> str | None:
        return self.job.spec.train.compile_backend if self.job.spec.train.compiles_loss else None

    def forward(
        self, micro_batches: Iterable[MicroBatch], keep_outputs: bool = False, criterion: LossFn | None = None
    ) -> Output:
        """Run only the forward, in evaluation mode; `keep_outputs` and `criterion` are as in `forward_backward`."""
        batches = self._prepare_batches(micro_batches)
        counted = self._with_denominator(batches, criterion is not None)
        with self._loss(criterion, keep_outputs) as loss_fn:
            if self._pipeline is not None:
                result = self._pipeline.forward_only(loss_fn, counted, keep_outputs)
            else:
                result = executor.forward_only(self.deepspeed, loss_fn, counted, keep_outputs)
        loss, output, label = self._results(result, batches, keep_outputs)
        return Output(loss.item(), output, label)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each replica without averaging them over replicas.

        `sync_grads()`, or the next batch outside of `no_sync`, averages them. A step may then take several batches,
        whose gradients add up, as in torch and ColossalAI. To get the mean over k batches, pass a criterion that
        divides by k.

        Raises:
            DslparError: ZeRO 2 or 3, which average each micro-batch's gradients as soon as they are computed.
        """
        stage = self.job.spec.zero.stage
        if stage > 1:
            message = f"no_sync() at ZeRO {stage} is not possible: no rank keeps the whole gradient of a micro-batch"
            raise_finding("ZER202", message, "use zero=1; or raise batch.accumulation", self.job.path)
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def sync_grads(self) -> None:
        """Average the gradients over replicas, and sum those of tied weights over stages; `step()` must follow.

        It does nothing if they are averaged already.
        """
        self._check_order("sync_grads", step_pending=True)
        if self._unreduced:
            executor.reduce_gradients(self.deepspeed)
            self._unreduced = False

    def step(self) -> None:
        """Step the optimizer and the LR scheduler. After `backward(loss)`, only every `accumulation`th call does so."""
        self._check_order("step", step_pending=True)
        if self._unreduced:
            raise self._out_of_order("step() after no_sync() without sync_grads(): each replica has its own gradients")
        lr = self.deepspeed.get_lr()[0]  # before the step, which also steps the scheduler
        executor.optimizer_step(self.deepspeed)
        self._step_pending = False
        if not self._at_step_start:
            return
        self.host_reads.finish()
        # DeepSpeed has counted only one batch.
        self.deepspeed.global_samples += max(0, self._num_batches - 1) * self.job.batch.global_size
        self._num_batches = 0
        if self._model.changes_after_step:
            self._model.after_step(self.module, self.steps_done / self.job.spec.train.steps)
        self.lr = lr
        self.skipped = not self.deepspeed.was_step_applied()
        # ZeRO reports inf for a skipped step. Without ZeRO it may be nan. The record must not depend on the layout.
        self.grad_norm = math.inf if self.skipped else float(self.deepspeed.get_global_grad_norm())

    # ---- single micro-batches, without a pipeline ----

    def __call__(self, *inputs: Any) -> Any:
        """Return the model's output for one micro-batch's inputs."""
        self._refuse_pipeline("engine(inputs)")
        if self.deepspeed.module.training:
            self._compare_replica_samples(inputs)
            self._seed_micro_batch(self.deepspeed.micro_steps % self.job.batch.accumulation)
        return self.deepspeed(self._to_device(inputs[0] if len(inputs) == 1 else inputs, inputs=True))

    def criterion(self, output: Any, label: Any) -> Tensor:
        """Return the mean loss of one micro-batch."""
        with compiled_losses(self._compile_backend):
            return self._loss_fn(output, self._to_device(label))

    def mean_over_replicas(self, loss: Tensor) -> Tensor:
        """Average a scalar that each replica computed from its own samples; the result has no autograd graph."""
        data = self.groups.axis("data")
        return collectives.all_reduce(loss.detach(), data) / data.size

    def backward(self, loss: Tensor) -> None:
        """Run one micro-batch's backward, which adds to the accumulated gradients; `step()` must follow."""
        self._refuse_pipeline("engine.backward(loss)")
        self._check_order("backward", step_pending=False)
        # DeepSpeed reduces only at a step's last micro-batch. At earlier micro-batches there is nothing to suppress.
        self._unreduced = self._in_no_sync and bool(self.deepspeed.is_gradient_accumulation_boundary())
        with executor.without_reduction(self.deepspeed) if self._in_no_sync else nullcontext(), fused_accumulation():
            self.deepspeed.backward(loss)
        self._step_pending = True

    def zero_grad(self) -> None:
        """Do nothing: the method is for programs that call it. `step()` clears the gradients.

        Raises:
            DslparError: a backward has run and its `step()` has not.
        """
        if self._step_pending:
            raise self._out_of_order("zero_grad() between backward and step() would throw the gradient away")

    # ---- the start of a step ----

    @property
    def _has_pipeline(self) -> bool:
        return self.groups.mesh.pipe > 1

    @property
    def _at_step_start(self) -> bool:
        """True if the next step has seen no micro-batch yet. In a pipeline this always holds between calls."""
        return self._has_pipeline or self.deepspeed.micro_steps % self.job.batch.accumulation == 0

    def _seed_micro_batch(self, index: int) -> None:
        """Seed the next forward's random draws for this replica's `index`-th micro-batch of the step.

        All ranks of a tensor group get the same seed, so layers draw equal masks wherever ranks hold equal copies. The
        masks depend neither on the pipeline stages nor on the schedule, and a resumed run draws the same ones.
        """
        seed = stable_hash(self.job.spec.train.seed, self.steps_done, self.groups.coord["data"], index)
        self.deepspeed.module.micro_batch_seed = seed
        seed_generators(seed, self.deepspeed.device)  # for draws of the program's code outside the layers

    def _prepare_batches(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Return the checked micro-batches on the device; an empty list on stages that need no data."""
        if not self.needs_data:
            return []
        # Copies from a list need not block: the caller regains control only after the step has read its loss, and
        # cannot overwrite the list's tensors before. A generator may reuse one buffer for all micro-batches, so copies
        # from its tensors block.
        held = isinstance(micro_batches, Sequence)
        batches = [
            (self._to_device(x, inputs=True, non_blocking=held), self._to_device(y, non_blocking=held))
            for x, y in step_of(micro_batches, self.job, self.steps_done)
        ]
        check_sizes(batches, self.job)
        return batches

    def _compare_replica_samples(self, batches: Any) -> None:
        if self.replica_samples is not None and self.needs_data:
            self.replica_samples.compare(batches)

    def _with_denominator(self, batches: list[MicroBatch], is_mean: bool) -> list[MicroBatch]:
        if is_mean or self._all_counted or not batches:
            return batches
        num_labels = getattr(self._loss_fn, "num_labels", 1)
        return with_denominator(batches, num_labels, self.groups.axis("data"), self.job)

    def _to_device(self, value: Any, inputs: bool = False, non_blocking: bool = False) -> Any:
        """Move a tensor or a tuple of tensors to the device; cast floating-point inputs to the model's dtype."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.job.spec.precision.dtype) if inputs else None
        return to_device(value, self.deepspeed.device, dtype, self.job.path, non_blocking=non_blocking)

    def _results(
        self, result: executor.Result, batches: list[MicroBatch], keep_outputs: bool
    ) -> tuple[Tensor, Any, Any]:
        # PipelineExecutor has already averaged its loss over replicas.
        loss = result.loss if self._has_pipeline else self.mean_over_replicas(result.loss)
        if not (keep_outputs and self.is_last_stage):
            return loss, None, None
        # Gathered per micro-batch: each rank may store only a part of an output.
        outputs = [self._model.whole_output(self.groups, output) for output in result.outputs]
        return loss, concatenate(outputs), concatenate([labels for _, labels in batches])

    # ---- calls in the wrong order ----

    def _check_order(self, call: str, step_pending: bool) -> None:
        if self._step_pending != step_pending:
            missing = "backward(loss) or forward_backward()" if step_pending else "the last backward's step()"
            raise self._out_of_order(f"{call}() was called without {missing} before it")

    def _out_of_order(self, message: str) -> DslparError:
        hint = "call backward(loss) and step() for each micro-batch; or forward_backward() and step(); or train_batch()"
        return DslparError([finding("BAT206", message, hint, self.job.path)])

    def _refuse_pipeline(self, call: str) -> None:
        if self._has_pipeline:
            stages = self.groups.mesh.pipe
            message = (
                f"{call} cannot run in a pipeline of {stages} stages: its schedule needs all micro-batches at once"
            )
            hint = "use engine.train_batch(), or PipelineSchedule(...).forward_backward_step(engine, data_iter)"
            raise_finding("PIP206", message, hint, self.job.path)
