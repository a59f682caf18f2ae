"""The proof can fail: each reduction left out, each order of cuts reversed, is seen, and by a wide margin.

Thresholds are far above TOLERANCE (1e-12) and below what was measured (0.1 to 1), so no test hangs on its number.
A mutation is made inside the ranks, which are processes of their own; nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dslpar import comm, mesh
from dslpar.comm import Axis, Pending
from dslpar.layers import cuboid, linear, placement
from tests.layers.cases import errors
from tests.layers.proof import TOLERANCE
from tests.layouts import LAYOUTS
from tests.ranks import on_ranks

Mutation = Callable[[], None]


def vectors_not_summed() -> None:
    comm.shared_together = lambda tensors, axis: tuple(tensors)


def depth_not_summed() -> None:
    _change_product(lambda how: replace(how, depth=Axis()))


def weight_rows_not_summed() -> None:
    """dW: this rank's rows of its own partial product, in place of the sum over q."""

    def start_reduce(self: cuboid.Kept, partial: Any) -> Pending:
        if self.dim == 0 and partial.dim() == 2:
            return Pending(partial.chunk(self.axis.size, 0)[self.axis.index].clone())
        return start_reduce_rightly(self, partial)

    start_reduce_rightly = cuboid.Kept.start_reduce
    cuboid.Kept.start_reduce = start_reduce


def input_gradient_not_summed() -> None:
    """1d: Megatron's f without its all-reduce; the forward reduction of an outward linear stays."""

    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.how = replace(ctx.how, x=cuboid.Kept(Axis(), None))
        return backward_rightly(ctx, *grads)

    backward_rightly = linear._Multiply.backward
    linear._Multiply.backward = backward


def residual_cut_y_then_z() -> None:
    _change_cuts("residual_cuts")


def inner_cut_z_then_y() -> None:
    _change_cuts("inner_cuts")


def weight_cut_q_then_y() -> None:
    def inward_weight(tensor: mesh.Tensor, *shape: int) -> placement.Placement:
        right = inward_weight_rightly(tensor, *shape)
        return replace(right, cuts=(right.cuts[0][::-1], *right.cuts[1:]))

    inward_weight_rightly = placement.inward_weight
    placement.inward_weight = inward_weight


def _change_product(change: Callable[[linear.Product], linear.Product]) -> None:
    product_rightly = linear.product
    linear.product = lambda *args: change(product_rightly(*args))


def _change_cuts(name: str) -> None:
    rightly = getattr(placement, name)

    def cuts(tensor: mesh.Tensor) -> placement.Cuts:
        right = rightly(tensor)
        return right._replace(features=right.features[::-1])

    setattr(placement, name, cuts)


MUTATIONS = (
    (vectors_not_summed, "1d-sequence-2", "block"),
    (vectors_not_summed, "2.5d-8-depth-2", "positions"),
    (depth_not_summed, "2.5d-8-depth-2", "mlp"),
    (weight_rows_not_summed, "2d-4", "mlp"),
    (input_gradient_not_summed, "1d-2", "inward"),
    (residual_cut_y_then_z, "cuboid-2-3-2", "inward"),
    (inner_cut_z_then_y, "cuboid-2-3-2", "outward"),
    (weight_cut_q_then_y, "2d-4", "inward"),
)


def mutated(mutate: Mutation, tensor: mesh.Tensor, case: str) -> dict[str, float]:
    mutate()
    try:
        return errors(tensor, case)
    except AssertionError as error:  # copies that differ are a way to be found out as well
        return {str(error): float("inf")}


@pytest.mark.parametrize(("mutate", "layout", "case"), MUTATIONS)
def test_a_mutation_is_seen(mutate: Mutation, layout: str, case: str) -> None:
    tensor = LAYOUTS[layout]
    worst = max(max(found.values()) for found in on_ranks(tensor.size, mutated, mutate, tensor, case))
    assert worst > 1e-2


def test_without_the_reduction_the_loss_of_the_first_step_is_still_exact() -> None:
    """Why gradients are compared, and not losses."""
    found = on_ranks(2, mutated, vectors_not_summed_quietly, LAYOUTS["1d-sequence-2"], "gpt_tied")[0]
    assert found["gpt_tied: loss"] <= TOLERANCE
    assert max(found.values()) > 1e-2


def vectors_not_summed_quietly() -> None:
    """As `vectors_not_summed`, with the check that copies are equal left out too."""
    from tests.layers import proof

    vectors_not_summed()
    proof.assert_copies_equal = lambda *_: None
