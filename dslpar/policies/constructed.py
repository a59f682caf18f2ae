"""Values that only a module's constructor sets: buffers, and parameters that `_init_weights` does not change.

Models are built on torch's meta device, where constructors produce no values. transformers sets most values again in
`_init_weights`. For the others the model is built once more, and only the constructors of the class in question run on
the CPU.
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
    """Set the values of buffers on the meta device.

    `prefix` is the part's name in the model. A buffer whose value nobody sets stays on meta, and torch refuses to
    compute with it.
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
    """Return a CPU tensor of the same shape and dtype with marker values, which show whether code fills it."""
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
    """Return the tensor `own` of the model's leaf `name` with its constructor's values, or else `otherwise`."""
    try:
        leaf = model.get_submodule(name)
    except AttributeError:  # a module of the part that the model does not have
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
