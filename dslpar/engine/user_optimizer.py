"""Optimizers that a program passes in place of the config's `optimizer` section.

    job, optimizer = resolve_user_optimizer(job, torch.optim.SGD(model.parameters(), lr=0.1), module, parameter_groups)

A program makes an instance over the whole model. On each rank, parameters that the rank does not hold are removed from
it. The job then names the optimizer, for the LR schedule, for records, and for DeepSpeed, whose ZeRO accepts only
elementwise optimizers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Location
from dslpar.layout.resolve import Job
from dslpar.linter.registry import rule_finding
from dslpar.schema import sections
from dslpar.schema.torch_optimizers import elementwise

ParameterGroups = list[dict[str, Any]]
OptimizerOrFactory = Optimizer | Callable[[ParameterGroups], Optimizer]
"""An optimizer over the model's parameters, or a class or other callable that makes one from parameter groups."""


def resolve_user_optimizer(
    job: Job, given: OptimizerOrFactory, module: nn.Module, groups: ParameterGroups
) -> tuple[Job, Optimizer]:
    """Return the job that names the optimizer, and the optimizer over this rank's parameters, which `module` has.

    Raises:
        DslparError: `given` is no optimizer, leaves out a trained parameter of this rank, or cannot be sharded by ZeRO;
            or the config's LR scheduler ends above the optimizer's learning rate.
    """
    # Read before the groups are filtered: a stage may lose the first group, and all stages must use the same lr.
    lr = given.param_groups[0]["lr"] if isinstance(given, Optimizer) else None
    optimizer: Any = _keep_local_parameters(given, module) if isinstance(given, Optimizer) else given(groups)
    if not isinstance(optimizer, Optimizer):
        message = f"the optimizer is a {type(optimizer).__name__}"
        raise_finding("CFG225", message, "give a torch.optim.Optimizer, or its class", job.path, "optimizer")
    if not optimizer.param_groups:
        message = "the optimizer holds no parameter of the model on this rank"
        hint = "create it over the parameters of the model that you pass"
        raise_finding("CFG225", message, hint, job.path, "optimizer")
    _check_complete(job, optimizer, module)
    lr = float(optimizer.param_groups[0]["lr"] if lr is None else lr)
    cls = _stepping_class(type(optimizer))
    # torch's optimizers get their public name, since the linter's tables and the job's record use it.
    package = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    section = sections.OtherOptimizer(target=f"{package}.{cls.__qualname__}", lr=lr)
    _check_shardable(job, section.target)
    _check_min_lr(job, lr)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, optimizer=section)), optimizer


def _stepping_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class that computes the step: a subclass may only have other defaults."""
    # torch wraps the step of each class that is instantiated.
    while not cls.__module__.startswith("torch.optim.") and _step_of(cls) is _step_of(cls.__base__):
        cls = cls.__base__  # type: ignore[assignment]
    return cls


def _step_of(cls: Any) -> Callable[..., Any]:
    step: Callable[..., Any] = inspect.unwrap(cls.step)
    return step


def _keep_local_parameters(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    # Changed in place: the program may keep reading its optimizer, so that object must be the optimizer that steps.
    local = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in local]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]  # ZeRO rejects empty ones
    return optimizer


def _check_complete(job: Job, optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that leaves out parameters with a gradient.

    The gradient norm contains such gradients without ZeRO, but not with ZeRO, so clipping would differ.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in optimized]
    if missing:
        message = f"the optimizer leaves out {len(missing)} parameters that have a gradient, such as {missing[0]!r}"
        hint = (
            "freeze them, p.requires_grad_(False), before dslpar.initialize; or create the optimizer over all of them"
        )
        raise_finding("CFG225", message, hint, job.path, "optimizer")


def _check_shardable(job: Job, target: str) -> None:
    known = elementwise(target) or target in {f"torch.optim.{name}" for name in sections.OPTIMIZERS}
    if job.spec.zero.stage and not known and not job.spec.deepspeed.get("zero_allow_untested_optimizer"):
        message = f"{target} is not known to be elementwise, and ZeRO {job.spec.zero.stage} shards tensors"
        hint = "zero=0; or another optimizer; or, if it is, deepspeed=dict(zero_allow_untested_optimizer=True)"
        raise_finding("ZER201", message, hint, job.path, "optimizer")


def _check_min_lr(job: Job, lr: float) -> None:
    """Refuse a min_lr above this optimizer's learning rate, which replaces the config's."""
    scheduler = job.spec.lr_scheduler
    min_lr = scheduler.min_lr if isinstance(scheduler, sections.LRScheduler) else 0.0
    if min_lr > lr:
        message = f"min_lr {min_lr} is above lr {lr} of the given optimizer"
        location = Location(job.path)
        raise DslparError([rule_finding("BAT106", message, f"at most {lr}", location, "lr_scheduler.min_lr")])
