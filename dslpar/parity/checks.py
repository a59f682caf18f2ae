"""Compare a layout's run with one process: losses, norms, learning rates, gradients, weights and copies.

checks = compare(reference, ranks, mesh)
[each for each in checks if not each.holds]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.core.mesh import Mesh
from dslpar.parity.layout_ranks import RankResult
from dslpar.parity.one_process import FLOOR, Reference, finite
from dslpar.parity.whole import Pieces

TRANSFORMERS_BOUND = 1e-10
"""Relative bound against transformers. Both sides compute in float64, which rounds by 1e-16. Rounding errors add up
over sums of some hundred terms and over some blocks.
"""


class Check(NamedTuple):
    """The worst deviation of one kind of number."""

    name: str
    """'loss', 'norm', 'gradients', 'weights', 'lr', 'copies', or 'transformers'."""
    worst: float
    """Relative deviation; for a tensor, relative to its largest element. NaN counts as infinite."""
    bound: float
    """The deviation that rounding may cause."""
    at: str
    """Location: the step, the parameter, or the parameter and two ranks."""

    @property
    def holds(self) -> bool:
        """True if the deviation is within its bound."""
        return self.worst <= self.bound

    @property
    def excess(self) -> float:
        """The deviation in multiples of its bound; infinite if the bound is zero and the deviation is not."""
        if self.worst == 0:
            return 0.0
        return self.worst / self.bound if self.bound else math.inf


class Difference(NamedTuple):
    """Relative deviation of a tensor and its bound, both for the element that exceeds its own bound most."""

    off: float
    """The relative deviation."""
    bound: float
    """The relative deviation that rounding may cause."""

    @property
    def excess(self) -> float:
        """The deviation in multiples of its bound."""
        return self.off / self.bound if self.bound else (math.inf if self.off else 0.0)


def compare(reference: Reference, ranks: Sequence[RankResult], mesh: Mesh) -> list[Check]:
    """Return all checks of a layout's run against one process."""
    curve = reference.curve
    gradients, weights = (
        Pieces(mesh, [each.gradients for each in ranks]),
        Pieces(mesh, [each.weights for each in ranks]),
    )
    found = {
        "loss": _by_step([each.losses for each in ranks], curve.losses, reference.loss_bounds),
        "gradients": tensors(gradients, curve.gradients, reference.gradient_bounds),
        "lr": _by_step([each.lrs for each in ranks], curve.lrs, [FLOOR] * len(curve.lrs)),
        "norm": _by_step([each.norms for each in ranks], curve.norms, reference.norm_bounds),
        "weights": tensors(weights, curve.weights, reference.weight_bounds),
    }
    policy = worst_of_transformers(reference)
    checks = [worst_of(name, of) for name, of in found.items() if of]
    return [*checks, _copies(gradients, weights), *([policy] if policy is not None else [])]


def worst_of_transformers(reference: Reference) -> Check | None:
    """Return the deviation of one process from transformers' own forward; None: it was not compared."""
    off = reference.off_transformers
    found = {name: Difference(finite(value), TRANSFORMERS_BOUND) for name, value in off.items()}
    return worst_of("transformers", found) if found else None


def worst_of(name: str, found: Mapping[str, Difference]) -> Check:
    """Return the check for the difference that exceeds its bound most."""
    at = max(found, key=lambda key: found[key].excess)
    return Check(name, found[at].off, found[at].bound, at)


def _by_step(
    by_rank: Sequence[Sequence[float]], true: Sequence[float], bounds: Sequence[float]
) -> dict[str, Difference]:
    """Return the worst deviation of any rank from the one process, for one number per step."""
    found = {}
    for step, (value, bound) in enumerate(zip(true, bounds, strict=True)):
        off = max(finite(abs(values[step] - value) / max(abs(value), 1e-300)) for values in by_rank)
        found[f"step {step + 1}"] = Difference(off, bound)
    return found


def tensors(pieces: Pieces, true: Mapping[str, Tensor], bounds: Mapping[str, float | Tensor]) -> dict[str, Difference]:
    """Compare every tensor by name. The deviation is infinite if one side or some rank lacks the tensor."""
    missing = {*(set(true) ^ set(pieces.names)), *(name for name in pieces.names if pieces.lacking(name))}
    found = {
        name: _difference(pieces.whole(name), true[name], bounds[name]) for name in pieces.names if name not in missing
    }
    return found | {name: Difference(math.inf, FLOOR) for name in missing}


def _difference(found: Tensor, true: Tensor, bound: float | Tensor) -> Difference:
    if found.shape != true.shape:
        return Difference(math.inf, FLOOR)
    off = (found.double() - true).abs()
    if not bool(torch.isfinite(off).all()):
        return Difference(math.inf, FLOOR)
    limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(off)
    largest = float(true.abs().max())
    scale = largest or float(limit.max()) or 1.0  # a zero gradient is scaled by its bound
    at = int((off / limit.clamp(min=1e-300)).argmax())
    return Difference(float(off.flatten()[at]) / scale, float(limit.flatten()[at]) / scale)


def _copies(*pieces: Pieces) -> Check:
    """Return the worst deviation between copies. Copies must be bit-identical, but tied copies on two stages may
    differ by rounding.
    """
    worst = Check("copies", 0.0, 0.0, "")
    for each in (copies for held in pieces for copies in held.unequal_copies()):
        first, second = each.ranks
        check = Check(
            "copies", finite(each.off), FLOOR if each.tied else 0.0, f"{each.name}, ranks {first} and {second}"
        )
        if check.excess > worst.excess:
            worst = check
    return worst


def merged(checks: Iterable[Sequence[Check]]) -> list[Check]:
    """Return the worst check of each name over several lists of checks."""
    worst: dict[str, Check] = {}
    for each in (check for run in checks for check in run):
        if each.name not in worst or each.excess > worst[each.name].excess:
            worst[each.name] = each
    return list(worst.values())
