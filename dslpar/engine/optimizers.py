"""Make a job's optimizer and LR scheduler: torch's and DeepSpeed's by name, or a class by its full name.

    make_optimizer = optimizer_factory(job)         # None: one of those that DeepSpeed makes from its dict
    make_lr_scheduler = lr_scheduler_factory(job)   # called with the optimizer

An LR scheduler steps once per applied optimizer step. A skipped step (its gradient was not finite) keeps the learning
rate, as in DeepSpeed and Megatron-LM, so that fp16's first loss scales do not use up the warm-up. Classes are checked
here, and called when DeepSpeed asks for an instance.
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
    """Return a factory that makes the optimizer from parameter groups; None if DeepSpeed's dict names it.

    Raises:
        DslparError: there is no such class, or it is not an optimizer. Calling the factory raises it if the class
            rejects its arguments or has no kernel for this device.
    """
    section = job.spec.optimizer
    if not isinstance(section, sections.OtherOptimizer):
        return None
    cls = locate(_full_name(section.target, job), Location(job.path))
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        message, hint = f"{section.target!r} is not a torch.optim.Optimizer", "name such a class, or type='AdamW'"
        raise_finding("CFG225", message, hint, job.path, "optimizer")
    arguments = {"lr": section.lr, **instantiate(section.args, job.trusted)}
    # An optimizer without weight_decay would reject the default 0, which the config need not contain.
    if section.weight_decay or "weight_decay" in inspect.signature(cls).parameters:
        arguments["weight_decay"] = section.weight_decay
    return lambda groups: deepspeed_patches.without_eager_state(
        _construct(cls, arguments, "optimizer", section.target, job, groups)
    )


def lr_scheduler_factory(job: Job) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a factory for the LR scheduler, which sets the optimizer to the learning rate of the run's first step.

    Raises:
        DslparError: there is no such class, or its `step` needs arguments. Calling the factory raises it if the class
            rejects its arguments.
    """
    section = job.spec.lr_scheduler
    if isinstance(section, sections.LRScheduler):
        lr = job.spec.optimizer.lr or 1.0  # lr is 0 if the optimizer's first group is frozen
        steps = job.spec.train.steps
        # LambdaLR multiplies each group's lr by the function's value. The curve is absolute, hence the division.
        return partial(LambdaLR, lr_lambda=lambda step: learning_rate(section, lr, steps, step) / lr)
    row = torch_schedulers.named(section.target)
    cls = locate(row.dotted if row else section.target, Location(job.path))
    if not _steps_by_itself(cls):
        required = "an LR scheduler that steps by itself, with state_dict() and load_state_dict()"
        hint = "name a class of torch.optim.lr_scheduler or one of DeepSpeed's schedulers, but not ReduceLROnPlateau"
        raise_finding("CFG212", f"{section.target!r} is not {required}", hint, job.path, "lr_scheduler")
    # A scheduler with its own peak argument gets the optimizer's lr, not DeepSpeed's default.
    arguments = ({row.sets_lr: job.spec.optimizer.lr} if row and row.sets_lr else {}) | instantiate(
        section.args, job.trusted
    )
    return partial(_construct, cls, arguments, "lr_scheduler", section.target, job)


def _full_name(target: str, job: Job) -> str:
    """Return the full name of an optimizer's class; some optimizers have a second class for offloading to the CPU."""
    row = torch_optimizers.named(target)
    if row is None:
        return target
    offloaded = (job.spec.zero.extra.get("offload_optimizer") or {}).get("device") == "cpu"
    return row.on_cpu if offloaded and row.on_cpu else row.dotted


def _steps_by_itself(cls: object) -> bool:
    """Return whether DeepSpeed can drive a scheduler: it has a state, and `step` needs no argument such as a loss."""
    if not isinstance(cls, type) or issubclass(cls, torch.optim.Optimizer):
        return False
    if not all(hasattr(cls, name) for name in ("step", "state_dict", "load_state_dict")):
        return False
    _, *others = inspect.signature(cls.step).parameters.values()  # type: ignore[attr-defined]
    return all(parameter.default is not parameter.empty for parameter in others)


def _construct(cls: Any, arguments: Mapping[str, Any], key: str, target: str, job: Job, first: Any) -> Any:
    """Return `cls(first, **arguments)`; report rejected arguments as the config author's mistake."""
    try:
        return cls(first, **_with_floats(cls, arguments))
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # DeepSpeed raises no class of its own if it has no kernel for the device or could not build it.
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


def _with_floats(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with floats for whole numbers where the class asks for a float.

    1 is a float for the language, as in Python's typing; torch's OneCycleLR refuses `pct_start=0`.
    """
    parameters = inspect.signature(cls).parameters

    def asks_for_float(name: str) -> bool:
        return name in parameters and parameters[name].annotation in (float, "float")

    return {
        name: float(value) if type(value) is int and asks_for_float(name) else value
        for name, value in arguments.items()
    }


def read_only(lr_scheduler: Any, path: str) -> Any:
    """Return a view of the LR scheduler that refuses `step`: stepping it twice would end the schedule too early."""
    if lr_scheduler is None:
        return None

    class ReadOnly(type(lr_scheduler)):  # type: ignore[misc]
        """The engine's LR scheduler, read-only."""

        def __init__(self) -> None:
            self.__dict__ = lr_scheduler.__dict__

        def step(self, *_: Any, **__: Any) -> NoReturn:
            message = "lr_scheduler.step(): the engine steps the LR scheduler itself, once per optimizer step"
            hint = "remove the call: engine.step() and engine.train_batch() step the scheduler"
            raise_finding("BAT209", message, hint, path)

    return ReadOnly()
