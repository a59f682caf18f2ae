"""Small worlds: every axis keeps at least two ranks; if all do not fit together, pairs meet."""

from __future__ import annotations

from itertools import combinations

import pytest

from dslpar.parity.small_mesh import Axes, TooFewRanksError, axes_of, parallel_of, small_worlds
from tests.support.layout_factors import PLAIN, job_of


def axes(**sizes: int) -> Axes:
    powers = {"q": 2} if "q" in sizes else {}
    return Axes(sizes, {name: powers.get(name, 1) for name in sizes})


@pytest.mark.parametrize(
    ("given", "ranks", "chosen"),
    [
        (axes(pipe=4, data=16, y=8), 8, {"pipe": 2, "data": 2, "y": 2}),
        (axes(pipe=1, data=16, y=8), 8, {"pipe": 1, "data": 3, "y": 2}),
        (axes(pipe=8, data=1, y=2), 8, {"pipe": 3, "data": 1, "y": 2}),
        (axes(pipe=4, data=4, y=4), 24, {"pipe": 4, "data": 3, "y": 2}),
        (axes(pipe=1, data=2, q=4), 8, {"pipe": 1, "data": 2, "q": 2}),
        (axes(pipe=1, data=1), 8, {"pipe": 1, "data": 1}),
    ],
)
def test_sizes_differ_where_ranks_allow_it_and_are_the_smallest(
    given: Axes, ranks: int, chosen: dict[str, int]
) -> None:
    worlds = small_worlds(given, ranks)
    assert [sorted(each.values()) for each in worlds.worlds] == [sorted(chosen.values())]
    assert not worlds.apart
    for name, size in worlds.worlds[0].items():
        assert 1 <= size <= given.sizes[name]
        assert (size == 1) == (given.sizes[name] == 1)


def test_a_ring_has_three_ranks_where_it_can_and_a_hybrid_keeps_both_of_its_ways() -> None:
    ring = Axes({"pipe": 1, "data": 2, "context": 8}, {"pipe": 1, "data": 1, "context": 1}, ring="context")
    assert small_worlds(ring, 8).worlds[0] == {"pipe": 1, "data": 2, "context": 3}
    assert small_worlds(ring, 4).worlds[0] == {"pipe": 1, "data": 2, "context": 2}
    assert small_worlds(ring._replace(hybrid=True), 8).worlds[0] == {"pipe": 1, "data": 2, "context": 4}
    with pytest.raises(TooFewRanksError, match="needs 4 ranks"):
        small_worlds(ring._replace(hybrid=True), 2)


def test_axes_that_do_not_fit_together_meet_in_pairs() -> None:
    given = axes(pipe=4, data=4, y=4, context=4)
    worlds = small_worlds(given, 8)
    assert worlds.ranks_needed == 16
    met = {pair for world in worlds.worlds for pair in combinations([n for n, s in world.items() if s > 1], 2)}
    assert met == set(combinations(given.used, 2))
    assert all(given.world(world) <= 8 for world in worlds.worlds)


@pytest.mark.parametrize(
    ("given", "ranks", "needed"), [(axes(pipe=1, data=2), 1, 2), (axes(pipe=1, data=1, q=4), 3, 4)]
)
def test_an_axis_that_fits_nowhere_is_an_error(given: Axes, ranks: int, needed: int) -> None:
    """Otherwise the axis would not run, and no difference would be seen."""
    with pytest.raises(TooFewRanksError, match=f"needs {needed} ranks"):
        small_worlds(given, ranks)


def test_pairs_that_fit_nowhere_are_named() -> None:
    worlds = small_worlds(Axes({"pipe": 2, "data": 1, "q": 2}, {"pipe": 1, "data": 1, "q": 3}), 8)
    assert worlds.apart == (("pipe", "q"),)
    assert {max(world.values()) for world in worlds.worlds} == {2}


def test_axes_divide_where_the_model_keeps_its_sizes() -> None:
    assert small_worlds(axes(pipe=1, data=1, y=4), 8, divide=True).worlds[0]["y"] == 2
    assert small_worlds(axes(pipe=2, data=1, y=4), 8, divide=True).worlds[0]["y"] == 4
    assert small_worlds(axes(pipe=1, data=1, y=5), 8, divide=True).worlds[0]["y"] == 5


@pytest.mark.parametrize("mode", ["1d 2", "2d 4", "2.5d 8", "3d 8", "cuboid 2 3 1", "ring 2"])
def test_sections_of_sizes_make_these_axes(mode: str) -> None:
    job = job_of(dict(PLAIN, mode=mode, pipe=2))
    assert job is not None
    given = axes_of(job.spec, job.mesh)
    spec = parallel_of(job.spec, given.sizes, None)
    assert spec.parallel.tensor is not None
    assert spec.parallel.tensor.size == job.mesh.tensor.size
    alone = parallel_of(job.spec, {**given.sizes, **dict.fromkeys(set(given.sizes) - {"data"}, 1)}, None)
    assert (alone.parallel.tensor, alone.parallel.pipeline) == (None, None)
