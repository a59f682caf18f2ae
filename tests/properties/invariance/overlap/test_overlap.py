"""Promise 1 with `comm_overlap`: every row that has something to overlap, 131 beside those of the table itself; and, of
rows whose tokens are in pieces, a covering of 17 in which they come through symmetric memory.
"""

from __future__ import annotations

import pytest

from tests.properties.invariance.layouts import LAYOUTS
from tests.properties.invariance.measure import out_of_bound
from tests.properties.invariance.options import OVERLAPPED, SYMMETRIC
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layouts import mode_of
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

pytestmark = TORCH_S_OWN_WARNINGS  # some rows of the table are compiled

SAMPLE = {"1d 2 sequence, pipe 1, data 1: ZeRO 1, keep w, 2 micro-batches"}
ONE_SYMMETRIC = {"data 2, 1d 2 sequence, ZeRO 2"}


@pytest.mark.parametrize("name", sampled(OVERLAPPED, SAMPLE))
def test_overlapped_collectives_do_not_change_the_maths(name: str) -> None:
    if name.startswith("transformers'") and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    assert not out_of_bound(OVERLAPPED[name])


@pytest.mark.parametrize("name", sampled(SYMMETRIC, ONE_SYMMETRIC))
def test_tokens_through_symmetric_memory_do_not_change_the_maths(name: str) -> None:
    if name.startswith("transformers'") and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    assert not out_of_bound(SYMMETRIC[name])


def test_every_row_with_something_to_overlap_is_there() -> None:
    assert all(row.job().mesh.tensor.comm_overlap for row in OVERLAPPED.values())
    modes = {mode_of(row.job().mesh.tensor) for row in LAYOUTS.values()}
    assert {mode_of(row.job().mesh.tensor) for row in OVERLAPPED.values()} == modes - {
        "None",
        "ring",
        "zigzag",
        "ulysses",
    }
    there = [*OVERLAPPED.values(), *LAYOUTS.values()]
    for row in LAYOUTS.values():
        tensor = row.job().mesh.tensor
        assert tensor.y * tensor.z * tensor.q == 1 or row._replace(overlap=True) in there
