"""The cuboid of each mode of tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from dslpar import resolve
from dslpar.distributed.groups import Groups
from dslpar.layout.modes import context_forms, cuboid_of, ulysses_size_of
from dslpar.layout.resolve import Job, heads_of
from dslpar.linter.check import load_text
from tests.support.lint import MODEL, PATH


def job_of(text: str, world: int = 8) -> Job:
    return resolve(load_text(MODEL + text, PATH), world)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("size=4, mode='1d'", dict(d=1, q=1, y=4, z=1, residual="replicated", keep="x", split="batch")),
        ("size=4, mode='1d', sequence=True", dict(y=4, residual="sequence")),
        ("size=4, mode='2d'", dict(d=1, q=2, y=2, z=1, residual="hidden", keep="x")),
        ("size=8, mode='2.5d', depth=2", dict(d=2, q=2, y=2, z=1, residual="hidden")),
        ("size=8, mode='3d'", dict(d=1, q=2, y=2, z=2, residual="batch", inner="batch", keep="none")),
        ("size=4, mode='sequence', impl='ulysses'", dict(d=4, y=1, split="sequence", impl="ulysses")),
        (
            "size=6, mode='cuboid', shape=[2, 3, 1]",
            dict(q=2, y=3, z=1, residual="hidden", inner="heads", keep="none"),
        ),
        ("size=4, mode='2d', keep='both'", dict(keep="both")),
    ],
)
def test_cuboid(tensor: str, expected: dict[str, Any]) -> None:
    world = 6 if "size=6" in tensor else 8
    cuboid = job_of(f"parallel = dict(tensor=dict({tensor}))\n", world).mesh.tensor
    assert {name: getattr(cuboid, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ("context=4", dict(d=4, y=1, mode="sequence", split="sequence", impl="ring", zigzag=True)),
        ("context=dict(size=4, impl='ulysses')", dict(d=4, impl="ulysses", zigzag=False, ulysses=4, ring=1)),
        (
            "context=2, tensor=dict(size=4, mode='2d')",
            dict(d=2, q=2, y=2, mode="2d", split="sequence", residual="hidden", zigzag=True),
        ),
        ("context=2, tensor=dict(size=2, mode='1d', sequence=True)", dict(d=2, y=2, residual="sequence")),
        ("context=8, tensor=dict(size=1, mode='1d')", dict(d=8, y=1, split="sequence")),
        ("context=1, tensor=dict(size=2, mode='2.5d', depth=2)", dict(d=2, split="batch", context=1)),
        ("context=dict(size=8, impl='hybrid')", dict(ulysses=8, ring=1, zigzag=False)),
        ("context=dict(size=8, impl='hybrid', ulysses_size=2)", dict(ulysses=2, ring=4, zigzag=True)),
        ("context=dict(size=4, impl='hybrid'), tensor=dict(size=2, mode='1d')", dict(ulysses=4, ring=1, y=2)),
    ],
)
def test_context_is_an_axis_beside_the_mode_s(parallel: str, expected: dict[str, Any]) -> None:
    """24 heads, of keys as well, are three each on 8 ranks."""
    cuboid = job_of(f"parallel = dict({parallel})\n").mesh.tensor
    assert {name: getattr(cuboid, name) for name in expected} == expected
    assert cuboid.size == cuboid.d * cuboid.q * cuboid.y * cuboid.z


@pytest.mark.parametrize(("kv_heads", "ranks"), [(24, 8), (12, 4), (6, 2), (3, 1)])
def test_hybrid_exchanges_as_many_heads_as_divide(kv_heads: int, ranks: int) -> None:
    text = MODEL.replace("num_heads=24", f"num_heads=24, num_kv_heads={kv_heads}")
    config = load_text(text + "parallel = dict(context=dict(size=8, impl='hybrid'))\n", PATH)
    assert resolve(config, 8).mesh.tensor.ulysses == ranks


def test_ranks_of_a_hybrid() -> None:
    """Neighbours exchange heads, and rings connect ranks at the same place among their neighbours."""
    mesh = job_of(
        "parallel = dict(context=dict(size=4, impl='hybrid', ulysses_size=2), tensor=dict(size=2, mode='1d'))\n"
    ).mesh
    for rank, (exchange, ring) in {0: ((0, 2), (0, 4)), 3: ((1, 3), (3, 7)), 6: ((4, 6), (2, 6))}.items():
        groups = Groups.without_processes(mesh, rank)
        assert groups.axis("ulysses").peers == exchange
        assert groups.axis("ring").peers == ring
        assert groups.axis("ulysses").peers[groups.axis("ulysses").index] == rank
        assert groups.axis("ring").peers[groups.axis("ring").index] == rank


def test_what_hybrid_decides_is_told_as_it_is() -> None:
    """Deciding again for the resulting cuboid gives the same."""
    text = MODEL.replace("num_heads=24", "num_heads=24, num_kv_heads=12")
    job = resolve(load_text(text + "parallel = dict(context=dict(size=8, impl='hybrid'))\n", PATH), 8)
    decided = ulysses_size_of(job.spec.parallel.context, job.mesh.tensor, heads_of(job.spec.model))
    assert decided.value == job.mesh.tensor.ulysses == 4
    assert "12 heads" in decided.why


@pytest.mark.parametrize(
    ("parallel", "per_node", "forms"),
    [
        ("context=dict(size=8, impl='ring')", 0, ["ring", "ulysses"]),
        ("context=8", 0, ["ring", "ulysses"]),
        ("context=dict(size=8, impl='ulysses')", 4, ["ulysses", "ring", "hybrid of 4"]),
        ("context=dict(size=8, impl='ulysses')", 8, ["ulysses", "ring"]),
        ("context=dict(size=16, impl='ring')", 0, ["ring", "ulysses", "hybrid of 8"]),
        (
            "context=dict(size=16, impl='hybrid', ulysses_size=2)",
            4,
            ["hybrid of 2", "ring", "ulysses", "hybrid of 8", "hybrid of 4"],
        ),
        ("context=dict(size=4, impl='ring'), tensor=dict(size=4, mode='1d')", 8, ["ring", "ulysses", "hybrid of 2"]),
        ("tensor=dict(size=4, mode='sequence')", 2, ["ring", "ulysses"]),
        ("tensor=dict(size=4, mode='1d')", 8, []),
    ],
)
def test_forms_of_context_parallelism(parallel: str, per_node: int, forms: list[str]) -> None:
    """The given form is first. At most 8 of 8 or 16 ranks exchange 24 key heads, and 2 of 4 beside tensor ranks."""
    spec = job_of(f"parallel = dict({parallel})\n", 16).spec
    heads = heads_of(spec.model)
    found = context_forms(spec.parallel.tensor, spec.parallel.context, heads, per_node)
    assert list(found) == forms
    for name, sections in found.items():
        cuboid = cuboid_of(*sections, heads)
        assert name == {1: "ring", cuboid.context: "ulysses"}.get(cuboid.ulysses, f"hybrid of {cuboid.ulysses}")
    if found:
        assert found[forms[0]] == (spec.parallel.tensor, spec.parallel.context)
