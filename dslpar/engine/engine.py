"""A Job on its ranks: one engine with one surface, whether DeepSpeed runs a pipeline below it or a plain module.

    engine = build(job, Groups(job.mesh))        # dslpar.engine.build
    loss = engine.train_batch(micro_batches)     # the mean over the global batch, before the update, on every rank
    engine.grad_norm, engine.lr                  # of that step
    engine.eval_batch(held_out)

`train_batch` is `forward_backward` and then `step`; without a pipeline a program may also go by single micro-batches:

    loss = engine.criterion(engine(x), y); engine.backward(loss); engine.step()   # a step at each `accumulation`th call

DeepSpeed does the running: gradient accumulation, the pipeline's schedule, ZeRO, mixed precision. A micro-batch is
(inputs, labels), tensors or tuples of tensors whose first dim is micro_size, the same on all ranks of a replica; the
layers slice.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.engine import executor, pipeline_module
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.watchdog.status_page import join_location, rank_name

MicroBatch = tuple[Any, Any]
"""Inputs and labels, of tokens: int64 [micro_size, sequence] each; a label of -100 is not counted."""


class Output(NamedTuple):
    """What the micro-batches of one step gave."""

    loss: float
    """The mean over the global batch, on every rank."""
    output: Any = None
    """The model's outputs, joined along the first dim; None where not asked for, and on all stages but the last."""
    label: Any = None
    """The labels, likewise."""


class Engine:
    """DeepSpeed's engine for a job; a class, since it is the one thing here that changes with every step.

    All ranks must call its methods together. `all_counted` says that no label is ever -100, which saves a message a
    step, or that the loss is a mean over micro-batches whatever the labels are.
    """

    grad_norm: float
    """Of the last step: the 2-norm over every distinct element of the gradient, unscaled, before clipping."""
    lr: float
    """The learning rate that the last step used."""
    skipped: bool
    """Whether the last step left the weights as they were, since its gradient was not finite."""

    def __init__(self, job: Job, groups: Groups, runner: Any, loss: Any, all_counted: bool) -> None:
        self.job, self.groups, self.deepspeed = job, groups, runner
        self._loss, self._all_counted = loss, all_counted
        self.grad_norm, self.lr, self.skipped = math.nan, math.nan, False
        self._awaits_step = False
        self._seeded_step = -1

    @property
    def feeds(self) -> bool:
        """Whether this rank reads micro-batches: on the first and the last stage; elsewhere they may be empty."""
        return self.groups.coord["pipe"] in (0, self.groups.mesh.pipe - 1)

    @property
    def can_pass(self) -> bool:
        """Whether a step may begin: none is half done."""
        return not self._awaits_step and self._begins_a_step

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the model's output."""
        return self.groups.coord["pipe"] == self.groups.mesh.pipe - 1

    @property
    def module(self) -> nn.Module:
        """What this rank holds of the model."""
        return self.deepspeed.module  # type: ignore[no-any-return]

    @property
    def steps_done(self) -> int:
        """Optimizer steps since the beginning of the run, skipped ones among them."""
        return self.deepspeed.global_steps  # type: ignore[no-any-return]

    @property
    def place(self) -> str:
        """rank 2 of 4 on host1, stage 1 (pipe 1, data 0, tensor 0), step 12: of the last step done."""
        groups = self.groups
        who = rank_name(groups.rank, groups.mesh.world_size, socket.gethostname())
        return join_location(who, groups.stage_name, f"step {self.steps_done}")

    @property
    def consumed_samples(self) -> int:
        """Samples of the global batches of all steps done: the position in the data."""
        return self.steps_done * self.job.batch.global_size

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of what this rank holds: the same names in every layout."""
        return pipeline_module.named_parameters(self.module)

    def train(self, mode: bool = True) -> Engine:
        """As torch.nn.Module's."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As torch.nn.Module's."""
        return self.train(False)

    # ---- whole steps ----

    def train_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """One optimizer step on `accumulation` micro-batches a rank. The loss over the global batch, before it."""
        loss = self.forward_backward(micro_batches).loss
        self.step()
        return loss

    def eval_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The loss over the global batch, without a step."""
        return self.forward(micro_batches).loss

    def forward_backward(self, micro_batches: Iterable[MicroBatch], keep: bool = False) -> Output:
        """A step's micro-batches forward and backward; `step()` is to follow. `keep`: outputs and labels too."""
        self._expect("forward_backward", awaits_step=False)
        if not self._begins_a_step:
            raise self._out_of_order("forward_backward() in the middle of a step that backward() began")
        batches = self._batches(micro_batches)
        self._seed()
        counted = self._counted(batches)
        self._awaits_step = True
        if self._piped:
            return self._output(executor.piped(self.deepspeed, counted, keep), batches, keep)
        return self._output(executor.plain(self.deepspeed, self._loss, counted, keep), batches, keep)

    def forward(self, micro_batches: Iterable[MicroBatch], keep: bool = False) -> Output:
        """Micro-batches forward alone, in evaluation mode. `keep`: outputs and labels too."""
        batches = self._batches(micro_batches)
        counted = self._counted(batches)
        if self._piped:
            return self._output(executor.piped_forward(self.deepspeed, counted, keep), batches, keep)
        return self._output(executor.plain_forward(self.deepspeed, self._loss, counted, keep), batches, keep)

    def step(self) -> None:
        """The optimizer's step, and the learning rate's. After `backward(loss)`, at each `accumulation`th call only."""
        self._expect("step", awaits_step=True)
        lr = self.deepspeed.get_lr()[0]
        executor.take_step(self.deepspeed)
        self._awaits_step = False
        if not self._begins_a_step:
            return
        self.lr = lr
        self.skipped = not self.deepspeed.was_step_applied()
        self.grad_norm = math.inf if self.skipped else float(self.deepspeed.get_global_grad_norm())

    # ---- single micro-batches, without a pipeline ----

    def __call__(self, *inputs: Any) -> Any:
        """The model's output for one micro-batch's inputs."""
        self._refuse_pipeline("engine(inputs)")
        if self.module.training and self._begins_a_step and self._seeded_step != self.steps_done:
            self._seed()
        return self.deepspeed(self._on_device(inputs[0] if len(inputs) == 1 else inputs, inputs=True))

    def criterion(self, output: Any, label: Any) -> Tensor:
        """The loss of one micro-batch: the mean over it."""
        loss: Tensor = self._loss(output, self._on_device(label))
        return loss

    def mean_over_replicas(self, loss: Tensor) -> Tensor:
        """The mean of a scalar that each replica has computed of its own samples, without a graph."""
        data = self.groups.axis("data")
        return collectives.all_reduce(loss.detach(), data) / data.size

    def backward(self, loss: Tensor) -> None:
        """Adds one micro-batch's share to the gradients; `step()` is to follow."""
        self._refuse_pipeline("engine.backward(loss)")
        self._expect("backward", awaits_step=False)
        self.deepspeed.backward(loss)
        self._awaits_step = True

    def zero_grad(self) -> None:
        """Nothing is left to do: each step leaves the gradients empty, and micro-batches before it add up."""
        if self._awaits_step:
            raise self._out_of_order("zero_grad() between backward and step() would throw the gradient away")

    # ---- what a step begins with ----

    @property
    def _piped(self) -> bool:
        return self.groups.mesh.pipe > 1

    @property
    def _begins_a_step(self) -> bool:
        """Whether no micro-batch of the next step was seen yet; of a pipeline always, between calls."""
        return self._piped or self.deepspeed.micro_steps % self.job.batch.accumulation == 0

    def _seed(self) -> None:
        """One state of torch's generator a step, replica and stage, the same on all of a tensor group: for dropout."""
        coord = self.groups.coord
        torch.manual_seed(stable_hash(self.job.spec.train.seed, self.steps_done, coord["data"], coord["pipe"]))
        self._seeded_step = self.steps_done

    def _batches(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches on the device; none on stages that need none."""
        if not self.feeds:
            return []
        batches = [(self._on_device(x, inputs=True), self._on_device(y)) for x, y in micro_batches]
        wanted = self.job.batch
        sizes = [first_tensor(inputs).shape[0] for inputs, _ in batches]
        if sizes != [wanted.micro_size] * wanted.accumulation:
            message = (
                f"micro-batches of {sizes} samples, where a step takes {wanted.accumulation} of {wanted.micro_size}"
            )
            hint = "feed so many of that size, or change batch.accumulation and batch.micro_size"
            raise_finding("BAT204", message, hint, self.job.path)
        return batches

    def _counted(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, their labels with what to divide by, if any label may not count.

        Losses are averaged over micro-batches and replicas, by DeepSpeed too; so each is the sum of its token losses
        over the *mean* number of counted tokens of all of them.
        """
        if self._all_counted or not batches:
            return batches
        if not all(isinstance(labels, Tensor) for _, labels in batches):
            message = "labels are a tuple, and the model's own loss takes one tensor"
            raise_finding("BAT205", message, "give dslpar.initialize(criterion=...), which takes them", self.job.path)
        data = self.groups.axis("data")
        counted = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
        total = collectives.all_reduce(counted, data).clamp(min=1)
        denominator = total.float() / (len(batches) * data.size)
        return [(inputs, (labels, denominator)) for inputs, labels in batches]

    def _on_device(self, value: Any, inputs: bool = False) -> Any:
        """A tensor or a tuple of them; floating inputs in the type that the model computes in."""
        if isinstance(value, list | tuple):
            return tuple(self._on_device(item, inputs) for item in value)
        if not isinstance(value, Tensor):
            message = f"a micro-batch holds a {type(value).__name__}"
            raise_finding("BAT205", message, "give tensors, or tuples of tensors: (inputs, labels)", self.job.path)
        low = inputs and value.is_floating_point() and self.job.spec.precision.dtype != "fp32"
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.job.spec.precision.dtype] if low else None
        return value.to(self.deepspeed.device, dtype)

    def _output(self, passed: executor.Passed, batches: list[MicroBatch], keep: bool) -> Output:
        """Over replicas too: DeepSpeed's pipeline has averaged over them by itself."""
        loss = (passed.loss if self._piped else self.mean_over_replicas(passed.loss)).item()
        if not (keep and self.is_last_stage):
            return Output(loss)
        return Output(loss, joined(passed.outputs), joined([labels for _, labels in batches]))

    # ---- calls out of place ----

    def _expect(self, call: str, awaits_step: bool) -> None:
        if self._awaits_step != awaits_step:
            before = "backward(loss) or forward_backward()" if awaits_step else "the step() that belongs to the last"
            raise self._out_of_order(f"{call}() without {before}{'' if awaits_step else ' backward'} before it")

    def _out_of_order(self, message: str) -> DslparError:
        hint = (
            "call backward(loss), then step(), for each micro-batch; or forward_backward() and step(); or train_batch()"
        )
        return DslparError([finding("BAT206", message, hint, self.job.path)])

    def _refuse_pipeline(self, call: str) -> None:
        if self._piped:
            stages = self.groups.mesh.pipe
            message = f"{call} in a pipeline of {stages} stages, whose schedule moves all micro-batches at once"
            hint = "use engine.train_batch(), or PipelineSchedule(...).forward_backward_step(engine, data_iter)"
            raise_finding("PIP206", message, hint, self.job.path)


def first_tensor(value: Any) -> Tensor:
    """Of a tensor or a tuple."""
    first: Tensor = value[0] if isinstance(value, tuple) else value
    return first


def joined(values: list[Any]) -> Any:
    """Tensors of several micro-batches, or tuples of them, along the first dim; scalars become a vector."""
    if isinstance(values[0], tuple):
        return tuple(joined(list(items)) for items in zip(*values, strict=True))
    return torch.cat(values) if values[0].dim() else torch.stack(values)
