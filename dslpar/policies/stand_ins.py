"""Stand-ins: replace modules of a transformers model, so that its forward runs without them and records their calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class StandIn(nn.Module):
    """A module without nn.Module's slow `__setattr__`, since its attributes change in every forward."""

    # nn.Module's `__setattr__` looks each attribute up among parameters, buffers and submodules.
    __setattr__ = object.__setattr__  # type: ignore[assignment]


class ForwardEnded(Exception):  # noqa: N818  # not an error
    """Raised to end a forward whose remaining results are not needed."""


class BlockStandIn(StandIn):
    """Stand-in for a block: records the block's arguments, and returns `output`, or the input if `output` is None.

    The caller of the forward must call `clear` afterwards, because recorded values keep an autograd graph alive.
    """

    def __init__(self, block: nn.Module, returned: int = 0, *, changes_shape: bool = False) -> None:
        super().__init__()
        for name, value in vars(block).items():  # loops read attributes such as `layer.attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)
        self.arguments = tuple(inspect.signature(type(block).forward).parameters)[1:]
        self.shapes = Shapes(copy.deepcopy(block)) if changes_shape else None
        self.returned = returned
        """Number of values that a block returns after the residual."""
        self.input: Tensor | None = None
        """Recorded input."""
        self.call: Mapping[str, Any] = {}
        """Recorded arguments besides the input, by name."""
        self.output: Tensor | None = None
        """Value to return; None: the input."""
        self.gave: Tensor | None = None
        """Recorded return value."""
        self.begins_graph = False
        """Whether the output begins a new autograd graph, so that later values do not depend on earlier ones."""
        self.ends_forward = False
        """Whether a call raises ForwardEnded, since nothing after this block is needed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, in a tuple if blocks return further values."""
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
        """Forget the recorded call and the output."""
        self.input, self.call, self.output, self.gave = None, {}, None, None


class LeafStandIn(StandIn):
    """Stand-in for a module that `Parts.leaves` yields: returns its input, or for an embedding table a zero to add.

    `made_up`: number of features of the zeros to return, for the token table or another module with its weight.
    """

    def __init__(self, module: nn.Module, name: str, made_up: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.calls: list[Any] | None = None
        """List to which a call appends this stand-in's name; None: calls are not recorded."""
        self.gives_nothing = isinstance(module, nn.Embedding)
        """Whether it stands for an embedding table, and returns zeros."""
        self.made_up = made_up
        self.is_rotary = is_rotary(module)
        self.keeps_input = False
        """Whether a call records its first argument as `input`."""
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.original = (module,)  # in a tuple, so that its weights are not registered here

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return `output` if it is set; otherwise zeros for an embedding, None for rotary positions, or the input."""
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
        """Return an attribute of the original module that the model's code reads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name in ("weight", "bias") or name.startswith("__"):
                raise
            return getattr(original[0], name)

    def clear(self) -> None:
        """Forget the recorded input and the output."""
        self.input, self.output = None, None


class ShapeStandIn(LeafStandIn):
    """Stand-in for a module in a model without a token table: returns zeros of the shapes that the module returns.

    Such models turn images into grids, patches and channels, so outputs have other shapes than inputs.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.shapes = Shapes(module)
        self.returned: Mapping[int, Tensor] = {}
        """Values to return, by position in the returned tuple."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros, in tuples as the module returns them, with `returned` in their positions."""
        if self.calls is not None:
            self.calls.append(self.name)
        given = [*args, *kwargs.values()]
        self.input = given[0] if self.keeps_input else None
        y = self.shapes(*args, **kwargs)
        return tuple(self.returned.get(place, each) for place, each in enumerate(y)) if self.returned else y

    def clear(self) -> None:
        """Forget the recorded input and all values to return."""
        super().clear()
        self.returned = {}


class Shapes:
    """Function that returns zeros of a module's output shapes.

    The shapes are found by calling the module on the meta device, once per set of input shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()  # in training mode, dropout would draw from the run's generator
        self.known: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros, in tuples as the module returns them.

        Floats have the dtype of the first float argument; of a table, which gets ids alone, that of its weight.
        """
        given = [*args, *kwargs.values()]
        key = tuple(tuple(each.shape) if isinstance(each, Tensor) else each for each in given)
        if key not in self.known:
            dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
            to_meta = partial(_mapped, lambda x: torch.empty_like(x, device="meta", dtype=_like(x, dtype)))
            with torch.no_grad():
                self.known[key] = self.module(*to_meta(args), **to_meta(kwargs))
        tensors_ = [each for each in given if isinstance(each, Tensor)]
        like = next((each for each in tensors_ if each.is_floating_point()), None)
        if like is None:
            dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
            like = torch.zeros((), dtype=dtype, device=tensors_[0].device)
        return _mapped(lambda x: _zeros(x, like), self.known[key])


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with `change` applied to its tensors, in nested tuples and dicts."""
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
