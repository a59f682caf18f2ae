"""Layers of image models and of ResMLP: patches, affine maps, linears over tokens, pooling, BatchNorm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed.groups import Groups
from dslpar.layers import Affine, BatchNorm, PatchEmbedding, Placement, TokenLinear, first_token, mean_of_tokens
from dslpar.layers import placement as at_of
from dslpar.models import ResMLP, build_module
from tests.support import dense
from tests.support.compare_dense import (
    BATCH,
    FFN,
    HIDDEN,
    SEQUENCE,
    Found,
    compare,
    error,
    numbers,
    piece,
    proven,
    randomized,
    relative,
    residual,
    whole,
)

CHANNELS, PATCH, SIDE, CLASSES = 3, 2, 12, 5
"""A patch of 12 numbers, and 36 patches: the layouts divide both."""


def affine(groups: Groups) -> Found:
    layer = Affine(groups, HIDDEN)
    yield from compare(groups, layer, lambda p, x: x * p["weight"] + p["bias"], residual(groups), residual(groups))


def scale(groups: Groups) -> Found:
    layer = Affine(groups, HIDDEN, bias=False)
    yield from compare(groups, layer, lambda p, x: x * p["weight"], residual(groups), residual(groups))


def token_linear(groups: Groups) -> Found:
    layer = TokenLinear(groups, SEQUENCE)
    yield from compare(groups, layer, dense.token_linear, residual(groups), residual(groups))


def token_linear_without_bias(groups: Groups) -> Found:
    layer = TokenLinear(groups, SEQUENCE, bias=False)
    yield from compare(groups, layer, dense.token_linear, residual(groups), residual(groups))


def patches(groups: Groups) -> Found:
    layer = randomized(PatchEmbedding(groups, SIDE, PATCH, CHANNELS, HIDDEN), groups)
    full, at = whole(layer, groups), at_of.residual(groups.tensor, BATCH, (SIDE // PATCH) ** 2, HIDDEN)

    def once(step: int) -> Found:
        pictures, y_grad = _images(10 * step + 1), numbers(at.shape, 10 * step + 2)
        y, dense_y = layer(pictures.to(torch.get_default_dtype())), dense.patches(full, pictures, PATCH)
        y.backward(piece(y_grad, at, groups))
        dense_y.backward(y_grad)
        yield "output", error(y, at, dense_y, groups)

    yield from proven(groups, layer, full, once)


def batch_norm_of_inner(groups: Groups) -> Found:
    """BatchNorm after an inward linear, on [tokens, F]."""
    at = at_of.inner(groups.tensor, BATCH * SEQUENCE, FFN)
    yield from compare(groups, BatchNorm(groups, FFN, after="inward"), dense.batch_norm, at, at)


def batch_norm_of_residual(groups: Groups) -> Found:
    """BatchNorm after an outward linear, on [tokens, H]."""
    at = at_of.residual(groups.tensor, BATCH * SEQUENCE, HIDDEN)
    yield from compare(groups, BatchNorm(groups, HIDDEN, after="outward"), dense.batch_norm, at, at)


def poolings(groups: Groups) -> Found:
    """The mean of tokens, in full; and the first token, stored as [tokens, H]."""
    whole_at = Placement(groups.tensor, (BATCH, HIDDEN), ((), ()))
    for name, pool, reference, at in (
        ("mean", mean_of_tokens, lambda x: x.mean(1), whole_at),
        ("first", first_token, lambda x: x[:, 0], at_of.residual(groups.tensor, BATCH, HIDDEN)),
    ):
        x_full, y_grad = numbers((BATCH, SEQUENCE, HIDDEN), 1).requires_grad_(), numbers((BATCH, HIDDEN), 2)
        x = piece(x_full, residual(groups), groups).requires_grad_()
        y, dense_y = pool(groups, x), reference(x_full)
        y.backward(piece(y_grad, at, groups))
        dense_y.backward(y_grad)
        yield f"{name}", error(y, at, dense_y, groups)
        yield f"{name}, gradient in", error(x.grad, residual(groups), x_full.grad, groups)


def resmlp(groups: Groups) -> Found:
    """The loss of a whole model, with one ignored label."""
    sizes = {"image_size": SIDE, "patch_size": PATCH, "num_channels": CHANNELS, "ffn_hidden_size": FFN}
    model = ResMLP(num_layers=2, hidden_size=HIDDEN, num_classes=CLASSES, init_std=0.3, **sizes)
    module = randomized(build_module(model, groups, seed=3), groups)
    full = whole(module, groups)
    labels = torch.arange(BATCH) % CLASSES
    labels[3] = -100

    def once(step: int) -> Found:
        pictures = _images(10 * step + 1)
        loss = model.loss(groups)(module(pictures.to(torch.get_default_dtype())), labels)
        dense_loss = functional.cross_entropy(dense.resmlp(full, pictures, 2, PATCH), labels)
        loss.backward()
        dense_loss.backward()
        yield "loss", relative(loss, dense_loss)

    yield from proven(groups, module, full, once)


def _images(seed: int) -> Tensor:
    return numbers((BATCH, CHANNELS, SIDE, SIDE), seed)


CASES = (
    affine,
    scale,
    token_linear,
    token_linear_without_bias,
    patches,
    batch_norm_of_inner,
    batch_norm_of_residual,
    poolings,
    resmlp,
)
