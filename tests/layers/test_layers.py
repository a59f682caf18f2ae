"""Every layer, and GPT, in every mode against dense float64: output, input gradient, every parameter's gradient.

The tolerance is argued in proof.py. The default run holds each mode and each way to keep activations once; `prove` runs
their product.
"""

from __future__ import annotations

import pytest

from dslpar.mesh import Tensor
from tests.layers.cases import errors
from tests.layers.proof import TOLERANCE
from tests.layouts import LAYOUTS, everything, kept
from tests.ranks import on_ranks


def assert_exact(tensor: Tensor, *cases: str) -> None:
    for rank, found in enumerate(on_ranks(tensor.size, errors, tensor, *cases, timeout=90)):
        wrong = {what: error for what, error in found.items() if not error <= TOLERANCE}
        assert not wrong, f"rank {rank} of {tensor}: {wrong}"


LATER = ("ring-2", "ring-4", "ulysses-4", "cuboid-1-2-2-sequence-batch")  # near to one of the others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.prove] if name in LATER else []) for name in LAYOUTS]
)
def test_layers_equal_dense_ones(name: str) -> None:
    assert_exact(LAYOUTS[name])


KEPT = {
    name: tensor for name, tensor in kept(["2d-4", "3d-8", "1d-sequence-2"]).items() if tensor not in LAYOUTS.values()
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_for_the_backward_changes_nothing(name: str) -> None:
    assert_exact(KEPT[name], "inward", "outward", "gpt_tied")


def test_one_process_equals_dense() -> None:
    assert_exact(Tensor())


EVERYTHING = everything()


@pytest.mark.prove
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_cuboid(name: str) -> None:
    assert_exact(EVERYTHING[name])
