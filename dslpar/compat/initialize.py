"""`colossalai.initialize`: build the engine of the launched run from a program's own objects.

As in ColossalAI, the program steps its LR scheduler, the loader decides the size of a batch, and `model` is this rank's
stage if there is a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dslpar import api
from dslpar.api import Batches, Run
from dslpar.compat.context import global_context
from dslpar.compat.data_loader import GradAccumDataloader
from dslpar.compat.engine import CalledModule, ColossalaiEngine
from dslpar.compat.lr_schedulers import GradAccumLrSchedulerByStep
from dslpar.compat.pipeline_part import PipelinePart
from dslpar.compat.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule, Schedule
from dslpar.data.pairs import is_dataset
from dslpar.engine.user_optimizer import OptimizerOrFactory
from dslpar.models import LayeredModel
from dslpar.models.sequential import Stage, is_plain_sequential


class Initialized(NamedTuple):
    """Objects that a program trains with, in ColossalAI's order."""

    engine: ColossalaiEngine
    train_dataloader: Any
    test_dataloader: Any
    lr_scheduler: Any


def initialize(
    model: nn.Module | LayeredModel | Callable[[], nn.Module],
    optimizer: OptimizerOrFactory | None = None,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Batches | None = None,
    test_dataloader: Batches | None = None,
    lr_scheduler: Any = None,
    verbose: bool = True,
) -> Initialized:
    """Return the launched run's engine, both data loaders and the LR scheduler; see `dslpar.initialize`.

    As in ColossalAI, `model` is this rank's stage if there is a pipeline, and the whole model otherwise. If a rank has
    several chunks, `model` is an nn.ModuleList of them.

    train_dataloader: if the config sets no batch size, the loader's `batch_size` is used: that of one micro-batch, and
        in a pipeline that of all micro-batches together. With gradient accumulation, the returned loader leaves out
        the last batches of an epoch that do not fill a step.
    lr_scheduler: an instance, which the program steps: with gradient accumulation, every `accumulation`th call of
        the returned scheduler steps it. A factory, such as a class, makes one that the engine steps.
    verbose: without effect.
    """
    run = _with_batch_size(global_context.run, train_dataloader)
    return build_engine(run, model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler)


def build_engine(
    run: Run,
    model: Any,
    optimizer: OptimizerOrFactory | None,
    criterion: Callable[..., Any] | None,
    train_dataloader: Batches | None,
    test_dataloader: Batches | None,
    lr_scheduler: Any,
) -> Initialized:
    """Build the engine of a run; see `initialize`."""
    if not isinstance(model, (nn.Module, LayeredModel)) and callable(model):
        model = model()
    is_instance = hasattr(lr_scheduler, "step") and not isinstance(lr_scheduler, type)
    keeps = is_instance or (lr_scheduler is None and not run.config.has("lr_scheduler"))
    made = api.initialize_run(
        run,
        ColossalaiEngine,
        _stage_of(run, model),
        criterion,
        optimizer,
        train_dataloader,
        test_dataloader,
        partial(KeptLearningRate, own=lr_scheduler) if keeps else lr_scheduler,
    )
    engine = made.engine
    assert isinstance(engine, ColossalaiEngine)
    engine.model = model
    engine.optimizer = optimizer if isinstance(optimizer, Optimizer) else engine.deepspeed.optimizer
    engine.schedule, engine.own_criterion = _schedule(engine), criterion
    size = 1 if engine.uses_pipeline else engine.job.batch.accumulation
    if (
        size > 1
        and train_dataloader is not None
        and not is_dataset(train_dataloader)
        and hasattr(made.train_data, "__len__")
    ):
        made = made._replace(train_data=GradAccumDataloader(made.train_data, size))
    own = (
        GradAccumLrSchedulerByStep(lr_scheduler, size)
        if keeps and lr_scheduler is not None and size > 1
        else lr_scheduler
    )
    return Initialized(engine, made.train_data, made.eval_data, own if keeps else made.lr_scheduler)


class KeptLearningRate:
    """LR scheduler that leaves the learning rates as they are, since the program's `own` scheduler sets them.

    The checkpoints of `engine.save()` have the state of `own`, and `engine.resume()` restores it.
    """

    def __init__(self, optimizer: Optimizer, own: Any = None) -> None:
        self.optimizer, self.own = optimizer, own

    def step(self, *_: Any) -> None:
        """Do nothing."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the program's scheduler; without one, an empty state."""
        return {} if self.own is None else dict(self.own.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the program's scheduler."""
        if self.own is not None and state:
            self.own.load_state_dict(state)


def _stage_of(run: Run, model: Any) -> Any:
    """Return the model as `dslpar.initialize` takes it."""
    if isinstance(model, PipelinePart):
        return model.model
    if not isinstance(model, nn.Module):
        return model
    if run.num_stages > 1:
        return Stage(*model) if isinstance(model, nn.ModuleList) else Stage(model)
    return model if is_plain_sequential(type(model)) else CalledModule.of(model)


def _schedule(engine: ColossalaiEngine) -> Schedule:
    job = engine.job
    if not engine.uses_pipeline:
        return NonPipelineSchedule()
    if job.chunks.num > 1:
        return InterleavedPipelineSchedule(job.batch.accumulation, job.chunks.num)
    return PipelineSchedule(job.batch.accumulation)


def _with_batch_size(run: Run, loader: Any) -> Run:
    """Return the run with the loader's batch size, if its config sets none."""
    batch = run.config.root.child("batch")
    sets = [name for name in ("micro_size", "global_size") if batch is not None and batch.child(name) is not None]
    size = _batch_size(loader)
    if sets or size is None:
        return run
    pieces = run.job.batch.accumulation if run.num_stages > 1 else 1
    if size % pieces:
        raise ValueError(
            f"the loader's batch_size is {size}: a pipeline cuts it into {pieces} micro-batches of equal size"
        )
    return global_context.with_overrides([f"batch.micro_size={size // pieces}"])


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a DataLoader, also if its batch sampler has it; None if it is unknown."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None
