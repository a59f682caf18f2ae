"""Modules that stand where a part of a transformers model was taken out, while its own forward runs around them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class BlockStandIn(nn.Module):
    """In place of a block: records its call, and gives `output`, or its input where that is None.

    What it has recorded, or is to give, is taken away by whoever ran the forward: else a graph would live on.
    """

    def __init__(self, block: nn.Module, returned: int = 0) -> None:
        super().__init__()
        for name, value in vars(block).items():  # loops read such as `layer.attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)
        self.arguments = tuple(inspect.signature(type(block).forward).parameters)[1:]
        self.returned = returned
        """How many values a block returns after the residual."""
        self.input: Tensor | None = None
        self.call: Mapping[str, Any] = {}
        self.output: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output; in a tuple, if blocks return more than it."""
        call = dict(zip(self.arguments, args, strict=False)) | kwargs
        self.input = call.pop(self.arguments[0])
        self.call = call
        y = self.input if self.output is None else self.output
        return (y, *[None] * self.returned) if self.returned else y

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        self.input, self.call, self.output = None, {}, None


class LeafStandIn(nn.Module):
    """In place of a module that holds weights, or buffers: passes its input on; of ids, a zero that adds nothing.

    `made_up`: it is a table of tokens, or the whole front of a model, whose output has so many features.
    """

    def __init__(self, module: nn.Module, name: str, made_up: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.calls: list[Any] | None = None
        """Where its name is noted when it is called."""
        self.gives_nothing = isinstance(module, nn.Embedding)
        self.made_up = made_up
        self.is_rotary = is_rotary(module)
        self.keeps_input = False
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.original = (module,)  # in a tuple: its weights are not this model's

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return `output` where one is set."""
        if self.calls is not None:
            self.calls.append(self.name)
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        self.input = x if self.keeps_input else None
        if self.output is not None:
            return self.output
        if self.is_rotary:
            return None
        if self.made_up is not None:
            shape = x.shape if self.gives_nothing else (1, 1)
            return torch.zeros(1, 1, 1, device=x.device, requires_grad=True).expand(*shape, self.made_up)
        return torch.zeros(1, 1, 1, device=x.device) if self.gives_nothing else x

    def __getattr__(self, name: str) -> Any:
        """Return what else the model's code reads from the module, such as a weight's dtype."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name in ("weight", "bias") or name.startswith("__"):
                raise
            return getattr(original[0], name)

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        self.input, self.output = None, None


def is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
