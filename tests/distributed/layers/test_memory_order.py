"""Memory layout of activations: sequence first inside a block, with few copies."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_counts import block_counts
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Linear, initialize, memory_order, placement
from tests.support.fake_world import in_forks
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

MICRO, SEQUENCE, HIDDEN, HEADS = 4, 24, 48, 6


def _orders(x: torch.Tensor) -> list[bool]:
    return [memory_order.is_sequence_first(x), x.is_contiguous()]


def test_what_is_sequence_first() -> None:
    x = torch.zeros(2, 3, 4)
    assert _orders(x) == [False, True]
    assert _orders(x.transpose(0, 1).contiguous().transpose(0, 1)) == [True, False]
    assert _orders(x.transpose(1, 2)) == [False, False]
    assert _orders(torch.zeros(1, 3, 4).transpose(0, 1).transpose(0, 1)) == [False, True]


@pytest.mark.parametrize("first", [False, True])
def test_products_keep_the_order_and_are_right(first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y_grad, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 3, 4), (2, 3, 5), (5, 4), (5,))
    )
    stored, stored_grad = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (x, y_grad))
    ordered = stored if first else x
    y = memory_order.linear(ordered, weight, bias)
    assert memory_order.is_sequence_first(y) == first
    torch.testing.assert_close(y, x @ weight.t() + bias, rtol=1e-14, atol=1e-14)
    assert memory_order.tokens(ordered).data_ptr() == ordered.data_ptr(), "a view"
    right = torch.einsum("bsn,bsk->nk", y_grad, x)
    for grad in (y_grad, stored_grad):  # of operands with equal memory order, and with different ones
        a, b = memory_order.weight_factors(grad, ordered)
        torch.testing.assert_close(a @ b, right, rtol=1e-14, atol=1e-14)


def _residuals() -> tuple[list[bool], list[bool], list[bool]]:
    """Return whether layers' results are contiguous: an inward linear's, an outward one's, and a block's with its
    gradient.
    """
    tensor = LAYOUTS["1d-sequence-2"]
    groups = Groups(Mesh(tensor=tensor))
    x = torch.ones(placement.residual(tensor, MICRO, SEQUENCE, HIDDEN).local_shape, requires_grad=True)
    inward = Linear(groups, HIDDEN, 2 * HIDDEN, role="inward")
    outward = Linear(groups, 2 * HIDDEN, HIDDEN, role="outward")
    block = Block(groups, HIDDEN, HEADS)
    for module in (inward, outward, block):
        initialize(module, groups, seed=1)
    inner = inward(x)
    y = block(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return _orders(inner), _orders(outward(inner)), [*_orders(y), gradient.shape == x.shape]


def test_what_leaves_a_layer_is_contiguous() -> None:
    for found in on_ranks(2, _residuals):
        assert found == ([False, True], [False, True], [False, True, True])


def _clones(form: str) -> tuple[int, int]:
    counts = block_counts(form, "1d, sequence")
    return counts.forward.by_name["clone"], counts.backward.by_name["clone"]


@pytest.mark.prove  # `make test` has test_device_counts.py
@pytest.mark.parametrize("form", ["GPT", "Llama"])
def test_what_is_gathered_along_the_sequence_is_copied_once_and_as_a_piece(form: str) -> None:
    """These are attention's X and its output's dY, which norms and sums leave contiguous. No panel is copied, and no
    MLP tensor.
    """
    assert in_forks(_clones, [form]) == [(1, 1)]
