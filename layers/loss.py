"""Cross-entropy and accuracy of logits whose vocabulary is sharded, and never gathered.

Letters: m tokens of this rank, V vocabulary in n pieces, t pieces of the micro-batch's M tokens. All-reduce the
maximum, then (sum of exponents, target logit) in one all-reduce: Megatron-LM's vocabulary-parallel cross-entropy (arXiv
1909.08053) with two of its three all-reduces merged. Label smoothing (1512.00567) sends nothing more: its share of the
other logits is added to the target's before they are summed. In and out in float32, or wider. Columns beyond the
vocabulary (padding) count as -inf, and get no share of the smoothing.

==================  ============================================  =========================================
function            forward sends, in elements a rank             backward
==================  ============================================  =========================================
`cross_entropy`     6 m (n-1)/n; and 2 (t-1)/t for the sum,       nothing
                    or M (t-1)/t for all losses ("none")
`accuracy`          4 m (n-1)/n and 2 (t-1)/t                     -
==================  ============================================  =========================================
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.layers.activation_sharding import unshard
from dslpar.layers.placement import inner_cuts, piece
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
    """Return torch's cross-entropy of the whole micro-batch, over the `vocab_size` columns that are no padding.

    `logits` are as stored, [batch/x, sequence, V/n] or [tokens/x, V/n]. `labels`, [batch, sequence] or [tokens], are of
    the whole micro-batch, equal on all ranks of the tensor group; those of `ignore_index` do not count.

    `reduction`: "mean", the sum of the token losses over `denominator` (default: the counted tokens; 1 where there are
    none, so that the mean of nothing is 0, where torch says nan); "sum"; or "none", the token losses in the shape of
    the labels, 0 where ignored. These two are divided by a `denominator` only where one is given.

    The numbers are the same on every rank of the tensor group, to the bit; each rank's backward is of its own tokens.

    Raises:
        DslparError: a label is neither in the vocabulary nor ignored (on an accelerator, the device stops); labels have
            another shape than the logits, or there are fewer logits than `vocab_size`; an unknown `reduction`, or a
            `label_smoothing` outside 0 to 1.
    """
    _check_options(reduction, label_smoothing)
    _check_shapes(groups, logits, labels, vocab_size)
    labels = labels.long()  # in 8 bits the comparisons and subtractions below would wrap around
    check_range(labels, vocab_size, "labels", ignore_index)
    cuts = inner_cuts(groups.tensor)
    if denominator is None and reduction == "mean":
        # Every rank has the labels of all: counting them sends nothing.
        denominator = (labels != ignore_index).sum().clamp(min=1)
    local_labels = local_tokens(groups, labels, cuts)
    losses = _token_losses(
        groups, upcast(logits.flatten(0, -2)), local_labels.flatten(), vocab_size, ignore_index, label_smoothing
    )
    if reduction == "none":
        result = unshard(groups, losses.view(local_labels.shape), cuts.of(logits.dim())[:-1])
    else:
        result = collectives.reduce_from_group(losses.sum(), groups.axis(*cuts.tokens))
    return result if denominator is None else result / denominator


def _check_options(reduction: str, label_smoothing: float) -> None:
    """Raise DslparError where torch refuses the option."""
    if reduction not in get_args(Reduction):
        message, hint = f"reduction={reduction!r}", f"one of {', '.join(map(repr, get_args(Reduction)))}"
    elif not 0 <= label_smoothing <= 1:
        message, hint = f"label_smoothing={label_smoothing!r}", "a share of each label, from 0.0 to 1.0"
    else:
        return
    message = f"cross_entropy with {message}"
    raise_finding("TEN225", message, hint)


def _check_shapes(groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int) -> None:
    """Raise DslparError where a rank would take other tokens' labels, or columns that are not there."""
    dims = inner_cuts(groups.tensor).of(logits.dim())
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in dims]
    *tokens, columns = (length * count for length, count in zip(logits.shape, counts, strict=False))
    if logits.dim() not in (2, 3) or list(labels.shape) != tokens:
        message = f"labels {tuple(labels.shape)} and, of all ranks, logits {(*tokens, columns)}"
        hint = "labels [batch, sequence] or [tokens], as the logits, of the whole micro-batch"
        raise_finding("TEN226", message, hint, key="model")
    if columns < vocab_size:
        message = f"logits of {columns} columns, and a vocabulary of {vocab_size}"
        raise_finding("TEN226", message, "the vocab_size of the head that made them", key="model")


@torch.no_grad()
def accuracy(
    groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the share of counted tokens whose largest logit is the label's; of equal ones the first, as in argmax.

    Arguments are those of `cross_entropy`. A scalar, equal on all ranks of the tensor group; 0 where no token counts.

    Raises:
        DslparError: a label is neither in the vocabulary nor ignored, or shapes do not fit.
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
    # Several ranks may hold the largest value: the smallest column wins, and a rank without it bids one past the end.
    past_the_end = torch.full_like(index, vocab_size)
    index = collectives.all_reduce(torch.where(value == largest, index + first, past_the_end), axis, "min")
    correct = (index == local_labels) & (local_labels != ignore_index)
    num_correct = collectives.all_reduce(correct.sum(), groups.axis(*cuts.tokens))
    return num_correct / (labels != ignore_index).sum().clamp(min=1)


def _local_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's largest logit, and the first column that has it; (-inf, 0) where there are no columns."""
    if logits.shape[-1] == 0:
        return upcast(logits.new_full(logits.shape[:-1], -torch.inf)), logits.new_zeros(logits.shape[:-1]).long()
    index = logits.argmax(-1)
    return upcast(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)), index


def _token_losses(
    groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int, smoothing: float
) -> Tensor:
    """Return the losses [m] of this rank's tokens from logits [m, V/n] and labels [m]."""
    letters = inner_cuts(groups.tensor).features
    axis = groups.axis(*letters)
    if axis.size == 1:
        return functional.cross_entropy(
            logits[:, :vocab_size], labels, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none"
        )
    first = piece(groups.tensor, groups.coord, letters)[0] * logits.shape[-1]
    ignored = labels == ignore_index
    targets = (labels - first).masked_fill(ignored, -1)
    columns = min(max(vocab_size - first, 0), logits.shape[-1])
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits, targets, axis, columns, smoothing, smoothing / vocab_size
    )
    return losses.masked_fill(ignored, 0)


class _TokenLosses(torch.autograd.Function):
    """Logits [m, V/n], and targets [m] counted from this rank's first column, to losses [m], equal on all ranks.

    Of this rank's columns the first `columns` are vocabulary. Each gets the share `even` of a token's label, which
    leaves 1 - `smoothing` on top for the target.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, columns: int, smoothing: float, even: float
    ) -> Tensor:
        vocabulary = logits[:, :columns]
        # A rank of padding alone has no columns: its -inf changes no maximum.
        largest = vocabulary.amax(-1, keepdim=True) if columns else logits.new_full((len(logits), 1), -torch.inf)
        shifted = logits - collectives.start_all_reduce_(largest, axis, "max").wait()
        outside = (targets < 0) | (targets >= columns)
        targets = targets.masked_fill(outside, 0).unsqueeze(-1)
        # A target outside this rank's columns counts 0 here and its logit on the rank that has it. It is read before
        # `exp_` overwrites the logits: one [m, V/n] tensor, the largest of the whole model, is all that lives.
        target = shifted.gather(-1, targets).squeeze(-1).masked_fill_(outside, 0)
        label_mean = target if smoothing == 0 else target * (1 - smoothing) + even * shifted[:, :columns].sum(-1)
        exponents = shifted.exp_()
        exponents[:, columns:] = 0
        exponent_sum, label_mean = collectives.start_all_reduce_(
            torch.stack([exponents.sum(-1), label_mean]), axis
        ).wait()
        ctx.save_for_backward(exponents.div_(exponent_sum.unsqueeze(-1)), targets, outside)
        ctx.columns, ctx.smoothing, ctx.even = columns, smoothing, even
        losses: Tensor = exponent_sum.log() - label_mean
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, targets, outside = ctx.saved_tensors
        loss_grad = grads[0].unsqueeze(-1)
        logits_grad = softmax * loss_grad
        if ctx.smoothing:
            logits_grad[:, : ctx.columns] -= loss_grad * ctx.even
        target_grad = loss_grad.masked_fill(outside.unsqueeze(-1), 0) * (ctx.smoothing - 1)
        return logits_grad.scatter_add_(-1, targets, target_grad), None, None, None, None, None
