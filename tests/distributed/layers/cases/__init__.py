"""Every layer as a case of the proof: a function from this rank's groups to (what was compared, error)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dslpar.core import mesh
from dslpar.distributed.groups import Groups
from tests.distributed.layers.cases import blocks, embedding_norm_loss, images, linears, models
from tests.support.compare_dense import Errors, Training, assert_copies_equal

CASES = (*linears.CASES, *blocks.CASES, *embedding_norm_loss.CASES, *images.CASES, *models.CASES)
FAMILIES = {case.__name__: case.__module__.rpartition(".")[2] for case in CASES}
"""The module of each case."""


def errors(tensor: mesh.TensorMesh, *names: str) -> Errors:
    """Return the errors of every case, or of the named ones, on this rank of a tensor group."""
    torch.set_default_dtype(torch.float64)
    return _found(Groups(mesh.Mesh(tensor=tensor)), names)


def errors_after_steps(tensor: mesh.TensorMesh, optimizer: Callable[..., Any], *names: str) -> Errors:
    """Return the errors in float32 after some steps of the optimizer that `optimizer` makes from parameter groups."""
    torch.set_default_dtype(torch.float32)
    return _found(Training(mesh.Mesh(tensor=tensor), optimizer), names)


def _found(groups: Groups, names: tuple[str, ...]) -> Errors:
    cases = [case for case in CASES if not names or case.__name__ in names]
    found = {f"{case.__name__}: {what}": error for case in cases for what, error in case(groups)}
    assert_copies_equal(groups)
    return found
