"""Every layer, as a case of the proof: a function from this rank's groups to (what was compared, error)."""

from __future__ import annotations

import torch

from dslpar import mesh
from dslpar.groups import Groups
from tests.layers.cases import blocks, ends, linears, models
from tests.layers.proof import Errors

CASES = (*linears.CASES, *blocks.CASES, *ends.CASES, *models.CASES)


def errors(tensor: mesh.Tensor, *names: str) -> Errors:
    """Every case (or the named ones), on this rank of a tensor group."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    cases = [case for case in CASES if not names or case.__name__ in names]
    return {f"{case.__name__}: {what}": error for case in cases for what, error in case(groups)}
