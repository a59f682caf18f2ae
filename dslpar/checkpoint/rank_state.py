"""Rank state: random generator states and module buffers of one rank. (The data position is in `train_state`.)

    ranks/00003.pt      {"random": {"python": ..., "torch": ..., ...}, "buffers": {name: tensor}, "schedule": {...}}

Random states are restored only in the layout that saved them. "schedule" is this rank's state of the LR scheduler.
Buffers, such as the running statistics of batch norms, differ between data-parallel replicas. A replica that did not
exist when the run was saved takes the first replica's buffers. (DeepSpeed stores only the first replica's buffers.)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from dslpar.checkpoint import train_state
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.state_files import numpy_state, read_rank_state
from dslpar.core import mesh
from dslpar.engine.engine import Engine
from dslpar.engine.pipeline_module import Pipeline, global_name


def collect(engine: Engine) -> dict[str, Any]:
    """Collect this rank's state as plain values and tensors, which torch.load reads with weights_only=True."""
    return {
        "random": _random_states(engine.deepspeed.device),
        "buffers": {name: value.detach().cpu().clone() for name, value in persistent_buffers(engine.module).items()},
        "schedule": train_state.lr_scheduler_state(engine),
    }


def restore(engine: Engine, state: Mapping[str, Any]) -> list[str]:
    """Restore this rank's buffers and random states; `state` is what the same rank saved in the same layout.

    Return the names of saved buffers that the model does not have, or has in another shape.
    """
    lost = state["buffers"].keys() - _set_buffers(engine.module, state["buffers"])
    _set_random_states(state["random"], engine.deepspeed.device)
    return sorted(lost)


def restore_buffers(module: nn.Module, coord: Mapping[str, int], checkpoint: Checkpoint) -> list[str]:
    """Restore buffers saved in another layout, by name and shape. Return the names of buffers that were not saved."""
    missing = set(persistent_buffers(module))
    # Read one file per saved pipeline rank, until all buffers are found: any of these ranks may have had the layers.
    for rank in source_ranks(checkpoint.manifest["layout"], coord) if missing else ():
        missing -= _set_buffers(module, read_rank_state(checkpoint, rank).get("buffers", {}))
        if not missing:
            break
    return sorted(missing)


def source_ranks(layout: Mapping[str, Any], coord: Mapping[str, int]) -> Iterable[int]:
    """Return one saved rank per saved pipeline rank: at `coord` on the other axes, or at 0 if an axis was shorter."""
    cuboid = mesh.TensorMesh(**{axis: layout["tensor"][axis] for axis in mesh.TENSOR_AXES})
    saved = mesh.Mesh(pipe=layout["pipe"], data=layout["data"], tensor=cuboid, order=tuple(layout["order"]))
    source = {axis: coord[axis] if coord[axis] < size else 0 for axis, size in saved.sizes.items()}
    return (saved.rank(source | {"pipe": pipe_rank}) for pipe_rank in range(saved.pipe))


# ---- buffers ----


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of this rank's module, by their names in the model without a pipeline."""
    submodules = module.named_modules()
    transient = {f"{path}.{name}".lstrip(".") for path, part in submodules for name in part._non_persistent_buffers_set}
    names = module.layer_names if isinstance(module, Pipeline) else None
    named = ((name, value) for name, value in module.named_buffers() if name not in transient)
    return {name if names is None else global_name(name, names): value for name, value in named}


def _set_buffers(module: nn.Module, stored: Mapping[str, Tensor]) -> set[str]:
    """Set the buffers whose name and shape match, and return their names."""
    local = persistent_buffers(module)
    fits = {name for name, value in stored.items() if name in local and local[name].shape == value.shape}
    with torch.no_grad():
        for name in fits:
            local[name].copy_(stored[name])
    return fits


# ---- random states ----


def _random_states(device: torch.device) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=True)
    # As a list: torch.load with weights_only refuses numpy's arrays.
    kind, keys, *rest = numpy
    states = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"device": get_accelerator().get_rng_state()}


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(numpy_state(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and "device" in states:  # else it was saved on CPUs
        get_accelerator().set_rng_state(states["device"])
