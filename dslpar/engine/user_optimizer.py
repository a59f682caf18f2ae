"""An optimizer and a schedule that a program gives in place of the config's sections.

    job, optimizer = optimizer_here(job, torch.optim.SGD(model.parameters(), lr=0.1), module)

An instance was made over the whole model: it keeps, on each rank, the parameters that are trained there. The job then
says what it is, for the learning rate's curve, for records, and for DeepSpeed, whose ZeRO takes elementwise ones alone.
"""

from __future__ import annotations

import dataclasses
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
MakesOptimizer = Optimizer | Callable[[ParameterGroups], Optimizer]
"""An optimizer over the model's parameters; or a class, or what else makes one of parameter groups."""


def optimizer_here(
    job: Job, given: MakesOptimizer, module: nn.Module, groups: ParameterGroups
) -> tuple[Job, Optimizer]:
    """The job that says so, and the optimizer over what `module`, this rank's, holds.

    Raises:
        DslparError: it is no optimizer, does not hold what is trained on this rank, or ZeRO cannot shard it; or the
            config's schedule ends above its rate.
    """
    whole = given.param_groups[0]["lr"] if isinstance(given, Optimizer) else None  # the same on every stage
    optimizer: Any = _kept(given, module) if isinstance(given, Optimizer) else given(groups)
    if not isinstance(optimizer, Optimizer):
        message = f"the optimizer is a {type(optimizer).__name__}"
        raise_finding("CFG225", message, "give a torch.optim.Optimizer, or its class", job.path, "optimizer")
    if not optimizer.param_groups:
        message = "the optimizer holds no parameter of the model on this rank"
        hint = "make it over the parameters of the model that you give"
        raise_finding("CFG225", message, hint, job.path, "optimizer")
    _check_all_held(job, optimizer, module)
    lr = float(optimizer.param_groups[0]["lr"] if whole is None else whole)
    section = sections.OtherOptimizer(target=_full_name(type(optimizer)), lr=lr)
    _check_shards(job, section.target)
    _check_rate(job, lr)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, optimizer=section)), optimizer


def _kept(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    here = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in here]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]  # ZeRO takes no empty one
    return optimizer


def _check_all_held(job: Job, optimizer: Optimizer, module: nn.Module) -> None:
    """Gradients that nobody applies are in the norm without ZeRO, and not with it: clipping would differ."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        message = f"the optimizer leaves out {len(left)} parameters that have a gradient, such as {left[0]!r}"
        hint = "freeze them, p.requires_grad_(False), before dslpar.initialize; or make it over all of them"
        raise_finding("CFG225", message, hint, job.path, "optimizer")


def _full_name(cls: type) -> str:
    """torch's classes by the name under which they are known."""
    package = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{package}.{cls.__qualname__}"


def _check_shards(job: Job, target: str) -> None:
    known = elementwise(target) or target in {f"torch.optim.{name}" for name in sections.OPTIMIZERS}
    if job.spec.zero.stage and not known and not job.spec.deepspeed.get("zero_allow_untested_optimizer"):
        message = f"{target}: not known to update each element by itself, and ZeRO {job.spec.zero.stage} shards tensors"
        hint = "zero=0, another optimizer, or, if it does, deepspeed=dict(zero_allow_untested_optimizer=True)"
        raise_finding("ZER201", message, hint, job.path, "optimizer")


def _check_rate(job: Job, lr: float) -> None:
    """The config's schedule falls from this rate, not from the config's own."""
    scheduler = job.spec.lr_scheduler
    low = scheduler.min_lr if isinstance(scheduler, sections.LRScheduler) else 0.0
    if low > lr:
        message = f"min_lr {low} is above lr {lr}, the given optimizer's"
        place = Location(job.path)
        raise DslparError([rule_finding("BAT106", message, f"at most {lr}", place, "lr_scheduler.min_lr")])
