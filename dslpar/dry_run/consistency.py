"""Check that ranks agree: the same collectives in the same order, on tensors of the same dtype and shape.

The ranks of a process group must call the same collectives in the same order. Otherwise each waits for a call that the
others never make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from dslpar.core.mesh import TensorMesh
from dslpar.dry_run.problem import Problem
from dslpar.dry_run.stage import ParameterRecord, StageRun, shown_form
from dslpar.dry_run.tiling import tiling_errors
from dslpar.layers.placement import Placement

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def disagreements(stage: int, rank: int, run: StageRun, other_rank: int, other: StageRun) -> Iterator[Problem]:
    """Find differences between two ranks' runs of one stage: operations, forms of activations, and parameters."""
    ranks = f"rank {rank}", f"rank {other_rank}"
    for kind in dict.fromkeys((*run.calls, *other.calls)):
        pairs = zip_longest(run.calls.get(kind, ()), other.calls.get(kind, ()))
        for index, (ours, theirs) in enumerate(pairs):
            if ours is None or theirs is None or ours[:4] != theirs[:4] or ours.step != theirs.step:
                where = f"stage {stage}, {_NAMES[kind]}"
                what = f"operation {index} is {ours or 'none'} on {ranks[0]}, and {theirs or 'none'} on {ranks[1]}"
                yield Problem("collectives", where, what, "ranks of one group would wait for each other forever")
                break
    for name in ("inputs", "outputs", "input_gradients"):
        mine, yours = (", ".join(map(shown_form, getattr(each, name))) for each in (run, other))
        if mine != yours:
            what = f"{name.replace('_', ' ')} are {mine} on {ranks[0]}, and {yours} on {ranks[1]}"
            yield Problem("boundary", f"stage {stage}", what, "pieces of one activation have one shape")
    for parameter, record in run.parameters.items():
        yield from _other_record(parameter, record, other.parameters.get(parameter), ranks)


def _other_record(
    name: str, record: ParameterRecord, other: ParameterRecord | None, ranks: tuple[str, str]
) -> Iterator[Problem]:
    if other is None:
        yield Problem("layers", name, f"{ranks[0]} has it, {ranks[1]} does not", "all ranks of a stage have its layers")
    elif record[:3] != other[:3]:
        shapes = (
            f"{list(record.local_shape)} of {list(record.shape)}",
            f"{list(other.local_shape)} of {list(other.shape)}",
        )
        what = f"{ranks[0]} holds {shapes[0]} and {ranks[1]} {shapes[1]}: two placements"
        yield Problem("tiling", name, what, "a placement must be the same on every rank")


def parameter_problems(parameters: Mapping[str, ParameterRecord], tensor: TensorMesh) -> Iterator[Problem]:
    """Find parameters whose shards do not cover every element exactly once; equal placements are checked once."""
    known: dict[Placement, list[str]] = {}
    for name, (placement, local_shape, _, _) in parameters.items():
        if placement is None:
            if tensor.size > 1:
                what = f"a plain parameter: each of {tensor.size} tensor ranks would hold all of it"
                yield Problem("tiling", name, what, "each rank would use its own part of the gradient as the whole")
            continue
        if placement.tensor != tensor:
            yield Problem("tiling", name, "its placement is for another cuboid", "it must be for the mesh's cuboid")
            continue
        if placement not in known:
            known[placement] = tiling_errors(placement)
        for error in known[placement]:
            yield Problem("tiling", name, error, "every element of a parameter has one place, and one copy that counts")
        if not known[placement] and placement.local_shape != local_shape:
            what = f"a rank holds {list(local_shape)}, but its placement requires {list(placement.local_shape)}"
            yield Problem("tiling", name, what, "the shards would not make up the whole parameter")
