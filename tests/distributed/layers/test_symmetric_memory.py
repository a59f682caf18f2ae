"""Products over symmetric memory, on torch's CPU stand-ins: equal to products that wait for their tokens.

`make gpu` checks the same on devices, if there are several.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dslpar.core import mesh
from tests.distributed.layers.test_overlap import CLOSE, differences
from tests.support.layouts import LAYOUTS, kept
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.symmetric_memory import fused_products_on_cpus

FUSED = {
    "1d-sequence-2": LAYOUTS["1d-sequence-2"],
    "1d-sequence-3, kept w": kept(["1d-sequence-3"])["1d-sequence-3-keep-w"],
    "ring-2-1d-sequence-2": LAYOUTS["ring-2-1d-sequence-2"],
    "batch-2": mesh.TensorMesh(y=2, mode="cuboid", residual="batch"),
    "inner-batch-2": mesh.TensorMesh(z=2, mode="cuboid", inner="batch"),
    "q-2-sequence-2": mesh.TensorMesh(q=2, y=2, mode="cuboid", residual="sequence"),
}
GATHERED = {"sequence-batch": LAYOUTS["cuboid-1-2-2-sequence-batch"], "3d-8": LAYOUTS["3d-8"]}
"""A forward gathers X and reduces Y: in halves, or in rings. A backward only gathers dY."""
IN_RINGS = {
    "1d-2": LAYOUTS["1d-2"],
    "hidden-2": mesh.TensorMesh(y=2, mode="cuboid", residual="hidden"),
    "heads-2": mesh.TensorMesh(z=2, mode="cuboid"),
}
"""Copies, and features."""


def differences_and_calls(tensor: mesh.TensorMesh) -> tuple[dict[str, float], Counter[str]]:
    with fused_products_on_cpus() as calls:
        return differences(replace(tensor, symmetric_memory=True)), calls


CALLED: dict[str, set[str]] = {
    **{name: {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"} for name in FUSED},
    **{name: {"fused_all_gather_matmul"} for name in GATHERED},
    **{name: set() for name in IN_RINGS},
}


@pytest.mark.parametrize("name", sampled(CALLED, lambda name: (FUSED | GATHERED | IN_RINGS)[name].size <= 4))
def test_a_fused_product_is_the_product_and_the_others_go_around_rings(name: str) -> None:
    tensor = (FUSED | GATHERED | IN_RINGS)[name]
    for found, calls in on_ranks(tensor.size, differences_and_calls, tensor):
        assert not {what: error for what, error in found.items() if not error <= CLOSE}
        assert calls.keys() == CALLED[name]
