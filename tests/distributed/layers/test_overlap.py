"""Products in parts with overlapped collectives: equal numbers, and only one kind of sum stays exposed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import truediv

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.device_counter import count_kernels
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Form, Rotary, initialize, mark_owners, overlap, placement
from tests.distributed.layers.test_linear import layers, results
from tests.support.compare_dense import BATCH, FFN, HIDDEN, SEQUENCE
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import INNERS, LAYOUTS, RESIDUALS, kept
from tests.support.live_storages import LiveStorages
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

CLOSE = 1e-14
"""Relative to the largest, in float64: a ring adds up to 6 terms in another order, of sums of 96 products."""
CUT = {name: tensor for name, tensor in LAYOUTS.items() if tensor.y * tensor.z * tensor.q > 1}
BOTH = {
    f"{residual}-{inner}": mesh.TensorMesh(y=2, z=2, mode="cuboid", residual=residual, inner=inner)
    for residual, inner in product(RESIDUALS, INNERS)
}
"""X is gathered and Y reduced, in every sharding."""
OF_THREE = {
    "hidden-3": mesh.TensorMesh(y=3, mode="cuboid", residual="hidden"),
    "heads-3": mesh.TensorMesh(z=3, mode="cuboid"),
    "hidden-heads-6": mesh.TensorMesh(y=2, z=3, mode="cuboid", residual="hidden"),
}
"""Rings of features, which have a direction, also with blocks."""
ALL = CUT | BOTH | OF_THREE | kept(["2d-4", "3d-8", "1d-sequence-3"])


def differences(tensor: mesh.TensorMesh) -> dict[str, float]:
    """Compare output and gradients in parts and at once: inward, outward and block products, 2 and 3 dims."""
    torch.set_default_dtype(torch.float64)
    found = {}
    ways = [layers_of(replace(tensor, comm_overlap=in_parts)) for in_parts in (True, False)]
    for name, parts in ways[0].items():
        for what, mine, right in zip(("y", "dx", "dW", "db"), parts, ways[1][name], strict=True):
            assert right.abs().max() > 0
            found[f"{name}: {what}"] = float((mine - right).abs().max() / right.abs().max())
    return found


def layers_of(tensor: mesh.TensorMesh) -> dict[str, list[Tensor]]:
    groups, found = Groups(Mesh(tensor=tensor)), {}
    sample_a_rank, token_a_rank = tensor.size, tensor.y * (2 * tensor.d if tensor.context > 1 else 1)
    shapes = (BATCH, SEQUENCE), (BATCH * SEQUENCE,), (sample_a_rank, 3 * token_a_rank), (sample_a_rank, token_a_rank)
    for shape in shapes:
        for name, (layer, x_at, y_at) in layers(groups, *shape).items():
            found[f"{name} of {shape}"] = results(layer, lambda x, *_, layer=layer: layer(x), x_at, y_at)
            layer.keep_memory_order()
            found[f"{name} of {shape}, as stored"] = results(
                layer, lambda x, *_, layer=layer: layer(sequence_first(x)), x_at, y_at
            )
    return found


def sequence_first(x: Tensor) -> Tensor:
    """Return X with its sequence as the slowest dim in memory, if it has one."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x


@pytest.mark.parametrize("name", sampled(ALL, {"1d-sequence-3", "1d-2", "heads-3", "sequence-batch", "hidden-heads"}))
def test_parts_are_the_whole(name: str) -> None:
    for found in on_ranks(ALL[name].size, differences, ALL[name]):
        assert not {what: error for what, error in found.items() if not error <= CLOSE}


def rounding(tensor: mesh.TensorMesh) -> float:
    """Return the error spread of Y in bfloat16, gathered around a ring by features, over that of a single product."""
    layer, x_at, _ = layers(Groups(Mesh(tensor=tensor)), BATCH, SEQUENCE)["inward"]
    generator = torch.Generator().manual_seed(1)
    x, panel = (torch.randn(shape, generator=generator) for shape in (x_at.shape, (FFN, HIDDEN)))
    x, panel = x.bfloat16(), panel.bfloat16()
    right = functional.linear(x.double(), panel.double())
    y, _ = overlap.linear(x_at.cut(x, layer.groups.coord), panel, layer.sharding.x, layer.sharding.y)
    return float((y - right).std() / (functional.linear(x, panel) - right).std())


def test_in_half_precision_y_is_rounded_once_a_piece() -> None:
    """A sum of 3 pieces is rounded 3 times, first when it is smaller: less than the root of 3 times the error."""
    found = on_ranks(3, rounding, OF_THREE["hidden-3"])
    assert all(1 < ratio < 3**0.5 for ratio in found), found


# ---- exposed collectives ----


def exposed_of_products(tensor: mesh.TensorMesh) -> dict[str, tuple[int, int]]:
    """Return (exposed, all) collectives of an inward and an outward product, and of blocks."""
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


def peaks(tensor: mesh.TensorMesh) -> dict[str, tuple[int, int]]:
    """Return the peak bytes that a linear's forward makes, and its backward."""
    groups, found = Groups(Mesh(tensor=tensor)), {}
    for name, (layer, x_at, _) in layers(groups, 16, 64).items():
        layer.keep_memory_order()
        initialize(layer, groups, seed=1)
        x = torch.ones(x_at.local_shape, requires_grad=True)
        with LiveStorages() as forward:
            y = layer(x)
        gradient = torch.ones_like(y)
        with LiveStorages() as backward:
            y.backward(gradient)
        found[name] = forward.peak, backward.peak
    return found


def test_parts_take_no_more_memory_than_the_whole() -> None:
    """X is an exception, since it also has a place among its pieces."""
    names = ("1d-sequence-4", "2d-4", "3d-8", "cuboid-2-3-2")
    whole = on_last_ranks(peaks, [LAYOUTS[name] for name in names])
    in_parts = on_last_ranks(peaks, [replace(LAYOUTS[name], comm_overlap=True) for name in names])
    for name, rights, ours in zip(names, whole, in_parts, strict=True):
        over = {each: (ours[each], rights[each]) for each in ours if max(map(truediv, ours[each], rights[each])) > 1.15}
        assert not over, name


LLAMA = Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=4, bias=False)


def exposed(tensor: mesh.TensorMesh) -> tuple[int, int]:
    """Return (exposed, all) collectives of a block, forward and backward."""
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
