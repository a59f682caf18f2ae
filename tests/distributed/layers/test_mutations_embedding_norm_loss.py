"""The comparison with dense norms, tables, heads, losses and conversions can fail, by a wide margin.

As in test_mutations.py, thresholds are far above the proof's tolerance (1e-12) and below the measured values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslpar.core import mesh
from dslpar.core.mesh import TensorMesh
from dslpar.distributed.collectives import Axis
from dslpar.layers import activation_sharding, embedding, loss, norm, placement
from tests.distributed.layers.cases import errors
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

FEATURES = TensorMesh(z=2, mode="cuboid")
TWICE = TensorMesh(y=2, z=2, mode="cuboid", residual="hidden")
"""Features of the residual are sharded over z, then over y."""


def gathered_slowest_first() -> None:
    def unshard(groups: Any, x: Any, dims: tuple[tuple[str, ...], ...]) -> Any:
        return original_unshard(groups, x, tuple(letters[::-1] for letters in dims))

    original_unshard, activation_sharding.unshard = activation_sharding.unshard, unshard


def sharded_fastest_first() -> None:
    def residual_cuts(tensor: mesh.TensorMesh) -> placement.ActivationSharding:
        right = placement.residual_cuts(tensor)
        return right._replace(features=right.features[::-1])

    activation_sharding.residual_cuts = residual_cuts


def statistics_keep_their_gradient() -> None:
    """The backward of a norm sums over this rank's features alone."""
    original_through = norm._statistics_backward
    norm._statistics_backward = lambda grad, normed, _, **how: original_through(grad, normed, Axis(), **how)


def padding_learns() -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.padding = -1
        return original_backward(ctx, *grads)

    original_backward, embedding._Lookup.backward = embedding._Lookup.backward, backward


def smoothing_is_not_differentiated() -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.even = 0.0
        return original_backward(ctx, *grads)

    original_backward, loss._TokenLosses.backward = loss._TokenLosses.backward, backward


def bias_of_the_head_is_not_summed() -> None:
    def logit_vector(*args: Any) -> placement.Placement:
        return replace(original_logit_vector(*args), partial=())

    original_logit_vector, placement.logit_vector = placement.logit_vector, logit_vector


MUTATIONS = (
    (gathered_slowest_first, TWICE, "conversions"),
    (sharded_fastest_first, TWICE, "conversions"),
    (statistics_keep_their_gradient, FEATURES, "norm"),
    (statistics_keep_their_gradient, FEATURES, "rms_norm"),
    (padding_learns, LAYOUTS["1d-2"], "embedding_with_padding"),
    (smoothing_is_not_differentiated, LAYOUTS["1d-2"], "losses_smoothed"),
    (bias_of_the_head_is_not_summed, LAYOUTS["2d-4"], "head_with_bias"),
)


def mutated(mutate: Any, tensor: TensorMesh, case: str) -> dict[str, float]:
    mutate()
    try:
        return errors(tensor, case)
    except AssertionError as error:  # different copies are a detection, too
        return {str(error): float("inf")}


@pytest.mark.parametrize(("mutate", "tensor", "case"), MUTATIONS)
def test_a_mutation_is_detected(mutate: Any, tensor: TensorMesh, case: str) -> None:
    assert max(max(found.values()) for found in on_ranks(tensor.size, mutated, mutate, tensor, case)) > 1e-3
