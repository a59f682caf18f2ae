"""Mixtures of experts: traffic, experts that get no token, and transformers' fused products."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import gather, initialize, placement
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.traffic_counter import counting
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from dslpar.policies.apply import Setting, apply
from dslpar.policies.weights import load
from dslpar.schema.policy import Policy

BATCH, SEQUENCE, HIDDEN = 4, 8, 16
POLICY = Policy(blocks=(), regions={}, outward=(), experts=("mlp.experts",), routers=("mlp.gate",))


def whole(implementation: str, num_experts: int = 8) -> nn.Module:
    """Return a mixture of transformers, unchanged."""
    config = transformers.MixtralConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=num_experts)
    config._experts_implementation = implementation
    torch.manual_seed(4)
    mixture = MixtralSparseMoeBlock(config)
    for p in mixture.parameters():
        nn.init.normal_(p, std=0.3)
    return mixture


def part_of(mixture: nn.Module, groups: Groups) -> nn.Module:
    """Return this rank's part of it, with its weights."""
    config: Any = transformers.MixtralConfig()
    weights = {f"mlp.{name}": p.detach() for name, p in mixture.named_parameters()}
    part = apply(copy.deepcopy(mixture), "mlp", Setting(groups, POLICY, HIDDEN, config))
    load(part, weights.__getitem__, groups)
    return part


def residual(groups: Groups) -> torch.Tensor:
    """Return this rank's piece of a residual, equal in all runs."""
    full = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(6))
    return placement.residual(groups.tensor, *full.shape).cut(full, groups.coord).requires_grad_()


@pytest.mark.parametrize(("layout", "size"), [("1d-2", 2), ("1d-sequence-4", 4), ("2d-4", 4), ("3d-8", 8)])
def test_a_mixture_sends_its_tokens_twice_each_way(layout: str, size: int) -> None:
    """The count is that of its docstring, and the router's gradient."""

    def rank() -> Fraction:
        groups = Groups(Mesh(tensor=LAYOUTS[layout]))
        part, x = part_of(whole("eager"), groups), residual(groups)
        with counting(groups) as sent:
            part(x).sum().backward()
        return Fraction(sum(sent.elements.values()))

    router = 8 * HIDDEN
    expected = Fraction(size - 1, size) * (4 * BATCH * SEQUENCE * HIDDEN + 2 * router)
    assert on_ranks(size, rank) == [expected] * size


def _whole_results(groups: Groups, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output and all gradients of a loss, of a mixture of six experts."""
    part, x = part_of(whole(implementation, num_experts=6), groups), residual(groups)
    y = part(x)
    y.square().sum().backward()
    at = placement.residual(groups.tensor, BATCH, SEQUENCE, HIDDEN)
    assert all(p.grad is not None for p in part.parameters())
    assert x.grad is not None
    if groups.tensor.zero_over_d:  # ZeRO does this
        for p in part.parameters():
            p.grad = collectives.all_reduce(p.grad, groups.axis("d"))  # type: ignore[arg-type]
    gradients = {name: gather(p.grad, p.placement, groups) for name, p in part.named_parameters()}  # type: ignore[attr-defined, arg-type]
    return gather(y, at, groups), gradients | {"x": gather(x.grad, at, groups)}


def _is_the_whole_mixture(tensor: TensorMesh, implementation: str) -> None:
    mixture = whole("eager", num_experts=6)
    x = residual(Groups(Mesh()))
    plain = mixture(x)
    plain.square().sum().backward()
    for y, gradients in on_ranks(tensor.size, lambda: _whole_results(Groups(Mesh(tensor=tensor)), implementation)):
        torch.testing.assert_close(y, plain.detach(), rtol=1e-5, atol=1e-5)
        for name, p in [*mixture.named_parameters(), ("x", x)]:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_products_of_transformers_skip_experts_of_other_ranks(implementation: str) -> None:
    """Compared in float32 with the plain loop on one rank; with 6 experts on 4 ranks the last rank has none."""
    _is_the_whole_mixture(LAYOUTS["2d-4"], implementation)


@pytest.mark.parametrize("layout", ["ring-2", "2.5d-8-depth-2"])
def test_ranks_of_d_have_equal_experts_where_zero_shards_over_d(layout: str) -> None:
    _is_the_whole_mixture(replace(LAYOUTS[layout], zero_over_d=True), "eager")


@pytest.mark.parametrize(
    ("layout", "implementation"),
    sampled(
        product(["1d-4", "2d-4", "ring-2", "3d-8"], ["eager", "grouped_mm", "batched_mm"]),
        {("1d-4", "eager"), ("2d-4", "grouped_mm"), ("ring-2", "batched_mm")},
    ),
)
def test_tokens_that_are_exchanged_give_the_same_mixture(layout: str, implementation: str) -> None:
    _is_the_whole_mixture(replace(LAYOUTS[layout], exchanges_tokens=True), implementation)


class _Returns(nn.Module):
    """A mixture that also returns its router's scores, as GPT-OSS's."""

    def __init__(self) -> None:
        super().__init__()
        of = whole("eager")
        self.gate, self.experts = of.gate, of.experts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, index = self.gate(tokens)
        return self.experts(tokens, index, weights).view(x.shape), weights


@pytest.mark.parametrize("exchanges_tokens", [False, True])
def test_what_a_mixture_returns_beside_the_residual_is_left_out(exchanges_tokens: bool) -> None:
    """It is of other tokens than the rank's, so code that reads it must fail."""
    groups = Groups(Mesh(tensor=TensorMesh(exchanges_tokens=exchanges_tokens)))
    y, scores = part_of(_Returns(), groups)(residual(groups))
    torch.testing.assert_close(y, whole("eager")(residual(groups)))
    assert scores is None


def test_experts_outside_transformers_interface_are_refused() -> None:
    mixture = whole("eager")
    del mixture.experts._is_expert_parallel
    with pytest.raises(DslparError, match=r"TEN234 .*mlp\.experts of MixtralExperts does not run its experts through"):
        part_of(mixture, Groups(Mesh()))


def test_parameters_that_are_not_one_per_expert_are_refused() -> None:
    mixture = whole("eager")
    mixture.experts.scale = nn.Parameter(torch.ones(3))
    message = r"TEN234 .*: the first dim of {'scale': \(3,\)} is not the number of experts, 8"
    with pytest.raises(DslparError, match=message):
        part_of(mixture, Groups(Mesh()))


def test_places_without_an_expert_are_zeros() -> None:
    """With 6 experts on 4 ranks, each rank has two places, and the last rank has no expert for them."""
    held = []
    for rank in range(4):
        groups = Groups.without_processes(Mesh(tensor=LAYOUTS["1d-4"]), rank=rank)
        part = part_of(whole("eager", num_experts=6), groups)
        initialize(part, groups, seed=1, keep=False)
        held.append(part.get_parameter("experts.down_proj"))
    assert [len(p) for p in held] == [2] * 4
    assert held[3].eq(0).all()
