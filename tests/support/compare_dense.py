"""Run a layer on this rank's shards and its dense reference on full tensors, and return how far they are apart.

    def inward(groups: Groups) -> Found:
        layer = Linear(groups, HIDDEN, FFN, role="inward")
        yield from compare(groups, layer, dense.linear, residual(groups), inner(groups, FFN))

Every rank compares its shard of the output, of the input's gradient and of every parameter's gradient. Copies on
several ranks must be bitwise equal. `assert_copies_equal` checks that once for all cases, since a proof spends its time
on messages between ranks. The error is max|a - b| / max|b|, with a - b over the shard and b over the full tensor. All
values are float64 with sums of at most some hundred terms, so a correct layer is off by a few times 1e-16. TOLERANCE
leaves room for a longer path. A missing or doubled term is off by 1e-3 or more. The cases are in
`tests.distributed.layers.cases`.

A case serves twice. If its groups are `Training`, the layer takes STEPS optimizer steps in float32 and its reference
takes the same steps in float64, with other numbers in each step. Then outputs and weights are compared (`proven`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import all_gather
from dslpar.distributed.groups import Groups
from dslpar.layers import Init, Placement, initialize, placement
from tests.support import dense

TOLERANCE = 1e-12
STEPS = 3

BATCH, SEQUENCE, HIDDEN, HEADS, FFN, VOCAB = 12, 12, 48, 12, 72, 17
"""The layouts divide all sizes but the vocabulary, which nothing divides, so it is always padded. A head has 4
features, which makes two frequencies of rotary positions.
"""
QUERY_HEADS, KV_HEADS = 24, 12
"""Grouped-query attention: every axis that shards heads divides both."""

Errors = dict[str, float]
Found = Iterator[tuple[str, float]]


class Training(Groups):
    """This rank's groups in a run whose cases take optimizer steps before they compare."""

    def __init__(self, mesh: Mesh, optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        super().__init__(mesh)
        self.optimizer = optimizer


def tokens() -> tuple[Tensor, Tensor]:
    """Return ids and labels of one micro-batch, equal on all ranks. One sample has no counted label."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels[0] = labels[2, :5] = -100
    return ids, labels


def compare(
    groups: Groups, layer: nn.Module, reference: Callable[..., Tensor], x_at: Placement, y_at: Placement
) -> Found:
    """Compare one layer between two activations, with random inputs and a random gradient of its output."""
    full = whole(randomized(layer, groups), groups)

    def once(step: int) -> Found:
        x_full, y_grad = numbers(x_at.shape, 10 * step + 1).requires_grad_(), numbers(y_at.shape, 10 * step + 2)
        x = piece(x_full, x_at, groups).requires_grad_()
        y, dense_y = layer(x), reference(full, x_full)
        y.backward(piece(y_grad, y_at, groups))
        dense_y.backward(y_grad)
        yield "output", error(y, y_at, dense_y, groups)
        yield "input gradient", error(x.grad, x_at, x_full.grad, groups)

    yield from proven(groups, layer, full, once)


def proven(groups: Groups, layer: nn.Module, full: dense.Parameters, once: Callable[[int], Found]) -> Found:
    """Yield what `once(step)` finds, and each parameter's gradient, or its value after the optimizer steps.

    `once` runs layer and reference, forward and backward, on that step's numbers, and only then yields comparisons.
    """
    if isinstance(groups, Training):
        yield from _after_steps(groups, layer, full, once)
    else:
        yield from once(0)
        yield from gradients(layer, full, groups)


def gradients(layer: nn.Module, full: dense.Parameters, groups: Groups) -> Found:
    """Compare the gradient of every parameter with the reference's."""
    for name, p in layer.named_parameters():
        yield f"gradient of {name}", error(p.grad, p.placement, full[name].grad, groups)


def error(shard: Tensor | None, at: Placement, whole: Tensor | None, groups: Groups) -> float:
    """Return the error of this rank's shard; padding must be 0. The shard is noted, to be compared with its copies."""
    assert shard is not None, "no gradient came"
    assert whole is not None, "the reference has no gradient"
    note_copy(shard, at, groups)
    expected = at.cut(whole.detach(), groups.coord)
    return ((shard.detach().double() - expected).abs().max() / whole.abs().max()).item()


def relative(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|."""
    return ((a.double() - b).abs().max() / b.abs().max()).item()


_copies: dict[str, list[Tensor]] = {}


def note_copy(shard: Tensor, at: Placement, groups: Groups) -> None:
    """Keep a shard, to be compared with its copies on other ranks."""
    if at.replicas and groups.axis(*at.replicas).size > 1:
        _copies.setdefault("".join(at.replicas), []).append(shard.detach().double().flatten().clone())


def assert_copies_equal(groups: Groups) -> None:
    """Compare all kept shards with their copies, bitwise, and forget them."""
    noted = sorted(_copies.items())
    _copies.clear()
    for letters, shards in noted:
        copies = all_gather(torch.cat(shards)[None], groups.axis(*letters))
        assert all(torch.equal(copy, copies[0]) for copy in copies), f"copies on different ranks of {letters} differ"


def randomized(layer: nn.Module, groups: Groups) -> nn.Module:
    """Randomize every parameter, gains and biases too: a zero bias would hide a wrong one."""
    for p in layer.parameters():
        p.init = Init(mean=0.1, std=0.3)
    initialize(layer, groups, seed=7)
    return layer


def whole(layer: nn.Module, groups: Groups) -> dict[str, Tensor]:
    """Return every parameter in full, gathered in one message, under the reference's names."""
    params = dict(layer.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in params.values()])
    by_rank = [
        torch.split(shards, [p.numel() for p in params.values()])
        for shards in all_gather(flat[None], groups.axis("tensor"))
    ]
    return {
        name: p.placement.merge([shard.view(p.shape) for shard in shards]).double().requires_grad_()
        for (name, p), shards in zip(params.items(), zip(*by_rank, strict=True), strict=True)
    }


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers, equal on all ranks: in float64, and exact in the layers' dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def piece(full: Tensor, at: Placement, groups: Groups) -> Tensor:
    """Return this rank's shard in the layers' dtype."""
    return at.cut(full.detach(), groups.coord).to(torch.get_default_dtype())


def residual(groups: Groups) -> Placement:
    """Return the placement of the stored residual [BATCH, SEQUENCE, HIDDEN]."""
    return placement.residual(groups.tensor, BATCH, SEQUENCE, HIDDEN)


def inner(groups: Groups, features: int) -> Placement:
    """Return the placement of an inner activation [BATCH, SEQUENCE, features]."""
    return placement.inner(groups.tensor, BATCH, SEQUENCE, features)


# ---- after some steps ----


def _after_steps(groups: Training, layer: nn.Module, full: dense.Parameters, once: Callable[[int], Found]) -> Found:
    before = {name: value.detach().clone() for name, value in full.items()}
    optimizers: list[torch.optim.Optimizer] = []
    for step in range(STEPS):
        next(once(step))
        optimizers = optimizers or _optimizers(groups, layer, full)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    yield from ((what, error) for what, error in once(STEPS) if "gradient" not in what)
    for name, p in layer.named_parameters():
        yield f"weight {name}", error(p, p.placement, full[name], groups)
        if p.requires_grad:
            yield f"movement of {name}", relative(before[name], full[name].detach())


def _optimizers(groups: Training, layer: nn.Module, full: dense.Parameters) -> list[torch.optim.Optimizer]:
    """Return equal optimizers of the layer and the reference, with a rate per parameter from its size and gradient."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for name, p in layer.named_parameters():
        if p.requires_grad:
            grad = full[name].grad
            assert grad is not None, f"the reference has no gradient of {name}"
            sizes = {"weight_size": full[name].abs().max().item(), "gradient_size": grad.abs().max().item()}
            ours.append({"params": [p], **sizes})
            theirs.append({"params": [full[name]], **sizes})
    return [groups.optimizer(params) for params in (ours, theirs) if params]
