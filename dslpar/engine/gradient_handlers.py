"""Gradient handlers, as ColossalAI has them: a program's own code between the sum of gradients and the step.

    @GRADIENT_HANDLER.register_module
    class Halve(BaseGradientHandler):
        def handle_gradient(self):
            for p in self.model.parameters(): p.grad.mul_(0.5)

    gradient_handler = [dict(type='Halve')]          # in the config

A handler is called once a step on every rank, after gradients are summed over micro-batches, averaged over replicas and
summed over tied weights, before their norm is taken and clipped. Without ZeRO only: there `p.grad` is whole.
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
from dslpar.schema.registry import GRADIENT_HANDLER


class BaseGradientHandler(ABC):
    """One of a run's handlers; `model` is what this rank holds, `optimizer` DeepSpeed's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change `p.grad` of the model's parameters in place; of replicas, all ranks alike."""


def handler_classes(job: Job) -> list[tuple[type, dict[str, Any]]]:
    """The classes that a job names, and their arguments. Raises DslparError where one is no handler."""
    return [
        (_class(handler.target, job.path), dict(instantiate(handler.args))) for handler in job.spec.gradient_handler
    ]


def install(runner: Any, classes: Sequence[tuple[type, dict[str, Any]]]) -> None:
    """Have DeepSpeed's engine call the handlers when it begins a step, whatever else it does then."""
    if not classes:
        return
    handlers = [made(runner.module, runner.optimizer, **arguments) for made, arguments in classes]
    take_model_step = runner._take_model_step

    def with_handlers(lr_kwargs: Any) -> None:
        for handler in handlers:
            handler.handle_gradient()
        take_model_step(lr_kwargs)

    runner._take_model_step = with_handlers


def _class(target: str, path: str) -> type:
    place = Location(path)
    made = GRADIENT_HANDLER.find(target) or (locate(target, place) if "." in target else None)
    made = made or GRADIENT_HANDLER.get(target, place)
    if not (isinstance(made, type) and issubclass(made, BaseGradientHandler)):
        hint = "derive it from dslpar.BaseGradientHandler"
        raise_finding("CFG224", f"{target!r} is not a gradient handler", hint, place, "gradient_handler")
    return made
