"""Gradient handlers, as in ColossalAI: user code that runs between gradient reduction and the optimizer step.

    @GRADIENT_HANDLER.register_module
    class Halve(BaseGradientHandler):
        def handle_gradient(self):
            for p in self.model.parameters(): p.grad.mul_(0.5)

    gradient_handler = [dict(type='Halve')]          # in the config

A handler is called once per step on every rank. By then gradients are summed over micro-batches, averaged over replicas
and summed over tied weights. The gradient norm is computed, and clipped, after all handlers. Handlers work at ZeRO
stage 0 only, because `p.grad` must be complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Location
from dslpar.language.lazy import instantiate, locate
from dslpar.layout.resolve import Job
from dslpar.schema.class_registry import GRADIENT_HANDLER


class BaseGradientHandler(ABC):
    """Base class of handlers; `model` is this rank's part of the model, `optimizer` is DeepSpeed's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change `p.grad` of the model's parameters in place, in the same way on all replicas."""


def handler_classes(job: Job) -> list[tuple[type, dict[str, Any]]]:
    """Return the handler classes that a job names, with their arguments.

    Raises:
        DslparError: a class is not a gradient handler.
    """
    handlers = job.spec.gradient_handler
    classes = [_class(handler.target, job.path) for handler in handlers]  # checked before any argument is instantiated
    return [(cls, dict(instantiate(handler.args, job.trusted))) for cls, handler in zip(classes, handlers, strict=True)]


def install(ds_engine: Any, classes: Sequence[tuple[type, dict[str, Any]]]) -> None:
    """Have DeepSpeed's engine call the handlers at the beginning of its step.

    Call it after `compute_norm_without_zero`, so that the norm is computed from the gradients that handlers leave.
    """
    if not classes:
        return
    handlers = [cls(ds_engine.module, ds_engine.optimizer, **arguments) for cls, arguments in classes]
    take_model_step = ds_engine._take_model_step

    def with_handlers(lr_kwargs: object) -> None:
        for handler in handlers:
            handler.handle_gradient()
        take_model_step(lr_kwargs)

    ds_engine._take_model_step = with_handlers


def _class(target: str, path: str) -> type:
    location = Location(path)
    cls = GRADIENT_HANDLER.find(target) or (locate(target, location) if "." in target else None)
    cls = cls or GRADIENT_HANDLER.get(target, location)  # get raises if the name is not registered
    if not (isinstance(cls, type) and issubclass(cls, BaseGradientHandler)):
        hint = "derive it from dslpar.BaseGradientHandler"
        raise_finding("CFG224", f"{target!r} is not a gradient handler", hint, location, "gradient_handler")
    return cls
