"""Products in parts, whose collectives run under them: the same numbers, and nothing exposed but one kind of sum."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.device_counter import count_kernels
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Form, Rotary, initialize, mark_owners, overlap, placement
from tests.distributed.layers.compare_dense import BATCH, SEQUENCE
from tests.distributed.layers.test_linear import layers, results
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import INNERS, LAYOUTS, RESIDUALS, kept
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

CLOSE = 1e-14
"""Relative to the largest, in float64: a ring adds up to 6 terms in another order, of sums of 96 products."""
CUT = {name: tensor for name, tensor in LAYOUTS.items() if tensor.y * tensor.z * tensor.q > 1}
BOTH = {
    f"{residual}-{inner}": mesh.Tensor(y=2, z=2, mode="cuboid", residual=residual, inner=inner)
    for residual, inner in product(RESIDUALS, INNERS)
}
"""X is gathered and Y reduced: every way to cut them."""
ALL = CUT | BOTH | kept(["2d-4", "3d-8", "1d-sequence-3"])


def differences(tensor: mesh.Tensor) -> dict[str, float]:
    """Of output and gradients of inward, outward and blocks, with 2 and 3 dims: in parts, and at once."""
    torch.set_default_dtype(torch.float64)
    found = {}
    ways = [layers_of(replace(tensor, comm_overlap=in_parts)) for in_parts in (True, False)]
    for name, parts in ways[0].items():
        for what, mine, right in zip(("y", "dx", "dW", "db"), parts, ways[1][name], strict=True):
            assert right.abs().max() > 0
            found[f"{name}: {what}"] = float((mine - right).abs().max() / right.abs().max())
    return found


def layers_of(tensor: mesh.Tensor) -> dict[str, list[torch.Tensor]]:
    groups, found = Groups(Mesh(tensor=tensor)), {}
    for shape in ((BATCH, SEQUENCE), (BATCH * SEQUENCE,)):
        for name, (layer, x_at, y_at) in layers(groups, *shape).items():
            found[f"{name} of {len(shape) + 1} dims"] = results(layer, lambda x, *_, layer=layer: layer(x), x_at, y_at)
            layer.keep_memory_order()
            found[f"{name} of {len(shape) + 1} dims, as stored"] = results(
                layer, lambda x, *_, layer=layer: layer(x), x_at, y_at
            )
    return found


@pytest.mark.parametrize("name", sampled(ALL, {"1d-sequence-3", "1d-2", "2d-4", "sequence-batch", "hidden-heads"}))
def test_parts_are_the_whole(name: str) -> None:
    for found in on_ranks(ALL[name].size, differences, ALL[name], timeout=200):
        assert not {what: error for what, error in found.items() if not error <= CLOSE}


# ---- what is exposed ----


def exposed_of_products(tensor: mesh.Tensor) -> dict[str, tuple[int, int]]:
    """Of an inward and an outward product, and of blocks, how many collectives no product hides, and of how many."""
    groups, found = Groups(Mesh(tensor=replace(tensor, comm_overlap=True))), {}
    for name, (layer, x_at, _) in layers(groups, BATCH, SEQUENCE).items():
        x, panel = torch.ones(x_at.local_shape), layer.sharding.w.gather(layer.weight.detach())
        with count_kernels() as counts:
            overlap.linear(x, panel, layer.sharding.x, layer.sharding.y)
        found[name] = counts.exposed, counts.collectives
    return found


def test_of_a_product_nothing_is_exposed_but_the_last_of_sums_to_copies() -> None:
    tensors = BOTH | {name: LAYOUTS[name] for name in ("1d-sequence-3", "2d-4", "3d-8", "cuboid-2-3-2")}
    for name, found in zip(tensors, on_last_ranks(exposed_of_products, [*tensors.values()]), strict=True):
        sums = {"outward"} if tensors[name].residual == "replicated" else set()
        assert {each for each, (number, _) in found.items() if number} == sums, name
        assert all(found[each][0] == 1 for each in sums), name
        assert all(of for _, of in found.values()), name


def test_of_copies_there_is_nothing_to_gather_and_the_product_is_whole() -> None:
    (found,) = on_last_ranks(exposed_of_products, [LAYOUTS["1d-2"]])
    assert found == {"inward": (0, 0), "outward": (1, overlap.NUM_CHUNKS), "blocks": (0, 0)}


LLAMA = Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=4, bias=False)


def exposed(tensor: mesh.Tensor) -> tuple[int, int]:
    """Collectives of a block, forward and backward, under which no product runs; and all of them."""
    groups = Groups(Mesh(tensor=tensor))
    block = Block(groups, 64, 8, form=LLAMA)
    initialize(block, groups, seed=1)
    mark_owners(block, groups)
    x = torch.ones(placement.residual(tensor, 4, 32, 64).local_shape, requires_grad=True)
    with count_kernels() as counts:
        y = block(x)
        y.backward(torch.ones_like(y))
    return counts.exposed, counts.collectives


def test_at_most_two_collectives_of_a_block_are_exposed() -> None:
    sizes = [replace(LAYOUTS[name], comm_overlap=True) for name in ("1d-sequence-2", "1d-sequence-4")]
    found = on_last_ranks(exposed, sizes)
    assert [number for number, _ in found] == [1, 1], found  # the sum of the vectors' gradients
    ((number, of),) = on_last_ranks(exposed, [LAYOUTS["1d-sequence-4"]])
    assert (number, of) == (7, 9), "without: what the parts are for"
