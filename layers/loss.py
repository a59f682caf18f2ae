"""Vocabulary-parallel cross-entropy and accuracy: logits are sharded over the vocabulary and never gathered.

Letters: m tokens of this rank, V vocabulary in n pieces, t pieces of the micro-batch's M tokens. One all-reduce takes
the maximum, a second one sums (sum of exponents, target logit). This is Megatron-LM's vocabulary-parallel cross-entropy
(arXiv 1909.08053) with two of its three all-reduces merged. Label smoothing (1512.00567) sends no more: its share of
the other logits is added to the target logit before the sum. Logits may have any floating dtype, losses are float32 or
wider. Columns beyond the vocabulary (padding) count as -inf, and get no share of the smoothing.

==================  ============================================  =========================================
function            forward sends, in elements per rank           backward
==================  ============================================  =========================================
`cross_entropy`     6 m (n-1)/n; and 2 (t-1)/t for the sum,       nothing
                    or M (t-1)/t for all losses ("none")
`accuracy`          4 m (n-1)/n and 2 (t-1)/t                     -
==================  ============================================  =========================================
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers.activation_sharding import unshard
from dslpar.layers.placement import inner_cuts, piece, residual_cuts
from dslpar.layers.token_ids import check_range, local_tokens
from dslpar.layers.upcast import upcast

IGNORE_INDEX = -100

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    groups: Groups,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    denominator: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return torch's cross-entropy of the whole micro-batch, over the `vocab_size` columns without the padding.

    `logits` are as stored, [batch/x, sequence, V/n] or [tokens/x, V/n]. `labels`, [batch, sequence] or [tokens], cover
    the whole micro-batch and are equal on all ranks of the tensor group. Labels equal to `ignore_index` do not count.

    `reduction` is "mean", "sum" or "none". "mean" divides the sum of the token losses by `denominator`, by default the
    number of counted tokens. Without any counted token the mean is 0, while torch returns nan. "none" returns the token
    losses in the shape of the labels, 0 for ignored ones. "sum" and "none" divide by `denominator` only if it is given.

    The result is bitwise equal on every rank of the tensor group. Each rank's backward covers its own tokens.

    Raises:
        DslparError: a label is neither in the vocabulary nor ignored (on an accelerator, the device asserts instead);
            the shapes of labels and logits do not match, or there are fewer logits than `vocab_size`; the `reduction`
            is unknown, or `label_smoothing` is outside 0 to 1.
    """
    _check_options(reduction, label_smoothing)
    _check_shapes(groups, logits, labels, vocab_size)
    labels = labels.long()  # with 8 bits the comparisons and subtractions below would wrap around
    check_range(labels, vocab_size, "labels", ignore_index)
    cuts = inner_cuts(groups.tensor)
    if denominator is None and reduction == "mean":
        # Every rank has all labels, so counting them sends nothing.
        denominator = (labels != ignore_index).sum().clamp(min=1)
    local_labels = local_tokens(groups, labels, cuts)
    losses = _IN_USE.token_losses(
        groups, logits.flatten(0, -2), local_labels.flatten(), vocab_size, ignore_index, label_smoothing
    )
    if reduction == "none":
        result = unshard(groups, losses.view(local_labels.shape), cuts.of(logits.dim())[:-1])
    else:
        result = collectives.reduce_from_group(losses.sum(), groups.axis(*cuts.tokens))
    return result if denominator is None else result / denominator


def cross_entropy_by_chunks(
    groups: Groups,
    head: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_chunks: int,
    denominator: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    compares_recomputed: bool = True,
) -> Tensor:
    """Return `cross_entropy` of head(x), computed for one part of each sequence after the other.

    `x` is the stored residual [batch/x, sequence, H/z]. `head` returns the stored logits [batch/x, tokens, V/n] of any
    part of its tokens. It runs again in the backward, so only one part's logits are in memory at a time. With
    `compares_recomputed` torch checks that the recomputation saves tensors of the same shapes. Other arguments are
    those of `cross_entropy`. All ranks of the tensor group must make the same call.

    Raises:
        DslparError: as `cross_entropy`, except for the checks of the logits' shape.
    """
    labels = labels.long()
    check_range(labels, vocab_size, "labels", ignore_index)
    if denominator is None:
        denominator = (labels != ignore_index).sum().clamp(min=1)
    cuts, residual = inner_cuts(groups.tensor), residual_cuts(groups.tensor)
    # The head gathers over the axes that cut the residual's tokens but not the logits'. So a part of the sequence has
    # tokens of each of these ranks.
    gathered = math.prod(groups.axis(letter).size for letter in residual.sequence if letter not in cuts.sequence)
    local_labels = local_tokens(groups, labels, cuts)
    by_piece = torch.unflatten(local_labels, 1, (gathered, -1))
    if x.dim() != 3 or by_piece.shape[-1] != x.shape[1]:
        message = f"labels {tuple(labels.shape)} and a stored residual {tuple(x.shape)}"
        raise_finding("TEN226", message, "labels [batch, sequence] of the whole micro-batch", key="model")

    token_losses = _IN_USE.token_losses  # read here, since on an accelerator autograd recomputes in another thread

    def losses(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = head(tokens).flatten(0, -2)
        return token_losses(groups, logits, labels.flatten(), vocab_size, ignore_index, smoothing=0.0).sum()

    parts = zip(x.tensor_split(num_chunks, 1), by_piece.tensor_split(num_chunks, -1), strict=True)
    total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    check = "default" if compares_recomputed else "none"
    run = partial(checkpoint, losses, use_reentrant=False, preserve_rng_state=False, determinism_check=check)
    for tokens, of_tokens in parts:
        if tokens.shape[1]:
            total = total + run(tokens, of_tokens)
    return collectives.reduce_from_group(total, groups.axis(*cuts.tokens)) / denominator


@contextmanager
def compiled_losses(backend: str | None) -> Iterator[None]:
    """Compile this thread's token losses with `backend` within the context; with None, change nothing.

    The compiled kernels make no copy of the logits. They move 6 bytes per bfloat16 logit, and 12 if the vocabulary is
    cut over ranks.
    """
    before, _IN_USE.token_losses = _IN_USE.token_losses, _compiled(backend) if backend else _IN_USE.token_losses
    try:
        yield
    finally:
        _IN_USE.token_losses = before


@lru_cache
def _compiled(backend: str) -> Callable[..., Tensor]:
    return torch.compile(_token_losses, backend=backend, dynamic=False)


def _check_options(reduction: str, label_smoothing: float) -> None:
    """Raise DslparError for the options that torch refuses."""
    if reduction not in get_args(Reduction):
        message, hint = f"reduction={reduction!r}", f"one of {', '.join(map(repr, get_args(Reduction)))}"
    elif not 0 <= label_smoothing <= 1:
        message, hint = f"label_smoothing={label_smoothing!r}", "a share of each label, from 0.0 to 1.0"
    else:
        return
    message = f"cross_entropy with {message}"
    raise_finding("TEN225", message, hint)


def _check_shapes(groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int) -> None:
    """Raise DslparError if labels and logits have other tokens, or logits have fewer columns than `vocab_size`."""
    dims = inner_cuts(groups.tensor).of(logits.dim())
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in dims]
    *tokens, columns = (length * count for length, count in zip(logits.shape, counts, strict=False))
    if logits.dim() not in (2, 3) or list(labels.shape) != tokens:
        message = f"labels {tuple(labels.shape)} do not match the logits of all ranks together, {(*tokens, columns)}"
        hint = "labels [batch, sequence] or [tokens], as the logits, of the whole micro-batch"
        raise_finding("TEN226", message, hint, key="model")
    if columns < vocab_size:
        message = f"logits have {columns} columns, but the vocabulary has {vocab_size} tokens"
        raise_finding("TEN226", message, "the vocab_size of the head that made them", key="model")


@torch.no_grad()
def accuracy(
    groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the share of counted tokens whose largest logit is the label's; of equal logits the first counts.

    Arguments are those of `cross_entropy`. The result is a scalar, equal on all ranks of the tensor group, and 0 if no
    token counts.

    Raises:
        DslparError: a label is neither in the vocabulary nor ignored, or the shapes do not match.
    """
    _check_shapes(groups, logits, labels, vocab_size)
    labels = labels.long()
    check_range(labels, vocab_size, "labels", ignore_index)
    cuts = inner_cuts(groups.tensor)
    axis = groups.axis(*cuts.features)
    first = piece(groups.tensor, groups.coord, cuts.features)[0] * logits.shape[-1]
    local_labels = local_tokens(groups, labels, cuts)
    value, index = _local_argmax(logits[..., : max(vocab_size - first, 0)])
    largest = collectives.all_reduce(value, axis, "max")
    # Several ranks may hold the largest value. The smallest column wins, and ranks without the value pass vocab_size.
    past_the_end = torch.full_like(index, vocab_size)
    index = collectives.all_reduce(torch.where(value == largest, index + first, past_the_end), axis, "min")
    correct = (index == local_labels) & (local_labels != ignore_index)
    num_correct = collectives.all_reduce(correct.sum(), groups.axis(*cuts.tokens))
    return num_correct / (labels != ignore_index).sum().clamp(min=1)


def _local_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's largest logit and its first column; (-inf, 0) if there are no columns."""
    if logits.shape[-1] == 0:
        return upcast(logits.new_full(logits.shape[:-1], -torch.inf)), logits.new_zeros(logits.shape[:-1]).long()
    index = logits.argmax(-1)
    return upcast(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)), index


def _token_losses(
    groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int, smoothing: float
) -> Tensor:
    """Return the losses [m], float32 or wider, of this rank's tokens from logits [m, V/n] and labels [m]."""
    letters = inner_cuts(groups.tensor).features
    if groups.axis(*letters).size == 1 and (logits.device.type == "cpu" or torch.compiler.is_compiling()):
        # This makes fewer calls than the code below, and calls dominate small steps on a CPU. The upcast copy fits into
        # a CPU's memory, and a compiled loss makes none.
        return functional.cross_entropy(
            upcast(logits)[:, :vocab_size],
            labels,
            ignore_index=ignore_index,
            label_smoothing=smoothing,
            reduction="none",
        )
    first = piece(groups.tensor, groups.coord, letters)[0] * logits.shape[-1]
    ignored = labels == ignore_index
    targets = (labels - first).masked_fill(ignored, -1)
    columns = min(max(vocab_size - first, 0), logits.shape[-1])
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits, targets, groups.axis(*letters), columns, smoothing, smoothing / vocab_size
    )
    return losses.masked_fill(ignored, 0)


class _TokenLosses(torch.autograd.Function):
    """Map logits [m, V/n] and targets [m], counted from this rank's first column, to losses [m], equal on all ranks.

    The first `columns` of this rank's columns belong to the vocabulary. Each gets the share `even` of a token's label.
    The target gets 1 - `smoothing` on top of it.

    The only tensor of the logits' size is the softmax of this rank's columns. A factor per token, from the ranks'
    all-reduced sums, turns it into the softmax over all columns. So 14 bytes move per float16 logit. Per bfloat16
    logit, which torch copies first, 22 bytes move, while torch's own loss moves 44.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, columns: int, smoothing: float, even: float
    ) -> Tensor:
        vocabulary = logits if columns == logits.shape[-1] else logits[:, :columns]
        softmax = _wide_softmax(vocabulary)
        # A maximum with its index takes a CPU as long as the softmax. Without the index, an accelerator would read the
        # softmax once more.
        own_largest, own_sum = _largest_and_sum(vocabulary, softmax, indexed=logits.device.type != "cpu")
        largest, exponent_sum = own_largest, own_sum
        # A target outside this rank's columns counts 0 here, and its logit counts on the rank that has it.
        outside = (targets < 0) | (targets >= columns) if axis.size > 1 else None
        targets = targets.clamp(0, max(columns - 1, 0))
        if axis.size > 1:
            largest = collectives.start_all_reduce_(own_largest.clone(), axis, "max").wait()
        label_mean = _pick(logits, targets).to(largest.dtype) - largest
        if outside is not None:
            label_mean.masked_fill_(outside, 0)
        if smoothing:
            label_mean = label_mean * (1 - smoothing)
            label_mean += even * (vocabulary.sum(-1, dtype=largest.dtype) - columns * largest)
        share: Tensor | None = None
        if axis.size > 1:
            own_sum = own_sum * (own_largest - largest).exp_()
            summed = collectives.start_all_reduce_(torch.stack([own_sum, label_mean]), axis).wait()
            exponent_sum, label_mean = summed.unbind()
            share = own_sum / exponent_sum
        ctx.save_for_backward(softmax, share, targets, outside)
        ctx.dtype, ctx.width, ctx.smoothing, ctx.even = logits.dtype, logits.shape[-1], smoothing, even
        losses: Tensor = exponent_sum.log() - label_mean
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, share, targets, outside = ctx.saved_tensors
        loss_grad, columns = grads[0], softmax.shape[-1]
        factor = (loss_grad if share is None else loss_grad * share).unsqueeze(-1)
        logits_grad = softmax.new_empty((len(softmax), ctx.width), dtype=ctx.dtype)
        vocabulary_grad = logits_grad
        if columns < ctx.width:
            logits_grad[:, columns:] = 0
            vocabulary_grad = logits_grad[:, :columns]
        # Rounded while it is written, since a float32 gradient would be a second tensor of this size.
        if ctx.smoothing:
            torch.addcmul(loss_grad.unsqueeze(-1) * -ctx.even, softmax, factor, out=vocabulary_grad)
        else:
            torch.mul(softmax, factor, out=vocabulary_grad)
        if columns:
            # Computed from the softmax, not from the rounded gradient, where 1 - p of a confident token has no bits
            # left.
            targets = targets.unsqueeze(-1)
            of_label = loss_grad * (1 - ctx.smoothing)
            of_label = of_label if outside is None else of_label.masked_fill(outside, 0)
            target_grad = softmax.gather(-1, targets).mul_(factor).sub_(of_label.unsqueeze(-1))
            target_grad = target_grad.sub_(loss_grad.unsqueeze(-1) * ctx.even) if ctx.smoothing else target_grad
            logits_grad.scatter_(-1, targets, target_grad.to(ctx.dtype))
        return logits_grad, None, None, None, None, None


class _InUse(threading.local):
    """The function that computes the token losses in this thread."""

    token_losses: Callable[..., Tensor] = staticmethod(_token_losses)


_IN_USE = _InUse()

_MANY, _PARTS = 1 << 24, 8
"""Number of logits from which on they are converted in parts, and the number of parts."""


def _wide_softmax(logits: Tensor) -> Tensor:
    """Return the softmax of logits [m, V], in float32 or wider.

    torch's GPU kernel upcasts float16 while it reads. bfloat16 is first copied to float32, a second tensor of the
    softmax's size. So large bfloat16 logits are converted one part of the tokens at a time.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.dtype != torch.bfloat16 or logits.numel() < _MANY or torch.compiler.is_compiling():
        return torch.softmax(logits, -1, dtype=wide)
    softmax = torch.empty(logits.shape, dtype=wide, device=logits.device)
    for part, rows in zip(logits.chunk(_PARTS), softmax.chunk(_PARTS), strict=True):
        torch.softmax(part, -1, dtype=wide, out=rows)
    return softmax


def _largest_and_sum(logits: Tensor, softmax: Tensor, indexed: bool) -> tuple[Tensor, Tensor]:
    """Return each token's largest logit, and the sum of exp(logit - largest): the inverse of its probability."""
    if logits.shape[-1] == 0:  # a rank with only padding: its -inf changes no maximum
        return softmax.new_full((len(softmax),), -torch.inf), softmax.new_zeros(len(softmax))
    if not indexed:
        return logits.amax(-1).to(softmax.dtype), softmax.amax(-1).reciprocal_()
    largest, index = logits.max(-1)
    return largest.to(softmax.dtype), _pick(softmax, index).reciprocal_()


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Return the value at each row's index: [m, V] and [m] to [m]."""
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)
