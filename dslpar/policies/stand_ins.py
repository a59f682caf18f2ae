"""Modules that stand where a part of a transformers model was taken out, while its own forward runs around them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class StandIn(nn.Module):
    """A module with nothing of torch's in it: what it has recorded, or is to give, changes in every forward."""

    # torch would look each attribute up among parameters, buffers, and modules.
    __setattr__ = object.__setattr__  # type: ignore[assignment]


class ForwardEnded(Exception):  # noqa: N818  # nothing went wrong
    """What ends a forward where nothing that comes after is wanted."""


class BlockStandIn(StandIn):
    """In place of a block: records its call, and gives `output`, or its input where that is None.

    What it has recorded, or is to give, is taken away by whoever ran the forward: else a graph would live on.
    """

    def __init__(self, block: nn.Module, returned: int = 0, *, changes_shape: bool = False) -> None:
        super().__init__()
        for name, value in vars(block).items():  # loops read such as `layer.attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)
        self.arguments = tuple(inspect.signature(type(block).forward).parameters)[1:]
        self.shapes = Shapes(copy.deepcopy(block)) if changes_shape else None
        self.returned = returned
        """How many values a block returns after the residual."""
        self.input: Tensor | None = None
        self.call: Mapping[str, Any] = {}
        self.output: Tensor | None = None
        self.gave: Tensor | None = None
        self.begins_graph = False
        """Whether what it gives has a graph of its own: what comes after depends on nothing before."""
        self.ends_forward = False
        """Whether nothing after it is wanted: then it raises ForwardEnded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output; in a tuple, if blocks return more than it."""
        call = dict(zip(self.arguments, args, strict=False)) | kwargs
        self.input = call.pop(self.arguments[0])
        self.call = call
        if self.ends_forward:
            raise ForwardEnded
        y = self.input if self.output is None else self.output
        if self.shapes and self.output is None:
            y = self.shapes(*args, **kwargs)
        if self.begins_graph and y is not None:
            y = y.detach().requires_grad_()
        self.gave = y
        return (y, *[None] * self.returned) if self.returned else y

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        self.input, self.call, self.output, self.gave = None, {}, None, None


class LeafStandIn(StandIn):
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


class ShapeStandIn(LeafStandIn):
    """In place of a module of a model without a table of tokens: zeros of the shapes that the module would give.

    Images become grids, patches and channels: no shape passes through.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.shapes = Shapes(module)
        self.returned: Mapping[int, Tensor] = {}
        """What it is to return, by the place in its tuple."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros, in tuples as the module returns them; `returned` in their places."""
        if self.calls is not None:
            self.calls.append(self.name)
        given = [*args, *kwargs.values()]
        self.input = given[0] if self.keeps_input else None
        y = self.shapes(*args, **kwargs)
        return tuple(self.returned.get(place, each) for place, each in enumerate(y)) if self.returned else y

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        super().clear()
        self.returned = {}


class Shapes:
    """The shapes that a module gives, found by calling it, on the meta device, once for those that it is given."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()  # in training, dropout would draw from the run's generator
        self.known: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros, in tuples as the module returns them, of the dtype of what it is given."""
        given = [*args, *kwargs.values()]
        key = tuple(tuple(each.shape) if isinstance(each, Tensor) else each for each in given)
        if key not in self.known:
            dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
            to_meta = partial(_mapped, lambda x: torch.empty_like(x, device="meta", dtype=_like(x, dtype)))
            with torch.no_grad():
                self.known[key] = self.module(*to_meta(args), **to_meta(kwargs))
        like = next(each for each in given if isinstance(each, Tensor) and each.is_floating_point())
        return _mapped(lambda x: _zeros(x, like), self.known[key])


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with its tensors changed, in tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(change, each) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    return value


def _like(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if x.is_floating_point() else x.dtype


def _zeros(x: Tensor, like: Tensor) -> Tensor:
    floats = x.is_floating_point()
    one = torch.zeros((), dtype=like.dtype if floats else x.dtype, device=like.device, requires_grad=floats)
    return one.expand(x.shape)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
