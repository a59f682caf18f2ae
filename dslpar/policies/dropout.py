"""Dropout of pieces: equal masks on ranks that hold equal copies, others on other pieces.

A mask depends on which activation is dropped: one within a region is cut otherwise than the residual. A `Stream` says
which it is now: entrances of regions and outward linears set it. Dropout comes as a module, which is replaced, or as a
call of torch's function: while such code runs, a mode (torch's own way to see calls of its functions, which its
DTensor and profilers come in by) takes the call.
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
"""transformers' attention in plain torch, which never runs here: attention goes through dslpar's door."""


class Stream:
    """Which activations the code that runs now works on."""

    def __init__(self) -> None:
        self.is_inner = False


def drop(groups: Groups, stream: Stream, x: Tensor, p: float) -> Tensor:
    """Drop elements of this rank's piece of an activation with probability `p`; any shape to the same."""
    cuts = placement.inner_cuts if stream.is_inner else placement.residual_cuts
    with shard_rng(groups, cuts(groups.tensor), x.device):
        return torch.dropout(x, p, train=True)  # what functional.dropout calls, past the mode below


class StreamDropout(nn.Module):
    """In place of nn.Dropout."""

    def __init__(self, groups: Groups, p: float, stream: Stream) -> None:
        super().__init__()
        self.groups, self.p, self.stream = groups, p, stream

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return drop(self.groups, self.stream, x, self.p) if self.training and self.p > 0 else x


class SampleDropout(nn.Module):
    """Around a module that drops whole samples (stochastic depth): each is dropped, or not, in all of its pieces."""

    def __init__(self, groups: Groups, module: nn.Module, stream: Stream) -> None:
        super().__init__()
        self.groups, self.module, self.stream = groups, module, stream

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [batch/x, ...] to the same."""
        cuts = (placement.inner_cuts if self.stream.is_inner else placement.residual_cuts)(self.groups.tensor)
        with shard_rng(self.groups, placement.Cuts(cuts.batch, (), ()), x.device):
            y: Tensor = self.module(x)
        return y


def drops_samples(module: nn.Module) -> bool:
    """Whether a module drops whole samples: tried, where it says how often it drops and holds nothing."""
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
    """While it is on, torch.nn.functional.dropout drops as `StreamDropout` does."""

    def __init__(self, groups: Groups, stream: Stream) -> None:
        super().__init__()
        self.groups, self.stream = groups, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call torch's function, or ours in the place of one."""
        kwargs = kwargs or {}
        return self._dropout(*args, **kwargs) if func is functional.dropout else func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        y = drop(self.groups, self.stream, x, p)
        return x.copy_(y) if inplace else y


def take_functions(part: nn.Module, groups: Groups, stream: Stream, config: Any) -> None:
    """Have the part's forward run with the mode on, where its code may drop by torch's function.

    A mode costs a Python call for each function of torch: where nothing drops, and on one rank, there is none.
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
    """Whether the files that a class comes from call torch's function: the class itself, or a function beside it."""
    files = {each.__module__ for each in cls.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")}
    return any(_file_calls(name) for name in files if not name.startswith("dslpar."))


@cache
def _file_calls(name: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return True  # unknown code
    return _CALL.search(_ATTENTION.sub("", source)) is not None
