"""Explain a difference: find the first wrong parameter and a correction that makes its gradient right.

    difference = explain(reference, ranks, mesh)
    difference.parameter, difference.ratio, difference.axis, difference.guess

A backward goes from the loss to the inputs, so the wrong gradient nearest to the loss is nearest to the mistake. Each
rank holds a piece of that gradient. Typical mistakes are undone on the pieces, one at a time: a missing or repeated sum
or mean over an axis, or pieces in another order. The correction that makes the gradient right, within rounding, shows
the mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.core.mesh import TENSOR_AXES, Mesh
from dslpar.parity.checks import tensors
from dslpar.parity.layout_ranks import RankResult
from dslpar.parity.one_process import FLOOR, Reference
from dslpar.parity.whole import Pieces

MATCHES = 1e-4
"""Largest relative difference at which a corrected gradient counts as right: a thousand roundings of float32. With a
wrong correction the difference is some tenths.
"""
_WHOLE = 1e-3
_LARGEST_RATIO = 64


class FirstDifference(NamedTuple):
    """The first parameter with a wrong gradient, or else with a wrong weight."""

    parameter: str
    """The parameter's global name; empty if only a loss or a norm is wrong."""
    ratio: float | None
    """Ratio of the gradient's norm to the true norm, if it is n or 1/n for a whole number n above 1; else None."""
    axis: str | None
    """The axis of the layout along which the gradient goes wrong; for several: 'y and data'."""
    guess: str
    """A description of the likely mistake."""


class _Hypothesis(NamedTuple):
    """A possible mistake, and the pieces after it is undone."""

    axis: str
    says: str
    """The mistake in words."""
    pieces: Mapping[int, Tensor]
    """The corrected pieces, by rank."""


def explain(reference: Reference, ranks: Sequence[RankResult], mesh: Mesh) -> FirstDifference | None:
    """Return the first difference between the ranks' results and the reference; None: gradients and weights agree."""
    gradients = Pieces(mesh, [each.gradients for each in ranks])
    off = _off(gradients, reference.curve.gradients, reference.gradient_bounds, reference.order)
    if off:
        name = off[0]
        if name not in gradients.names or name not in reference.curve.gradients:
            where = "only under the layout" if name in gradients.names else "only on one process"
            return FirstDifference(name, None, None, f"{name} has a gradient {where}")
        if lacking := gradients.lacking(name):
            ranks_without = ", ".join(map(str, lacking))
            return FirstDifference(name, None, None, f"{name} has no gradient on ranks {ranks_without}")
        return explain_gradient(name, gradients, reference.curve.gradients[name])
    if (found := _unequal(gradients, reference.order, "copies of its gradient differ")) is not None:
        return found
    weights = Pieces(mesh, [each.weights for each in ranks])
    off = _off(weights, reference.curve.weights, reference.weight_bounds, reference.order)
    if off:
        says = "gradients of the first step are right, and weights after the last are not: look at clipping, the"
        return FirstDifference(off[0], None, None, f"{says} learning rate, the optimizer and its state")
    return _unequal(weights, reference.order, "copies of the weight drift apart")


def _unequal(pieces: Pieces, order: Sequence[str], says: str) -> FirstDifference | None:
    """Return the first parameter, in backward order, whose copies differ by more than allowed."""
    place = {name: at for at, name in enumerate(order)}
    found = [each for each in pieces.unequal_copies() if each.off > FLOOR or not each.tied]
    if not found:
        return None
    first = max(found, key=lambda each: place.get(each.name, -1))
    axis = _axis_between(pieces.mesh, *first.ranks)
    return FirstDifference(first.name, None, axis, f"{says} along {axis or 'no one axis'}")


def _off(
    pieces: Pieces, true: Mapping[str, Tensor], bounds: Mapping[str, float | Tensor], order: Sequence[str]
) -> list[str]:
    """Return the names of wrong tensors, in backward order."""
    found = tensors(pieces, true, bounds)
    wrong = {name for name, each in found.items() if not each.off <= each.bound}
    place = {name: at for at, name in enumerate(order)}
    return sorted(wrong, key=lambda name: -place.get(name, len(place)))


def explain_gradient(name: str, gradients: Pieces, true: Tensor, matches: float = MATCHES) -> FirstDifference:
    """Explain a wrong gradient by a correction that makes it right.

    matches: the largest relative difference that counts as right. It must be larger than the gradient's rounding error.
    """
    found = gradients.whole(name)
    ratio = _ratio(found, true, max(_WHOLE, matches))
    for each in _hypotheses(name, gradients):
        if _matches(gradients.whole(name, each.pieces), true, matches):
            return FirstDifference(name, ratio, each.axis, f"{name}: {each.says}")
    if not bool(torch.isfinite(found).all()):
        return FirstDifference(name, None, None, f"the gradient of {name} is not finite")
    if not bool(found.any()):
        return FirstDifference(name, None, None, f"the gradient of {name} is zero")
    if ratio is not None:
        return FirstDifference(name, ratio, None, f"the gradient of {name} is {_times(ratio)} what it should be")
    return FirstDifference(name, None, None, f"the gradient of {name} is wrong, and no single sum or order explains it")


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 1 else f"1/{1 / ratio:.0f} of"


def _ratio(found: Tensor, true: Tensor, near: float) -> float | None:
    """Return n or 1/n if the ratio of norms is near it, for a whole number n above 1; else None."""
    norm, wanted = float(found.double().norm()), float(true.norm())
    if not (norm > 0 and wanted > 0):
        return None
    ratio = norm / wanted
    for value in (ratio, 1 / ratio):
        nearest = round(value)
        if 2 <= nearest <= _LARGEST_RATIO and abs(value - nearest) < near * nearest:
            return float(nearest) if value == ratio else 1.0 / nearest
    return None


def _matches(found: Tensor, true: Tensor, matches: float) -> bool:
    if found.shape != true.shape:
        return False
    return bool((found.double() - true).abs().max() <= matches * true.abs().max())


# ---- hypotheses ----


def _hypotheses(name: str, gradients: Pieces) -> Iterator[_Hypothesis]:
    """Yield possible corrections, simplest first."""
    pieces, mesh = gradients.pieces(name), gradients.mesh
    axes = [axis for axis in ("data", *TENSOR_AXES, "pipe") if mesh.sizes[axis] > 1]
    sets = [(axis,) for axis in axes] + list(combinations(axes, 2))
    for names in sets:
        peers = {rank: [each for each in mesh.peers(rank, *names) if each in pieces] for rank in pieces}
        if max(map(len, peers.values())) == 1:
            continue
        axis = " and ".join(names)
        sums = {rank: _sum(pieces, of) for rank, of in peers.items()}
        yield _Hypothesis(axis, f"its gradient is not summed over {axis}", sums)
        means = {rank: sums[rank] / len(of) for rank, of in peers.items()}
        yield _Hypothesis(axis, f"its gradient is not averaged over {axis}", means)
    for names in sets:
        size, axis = mesh.size(*names), " and ".join(names)
        smaller = {rank: piece / size for rank, piece in pieces.items()}
        yield _Hypothesis(
            axis, f"its gradient is summed over {axis} once more than it should be ({size} times)", smaller
        )
        larger = {rank: piece * size for rank, piece in pieces.items()}
        yield _Hypothesis(axis, f"its gradient is divided by the {size} ranks of {axis} once too often", larger)
    yield from _orders(name, gradients)


def _sum(pieces: Mapping[int, Tensor], ranks: Sequence[int]) -> Tensor:
    return torch.stack([pieces[rank].double() for rank in ranks]).sum(0)


def _orders(name: str, gradients: Pieces) -> Iterator[_Hypothesis]:
    """Yield other orders of the pieces: shifted along an axis, or with two axes exchanged that shard the same dim."""
    placement, pieces, mesh = gradients.placement(name), gradients.pieces(name), gradients.mesh
    if placement is None:
        return
    for letters in placement.cuts:
        used = [letter for letter in letters if mesh.sizes[letter] > 1]
        for axis in used:
            size = mesh.sizes[axis]
            for shift in range(1, size):
                moved = _moved(pieces, mesh, lambda coord, a=axis, n=size, k=shift: {a: (coord[a] + k) % n})
                yield _Hypothesis(axis, f"its shards are in the wrong order along {axis}", moved)
        for one, other in combinations(used, 2):
            moved = _moved(pieces, mesh, lambda coord, a=one, b=other: _exchanged(coord, mesh, a, b))
            says = f"its dim is sharded over {other} and then {one}, which should be the other way round"
            yield _Hypothesis(f"{one} and {other}", says, moved)


def _moved(pieces: Mapping[int, Tensor], mesh: Mesh, source: object) -> dict[int, Tensor]:
    """Return for each rank the piece of the rank at the coordinates that `source` returns."""
    assert callable(source)
    return {rank: pieces[mesh.rank({**mesh.coord(rank), **source(mesh.coord(rank))})] for rank in pieces}


def _exchanged(coord: Mapping[str, int], mesh: Mesh, one: str, other: str) -> dict[str, int]:
    place = coord[one] * mesh.sizes[other] + coord[other]
    return {one: place % mesh.sizes[one], other: place // mesh.sizes[one]}


def _axis_between(mesh: Mesh, first: int, second: int) -> str | None:
    one, other = mesh.coord(first), mesh.coord(second)
    return " and ".join(axis for axis in one if one[axis] != other[axis]) or None
