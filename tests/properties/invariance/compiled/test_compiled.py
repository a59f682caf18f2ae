"""Promise 1 with `train.compile`, at ZeRO 0 to 2: 108 rows of dslpar.layers' blocks, all that are not so in the table;
52 of other models, those of up to 4 ranks; and with `comm_overlap` too, a covering of 16.

By `aot_eager`: torch traces forward and backward, and the kernels are those of a run without, which is in the table.
"""

from __future__ import annotations

import pytest

from tests.properties.invariance.cover import FEW_RANKS
from tests.properties.invariance.layouts import LAYOUTS, Layout
from tests.properties.invariance.measure import out_of_bound
from tests.properties.invariance.options import BOTH, COMPILED, is_ours
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layouts import mode_of
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

pytestmark = [*TORCH_S_OWN_WARNINGS, pytest.mark.minutes(10)]

SAMPLE = {"1d 2, pipe 1, data 1: ZeRO 0, keep x, 1 micro-batches"}
"""In `make test`; with overlap too, blocks are compiled in tests/distributed/layers/test_device_counts.py."""
REFUSED = "transformers' T5, pipe 2, 1d 2, ZeRO 1, recompute 1"
"""`NOT_RECOMPUTED` has why."""


@pytest.mark.parametrize("name", sampled(COMPILED, SAMPLE))
def test_compiled_layers_do_not_change_the_maths(name: str) -> None:
    if name.startswith("transformers'") and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    assert not out_of_bound(COMPILED[name])


@pytest.mark.parametrize("name", sampled(BOTH, ()))
def test_compiled_layers_among_overlapped_collectives_do_not_change_the_maths(name: str) -> None:
    assert not out_of_bound(BOTH[name])


def test_every_row_that_can_be_compiled_is_there() -> None:
    assert all(row.job().spec.train.compile for row in (COMPILED | BOTH).values())
    assert all(row.job().mesh.tensor.comm_overlap for row in BOTH.values())
    there = [*COMPILED.values(), *LAYOUTS.values()]
    for name, row in LAYOUTS.items():
        expected = row.zero < 3 and (is_ours(row) or row.world <= FEW_RANKS)
        assert not expected or row._replace(compiled=True) in there or name == REFUSED
    assert REFUSED in LAYOUTS
    assert REFUSED not in COMPILED
    assert modes(COMPILED) == modes(LAYOUTS)
    assert modes(BOTH) == modes(LAYOUTS) - {"None", "ring", "zigzag", "ulysses"}


def modes(rows: dict[str, Layout]) -> set[str]:
    return {mode_of(row.job().mesh.tensor) for row in rows.values()}
