"""Fill a module with a checkpoint's weights. Each rank reads only its own pieces, and no optimizer state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dslpar.checkpoint import contents, rank_state
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import load_index
from dslpar.checkpoint.slices import box_of, full_box
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import placement_of

_MAX_LISTED = 12


def verify(checkpoint: Checkpoint, world: Axis) -> None:
    """Verify every byte of a checkpoint; each rank reads its share. All ranks must call it together.

    Raises:
        DslparError: on every rank, if a file is corrupted.
    """

    def gather(found: list[str]) -> list[str]:
        return [each for reports in collectives.gather_objects(found, world) for each in reports]

    if damages := contents.corruptions(checkpoint, world.index, world.size, gather):
        name = Path(checkpoint.path).name
        hint = "restore these files, or name another checkpoint of the run: --checkpoint NAME"
        raise_finding("CKP215", f"{name} is corrupted:", hint, checkpoint.path, details=damages[:_MAX_LISTED])


@torch.no_grad()
def load_weights(module: nn.Module, groups: Groups, checkpoint: Checkpoint, has_program_model: bool = False) -> None:
    """Fill the module's parameters and buffers by name. All ranks must call it together.

    The names must be global: those of the model without a pipeline. `has_program_model`: a program's function has built
    the module, so an error is about that function.

    Raises:
        DslparError: on every rank, if the checkpoint does not hold this model.
    """
    index = load_index(Path(checkpoint.path))
    reader = TensorReader(Path(checkpoint.path), index)
    problems = []
    for name, p in module.named_parameters():
        placement = placement_of(p)
        shape = tuple(p.shape) if placement is None else placement.shape
        stored = index.parameters.get(name)
        if stored is None and 0 in shape:
            continue
        if stored is None or stored.shape != shape:
            there = "is not in the checkpoint" if stored is None else f"has shape {stored.shape} in the checkpoint"
            problems.append(f"{name!r} {shape} {there}")
            continue
        box = full_box(shape) if placement is None else box_of(placement, groups.coord)
        p.copy_(reader.local(name, "", box))
    missing = rank_state.restore_buffers(module, groups.coord, checkpoint)
    problems += [f"the checkpoint has no buffer {name!r} of this shape" for name in missing]
    world = groups.axis("pipe", "data", "tensor")
    if has_program_model:  # of a config's model, the sizes were compared before it was built
        names = [name for name, _ in module.named_parameters()]
        known = {name for found in collectives.gather_objects(names, world) for name in found}
        problems += [f"the model has no {name!r}" for name in sorted(index.parameters.keys() - known)]
    reports = collectives.gather_objects(problems, world)
    if found := list(dict.fromkeys(each for report in reports for each in report)):
        message = f"{checkpoint.path} does not hold this model:"
        hint = "name the config of the run that saved it, or leave --config out"
        if has_program_model:
            hint = "name with --model what builds the model that the program passed to dslpar.initialize"
        raise DslparError([finding("CKP208", message, hint, checkpoint.path, "model", found[:_MAX_LISTED])])
