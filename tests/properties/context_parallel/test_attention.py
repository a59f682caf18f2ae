"""Attention over sharded sequences: output and every gradient equal one process, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Attention, Rotary, initialize, normal, placement
from dslpar.layers.parameter import gather
from dslpar.layout.divisors import head_ranks
from tests.properties.context_parallel.table import (
    CASES,
    HEADS,
    HIDDEN,
    IMPLS,
    SAMPLES,
    TOKENS,
    Case,
    cuboid,
    worlds,
)
from tests.support.ranks import on_ranks

TOLERANCE = 1e-12
"""Relative to max|b|: sums of some hundred terms, each rounded by 1e-16."""
WINDOW = 7
SHAPE = (SAMPLES, TOKENS, HIDDEN)


def attention(groups: Groups, case: Case) -> Attention:
    layer = Attention(
        groups,
        HIDDEN,
        HEADS,
        num_kv_heads=HEADS // case.kv_groups,
        causal=case.mask != "full",
        window=WINDOW if case.mask == "window" else None,
        rotary=Rotary(),
        init=normal(0.3),
        init_out=normal(0.3),
    ).double()
    initialize(layer, groups, seed=3)
    return layer


def mask_of(case: Case) -> Tensor | None:
    """Return a mask per sample: documents of several lengths with padding behind, or padding before all tokens."""
    place, sample = torch.arange(TOKENS), torch.arange(SAMPLES)[:, None]
    if case.mask == "packed":
        documents = 1 + (place + 5 * sample) // 11
        return torch.where(place < TOKENS - 3 * sample, documents, 0).int()
    return place >= 4 * sample if case.mask == "padded" else None


def numbers(seed: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def found(groups: Groups, case: Case) -> dict[str, Tensor]:
    """Return full output and gradients."""
    layer, at = attention(groups, case), placement.residual(groups.tensor, *SHAPE)
    x = at.cut(numbers(1), groups.coord).requires_grad_()
    y = layer(x, mask=mask_of(case))
    y.backward(at.cut(numbers(2), groups.coord))
    assert x.grad is not None
    of_layer = {name: gather(p.grad, p.placement, groups) for name, p in layer.named_parameters()}
    return {"output": gather(y.detach(), at, groups), "input": gather(x.grad, at, groups)} | of_layer


def deviations(beside: str, size: int, whole: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Return the largest deviation of any tensor, by case."""
    groups = {impl: Groups(Mesh(tensor=cuboid(beside, size, impl))) for impl in IMPLS}
    worst = {}
    for name, case in CASES.items():
        if HEADS // case.kv_groups % head_ranks(groups[case.impl].tensor):
            continue  # TEN206: heads do not divide
        own, reference = found(groups[case.impl], case), whole[name]
        worst[name] = max(
            ((own[key] - value).abs().max() / value.abs().max()).item() for key, value in reference.items()
        )
    return worst


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Tensor]]:
    """Return the results of one process; the implementation does not matter there."""
    by_kind = {(case.mask, case.kv_groups): found(Groups(Mesh()), case) for case in CASES.values()}
    return {name: by_kind[case.mask, case.kv_groups] for name, case in CASES.items()}


@pytest.mark.prove  # `make test` has layouts with a context: tests/properties/layouts, tests/distributed/layers
@pytest.mark.minutes(8)
@pytest.mark.parametrize("world", worlds())
def test_attention_is_that_of_one_process(world: str, whole: dict[str, dict[str, Tensor]]) -> None:
    beside, size = worlds()[world]
    ranks = cuboid(beside, size, "ring").size
    for off in on_ranks(ranks, deviations, beside, size, whole):
        assert len(off) >= 30, "cases that do not divide are few"
        assert not {name: value for name, value in off.items() if not value <= TOLERANCE}
