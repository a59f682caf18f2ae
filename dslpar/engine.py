"""A Job on its ranks: one engine with one surface, whether DeepSpeed runs a pipeline below it or a plain module.

    engine = build(job, Groups(job.mesh))
    loss = engine.train_batch(micro_batches)     # the mean over the global batch, before the update, on every rank
    engine.grad_norm, engine.lr                  # of that step
    engine.eval_batch(held_out)

DeepSpeed does the running: gradient accumulation, the pipeline's schedule, ZeRO, mixed precision. A micro-batch is
(ids, labels), each [micro_size, sequence], the same on all ranks of a replica; the layers slice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dslpar import comm, pipeline, workarounds
from dslpar.ds_config import ds_config
from dslpar.errors import DslparError, Finding, Location
from dslpar.foreign import model_of
from dslpar.groups import Groups, Mpu
from dslpar.job import Job
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layers.parameter import stable_hash
from dslpar.models import LayeredModel, build_module
from dslpar.models.layered import Labels
from dslpar.schedule import learning_rate

MicroBatch = tuple[Tensor, Tensor]
"""ids and labels, int64 [micro_size, sequence]; a label of -100 is not counted."""


class Engine:
    """DeepSpeed's engine for a job; a class, since it is the one thing here that changes with every step.

    All ranks must call its methods together. `all_counted` says that no label is ever -100, which saves a message a
    step.
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

    @property
    def feeds(self) -> bool:
        """Whether this rank reads micro-batches: on the first and the last stage; elsewhere they may be empty."""
        return self.groups.coord["pipe"] in (0, self.groups.mesh.pipe - 1)

    @property
    def module(self) -> nn.Module:
        """What this rank holds of the model."""
        return self.deepspeed.module  # type: ignore[no-any-return]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.deepspeed.global_steps  # type: ignore[no-any-return]

    @property
    def consumed_samples(self) -> int:
        """Samples of the global batches of all steps done: the position in the data."""
        return self.step * self.job.batch.global_size

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter) of what this rank holds: the same names in every layout."""
        return pipeline.named_parameters(self.module)

    def train_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """One optimizer step on `accumulation` micro-batches a rank. The loss over the global batch, before it."""
        self.lr = self.deepspeed.get_lr()[0]
        self._seed()
        batches = self._counted(micro_batches)
        loss = self._train_pipeline(batches) if self._piped else self._train_plain(batches)
        self.skipped = not self.deepspeed.was_step_applied()
        self.grad_norm = math.inf if self.skipped else float(self.deepspeed.get_global_grad_norm())
        return loss

    def eval_batch(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The loss over the global batch, without a step."""
        batches = self._counted(micro_batches)
        with torch.no_grad():
            return self._eval_pipeline(batches) if self._piped else self._eval_plain(batches)

    # ---- the two engines of DeepSpeed ----

    @property
    def _piped(self) -> bool:
        return self.groups.mesh.pipe > 1

    def _train_pipeline(self, batches: Sequence[tuple[Tensor, Labels]]) -> float:
        return float(self.deepspeed.train_batch(iter(batches)))

    def _eval_pipeline(self, batches: Sequence[tuple[Tensor, Labels]]) -> float:
        return float(self.deepspeed.eval_batch(iter(batches)))

    def _train_plain(self, batches: Sequence[tuple[Tensor, Labels]]) -> float:
        self.module.train()
        losses = []
        for ids, labels in batches:
            loss = self._loss(self.deepspeed(ids), labels)
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def _eval_plain(self, batches: Sequence[tuple[Tensor, Labels]]) -> float:
        self.module.eval()
        return self._mean([self._loss(self.deepspeed(ids), labels) for ids, labels in batches])

    def _mean(self, losses: list[Tensor]) -> float:
        """Over micro-batches and replicas: DeepSpeed's pipeline does the same by itself."""
        data = self.groups.axis("data")
        return comm.all_reduce(torch.stack(losses).mean(), data).item() / data.size

    # ---- what a step begins with ----

    def _seed(self) -> None:
        """One state of torch's generator a step, replica and stage, the same on all of a tensor group: for dropout."""
        coord = self.groups.coord
        torch.manual_seed(stable_hash(self.job.spec.train.seed, self.step, coord["data"], coord["pipe"]))

    def _counted(self, micro_batches: Iterable[MicroBatch]) -> list[tuple[Tensor, Labels]]:
        """Micro-batches on the device, their labels with what to divide by, if any label may not count.

        Losses are averaged over micro-batches and replicas, by DeepSpeed too; so each is the sum of its token losses
        over the *mean* number of counted tokens of all of them.
        """
        if not self.feeds:
            return []
        device = self.deepspeed.device
        batches = [(ids.to(device), labels.to(device)) for ids, labels in micro_batches]
        assert len(batches) == self.job.batch.accumulation, f"{len(batches)} micro-batches"
        if self._all_counted:
            return list(batches)
        data = self.groups.axis("data")
        counted = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
        total = comm.all_reduce(counted, data).clamp(min=1)
        denominator = total.float() / (len(batches) * data.size)
        return [(ids, (labels, denominator)) for ids, labels in batches]


def build(job: Job, groups: Groups, *, all_counted: bool = False) -> Engine:
    """The model, its optimizer and its schedule, in DeepSpeed's hands. All ranks must call it together.

    torch.distributed must run, also where one process trains by itself.

    Raises:
        DslparError: the model's class is not there or no model, or the device does not compute in `precision`.
    """
    _check_precision(job)
    workarounds.avoid_compiling()
    workarounds.forgive_old_names()
    workarounds.let_ranks_count_nothing()
    model = model_of(job)
    loss = model.loss(groups)
    module = _module(job, model, groups)
    runner, *_ = deepspeed.initialize(
        model=module,
        model_parameters=parameter_groups(module),
        mpu=None if job.mesh.pipe > 1 else Mpu(groups),
        lr_scheduler=partial(_scheduler, job),
        config=copy.deepcopy(ds_config(job)),  # DeepSpeed writes into it
        dist_init_required=False,
    )
    if job.spec.zero.stage == 0 and job.spec.precision.dtype == "fp32":
        workarounds.compute_norm_without_zero(runner, groups.axis("model"))
    return Engine(job, groups, runner, loss, all_counted)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices, which decay, and the rest, which does not: biases and gains are no weights to shrink.

    Both on every rank, since ZeRO reduces the norm of each group by itself.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    decay: dict[str, Any] = {"params": [p for p in parameters if p.dim() >= 2]}
    rest = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return [group for group in (decay, rest) if group["params"]]


def _check_precision(job: Job) -> None:
    """What no linter can know: what this machine's accelerator computes in."""
    dtype, accelerator = job.spec.precision.dtype, get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype in supported and not supported[dtype]():
        said = f"DeepSpeed has no {dtype} on this device ({accelerator.device_name()})"
        help_ = "choose another precision: 'fp32', 'bf16' or 'fp16'"
        raise DslparError(
            [Finding("PRE201", "no-such-precision-here", "error", said, help_, Location(job.path), "precision")]
        )


def _module(job: Job, model: LayeredModel, groups: Groups) -> nn.Module:
    torch.manual_seed(job.spec.train.seed)  # for modules that draw their own weights
    if job.mesh.pipe == 1:
        return build_module(model, groups, job.spec.train.seed)
    counts = job.stages.counts
    assert counts is not None, "a pipeline of a model whose layers are not known"
    return pipeline.pipeline_module(model.layers(groups), counts, groups, job.spec.train.seed, model.loss(groups))


def _scheduler(job: Job, optimizer: torch.optim.Optimizer) -> LambdaLR:
    lr = job.spec.optimizer.lr
    return LambdaLR(optimizer, lambda step: learning_rate(job.spec.lr_scheduler, lr, job.spec.train.steps, step) / lr)
