"""Norms, tables, heads, losses, and conversions between full and stored activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import (
    Embedding,
    Head,
    LayerNorm,
    Placement,
    PositionEmbedding,
    RMSNorm,
    accuracy,
    cross_entropy,
    from_inner,
    from_residual,
    placement,
    to_inner,
    to_residual,
)
from dslpar.layers.loss import Reduction
from dslpar.layout import divisors
from tests.support import dense
from tests.support.compare_dense import (
    BATCH,
    FFN,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    Found,
    compare,
    error,
    inner,
    note_copy,
    numbers,
    piece,
    proven,
    randomized,
    relative,
    residual,
    tokens,
    whole,
)


def norm(groups: Groups) -> Found:
    layer = LayerNorm(groups, HIDDEN)
    yield from compare(groups, layer, dense.norm, residual(groups), residual(groups))


def norm_without_bias(groups: Groups) -> Found:
    layer = LayerNorm(groups, HIDDEN, bias=False)
    yield from compare(groups, layer, dense.norm, residual(groups), residual(groups))


def rms_norm(groups: Groups) -> Found:
    layer = RMSNorm(groups, HIDDEN)
    yield from compare(groups, layer, dense.rms_norm, residual(groups), residual(groups))


def norm_frozen_in_part(groups: Groups) -> Found:
    """The gain is trained, the bias is frozen."""
    layer = LayerNorm(groups, HIDDEN)
    layer.bias.requires_grad_(False)
    yield from _frozen(groups, layer, dense.norm)


def rms_norm_frozen(groups: Groups) -> Found:
    layer = RMSNorm(groups, HIDDEN)
    layer.weight.requires_grad_(False)
    yield from _frozen(groups, layer, dense.rms_norm)


def _frozen(groups: Groups, layer: nn.Module, reference: Callable[..., Tensor]) -> Found:
    """Compare the input's gradient, and those of trained parameters."""
    needs = {name: p.requires_grad for name, p in layer.named_parameters()}
    full, at = whole(randomized(layer, groups), groups), residual(groups)
    x_full, y_grad = numbers(at.shape, 1).requires_grad_(), numbers(at.shape, 2)
    x = piece(x_full, at, groups).requires_grad_()
    layer(x).backward(piece(y_grad, at, groups))
    reference(full, x_full).backward(y_grad)
    yield "input gradient", error(x.grad, at, x_full.grad, groups)
    for name, p in layer.named_parameters():
        if needs[name]:
            yield f"gradient of {name}", error(p.grad, p.placement, full[name].grad, groups)
        else:
            assert p.grad is None, f"a gradient of {name}, which is frozen"


def positions(groups: Groups) -> Found:
    layer = PositionEmbedding(groups, SEQUENCE + 3, HIDDEN)
    yield from compare(groups, layer, dense.positions, residual(groups), residual(groups))


def embedding(groups: Groups) -> Found:
    yield from _embedding(groups, tokens()[0], residual(groups))


def embedding_with_padding(groups: Groups) -> Found:
    """The padding row is on the last rank of y, if there are several; a negative index counts from the end."""
    ids, _ = tokens()
    assert (ids == VOCAB - 2).any()
    yield from _embedding(groups, ids, residual(groups), -2)


def embedding_of_tokens(groups: Groups) -> Found:
    """Map ids [tokens] to a residual [tokens, H]."""
    yield from _embedding(groups, tokens()[0].flatten(), _residual_of_tokens(groups), 0)


def _embedding(groups: Groups, ids: Tensor, at: Placement, padding_idx: int | None = None) -> Found:
    """Compare the output, and the gradient of the table."""
    layer = randomized(Embedding(groups, VOCAB, HIDDEN, padding_idx=padding_idx), groups)
    full = whole(layer, groups)

    def once(step: int) -> Found:
        y, dense_y = layer(ids), dense.embedding(full, ids, layer.padding_idx)
        y_grad = numbers(at.shape, 10 * step + 2)
        y.backward(piece(y_grad, at, groups))
        dense_y.backward(y_grad)
        yield "output", error(y, at, dense_y, groups)

    yield from proven(groups, layer, full, once)


def embedding_frozen(groups: Groups) -> Found:
    layer = randomized(Embedding(groups, VOCAB, HIDDEN), groups).requires_grad_(False)
    ids, _ = tokens()
    y = layer(ids)
    assert not y.requires_grad
    yield "output", error(y, residual(groups), dense.embedding(whole(layer, groups), ids), groups)


def head(groups: Groups) -> Found:
    yield from _head(groups, bias=False)


def head_with_bias(groups: Groups) -> Found:
    yield from _head(groups, bias=True)


def _head(groups: Groups, bias: bool) -> Found:
    """An untied head with its loss, some labels ignored, over a given denominator."""
    layer = randomized(Head(groups, HIDDEN, VOCAB, bias=bias), groups)
    _, labels = tokens()
    full, at = whole(layer, groups), residual(groups)

    def once(step: int) -> Found:
        x_full = numbers((BATCH, SEQUENCE, HIDDEN), 10 * step + 1).requires_grad_()
        x = piece(x_full, at, groups).requires_grad_()
        loss = cross_entropy(groups, layer(x), labels, VOCAB, torch.tensor(100.0))
        dense_loss = dense.cross_entropy(dense.linear(full, x_full), labels, 100)
        loss.backward()
        dense_loss.backward()
        yield "loss", relative(loss, dense_loss)
        yield "input gradient", error(x.grad, at, x_full.grad, groups)

    yield from proven(groups, layer, full, once)


def losses_smoothed(groups: Groups) -> Found:
    _, labels = tokens()
    yield from _losses(groups, _logits(groups), labels, 0.2, "mean")


def losses_of_each_token(groups: Groups) -> Found:
    _, labels = tokens()
    yield from _losses(groups, _logits(groups), labels, 0.0, "none")


def losses_of_tokens_summed(groups: Groups) -> Found:
    """Logits [tokens, V]."""
    _, labels = tokens()
    yield from _losses(groups, _logits_of_tokens(groups), labels.flatten(), 0.0, "sum")


def losses_of_each_of_tokens_smoothed(groups: Groups) -> Found:
    _, labels = tokens()
    yield from _losses(groups, _logits_of_tokens(groups), labels.flatten(), 0.1, "none")


def _losses(groups: Groups, at: Placement, labels: Tensor, smoothing: float, reduction: Reduction) -> Found:
    """Compute the loss from logits whose padding columns are as random as the others, and must not count."""
    full = numbers(at.shape, 1).requires_grad_()
    logits = piece(full, at, groups).requires_grad_()
    loss = cross_entropy(groups, logits, labels, VOCAB, label_smoothing=smoothing, reduction=reduction)
    losses = dense.token_losses(full[..., :VOCAB], labels, smoothing)
    dense_loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (labels != -100).sum()}[reduction]
    loss_grad = numbers(tuple(dense_loss.shape), 3)
    loss.backward(loss_grad.to(loss.dtype))
    dense_loss.backward(loss_grad)
    note_copy(loss, Placement(groups.tensor, tuple(loss.shape), ((),) * loss.dim()), groups)
    yield "loss", relative(loss, dense_loss)
    yield "gradient of logits", error(logits.grad, at, full.grad, groups)


def accuracies(groups: Groups) -> Found:
    """Logits have only four values, so a row's largest occurs several times, on several ranks."""
    _, labels = tokens()
    for at, of in ((_logits(groups), labels), (_logits_of_tokens(groups), labels.flatten())):
        full = numbers(at.shape, 1).mul_(2).round_().clamp_(-2, 1)
        found = accuracy(groups, piece(full, at, groups), of, VOCAB)
        expected = dense.accuracy(full[..., :VOCAB], of)
        assert 0 < expected < 1
        yield f"accuracy of {tuple(of.shape)}", abs(found.item() - expected)


def conversions(groups: Groups) -> Found:
    """Convert full to stored activations and back, and compare values and gradient each way."""
    for name, enter, leave, at in (
        ("residual", to_residual, from_residual, residual(groups)),
        ("inner", to_inner, from_inner, inner(groups, FFN)),
        ("residual of tokens", to_residual, from_residual, _residual_of_tokens(groups)),
        ("inner of tokens", to_inner, from_inner, placement.inner(groups.tensor, BATCH * SEQUENCE, FFN)),
    ):
        full, grad = numbers(at.shape, 1), numbers(at.shape, 2)
        dtype = torch.get_default_dtype()
        x, stored = full.to(dtype).requires_grad_(), piece(full, at, groups).requires_grad_()
        entered, left = enter(groups, x), leave(groups, stored)
        entered.backward(piece(grad, at, groups))
        left.backward(grad.to(dtype))
        yield f"{name}, in", error(entered, at, full, groups)
        yield f"{name}, gradient in", relative(x.grad, grad)
        yield f"{name}, out", relative(left, full)
        yield f"{name}, gradient out", error(stored.grad, at, grad, groups)


def _residual_of_tokens(groups: Groups) -> Placement:
    return placement.residual(groups.tensor, BATCH * SEQUENCE, HIDDEN)


def _logits(groups: Groups) -> Placement:
    return inner(groups, divisors.vocabulary(VOCAB, groups.tensor).value)


def _logits_of_tokens(groups: Groups) -> Placement:
    return placement.inner(groups.tensor, BATCH * SEQUENCE, divisors.vocabulary(VOCAB, groups.tensor).value)


CASES = (
    norm,
    norm_without_bias,
    norm_frozen_in_part,
    rms_norm,
    rms_norm_frozen,
    positions,
    embedding,
    embedding_with_padding,
    embedding_of_tokens,
    embedding_frozen,
    head,
    head_with_bias,
    losses_smoothed,
    losses_of_each_token,
    losses_of_tokens_summed,
    losses_of_each_of_tokens_smoothed,
    accuracies,
    conversions,
)
