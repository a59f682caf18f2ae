"""Promise 1 with symmetric memory, on torch's CPU stand-ins for its fused products."""

from __future__ import annotations

import pytest

from dslpar.schema.types import SYMMETRIC_MEMORY
from tests.properties.invariance.layouts import Layout, pipe, tensor
from tests.properties.invariance.run_and_reference import out_of_bound

ROWS = {
    "data 2, 1d 2 sequence, ZeRO 2": Layout(4, tensor("1d", 2, sequence=True), zero=2),
    "1d 4 sequence, keep none, recompute": Layout(4, tensor("1d", 4, sequence=True, keep="none"), recompute=1),
    "pipe 2, 1d 2 sequence, ZeRO 1, zero bubble": Layout(
        4,
        pipe(2) | tensor("1d", 2, sequence=True),
        zero=1,
        tied=False,
        ignoring=True,
        accumulation=4,
        schedule=("zero_bubble", 1),
    ),
    "Llama, data 2, 1d 2 sequence, ZeRO 3": Layout(
        4, tensor("1d", 2, sequence=True), zero=3, tied=False, model="Llama"
    ),
    "cuboid (1, 2, 2), batch, heads": Layout(
        4, tensor("cuboid", 4, shape=(1, 2, 2), residual="batch", inner="heads"), tied=False
    ),
    "cuboid (1, 2, 2), sequence, batch, ZeRO 1": Layout(
        4, tensor("cuboid", 4, shape=(1, 2, 2), residual="sequence", inner="batch", keep="both"), zero=1
    ),
    "3d 8, sequence": Layout(8, tensor("3d", 8, residual="sequence")),
}
ROWS = {name: row._replace(overlap=SYMMETRIC_MEMORY) for name, row in ROWS.items()}


@pytest.mark.prove  # `make test` has each product and its gradients: tests/distributed/layers/test_symmetric_memory.py
@pytest.mark.parametrize("name", ROWS)
def test_tokens_through_symmetric_memory_do_not_change_the_maths(name: str) -> None:
    assert not out_of_bound(ROWS[name])
