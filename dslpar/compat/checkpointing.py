"""ColossalAI's checkpoint files: one file with the whole model's weights and the number of the epoch.

    save_checkpoint("vit.pt", epoch, engine.model)
    epoch = load_checkpoint("vit.pt", model)         # into any layout

As in ColossalAI, optimizer and LR scheduler are not saved. `engine.save()` and `engine.resume()` save the whole state
of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.checkpoint.full_state_dict import fill, local_piece
from dslpar.compat.context import global_context
from dslpar.distributed import collectives
from dslpar.layers import gather, placement_of


def save_checkpoint(
    file: Any, epoch: int, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
) -> None:
    """Save the model's weights and buffers, gathered from tensor ranks and stages, to one file of rank 0.

    All ranks must call it together. `optimizer` and `lr_scheduler` have no effect; `kwargs` are those of `torch.save`.
    """
    groups = global_context.run.groups
    state = _whole_state(model)
    if groups.mesh.pipe > 1:
        state = _merge(collectives.gather_objects(state, groups.axis("pipe")))
    if groups.rank == 0:
        if isinstance(file, (str, Path)):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"epoch": epoch, "model": state}, file, **kwargs)
    collectives.barrier(groups.axis("pipe", "data", "tensor"))  # another rank may read the file next


def load_checkpoint(
    file: Any, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, strict: bool = True
) -> int:
    """Load the weights of a file into a model, of which each rank takes its part; return the number of the epoch.

    `optimizer` and `lr_scheduler` have no effect.

    Raises:
        RuntimeError: shapes differ or, with `strict`, names.
    """
    saved = torch.load(file, map_location="cpu", weights_only=True)
    groups, names, weights = global_context.run.groups, _names(model), saved["model"]
    missing = [whole for whole in names.values() if whole not in weights]
    # In a pipeline the file has the layers of all stages, and a rank does not know the names of the others.
    unknown = [] if groups.mesh.pipe > 1 else [name for name in weights if name not in names.values()]
    if strict and (missing or unknown):
        raise RuntimeError(
            f"{file} and the model differ: missing in the file {missing}, unknown to the model {unknown}"
        )
    local = {own: weights[whole] for own, whole in names.items() if whole in weights}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in local:
                fill(p, local[name], groups)
        for name, buffer in model.named_buffers():
            if name in local:
                buffer.copy_(local[name])
    return int(saved.get("epoch", -1))


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state by the names in the whole model, on the CPU."""
    groups, names = global_context.run.groups, _names(model)
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        p = parameters.get(name)
        placement = None if p is None else placement_of(p)
        piece = value if p is None else local_piece(p)
        whole = piece if placement is None else gather(piece.view(placement.local_shape), placement, groups)
        state[names[name]] = whole.detach().cpu().clone()
    return state


def _merge(stages: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the states of all stages, whose names must differ, except for equal copies of a tied weight."""
    merged: dict[str, Tensor] = {}
    for state in stages:
        for name, value in state.items():
            if name in merged and not torch.equal(merged[name], value):
                raise ValueError(f"two stages have a weight named {name!r}: save with engine.save()")
            merged[name] = value
    return merged


def _names(model: nn.Module) -> dict[str, str]:
    """Return the names in the whole model by the model's own; a stage's layers are counted from 0 on every stage."""
    rename = getattr(model, "whole_name", lambda name: name)
    return {name: rename(name) for name in model.state_dict()}
