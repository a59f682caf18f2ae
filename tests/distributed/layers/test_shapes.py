"""Local shapes of an MLP's weights and activations, against facts/shapes.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, placement
from tests.support.layouts import LAYOUTS
from tests.support.paths import TABLES
from tests.support.ranks import on_ranks

CASES = json.loads((TABLES / "shapes.json").read_text())["cases"]
TENSORS = {
    "dict(tensor=dict(size=4, mode='1d'))": LAYOUTS["1d-4"],
    "dict(tensor=dict(size=4, mode='2d'))": LAYOUTS["2d-4"],
    "dict(tensor=dict(size=8, mode='2.5d', depth=2))": LAYOUTS["2.5d-8-depth-2"],
    "dict(tensor=dict(size=8, mode='3d'))": LAYOUTS["3d-8"],
    "dict(tensor=dict(size=4, mode='sequence'))": TensorMesh(d=4, mode="sequence", split="sequence"),
}


def held(tensor: TensorMesh) -> tuple[list[int], list[int], list[int]]:
    """Return shapes of input and output, and elements of each weight, on this rank."""
    groups = Groups(Mesh(tensor=tensor))
    mlp = MLP(groups, 256, 1024)
    x = torch.zeros(placement.residual(tensor, 16, 32, 256).local_shape)
    for p in mlp.parameters():
        torch.nn.init.zeros_(p)
    return list(x.shape), list(mlp(x).shape), [mlp.up.weight.numel(), mlp.down.weight.numel()]


@pytest.mark.parametrize("fact", CASES, ids=lambda fact: fact["parallel"])
def test_shapes(fact: dict[str, Any]) -> None:
    tensor = TENSORS[fact["parallel"]]
    for x, y, weights in on_ranks(tensor.size, held, tensor):
        assert x == y == fact["input"]
        assert weights == [fact["weight_elements"]] * 2
