"""Optimizers and learning-rate schedules: torch's and DeepSpeed's by their names there, or a class by its full name.

    make = optimizer_of(job)             # None: one of those that DeepSpeed makes from its dict
    make_schedule = schedule_of(job)     # of an optimizer

One step of a schedule is one optimizer step that was applied: a skipped one (its gradient was not finite) leaves the
learning rate where it is, as DeepSpeed and Megatron-LM have it, so that no part of a warm-up is lost to the first loss
scales of fp16. The classes are called only here, when DeepSpeed asks for them, and checked before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Location
from dslpar.distributed import deepspeed_patches
from dslpar.language.lazy import instantiate, locate
from dslpar.layout.lr_scheduler import learning_rate
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from dslpar.schema import torch_optimizers as known_optimizers
from dslpar.schema import torch_schedulers as known_schedules

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""


def optimizer_of(job: Job) -> Callable[[Groups], torch.optim.Optimizer] | None:
    """Makes the optimizer from parameter groups; None where DeepSpeed's dict says which.

    Raises:
        DslparError: there is no such class, or it is no optimizer. When called: it refuses its arguments, or it has no
            kernel for this device.
    """
    asked = job.spec.optimizer
    if not isinstance(asked, sections.OtherOptimizer):
        return None
    made = locate(_full_name(asked.target, job), Location(job.path))
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        message, hint = f"{asked.target!r} is no torch.optim.Optimizer", "name a class of that kind, or type='AdamW'"
        raise_finding("CFG225", message, hint, job.path, "optimizer")
    arguments = {"lr": asked.lr, **instantiate(asked.args)}
    if asked.weight_decay or "weight_decay" in inspect.signature(made).parameters:
        arguments["weight_decay"] = asked.weight_decay
    return lambda groups: deepspeed_patches.with_lazy_state(
        _made(made, arguments, "optimizer", asked.target, job, groups)
    )


def schedule_of(job: Job) -> Callable[[torch.optim.Optimizer], Any]:
    """Makes the schedule, at the run's first step: the learning rate of that step is then already the optimizer's.

    Raises:
        DslparError: there is no such class, or it is no schedule of steps alone. When called: it refuses its arguments.
    """
    asked = job.spec.lr_scheduler
    if isinstance(asked, sections.LRScheduler):
        lr, steps = (
            job.spec.optimizer.lr or 1.0,
            job.spec.train.steps,
        )  # 0: of frozen ones, in an optimizer's first group
        return partial(LambdaLR, lr_lambda=lambda step: learning_rate(asked, lr, steps, step) / lr)
    row = known_schedules.named(asked.target)
    made = locate(row.dotted if row else asked.target, Location(job.path))
    if not _is_schedule(made):
        message = f"{asked.target!r} is no schedule of steps: a class with step(), state_dict() and load_state_dict()"
        hint = "name a class of torch.optim.lr_scheduler, or of DeepSpeed's; none that watches a loss"
        raise_finding("CFG212", message, hint, job.path, "lr_scheduler")
    # Where a schedule has a peak of its own, it is the optimizer's lr, not a number of DeepSpeed's.
    arguments = ({row.sets_lr: job.spec.optimizer.lr} if row and row.sets_lr else {}) | instantiate(asked.args)
    return partial(_made, made, arguments, "lr_scheduler", asked.target, job)


def _full_name(target: str, job: Job) -> str:
    """Where the optimizer's class lives; some have another class for state that is offloaded to the CPU."""
    row = known_optimizers.named(target)
    if row is None:
        return target
    offloaded = (job.spec.zero.extra.get("offload_optimizer") or {}).get("device") == "cpu"
    return row.on_cpu if offloaded and row.on_cpu else row.dotted


def _is_schedule(made: Any) -> bool:
    """Whether DeepSpeed can drive it: it steps without being told anything, such as a loss, and can be saved."""
    if not isinstance(made, type) or issubclass(made, torch.optim.Optimizer):
        return False
    if not all(hasattr(made, name) for name in ("step", "state_dict", "load_state_dict")):
        return False
    _, *others = inspect.signature(made.step).parameters.values()  # type: ignore[attr-defined]
    return all(parameter.default is not parameter.empty for parameter in others)


def _made(made: Any, arguments: Mapping[str, Any], key: str, target: str, job: Job, first: Any) -> Any:
    """`made(first, **arguments)`, whose refusal is the author's to read."""
    try:
        return made(first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if _lacks_its_op(error):
            message = f"{target!r} has no kernel on this machine: {error}"
            hint = "another optimizer, such as 'AdamW'"
            raise DslparError([finding("CFG229", message, hint, job.path, key)]) from error
        if isinstance(error, RuntimeError):
            raise  # of no arguments
        message = f"{target!r} refuses its arguments ({', '.join(arguments)}): {error}"
        _, *names = inspect.signature(made).parameters
        hint = f"correct the arguments of {key}; it takes {', '.join(names)}"
        raise DslparError([finding("CFG223", message, hint, job.path, key)]) from error


def _lacks_its_op(error: Exception) -> bool:
    """Whether DeepSpeed has no kernel for the device, or could not build it; there is no class for this."""
    return any(words in str(error) for words in ("op had not been implemented", "failed to build/load"))
