"""One process with dslpar's layers against transformers' own forward, in float64."""

from __future__ import annotations

import pytest

from dslpar.parity.prove import reference_of
from dslpar.parity.shrink import shrink
from tests.support.layout_factors import PLAIN, job_of
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_constants_are_rounded_alike(family: str) -> None:
    """Gemma multiplies its embedding by the root of the hidden size, a float32 constant of the model."""
    job = job_of({**PLAIN, "family": family, "mode": "1d 3"})
    assert job is not None
    (small,) = shrink(job, max_ranks=3, steps=1)
    off = reference_of(small.job, steps=1, program=None).off_transformers
    assert max(off.values()) < 1e-12
