"""The load-balancing loss over ranks: against transformers' formula on all tokens, in fp64, with its gradient.

Sums over ranks in another order differ by some units in the last place: 1e-12 relative, as for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.layers.balance_loss import balance_loss, router_sums
from tests.support.maths_mutants import Mutant
from tests.support.ranks import on_ranks

EXPERTS, TOP_K, LAYERS, TOKENS = 5, 2, 3, 24
CLOSE = 1e-12


class Given(NamedTuple):
    """Router logits of all layers and tokens [LAYERS, TOKENS, EXPERTS], and which tokens count."""

    logits: Tensor
    counted: Tensor


def given() -> Given:
    """Return uneven logits: ranks, layers and tokens prefer different experts."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(LAYERS, TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    preferred = torch.arange(TOKENS) * EXPERTS // TOKENS
    logits[0] += 2 * torch.nn.functional.one_hot(preferred, EXPERTS)
    return Given(logits, torch.rand(TOKENS, generator=generator) > 0.3)


def dense(logits: Tensor, counted: Tensor) -> Tensor:
    """Return the loss as transformers defines it, on concatenated logits."""
    rows = logits[:, counted].softmax(-1).flatten(0, 1)
    chosen = torch.zeros_like(rows).scatter(-1, rows.topk(TOP_K, -1).indices, 1.0)
    return EXPERTS * (chosen.mean(0) * rows.mean(0)).sum()


def of_ranks(mesh: Mesh, change: Callable[[], None]) -> tuple[float, Tensor]:
    """Return the loss and its gradient as DeepSpeed averages them, if each rank has other tokens.

    `change` is called first on each rank.
    """

    def rank() -> tuple[float, Tensor]:
        change()
        groups, (logits, counted) = Groups(mesh), given()
        own = slice(groups.rank * TOKENS // mesh.world_size, (groups.rank + 1) * TOKENS // mesh.world_size)
        leaf = logits[:, own].clone().requires_grad_()
        sums = torch.zeros(2, EXPERTS, dtype=torch.float64)
        for of_layer in leaf:
            sums = sums + router_sums(of_layer, TOP_K, counted[own])
        loss = balance_loss(groups, sums, TOP_K)
        loss.backward()
        assert leaf.grad is not None
        return loss.item(), leaf.grad

    found = on_ranks(mesh.world_size, rank)
    return sum(loss for loss, _ in found) / len(found), torch.cat([each for _, each in found], 1) / mesh.data


def off(mesh: Mesh, change: Callable[[], None] = lambda: None) -> float:
    """Return the larger relative error of the loss and of its gradient."""
    logits, counted = given()
    logits.requires_grad_()
    true = dense(logits, counted)
    true.backward()
    assert logits.grad is not None
    loss, gradient = of_ranks(mesh, change)
    largest = float(logits.grad.abs().max())
    return max(abs(loss - true.item()) / true.item(), float((gradient - logits.grad).abs().max()) / largest)


MESHES = {
    "one": Mesh(),
    "data 2": Mesh(data=2),
    "tensor 2": Mesh(tensor=TensorMesh(y=2, mode="1d")),
    "data 2, tensor 2": Mesh(data=2, tensor=TensorMesh(y=2, mode="1d")),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_of_all_ranks_is_that_of_all_tokens(mesh: str) -> None:
    assert off(MESHES[mesh]) < CLOSE


MODULE = "dslpar.layers.balance_loss"
MISTAKES = [
    (
        "choices-of-one-data-rank",
        "balance_loss",
        "choices = collectives.all_reduce(choices.detach(), data)",
        "choices = choices.detach()",
    ),
    ("share-not-scaled", "balance_loss", "* (len(choices) * data.size)", "* len(choices)"),
    (
        "sums-of-one-tensor-rank",
        "balance_loss",
        'collectives.reduce_from_group(sums, groups.axis("tensor")).unbind()',
        "sums.unbind()",
    ),
    ("k-counted-as-one", "balance_loss", "(choices.sum() / top_k)", "choices.sum()"),
    ("padding-counted", "router_sums", "excluded = (counted == 0).unsqueeze(-1)", "excluded = torch.tensor(False)"),
]


@pytest.mark.parametrize(("name", "function", "old", "new"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_far_from_it(name: str, function: str, old: str, new: str) -> None:
    mutant = Mutant(name, "reduction", MODULE, function, old, new, name)
    assert off(MESHES["data 2, tensor 2"], mutant.apply) > 1e-3


def test_a_mean_over_layers_is_another_number() -> None:
    """The dense formula itself tells a loss per layer apart."""
    logits, counted = given()
    by_layer = torch.stack([dense(each[None], counted) for each in logits]).mean()
    assert abs(by_layer - dense(logits, counted)) > 1e-2


def test_no_counted_token_is_no_loss() -> None:
    """transformers divides by 0."""
    logits = given().logits[0].requires_grad_()
    loss = balance_loss(Groups(Mesh()), router_sums(logits, TOP_K, torch.zeros(TOKENS)), TOP_K)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_sums_are_float32_or_wider_and_choose_by_rounded_probabilities() -> None:
    """In bf16 transformers chooses by bf16 probabilities, of which more are equal, and sums in float32."""
    logits = given().logits[0].bfloat16()
    sums = router_sums(logits, TOP_K)
    assert sums.dtype is torch.float32
    rounded = logits.softmax(-1)
    chosen = torch.zeros(TOKENS, EXPERTS).scatter(-1, rounded.topk(TOP_K, -1).indices, 1.0)
    assert torch.equal(sums, torch.stack([chosen.sum(0), rounded.float().sum(0)]))
