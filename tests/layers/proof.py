"""Runs a layer on this rank's pieces and its dense reference on the whole, and says how far apart they are.

Everything is compared on every rank, gathered: the output, the gradient of the input, the gradient of every parameter.
Errors are max|a - b| / max|b|. All is float64 with sums of at most some hundred terms, so a right layer is off by a few
units of 1e-16; TOLERANCE leaves room for a longer path, and any missing or doubled term is off by 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from dslpar import mesh
from dslpar.comm import all_gather
from dslpar.groups import Groups
from dslpar.layers import (
    MLP,
    Attention,
    Block,
    Embedding,
    Head,
    Init,
    LayerNorm,
    Linear,
    Placement,
    PositionEmbedding,
    cross_entropy,
    gather,
    initialize,
    placement,
)
from dslpar.models import GPT, build_module
from tests.layers import dense

TOLERANCE = 1e-12

BATCH, SEQUENCE, HIDDEN, HEADS, FFN, VOCAB = 12, 12, 24, 12, 48, 17
"""Divisible by all that the layouts divide by; the vocabulary by nothing, so it is always padded."""

Errors = dict[str, float]


def errors(tensor: mesh.Tensor, *names: str) -> Errors:
    """Every layer and GPT (or the named cases), on this rank of a tensor group."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    cases = [case for case in CASES if not names or case.__name__ in names]
    return {f"{case.__name__}: {what}": error for case in cases for what, error in case(groups)}


Found = Iterator[tuple[str, float]]


def inward(groups: Groups) -> Found:
    layer = Linear(groups, HIDDEN, FFN, role="inward")
    yield from _compare(groups, layer, dense.linear, _residual(groups), _inner(groups, FFN))


def outward(groups: Groups) -> Found:
    layer = Linear(groups, FFN, HIDDEN, role="outward")
    yield from _compare(groups, layer, dense.linear, _inner(groups, FFN), _residual(groups))


def norm(groups: Groups) -> Found:
    layer = LayerNorm(groups, HIDDEN)
    yield from _compare(groups, layer, dense.norm, _residual(groups), _residual(groups))


def positions(groups: Groups) -> Found:
    layer = PositionEmbedding(groups, SEQUENCE + 3, HIDDEN)
    yield from _compare(groups, layer, dense.positions, _residual(groups), _residual(groups))


def mlp(groups: Groups) -> Found:
    layer = MLP(groups, HIDDEN, FFN)
    yield from _compare(groups, layer, dense.mlp, _residual(groups), _residual(groups))


def attention(groups: Groups) -> Found:
    layer = Attention(groups, HIDDEN, HEADS)
    reference = partial(dense.attention, num_heads=HEADS)
    yield from _compare(groups, layer, reference, _residual(groups), _residual(groups))


def block(groups: Groups) -> Found:
    layer = Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN)
    reference = partial(dense.block, num_heads=HEADS)
    yield from _compare(groups, layer, reference, _residual(groups), _residual(groups))


def embedding(groups: Groups) -> Found:
    """The output, then the gradient of the table."""
    layer = _random(Embedding(groups, VOCAB, HIDDEN), groups)
    ids, _ = tokens()
    full = _full(layer, groups)
    y, dense_y = layer(ids), dense.embedding(full, ids)
    at, y_grad = _residual(groups), _numbers(dense_y.shape, 2)
    y.backward(at.cut(y_grad, groups.coord))
    dense_y.backward(y_grad)
    yield "output", _error(y, at, dense_y, groups)
    yield from _gradients(layer, full, groups)


def head(groups: Groups) -> Found:
    """An untied head and the loss after it, some labels ignored, over a given denominator."""
    layer = _random(Head(groups, HIDDEN, VOCAB), groups)
    _, labels = tokens()
    full, at, x_full = _full(layer, groups), _residual(groups), _numbers((BATCH, SEQUENCE, HIDDEN), 1)
    x, x_full = at.cut(x_full, groups.coord).requires_grad_(), x_full.requires_grad_()
    loss = cross_entropy(groups, layer(x), labels, VOCAB, torch.tensor(100.0))
    dense_loss = dense.cross_entropy(dense.linear(full, x_full), labels, 100)
    loss.backward()
    dense_loss.backward()
    yield "loss", _relative(loss, dense_loss)
    yield "input gradient", _error(x.grad, at, x_full.grad, groups)
    yield from _gradients(layer, full, groups)


def gpt_tied(groups: Groups) -> Found:
    yield from _gpt(groups, tie_embeddings=True)


def gpt_untied(groups: Groups) -> Found:
    yield from _gpt(groups, tie_embeddings=False)


CASES = (
    inward,
    outward,
    norm,
    positions,
    mlp,
    attention,
    block,
    embedding,
    head,
    gpt_tied,
    gpt_untied,
)


def tokens() -> tuple[Tensor, Tensor]:
    """Ids and labels of one micro-batch, equal on all ranks; one sample has no counted label at all."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels[0] = labels[2, :5] = -100
    return ids, labels


def _gpt(groups: Groups, tie_embeddings: bool) -> Found:
    model = GPT(
        num_layers=2,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        max_seq_len=SEQUENCE,
        tie_embeddings=tie_embeddings,
        init_std=0.3,
    )
    module = _random(build_module(model, groups, seed=3), groups)
    full = _full(module, groups)
    ids, labels = tokens()
    loss = model.loss(groups)(module(ids), labels)
    dense_loss = dense.cross_entropy(dense.gpt(full, ids, 2, HEADS), labels)
    loss.backward()
    dense_loss.backward()
    losses = all_gather(loss.detach()[None], groups.axis("tensor"))
    assert (losses == losses[0]).all(), "the loss differs between ranks of a tensor group"
    yield "loss", _relative(loss, dense_loss)
    yield from _gradients(module, full, groups)


def _compare(
    groups: Groups, layer: nn.Module, reference: Callable[..., Tensor], x_at: Placement, y_at: Placement
) -> Found:
    """One layer between two activations, fed with random numbers and a random gradient of its output."""
    full = _full(_random(layer, groups), groups)
    x_full, y_grad = _numbers(x_at.shape, 1).requires_grad_(), _numbers(y_at.shape, 2)
    x = x_at.cut(x_full.detach(), groups.coord).requires_grad_()
    y, dense_y = layer(x), reference(full, x_full)
    y.backward(y_at.cut(y_grad, groups.coord))
    dense_y.backward(y_grad)
    yield "output", _error(y, y_at, dense_y, groups)
    yield "input gradient", _error(x.grad, x_at, x_full.grad, groups)
    yield from _gradients(layer, full, groups)


def _gradients(layer: nn.Module, full: dense.Parameters, groups: Groups) -> Found:
    for name, p in layer.named_parameters():
        yield f"gradient of {name}", _error(p.grad, p.placement, full[name].grad, groups)


def _error(shard: Tensor | None, at: Placement, whole: Tensor | None, groups: Groups) -> float:
    """Gathered against the reference; copies must be equal to the bit."""
    assert shard is not None, "no gradient came"
    assert whole is not None, "the reference has no gradient"
    _assert_copies_equal(shard.detach(), at, groups)
    return _relative(gather(shard, at, groups), whole)


def _relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def _assert_copies_equal(shard: Tensor, at: Placement, groups: Groups) -> None:
    copies = all_gather(shard[None], groups.axis(*at.replicas))
    assert all(torch.equal(copy, copies[0]) for copy in copies), "copies on different ranks differ"


def _random(layer: nn.Module, groups: Groups) -> nn.Module:
    """Every parameter random, gains and biases too: a zero bias would hide a wrong one."""
    for p in layer.parameters():
        p.init = Init(mean=0.1, std=0.3)
    initialize(layer, groups, seed=7)
    return layer


def _full(layer: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return {name: gather(p, p.placement, groups).requires_grad_() for name, p in layer.named_parameters()}


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _residual(groups: Groups) -> Placement:
    return placement.residual(groups.tensor, BATCH, SEQUENCE, HIDDEN)


def _inner(groups: Groups, features: int) -> Placement:
    return placement.inner(groups.tensor, BATCH, SEQUENCE, features)
