"""Norms, tables, heads and losses."""

from __future__ import annotations

import torch

from dslpar.groups import Groups
from dslpar.layers import Embedding, Head, LayerNorm, PositionEmbedding, cross_entropy
from tests.layers import dense
from tests.layers.proof import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    Found,
    compare,
    error,
    gradients,
    numbers,
    randomized,
    relative,
    residual,
    tokens,
    whole,
)


def norm(groups: Groups) -> Found:
    layer = LayerNorm(groups, HIDDEN)
    yield from compare(groups, layer, dense.norm, residual(groups), residual(groups))


def positions(groups: Groups) -> Found:
    layer = PositionEmbedding(groups, SEQUENCE + 3, HIDDEN)
    yield from compare(groups, layer, dense.positions, residual(groups), residual(groups))


def embedding(groups: Groups) -> Found:
    """The output, then the gradient of the table."""
    layer = randomized(Embedding(groups, VOCAB, HIDDEN), groups)
    ids, _ = tokens()
    full = whole(layer, groups)
    y, dense_y = layer(ids), dense.embedding(full, ids)
    at, y_grad = residual(groups), numbers(dense_y.shape, 2)
    y.backward(at.cut(y_grad, groups.coord))
    dense_y.backward(y_grad)
    yield "output", error(y, at, dense_y, groups)
    yield from gradients(layer, full, groups)


def head(groups: Groups) -> Found:
    """An untied head and the loss after it, some labels ignored, over a given denominator."""
    layer = randomized(Head(groups, HIDDEN, VOCAB), groups)
    _, labels = tokens()
    full, at, x_full = whole(layer, groups), residual(groups), numbers((BATCH, SEQUENCE, HIDDEN), 1)
    x, x_full = at.cut(x_full, groups.coord).requires_grad_(), x_full.requires_grad_()
    loss = cross_entropy(groups, layer(x), labels, VOCAB, torch.tensor(100.0))
    dense_loss = dense.cross_entropy(dense.linear(full, x_full), labels, 100)
    loss.backward()
    dense_loss.backward()
    yield "loss", relative(loss, dense_loss)
    yield "input gradient", error(x.grad, at, x_full.grad, groups)
    yield from gradients(layer, full, groups)


CASES = (
    norm,
    positions,
    embedding,
    head,
)
