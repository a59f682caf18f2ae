"""The optimizer and the LR scheduler of a job: torch's and DeepSpeed's by their names, or a class by its full name.

    make_optimizer = optimizer_factory(job)         # None: one of those that DeepSpeed makes from its dict
    make_lr_scheduler = lr_scheduler_factory(job)   # called with the optimizer

An LR scheduler steps once an optimizer step that was applied. A skipped one (its gradient was not finite) leaves the
learning rate where it is, as in DeepSpeed and Megatron-LM, so that no part of a warm-up is lost to the first loss
scales of fp16. Classes are checked here, and called when DeepSpeed asks for an instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LambdaLR

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Location
from dslpar.distributed import deepspeed_patches
from dslpar.language.lazy import instantiate, locate
from dslpar.layout.lr_scheduler import learning_rate
from dslpar.layout.resolve import Job
from dslpar.schema import sections, torch_optimizers, torch_schedulers

ParameterGroups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""


def optimizer_factory(job: Job) -> Callable[[ParameterGroups], torch.optim.Optimizer] | None:
    """Return what makes the optimizer from parameter groups; None where DeepSpeed's dict names it.

    Raises:
        DslparError: there is no such class, or it is not an optimizer. When called: it refuses its arguments, or it has
            no kernel for this device.
    """
    section = job.spec.optimizer
    if not isinstance(section, sections.OtherOptimizer):
        return None
    cls = locate(_full_name(section.target, job), Location(job.path))
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        message, hint = f"{section.target!r} is not a torch.optim.Optimizer", "name such a class, or type='AdamW'"
        raise_finding("CFG225", message, hint, job.path, "optimizer")
    arguments = {"lr": section.lr, **instantiate(section.args, job.trusted)}
    # An optimizer that knows no decay would refuse the 0 that nobody has written.
    if section.weight_decay or "weight_decay" in inspect.signature(cls).parameters:
        arguments["weight_decay"] = section.weight_decay
    return lambda groups: deepspeed_patches.without_eager_state(
        _construct(cls, arguments, "optimizer", section.target, job, groups)
    )


def lr_scheduler_factory(job: Job) -> Callable[[torch.optim.Optimizer], Any]:
    """Return what makes the LR scheduler at the run's first step, whose learning rate the optimizer then has.

    Raises:
        DslparError: there is no such class, or it does not step by itself. When called: it refuses its arguments.
    """
    section = job.spec.lr_scheduler
    if isinstance(section, sections.LRScheduler):
        lr = job.spec.optimizer.lr or 1.0  # lr is 0 where the optimizer's first group is frozen
        steps = job.spec.train.steps
        # LambdaLR multiplies the function with each group's lr, and the curve is absolute: hence the division.
        return partial(LambdaLR, lr_lambda=lambda step: learning_rate(section, lr, steps, step) / lr)
    row = torch_schedulers.named(section.target)
    cls = locate(row.dotted if row else section.target, Location(job.path))
    if not _steps_by_itself(cls):
        required = "an LR scheduler that steps by itself, with state_dict() and load_state_dict()"
        hint = "name a class of torch.optim.lr_scheduler, or of DeepSpeed's; none that watches a loss"
        raise_finding("CFG212", f"{section.target!r} is not {required}", hint, job.path, "lr_scheduler")
    # Where a scheduler has a peak of its own, it is the optimizer's lr, and not DeepSpeed's default.
    arguments = ({row.sets_lr: job.spec.optimizer.lr} if row and row.sets_lr else {}) | instantiate(
        section.args, job.trusted
    )
    return partial(_construct, cls, arguments, "lr_scheduler", section.target, job)


def _full_name(target: str, job: Job) -> str:
    """Return the full name of an optimizer's class; some have another one for state that is offloaded to the CPU."""
    row = torch_optimizers.named(target)
    if row is None:
        return target
    offloaded = (job.spec.zero.extra.get("offload_optimizer") or {}).get("device") == "cpu"
    return row.on_cpu if offloaded and row.on_cpu else row.dotted


def _steps_by_itself(cls: object) -> bool:
    """Return whether DeepSpeed can drive a scheduler: `step` needs no argument, such as a loss, and it has a state."""
    if not isinstance(cls, type) or issubclass(cls, torch.optim.Optimizer):
        return False
    if not all(hasattr(cls, name) for name in ("step", "state_dict", "load_state_dict")):
        return False
    _, *others = inspect.signature(cls.step).parameters.values()  # type: ignore[attr-defined]
    return all(parameter.default is not parameter.empty for parameter in others)


def _construct(cls: Any, arguments: Mapping[str, Any], key: str, target: str, job: Job, first: Any) -> Any:
    """Return `cls(first, **arguments)`; arguments that it refuses are the author's mistake."""
    try:
        return cls(first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        # DeepSpeed has no kernel for the device, or could not build it: it raises no class of its own.
        if any(text in str(error) for text in ("op had not been implemented", "failed to build/load")):
            message = f"{target!r} has no kernel on this machine: {error}"
            hint = "choose another optimizer, such as 'AdamW'"
            raise DslparError([finding("CFG229", message, hint, job.path, key)]) from error
        if isinstance(error, RuntimeError):
            raise  # it is not about arguments
        message = f"{target!r} refuses its arguments ({', '.join(arguments)}): {error}"
        _, *names = inspect.signature(cls).parameters
        hint = f"correct the arguments of {key}; it takes {', '.join(names)}"
        raise DslparError([finding("CFG223", message, hint, job.path, key)]) from error


def read_only(lr_scheduler: Any, path: str) -> Any:
    """Return a view of the LR scheduler that refuses `step`: stepped twice a step, it would end in half the run."""
    if lr_scheduler is None:
        return None

    class ReadOnly(type(lr_scheduler)):  # type: ignore[misc]
        """The engine's LR scheduler, to read."""

        def __init__(self) -> None:
            self.__dict__ = lr_scheduler.__dict__

        def step(self, *_: Any, **__: Any) -> NoReturn:
            message = "lr_scheduler.step(): the engine steps the LR scheduler, once an optimizer step"
            hint = "leave the call out: engine.step() and engine.train_batch() do it"
            raise_finding("BAT209", message, hint, path)

    return ReadOnly()
