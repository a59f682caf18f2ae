"""Compute values that only a module's constructor sets: buffers, and parameters that `_init_weights` does not change.

Models are built on torch's meta device, where constructors produce no values. transformers' `_init_weights` sets most
values. For the others the model is built once more on the meta device, but with the constructors of the module's class
on the CPU.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dslpar.policies.probe import on_cpu


@torch.no_grad()
def fill_buffers(model: Any, part: nn.Module, prefix: str = "") -> None:
    """Replace a part's buffers on the meta device by buffers with values.

    `prefix` is the part's name in the model. If neither `_init_weights` nor the constructor sets a buffer, it stays on
    the meta device, and torch refuses to compute with it.
    """
    for name, module in part.named_modules():
        on_meta = {own: buffer for own, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for own, buffer in on_meta.items():
            module._buffers[own] = unfilled(buffer)
        if on_meta:
            with torch.device("cpu"):
                model._init_weights(module)
        for own, buffer in on_meta.items():
            filled = module._buffers[own]
            if filled is None or not is_filled(filled):
                module._buffers[own] = constructed(model, ".".join(filter(None, (prefix, name))), own, buffer)


def unfilled(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape and dtype, full of a marker value; `is_filled` looks for the marker."""
    dtype = tensor.dtype
    value = torch.nan if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min
    return torch.full_like(tensor, value, device="cpu")


def is_filled(tensor: Tensor) -> bool:
    """Return whether no marker of `unfilled` is left; False for bool tensors, which have no marker."""
    if tensor.dtype is torch.bool:
        return False
    left = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min
    return not bool(left.any())


def constructed(model: Any, name: str, own: str, otherwise: Tensor) -> Tensor:
    """Return the tensor `own` of the model's module `name` with its constructor's values.

    Return `otherwise` if the constructor has no values for it, or the module has children or is torch's own.
    """
    try:
        leaf = model.get_submodule(name)
    except AttributeError:  # the part has a module that the model does not have
        return otherwise
    cls: Any = type(leaf)
    if list(leaf.children()) or cls.__module__.startswith("torch."):
        return otherwise
    found = getattr(_with_values(model, cls).get_submodule(name), own, None)
    return otherwise if found is None or found.is_meta else found.detach().clone()


@lru_cache(maxsize=4)
def _with_values(model: Any, cls: Any) -> Any:
    """Build the model again, with modules of `cls` on the CPU and all others on the meta device."""
    with patch.object(cls, "__init__", on_cpu(cls.__init__)), torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config))
