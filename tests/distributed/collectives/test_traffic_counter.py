"""Traffic counter: counts on real ranks, for collectives of dslpar, DeepSpeed and DTensor."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.schema import sections
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting
from tests.support.versions import needs_torch

MESH = Mesh(data=2, tensor=TensorMesh(d=2, y=2, mode="cuboid"))
ELEMENTS = 12

CALLS: dict[str, tuple[Callable[[collectives.Axis], Any], str, Fraction | int]] = {
    # 12 elements on each of 2 ranks
    "all_gather": (lambda axis: collectives.all_gather(x(), axis), "all_gather", ELEMENTS),
    "start_all_gather_": (
        lambda axis: collectives.start_all_gather_(x().repeat(2, 1).flatten(), axis).wait(),
        "all_gather",
        ELEMENTS,
    ),
    "reduce_scatter": (lambda axis: collectives.reduce_scatter(x(), axis), "reduce_scatter", ELEMENTS // 2),
    "start_reduce_scatter": (
        lambda axis: collectives.start_reduce_scatter(x(), axis).wait(),
        "reduce_scatter",
        ELEMENTS // 2,
    ),
    "all_reduce": (lambda axis: collectives.all_reduce(x(), axis), "all_reduce", ELEMENTS),
    "start_all_reduce_": (lambda axis: collectives.start_all_reduce_(x(), axis).wait(), "all_reduce", ELEMENTS),
    "all_to_all": (lambda axis: collectives.all_to_all(x(), axis, 0, 1), "all_to_all", ELEMENTS // 2),
    "start_ring_shift": (lambda axis: collectives.start_ring_shift(x(), axis).wait(), "send", ELEMENTS),
    "barrier": (collectives.barrier, "barrier", 0),
}


def x() -> torch.Tensor:
    """Return a [4, 3] tensor in float32."""
    return torch.ones(4, 3)


def each_call() -> dict[str, tuple[Any, Any, Any]]:
    """Return elements, bytes and calls, by call and axis."""
    groups, found = Groups(MESH), {}
    for name, (call, _, _) in CALLS.items():
        for letters in (("y",), ("d",), ("data",)):
            with counting(groups) as sent:
                call(groups.axis(*letters))
            found[(name, *letters)] = dict(sent.elements), dict(sent.bytes), dict(sent.calls)
    return found


def test_each_collective_of_comm_is_counted_by_its_axis() -> None:
    for found in on_ranks(8, each_call):
        for (name, axis), (elements, in_bytes, calls) in found.items():
            _, collective, number = CALLS[name]
            key = (collective, axis)
            assert elements == ({key: number} if number else {}), (name, axis)
            assert in_bytes == ({key: 4 * number} if number else {}), (name, axis)
            assert calls == ({key: 1} if number else {}), (name, axis)


def several() -> dict[str, Any]:
    """Make calls that need several axes, or ranks that differ."""
    groups, found = Groups(MESH), {}
    model, world = groups.axis("d", "y"), groups.axis("pipe", "data", "tensor")
    with counting(groups) as sent:
        collectives.all_reduce(x(), model)
        collectives.all_reduce(x(), world)
    found["several axes"] = dict(sent.elements)
    with counting(groups) as sent:
        collectives.broadcast(x(), groups.axis("y"))
    found["broadcast"] = sent.elements.total
    with counting(groups) as sent:
        panel = collectives.all_gather_autograd(x().requires_grad_(), groups.axis("y"), 0)
        y = panel + collectives.copy_to_group(x().repeat(2, 1).requires_grad_(), groups.axis("d"))
        forward = dict(sent.elements)
        y.sum().backward()
    found["forward"], found["both"] = forward, dict(sent.elements)
    thirds = (0, 3, 6)
    stranger = dist.new_group(list(thirds), use_local_synchronization=True)
    with counting(groups) as sent:
        if groups.rank in thirds:
            collectives.all_reduce(x(), collectives.Axis(3, 0, thirds, stranger))
    found["stranger"] = dict(sent.elements)
    collectives.all_reduce(x(), model)
    found["after"] = dict(sent.elements)
    pair = (groups.rank // 4 * 4, groups.rank // 4 * 4 + 3)  # they differ on d and y, but are not all that do
    two = dist.new_group(list(pair), use_local_synchronization=True) if groups.rank in pair else None
    with counting(groups) as sent:
        if two is not None:
            collectives.all_reduce(x(), collectives.Axis(2, pair.index(groups.rank), pair, two))
    found["pair"] = dict(sent.elements)
    return found


def test_axes_that_are_several_and_backwards() -> None:
    for rank, found in enumerate(on_ranks(8, several)):
        assert found["several axes"] == {
            ("all_reduce", "d y"): 2 * Fraction(3, 4) * ELEMENTS,
            ("all_reduce", "data d y"): 2 * Fraction(7, 8) * ELEMENTS,
        }
        assert found["broadcast"] == (ELEMENTS if rank % 2 == 0 else 0), "the source alone"
        assert found["forward"] == {("all_gather", "y"): ELEMENTS}
        backward = {("reduce_scatter", "y"): ELEMENTS, ("all_reduce", "d"): 2 * ELEMENTS}
        assert found["both"] == found["forward"] | backward
        assert found["stranger"] == ({("all_reduce", "other"): 2 * Fraction(2, 3) * ELEMENTS} if rank % 3 == 0 else {})
        assert found["after"] == found["stranger"], "counting has ended"
        assert found["pair"] == ({("all_reduce", "other"): ELEMENTS} if rank % 4 in (0, 3) else {})


def dtensor() -> dict[str, Any]:
    """Run a column- and a row-parallel linear by DTensor: an all-reduce in the forward, and one in the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    groups = Groups(Mesh(tensor=TensorMesh(y=2, mode="1d")))
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
    parallelize_module(mlp, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(4, 8, requires_grad=True)
    with counting(groups) as sent:
        y = mlp(inputs)
        y.sum().backward()
    return dict(sent.elements)


@needs_torch(5, "it warns of random numbers on CPUs, which are not drawn")
def test_dtensor_s_collectives_are_counted_once() -> None:
    assert on_ranks(2, dtensor) == [{("all_reduce", "y"): 2 * 4 * 8}] * 2


def deepspeed_s() -> dict[str, Any]:
    """Call collectives through deepspeed.comm, over a separate group."""
    import deepspeed.comm

    groups = Groups(Mesh(data=2))
    group = deepspeed.comm.new_group([0, 1])
    with counting(groups) as sent:
        deepspeed.comm.all_reduce(x(), group=group)
        deepspeed.comm.reduce(x(), 0, group=group)
    return dict(sent.elements)


def test_deepspeed_s_collectives_are_counted() -> None:
    both = {("all_reduce", "data"): ELEMENTS}
    assert on_ranks(2, deepspeed_s, init="deepspeed") == [both, both | {("reduce", "data"): ELEMENTS}]


def a_step() -> tuple[dict[Any, Any], int]:
    """Return the traffic of a ZeRO 1 step, and the elements that it shards."""
    made = job(2, zero=sections.Zero(stage=1))
    engine = engine_of(made)
    step = batches(made, engine.groups.coord["data"], 0)
    engine.train_batch(step)
    with counting(engine.groups) as sent:
        engine.train_batch(step)
    return dict(sent.elements), sum(p.numel() for p in engine.module.parameters())


def test_a_step_of_zero_reduces_gradients_and_gathers_weights() -> None:
    """Each rank gets a piece. DeepSpeed pads pieces, by a few elements per group and rank at most."""
    (first, elements), (second, _) = on_ranks(2, a_step, init="deepspeed")
    assert first.keys() <= {(name, "data") for name in ("reduce", "all_gather", "all_reduce", "broadcast")}
    assert first["reduce", "data"] + second["reduce", "data"] == elements
    assert 0 <= first["all_gather", "data"] - Fraction(elements, 2) <= 8
    assert first["all_reduce", "data"] < 30, "norms, losses and flags"


def unknown() -> None:
    torch.library.define("c10d::sends_who_knows_what", "(Tensor x) -> Tensor")
    torch.library.impl("c10d::sends_who_knows_what", "CPU")(lambda x: x)
    with pytest.raises(NotImplementedError, match="sends_who_knows_what"), counting(Groups(Mesh())):
        torch.ops.c10d.sends_who_knows_what(x())


def test_what_is_not_in_the_table_is_no_silence() -> None:
    on_ranks(1, unknown)
