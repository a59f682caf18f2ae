"""Every collective and its backward, on 3 gloo ranks, against arithmetic on all ranks' tensors at once.

Values are small integers in float32, so all sums are exact and compared for equality.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed import collectives, gloo_collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from tests.support.ranks import on_ranks

SIZE = 3
SHAPE = (3, 6, 9)


def axis_of_all() -> Axis:
    warnings.simplefilter("error")  # no deprecated names of torch may be used
    return Groups(Mesh(tensor=Cuboid(y=SIZE))).axis("y")


def numbers(rank: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(10 * seed + rank)).float()


def chunk(x: Tensor, rank: int, dim: int) -> Tensor:
    return x.chunk(SIZE, dim)[rank]


# For each differentiable function: rank r's results from the list of all ranks' tensors, forward and backward.
Whole = Callable[[list[Tensor], int, int], Tensor]


def gather(xs: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat(xs, dim)


def scatter(xs: list[Tensor], rank: int, dim: int) -> Tensor:
    return chunk(torch.stack(xs).sum(0), rank, dim)


def reduce(xs: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.stack(xs).sum(0)


def same(xs: list[Tensor], rank: int, dim: int) -> Tensor:
    return xs[rank]


def own_slice(xs: list[Tensor], rank: int, dim: int) -> Tensor:
    return chunk(xs[rank], rank, dim)


PAIRS: dict[str, tuple[Whole, Whole]] = {
    "all_gather_autograd": (gather, scatter),
    "reduce_scatter_autograd": (scatter, gather),
    "reduce_from_group": (reduce, same),
    "copy_to_group": (same, reduce),
    "scatter_to_group": (own_slice, gather),
    "gather_from_group": (gather, own_slice),
}


DIMS = (0, 1, -1)


def apply_pair(name: str) -> list[tuple[Tensor, Tensor, bool]]:
    """Return for each dim this rank's output and input gradient, and whether the input was left unchanged."""
    axis = axis_of_all()
    results = []
    for dim in DIMS:
        x = numbers(axis.index, SHAPE).requires_grad_()
        before = x.detach().clone()
        y = getattr(collectives, name)(x, axis, *([] if name in ("reduce_from_group", "copy_to_group") else [dim]))
        y.backward(numbers(axis.index, tuple(y.shape), seed=1))
        assert x.grad is not None
        results.append((y.detach(), x.grad, torch.equal(x, before)))
    return results


@pytest.fixture(params=[True, False], ids=["over gloo", "as over NCCL"])
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run both kinds of sums: gloo's shortcuts, and torch's own collectives, which NCCL uses. Here gloo runs both."""
    if not request.param:
        monkeypatch.setattr(gloo_collectives, "serves", lambda group: False)


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize("name", PAIRS)
def test_pair(name: str) -> None:
    forward, backward = PAIRS[name]
    xs = [numbers(rank, SHAPE) for rank in range(SIZE)]
    for dim, results in zip(DIMS, zip(*on_ranks(SIZE, apply_pair, name), strict=True), strict=True):
        grads = [numbers(rank, tuple(y.shape), seed=1) for rank, (y, _, _) in enumerate(results)]
        for rank, (y, x_grad, untouched) in enumerate(results):
            assert torch.equal(y, forward(xs, rank, dim))
            assert torch.equal(x_grad, backward(grads, rank, dim))
            assert untouched


@pytest.mark.parametrize("name", PAIRS)
def test_an_axis_of_one_costs_nothing(name: str) -> None:
    x = torch.ones(2, requires_grad=True)
    assert getattr(collectives, name)(x, Axis(), *([] if name in ("reduce_from_group", "copy_to_group") else [0])) is x


def exchange() -> tuple[Tensor, Tensor]:
    axis = axis_of_all()
    x = numbers(axis.index, SHAPE).requires_grad_()
    y = collectives.all_to_all_autograd(x, axis, split_dim=-1, concat_dim=1)
    y.backward(y.detach())  # the received tensor goes back, so the sum is what was sent
    assert x.grad is not None
    return y.detach(), x.grad


def test_all_to_all_and_back() -> None:
    xs = [numbers(rank, SHAPE) for rank in range(SIZE)]
    for rank, (y, x_grad) in enumerate(on_ranks(SIZE, exchange)):
        assert torch.equal(y, torch.cat([chunk(x, rank, -1) for x in xs], 1))
        assert torch.equal(x_grad, xs[rank])


def copy_together() -> list[Tensor]:
    axis = axis_of_all()
    tensors = [torch.zeros(shape, requires_grad=True) for shape in ((2, 3), (4,), ())]
    first, second, _ = collectives.copy_to_group_coalesced(tensors, axis)  # the unused one's gradient is zero
    (first.sum() * axis.index + second.sum()).backward()
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def test_copy_to_group_coalesced() -> None:
    for a, b, c in on_ranks(SIZE, copy_together):
        assert a.tolist() == [[3.0] * 3] * 2
        assert b.tolist() == [3.0] * 4
        assert c.item() == 0


def values_and_objects() -> dict[str, object]:
    axis = axis_of_all()
    own = torch.tensor([float(axis.index)])
    received = collectives.start_ring_shift(own, axis).wait()
    collectives.barrier(axis)
    return {
        "max": collectives.all_reduce(own, axis, "max").item(),
        "shift": received.item(),
        "broadcast": collectives.broadcast(own, axis, source=1).item(),
        "broadcast object": collectives.broadcast_object({"from": axis.index}, axis, source=2),
        "objects": collectives.gather_objects(axis.index, axis),
        "own is untouched": own.item(),
    }


def test_values_and_objects() -> None:
    for rank, found in enumerate(on_ranks(SIZE, values_and_objects)):
        assert found == {
            "max": 2.0,
            "shift": (rank - 1) % SIZE,
            "broadcast": 1.0,
            "broadcast object": {"from": 2},
            "objects": [0, 1, 2],
            "own is untouched": rank,
        }


def test_alone_everything_is_the_identity() -> None:
    x, axis = torch.ones(2), Axis()
    assert collectives.all_reduce(x, axis) is x
    assert collectives.broadcast(x, axis) is x
    assert collectives.start_broadcast_(x, axis, 0).wait() is collectives.start_all_gather_(x, axis).wait() is x
    assert collectives.broadcast_object("a", axis) == "a"
    assert collectives.gather_objects("a", axis) == ["a"]
    assert collectives.copy_to_group_coalesced([x], axis) == (x,)
    collectives.barrier(axis)


def reduced(dtype: torch.dtype) -> bool:
    axis = Groups(Mesh(tensor=Cuboid(y=3, mode="1d"))).axis("y")
    x = torch.arange(24).reshape(2, 6, 2).to(dtype) * (axis.index + 1)
    whole = torch.arange(24).reshape(2, 6, 2).to(dtype) * 6
    piece = collectives.start_reduce_scatter(x, axis, dim=1)
    return piece.wait().dtype == dtype and torch.equal(piece.wait(), whole.chunk(3, 1)[axis.index])


def written_in_place(dtype: torch.dtype) -> list[list[float]]:
    """Write one vector, and another with a part per rank, also on the second of two groups."""
    groups = Groups(Mesh(data=2, tensor=Cuboid(y=3, mode="1d")))
    axis = groups.axis("y")
    x, parts = torch.full((4,), groups.rank).to(dtype), torch.full((6,), -1).to(dtype)
    parts[2 * axis.index : 2 * axis.index + 2] = groups.rank
    pending = [collectives.start_broadcast_(x[1:3], axis, 2), collectives.start_all_gather_(parts, axis)]
    assert [each.wait().data_ptr() for each in pending] == [x[1:].data_ptr(), parts.data_ptr()]
    return [x.tolist(), parts.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_in_place(dtype: torch.dtype) -> None:
    for rank, (x, parts) in enumerate(on_ranks(6, written_in_place, dtype)):
        first = rank // 3 * 3
        assert x == [rank, first + 2, first + 2, rank]
        assert parts == [first, first, first + 1, first + 1, first + 2, first + 2]


def sums_of_two() -> list[Tensor]:
    axis = Groups(Mesh(tensor=Cuboid(y=2))).axis("y")
    x = numbers(axis.index, (4, 2, 6))
    return [collectives.all_reduce(x, axis), *(collectives.reduce_scatter(x, axis, dim) for dim in (0, 1, 2, -2))]


@pytest.mark.usefixtures("branch")
def test_sums_of_two_ranks() -> None:
    """gloo has a shortcut for two ranks."""
    whole = numbers(0, (4, 2, 6)) + numbers(1, (4, 2, 6))
    for rank, (total, *pieces) in enumerate(on_ranks(2, sums_of_two)):
        assert torch.equal(total, whole)
        for piece, dim in zip(pieces, (0, 1, 2, -2), strict=True):
            assert torch.equal(piece, whole.chunk(2, dim)[rank])


@pytest.mark.usefixtures("branch")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_of_pieces_in_every_type(dtype: torch.dtype) -> None:
    """Small whole numbers are exact in all dtypes."""
    assert on_ranks(3, reduced, dtype) == [True] * 3
