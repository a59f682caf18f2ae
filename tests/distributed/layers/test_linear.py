"""Linear's hand-written product against its definition: differentiable collectives around torch's linear.

Both do the same sums in the same order, apart from a bias that torch's kernel adds during the product. So 1e-15 is some
units in the last place. test_layers.py compares the definition itself with dense layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, initialize, placement
from dslpar.layers.gather_reduce import Sharding
from dslpar.layers.linear import sharded_matmul
from dslpar.layers.operand_shardings import MatmulSharding
from dslpar.layers.parameter import Init
from dslpar.layers.placement import Placement
from tests.support.compare_dense import BATCH, FFN, HIDDEN, SEQUENCE, relative
from tests.support.layouts import LAYOUTS, kept
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting

Errors = dict[str, float]
BLOCKS = (FFN, HIDDEN, HIDDEN)
INNER_BLOCKS = sum(BLOCKS)


# The definition -------------------------------------------------------------------------------------------------


def composed(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: MatmulSharding) -> Tensor:
    """Gather each operand, multiply, and reduce the sum to Y's sharding; autograd does the rest."""
    panel = gathered(collectives.copy_to_group(weight, sharding.depth), sharding.w)
    y = summed(functional.linear(gathered(x, sharding.x), panel), sharding.y)
    return y if bias is None else y + bias


def gathered(stored: Tensor, sharding: Sharding) -> Tensor:
    if sharding.dim is None:
        return collectives.copy_to_group(stored, sharding.axis)
    panel = collectives.all_gather_autograd(stored, sharding.axis, sharding.dim)
    return panel if sharding.axis.size == 1 else panel.index_select(sharding.dim, by_rank(panel, sharding).argsort())


def summed(partial: Tensor, sharding: Sharding) -> Tensor:
    if sharding.dim is None:
        return collectives.reduce_from_group(partial, sharding.axis)
    if sharding.axis.size > 1:
        partial = partial.index_select(sharding.dim, by_rank(partial, sharding))
    return collectives.reduce_scatter_autograd(partial, sharding.axis, sharding.dim)


def by_rank(panel: Tensor, sharding: Sharding) -> Tensor:
    """Return where in the panel each element of the first rank's piece is, then of the second's, ..."""
    assert sharding.dim is not None
    length = panel.shape[sharding.dim]
    blocks = torch.arange(length).split(
        [length * block // sum(sharding.blocks or (1,)) for block in sharding.blocks or (1,)]
    )
    return torch.cat([block.chunk(sharding.axis.size)[rank] for rank in range(sharding.axis.size) for block in blocks])


# Comparison -------------------------------------------------------------------------------------------------------


def differences(tensor: mesh.TensorMesh) -> Errors:
    """Compare output and every gradient on this rank: inward, outward and with blocks, with 2 and 3 dims."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    found = {}
    for shape in ((BATCH, SEQUENCE), (BATCH * SEQUENCE,)):
        for name, (layer, x_at, y_at) in layers(groups, *shape).items():
            ours, theirs = (results(layer, way, x_at, y_at) for way in (sharded_matmul, composed))
            for what, mine, right in zip(("y", "dx", "dW", "db"), ours, theirs, strict=True):
                found[f"{name} of {len(shape) + 1} dims: {what}"] = relative(mine, right)
    return found


def layers(groups: Groups, *tokens: int) -> dict[str, tuple[Linear, Placement, Placement]]:
    residual = placement.residual(groups.tensor, *tokens, HIDDEN)
    inner, blocks = (placement.inner(groups.tensor, *tokens, features) for features in (FFN, INNER_BLOCKS))
    return {
        "inward": (Linear(groups, HIDDEN, FFN, role="inward"), residual, inner),
        "outward": (Linear(groups, FFN, HIDDEN, role="outward"), inner, residual),
        "blocks": (Linear(groups, HIDDEN, BLOCKS, role="inward"), residual, blocks),
    }


Way = Callable[[Tensor, Tensor, Tensor | None, MatmulSharding], Tensor]


def results(layer: Linear, way: Way, x_at: Placement, y_at: Placement) -> list[Tensor]:
    """Use numbers that differ between ranks wherever they may."""
    for p in layer.parameters():
        p.init, p.grad = Init(0.1, 0.3), None  # type: ignore[attr-defined]
    initialize(layer, layer.groups, seed=1)
    x, y_grad = (numbers(at, layer.groups, seed) for seed, at in enumerate((x_at, y_at)))
    y = way(x.requires_grad_(), layer.weight, layer.bias, layer.sharding)
    y.backward(y_grad)
    grads = [tensor.grad for tensor in (x, layer.weight, layer.bias) if tensor is not None]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def numbers(at: Placement, groups: Groups, seed: int) -> Tensor:
    full = torch.randn(at.shape, generator=torch.Generator().manual_seed(seed))
    return at.cut(full, groups.coord)


ALL = LAYOUTS | {name: tensor for name, tensor in kept(["2d-4", "3d-8"]).items() if tensor not in LAYOUTS.values()}
FEW = [name for name, tensor in ALL.items() if tensor.size <= 3 or name.startswith("2d-4")]
MANY = [pytest.param(name, marks=pytest.mark.prove) for name in ALL if name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *MANY])
def test_the_product_equals_its_definition(name: str) -> None:
    for found in on_ranks(ALL[name].size, differences, ALL[name]):
        assert not {what: error for what, error in found.items() if not error <= 1e-15}


def scrambled(tensor: mesh.TensorMesh) -> float:
    """Return `differences` if blocks are sharded as one."""
    original_split = Sharding.start_reduce

    def start_reduce(self: Sharding, partial: Tensor) -> collectives.Pending:
        return original_split(replace(self, blocks=()), partial)

    Sharding.start_reduce = start_reduce  # type: ignore[method-assign]
    return max(differences(tensor).values())


def test_blocks_that_are_cut_as_one_are_detected() -> None:
    assert max(on_ranks(4, scrambled, LAYOUTS["2d-4"])) > 1e-2


# Frozen parameters cost nothing -----------------------------------------------------------------------------------


Frozen = tuple[str, ...]


def all_calls(tensor: mesh.TensorMesh, cases: list[Frozen]) -> list[dict[tuple[str, str], int]]:
    """Count collectives of an inward linear's backward if the named ones of x, weight and bias need no gradient."""
    groups = Groups(Mesh(tensor=tensor))
    return [calls_of_backward(groups, frozen) for frozen in cases]


def calls_of_backward(groups: Groups, frozen: Frozen) -> dict[tuple[str, str], int]:
    layer, x_at, y_at = layers(groups, BATCH, SEQUENCE)["inward"]
    tensors = {"x": numbers(x_at, groups, 0), "weight": layer.weight, "bias": layer.bias}
    for name, value in tensors.items():
        assert value is not None
        value.requires_grad_(name not in frozen)
    y = layer(tensors["x"])
    with counting(groups) as sent:
        y.backward(numbers(y_at, groups, 1))
    return dict(sent.calls)


THREE_D = LAYOUTS["3d-8"]
DY = {("all_gather", "z"): 1}
DX = {("all_gather", "q"): 1, ("reduce_scatter", "y"): 1}  # W gathered again
DW = {("all_gather", "y"): 1, ("reduce_scatter", "q"): 1}  # X gathered again
DB = {("all_reduce", "q z"): 1}
INWARD_3D: dict[Frozen, dict[tuple[str, str], int]] = {
    (): DY | DX | DW | DB,
    ("x",): DY | DW | DB,
    ("weight",): DY | DX | DB,
    ("bias",): DY | DX | DW,
    ("weight", "bias"): DY | DX,
    ("x", "bias"): DY | DW,
    ("x", "weight"): DB,
}
"""An inward linear in 3d that keeps no gathered operand."""


def test_no_collective_serves_what_is_frozen() -> None:
    for calls in on_ranks(THREE_D.size, all_calls, THREE_D, list(INWARD_3D)):
        assert dict(zip(INWARD_3D, calls, strict=True)) == INWARD_3D


def saved_elements(tensor: mesh.TensorMesh, frozen: Frozen) -> int:
    """Return what an inward linear keeps for its backward."""
    groups = Groups(Mesh(tensor=tensor))
    layer, x_at, _ = layers(groups, BATCH, SEQUENCE)["inward"]
    x, saved = numbers(x_at, groups, 0).requires_grad_("x" not in frozen), []
    layer.weight.requires_grad_("weight" not in frozen)

    def pack(value: Tensor) -> Tensor:
        saved.append(value.numel())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        layer(x)
    return sum(saved)


def test_nothing_is_kept_for_what_is_frozen() -> None:
    both = replace(LAYOUTS["2d-4"], keep="both")
    x, weight = BATCH // 2 * SEQUENCE * HIDDEN, FFN // 2 * HIDDEN  # panels: gathered over y, and over q
    for frozen, kept_elements in {(): x + weight, ("weight",): weight, ("x",): x}.items():
        assert on_ranks(4, saved_elements, both, frozen) == [kept_elements] * 4
