"""Tokens that go to their experts and come back: against a dense mixture in fp64, forward and every gradient.

A sum over experts or ranks in another order differs by some units in the last place, of sums of some hundred terms:
1e-12 relative, as for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import Mixture, gather, mixture, placement
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.token_exchange import EXPERT_AXES, TokenExchange
from tests.support import compare_dense
from tests.support.compare_dense import relative
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

HIDDEN, TOP_K = 8, 2
Choose = Callable[[Tensor, Tensor], Tensor]
"""Return the experts [n, k] of tokens [n, H], given their scores [n, E]."""


def by_score(x: Tensor, scores: Tensor) -> Tensor:
    return scores.topk(TOP_K).indices


def all_to_one(x: Tensor, scores: Tensor) -> Tensor:
    """Give every token the same expert, and another one by its sign."""
    other = (x[:, 0] > 0).long()
    return torch.stack([torch.full_like(other, scores.shape[1] - 1), other], 1)


def tensors(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Dense:
    """The mixture on one process."""

    def __init__(self, num_experts: int, shape: tuple[int, ...], choose: Choose) -> None:
        self.x = tensors(*shape, HIDDEN, seed=1).requires_grad_()
        self.router = tensors(num_experts, HIDDEN, seed=2).requires_grad_()
        self.weight = tensors(num_experts, HIDDEN, HIDDEN, seed=3).requires_grad_()
        self.pull = tensors(*shape, HIDDEN, seed=4)
        self.choose = choose

    def outputs(self) -> list[Tensor]:
        """Return y, and the gradients of x, of the router and of the experts, of the loss (y * pull).sum()."""
        tokens = self.x.view(-1, HIDDEN)
        index, weights = routed(tokens, self.router, self.choose)
        each = torch.einsum("nh,ehf->nef", tokens, self.weight).tanh()
        y = sum(weights[:, [c]] * each[torch.arange(len(tokens)), index[:, c]] for c in range(TOP_K))
        y = y.view(self.x.shape)  # type: ignore[union-attr]
        (y * self.pull).sum().backward()
        return [y.detach(), *(t.grad for t in (self.x, self.router, self.weight))]  # type: ignore[misc]


def routed(tokens: Tensor, router: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(tokens @ router.T, -1)
    index = choose(tokens, scores)
    return index, scores.gather(1, index)


def sharded(tensor: TensorMesh, data: int, num_experts: int, shape: tuple[int, ...], choose: Choose) -> list[Tensor]:
    """Return what `Dense.outputs` returns, computed by the ranks of a mesh."""
    groups, dense = Groups(Mesh(data=data, tensor=tensor)), Dense(num_experts, shape, choose)
    batch = slice(groups.coord["data"] * (n := shape[0] // data), (groups.coord["data"] + 1) * n)
    at = placement.residual(tensor, n, shape[1], HIDDEN)
    x, pull = (at.cut(full[batch].detach(), groups.coord) for full in (dense.x, dense.pull))
    x.requires_grad_()
    split, exchange = DistinctTokens(groups), TokenExchange(groups, num_experts)
    padded = torch.zeros(exchange.share * groups.axis("expert").size, HIDDEN, HIDDEN, dtype=torch.float64)
    padded[:num_experts] = dense.weight.detach()
    _, count = placement.piece(tensor, groups.coord, EXPERT_AXES)
    assert count == groups.axis("expert").size
    own = padded[exchange.first : exchange.first + exchange.share].clone().requires_grad_()

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([(part @ w).tanh() for part, w in zip(parts, own, strict=True)])

    tokens = split.take(x)
    y = split.give_back(exchange.run(tokens, *routed(tokens, dense.router, choose), experts), x.shape)
    (y * pull).sum().backward()
    assert x.grad is not None
    assert own.grad is not None
    assert dense.router.grad is not None
    every = groups.axis("pipe", "data", "tensor")
    weight = collectives.all_reduce(own.grad, groups.expert_data_axis)
    weight = collectives.all_gather(weight, groups.axis("expert"))[:num_experts]
    of_data = [collectives.all_gather(gather(each, at, groups), groups.axis("data")) for each in (y, x.grad)]
    return [*of_data, collectives.all_reduce(dense.router.grad, every), weight]


def check(tensor: TensorMesh, data: int, num_experts: int, shape: tuple[int, ...], choose: Choose) -> None:
    expected = Dense(num_experts, shape, choose).outputs()
    for found in on_ranks(data * tensor.size, sharded, tensor, data, num_experts, shape, choose):
        assert [each.shape for each in found] == [each.shape for each in expected]
        assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < 1e-12


@pytest.mark.parametrize(
    ("layout", "data", "e"),
    [
        ("1d-1", 2, 2),
        ("1d-1", 4, 2),
        ("1d-2", 2, 2),
        ("1d-4", 1, 1),
        ("1d-sequence-4", 1, 1),
        ("2d-4", 2, 2),
        ("3d-8", 1, 1),
        ("ring-2", 2, 2),
    ],
)
@pytest.mark.parametrize("choose", [by_score, all_to_one])
def test_a_mixture_on_many_ranks_is_the_dense_one(layout: str, data: int, e: int, choose: Choose) -> None:
    tensor = LAYOUTS[layout] if layout != "1d-1" else TensorMesh()
    check(replace(tensor, e=e, exchanges_tokens=True), data, 6, (4 * data, 8), choose)


@pytest.mark.parametrize(("layout", "shape"), [("1d-4", (1, 6)), ("cuboid-1-2-2-hidden", (1, 6)), ("1d-2", (1, 1))])
def test_tokens_that_do_not_divide_over_the_ranks(layout: str, shape: tuple[int, int]) -> None:
    """The last ranks have fewer tokens or none; with hidden, two axes cut the features."""
    hidden = TensorMesh(y=2, z=2, mode="cuboid", residual="hidden")
    tensor = hidden if layout == "cuboid-1-2-2-hidden" else LAYOUTS[layout]
    check(replace(tensor, exchanges_tokens=True, expert_chunks=2), 1, 6, shape, by_score)


@pytest.mark.parametrize("layout", ["1d-4", "2d-4"])
def test_no_router_sees_padding(layout: str) -> None:
    def rank() -> int:
        groups = Groups(Mesh(tensor=LAYOUTS[layout]))
        at = placement.residual(groups.tensor, 2, 3, HIDDEN)
        return len(DistinctTokens(groups).take(torch.ones(at.local_shape)))

    samples = 2 // LAYOUTS[layout].q
    assert sum(on_ranks(4, rank)) == 3 * samples * LAYOUTS[layout].q


# ---- the layer ----


def dense_mixture(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what `Mixture(activation="swiglu", top_k=2, shared_ffn_hidden_size=...)` computes."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities = torch.softmax(tokens @ p["router"].T, -1)
    weights, index = probabilities.topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("nh,efh->nef", tokens, p["up"]).chunk(2, -1)
    each = torch.einsum("nef,ehf->neh", functional.silu(gate) * up, p["down"])
    chosen = torch.zeros_like(probabilities).scatter(1, index, weights)
    y = torch.einsum("ne,neh->nh", chosen, each)
    gate, up = (tokens @ p["shared_expert.up.weight"].T).chunk(2, -1)
    return (y + (functional.silu(gate) * up) @ p["shared_expert.down.weight"].T).view(x.shape)


def errors_of_mixture(tensor: TensorMesh) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    options = {"num_experts": 6, "activation": "swiglu", "shared_ffn_hidden_size": compare_dense.FFN}
    layer = Mixture(groups, compare_dense.HIDDEN, 20, **options)
    at = compare_dense.residual(groups)
    return dict(compare_dense.compare(groups, layer, dense_mixture, at, at))


@pytest.mark.parametrize("layout", ["1d-4", "1d-sequence-2", "2d-4", "3d-8", "ring-2-zigzag"])
def test_a_mixture_equals_a_dense_one(layout: str) -> None:
    for found in on_ranks(LAYOUTS[layout].size, errors_of_mixture, LAYOUTS[layout]):
        assert found.keys() > {"output", "input gradient", "gradient of router", "gradient of up", "gradient of down"}
        assert max(found.values()) < 1e-12


def test_equal_experts_are_chosen_by_their_index() -> None:
    mixture = Mixture(Groups(Mesh()), 4, 8, num_experts=5, top_k=3)
    index, weights, *_ = mixture.route(torch.ones(2, 4), torch.zeros(5, 4))
    assert index.tolist() == [[0, 1, 2]] * 2
    assert weights.allclose(torch.full((2, 3), 1 / 3))


def test_a_grouped_product_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights = torch.randn(9, 16), torch.randn(3, 8, 16)
    counts = torch.tensor([4, 0, 5])
    loop = mixture.grouped_linear(rows, weights, counts)
    monkeypatch.setattr(mixture, "_has_grouped_product", lambda rows: True)
    torch.testing.assert_close(mixture.grouped_linear(rows, weights, counts), loop)


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (TensorMesh(), {"top_k": 7}, "top_k is 7, of 6 experts"),
        (TensorMesh(), {"top_k": 0}, "top_k is 0, of 6 experts"),
        (TensorMesh(), {"capacity_factor": 0.0}, r"capacity_factor is 0\.0"),
        (TensorMesh(), {"capacity_factor": float("inf")}, "capacity_factor is inf"),
        (replace(LAYOUTS["ring-2"], zero_over_d=True), {}, "ZeRO shards over the 2 ranks of axis d"),
    ],
)
def test_what_no_mixture_can_be_is_refused(tensor: TensorMesh, options: dict[str, Any], message: str) -> None:
    groups = Groups.without_processes(Mesh(tensor=tensor))
    with pytest.raises(DslparError, match=message):
        Mixture(groups, 8, 16, num_experts=6, **options)
