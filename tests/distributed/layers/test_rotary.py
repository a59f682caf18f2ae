"""Rotary positions: known rotations, their purpose, and what they must not depend on.

The proof compares them on sharded sequences (cases attention_rotary, block_llama).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Attention, Rotary, initialize
from tests.support.compare_dense import numbers
from tests.support.dense import rotated


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[batch, sequence, heads, features]."""
    return numbers(shape, 1).to(dtype)


def test_a_rotation_by_hand() -> None:
    """Pairs are (0, 2) and (1, 3); at position 3 they turn by 3 and by 3 / sqrt(theta) radians."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 1, 4)
    slow = 3 / math.sqrt(100)
    expected = [math.cos(3), -2 * math.sin(slow), math.sin(3), 2 * math.cos(slow)]
    assert Rotary(theta=100.0)(x, first=3).flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_against_complex_numbers() -> None:
    """Float64: a few roundings of 1e-16."""
    x = heads(2, 9, 3, 8)
    assert (Rotary(500.0)(x, 0) - rotated(x, 500.0)).abs().max() < 1e-14


def test_a_piece_is_rotated_as_within_the_whole() -> None:
    x, rotary = heads(2, 12, 3, 8), Rotary()
    pieces = [rotary(piece, first) for piece, first in zip(x.split(4, dim=1), (0, 4, 8), strict=True)]
    assert torch.equal(torch.cat(pieces, 1), rotary(x, 0))


def test_values_are_copied_beside_rotated_heads() -> None:
    x, rotary = heads(2, 5, 6, 8), Rotary()
    y = rotary(x, 1, num_heads=4)
    assert torch.equal(y[:, :, :4], rotary(x[:, :, :4], 1))
    assert torch.equal(y[:, :, 4:], x[:, :, 4:])


def kept(layer: Attention) -> int:
    """Return the elements of distinct storages that are kept for the backward, without position tables and weights."""
    storages: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(torch.ones(2, 8, 16, requires_grad=True))
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    held = [x for at, x in storages.items() if at not in weights and x.shape != (8, 1, 4)]
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in held)


def test_rotated_positions_keep_no_activation() -> None:
    groups = Groups(Mesh())
    plain, rotated = Attention(groups, 16, 2), Attention(groups, 16, 2, rotary=Rotary())
    assert kept(rotated) == kept(plain) == 5 * 2 * 8 * 16 + 2 * 8 * 2  # input, q, k, v, output; a log-sum-exp per head


def test_products_depend_on_distances_alone() -> None:
    q, k = heads(1, 5, 2, 8).transpose(1, 2), numbers((1, 2, 5, 8), 2)

    def products(first: int) -> Tensor:
        turned = [Rotary()(part.transpose(1, 2), first).transpose(1, 2) for part in (q, k)]
        return turned[0] @ turned[1].transpose(-1, -2)

    assert (products(0) - products(77)).abs().max() < 1e-12  # angles of up to 80: 80 * 1e-16 each
    assert (products(0) - q @ k.transpose(-1, -2)).abs().max() > 0.1


def test_gradient() -> None:
    x = heads(1, 3, 2, 4).requires_grad_()
    turn: Callable[[Tensor], Tensor] = lambda x: Rotary()(x, 2, num_heads=1)  # noqa: E731
    assert torch.autograd.gradcheck(turn, x)
    assert torch.autograd.gradgradcheck(turn, x)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_far_positions_keep_the_precision_of_the_type(dtype: torch.dtype, tolerance: float) -> None:
    """Elements below 4 are rounded once: 4 * 2^-9 in bfloat16. With float32 angles, position 10^6 is off by 0.03."""
    x = heads(1, 4, 1, 8, dtype=dtype).clamp(-2, 2)
    y, exact = Rotary()(x, 10**6), Rotary()(x.double(), 10**6)
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() < tolerance


def test_only_tables_are_kept_for_the_backward() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        Rotary()(heads(4, 6, 5, 8).requires_grad_(), 0)
    assert [tuple(x.shape) for x in kept] == [(6, 1, 4), (6, 1, 4)]


def test_a_model_holds_no_table() -> None:
    """There is nothing to save, shard or cast, and a copy of a layer that has run computes the same."""
    groups = Groups(Mesh())
    layer = Attention(groups, 16, 2, rotary=Rotary())
    initialize(layer, groups, seed=1)
    x = torch.ones(1, 5, 16)
    y = layer(x)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
    assert torch.equal(copy.deepcopy(layer)(x), y)


def test_a_table_of_an_evaluation_serves_training() -> None:
    rotary = Rotary(theta=77.0)
    with torch.inference_mode():
        rotary(heads(1, 5, 1, 4), 0)
    x = heads(1, 5, 1, 4).requires_grad_()
    rotary(x, 0).sum().backward()
    assert x.grad is not None
