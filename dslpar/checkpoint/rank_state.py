"""What a rank keeps for itself: random states, and the buffers of its modules.

    ranks/00003.pt      {"random": {"python": ..., "torch": ..., ...}, "buffers": {name: tensor}, "schedule": {...}}

Random states have a meaning on the same layout alone. Buffers, such as the statistics that a norm keeps of the samples
it has seen, are each replica's own, and of them a replica that was not there before takes those of the first one;
DeepSpeed stores the first one's for all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from dslpar.checkpoint import folder, train_state
from dslpar.core import mesh
from dslpar.engine.engine import Engine
from dslpar.engine.pipeline_module import Pipeline, global_name


def values_of(engine: Engine) -> dict[str, Any]:
    """Plain values and tensors alone, which load without running what a file says."""
    return {
        "random": _random_states(engine.deepspeed.device),
        "buffers": {name: value.detach().cpu().clone() for name, value in buffers_of(engine.module).items()},
        "schedule": train_state.schedule_of(engine),
    }


def read(path: Path, rank: int) -> dict[str, Any]:
    """What that rank has kept; nothing, where there is no such file, since no run has had this layout."""
    file = folder.rank_path(path, rank)
    kept: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else {}
    return kept


def restore(engine: Engine, kept: Mapping[str, Any]) -> None:
    """On the same layout: all of it."""
    _set_buffers(engine.module, kept["buffers"])
    _set_random_states(kept["random"], engine.deepspeed.device)


def restore_buffers(engine: Engine, path: Path, layout: Mapping[str, Any]) -> list[str]:
    """On another layout: buffers of the same name and shape. Returns the names of those that nobody had."""
    wanted = set(buffers_of(engine.module))
    for rank in had_them(layout, engine.groups.coord) if wanted else ():
        wanted -= _set_buffers(engine.module, read(path, rank).get("buffers", {}))
        if not wanted:
            break
    return sorted(wanted)


def had_them(layout: Mapping[str, Any], coord: Mapping[str, int]) -> Iterable[int]:
    """Of each stage the rank that was where this one is, or was the first."""
    cuboid = mesh.Tensor(**{axis: layout["tensor"][axis] for axis in mesh.TENSOR_AXES})
    before = mesh.Mesh(pipe=layout["pipe"], data=layout["data"], tensor=cuboid, order=tuple(layout["order"]))
    here = {axis: coord[axis] if coord[axis] < size else 0 for axis, size in before.sizes.items()}
    return (before.rank(here | {"pipe": stage}) for stage in range(before.pipe))


# ---- buffers ----


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The persistent ones of this rank's module, by the names that they have without a pipeline."""
    parts = module.named_modules()
    passing = {f"{path}.{name}".lstrip(".") for path, part in parts for name in part._non_persistent_buffers_set}
    names = module.layer_names if isinstance(module, Pipeline) else None
    named = ((name, value) for name, value in module.named_buffers() if name not in passing)
    return {name if names is None else global_name(name, names): value for name, value in named}


def _set_buffers(module: nn.Module, stored: Mapping[str, Tensor]) -> set[str]:
    """Sets those that fit; their names."""
    own = buffers_of(module)
    fits = {name for name, value in stored.items() if name in own and own[name].shape == value.shape}
    with torch.no_grad():
        for name in fits:
            own[name].copy_(stored[name])
    return fits


# ---- random states ----


def _random_states(device: torch.device) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy
    states = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"device": get_accelerator().get_rng_state()}


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and "device" in states:  # else it was saved on CPUs
        get_accelerator().set_rng_state(states["device"])
