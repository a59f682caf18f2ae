"""Dropout on sharded activations: ranks with equal copies draw equal masks, ranks with different pieces different ones.

Which ranks hold copies depends on the kind of activation: inner activations of a region are sharded differently than
the residual. A `Stream` records the kind that the running code works on; inward and outward linears change it. Dropout
modules are replaced. Calls of torch's function are intercepted by a TorchFunctionMode, torch's hook for calls of its
functions, which DTensor and profilers also use.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.dropout import shard_rng

_CALL = re.compile(r"\b(functional|F)\.dropout\b")
_ATTENTION = re.compile(r"^def eager_attention_forward\b.*?(?=^\S(?<!\)))", re.MULTILINE | re.DOTALL)
"""transformers' eager attention, whose dropout never runs here: dslpar's attention function replaces it."""


class Stream:
    """Kind of activation that the running code works on: inner (in a region), or the residual."""

    def __init__(self) -> None:
        self.is_inner = False


def drop(groups: Groups, stream: Stream, x: Tensor, p: float) -> Tensor:
    """Drop elements of this rank's piece of an activation with probability `p`; the shape does not change."""
    cuts = placement.inner_cuts if stream.is_inner else placement.residual_cuts
    with shard_rng(groups, cuts(groups.tensor), x.device):
        return torch.dropout(x, p, train=True)  # not functional.dropout, which the mode below intercepts


class StreamDropout(nn.Module):
    """Replacement of nn.Dropout."""

    def __init__(self, groups: Groups, p: float, stream: Stream) -> None:
        super().__init__()
        self.groups, self.p, self.stream = groups, p, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements; the shape stays."""
        return drop(self.groups, self.stream, x, self.p) if self.training and self.p > 0 else x


class SampleDropout(nn.Module):
    """Wrapper of a module that drops whole samples (stochastic depth), so that all pieces of a sample drop together."""

    def __init__(self, groups: Groups, module: nn.Module, stream: Stream) -> None:
        super().__init__()
        self.groups, self.module, self.stream = groups, module, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop samples of [batch/x, ...]; the shape stays."""
        cuts = (placement.inner_cuts if self.stream.is_inner else placement.residual_cuts)(self.groups.tensor)
        with shard_rng(self.groups, placement.ActivationSharding(cuts.batch, (), ()), x.device):
            y: Tensor = self.module(x)
        return y


def drops_samples(module: nn.Module) -> bool:
    """Return whether a module drops whole samples. A module with `drop_prob` and no parameters is called as a test."""
    p = getattr(module, "drop_prob", None)
    if not isinstance(p, float) or not 0 < p < 1 or any(module.children()) or any(True for _ in module.parameters()):
        return False
    was_training = module.training
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        kept = module.train()(torch.ones(256, 2, 3)) * (1 - p)
    module.train(was_training)
    is_whole = torch.equal(kept, kept[:, :1, :1].expand_as(kept))
    return is_whole and bool(((kept - 1).abs() < 1e-5).logical_or(kept == 0).all())


class FunctionalDropout(TorchFunctionMode):
    """Mode in which torch.nn.functional.dropout behaves as `StreamDropout`."""

    def __init__(self, groups: Groups, stream: Stream) -> None:
        super().__init__()
        self.groups, self.stream = groups, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call torch's function, or `drop` in place of functional.dropout."""
        kwargs = kwargs or {}
        return self._dropout(*args, **kwargs) if func is functional.dropout else func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        y = drop(self.groups, self.stream, x, p)
        return x.copy_(y) if inplace else y


def take_functions(part: nn.Module, groups: Groups, stream: Stream, config: Any) -> None:
    """Run the part's forward in `FunctionalDropout` if its code may call torch's dropout function.

    A mode costs a Python call per torch function, so it is not used on a single rank, or if all dropout rates are 0.
    """
    settings: Mapping[str, Any] = vars(config)
    drops = any("drop" in key and isinstance(value, float) and value > 0 for key, value in settings.items())
    classes: set[Any] = {type(each) for each in part.modules()}
    if drops and groups.axis("tensor").size > 1 and any(map(_may_call, classes)):
        forward: Callable[..., Any] = part.forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with FunctionalDropout(groups, stream):
                return forward(*args, **kwargs)

        part.forward = run


@cache
def _may_call(cls: Any) -> bool:
    """Return whether the files that define a class and its bases call torch's dropout function."""
    files = {each.__module__ for each in cls.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")}
    return any(_file_calls(name) for name in files if not name.startswith("dslpar."))


@cache
def _file_calls(name: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return True  # without source code, assume a call
    return _CALL.search(_ATTENTION.sub("", source)) is not None
