"""Cross-entropy of logits whose vocabulary is in pieces, never gathered.

Letters: M tokens, V vocabulary in n pieces. All-reduce the maximum, then (sum of exponents, target logit) in one
all-reduce: Megatron-LM's vocabulary-parallel cross-entropy (arXiv 1909.08053) with two of its three all-reduces merged.
In and out in float32, or wider. Columns beyond the vocabulary (padding) count as -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dslpar import comm
from dslpar.comm import Axis
from dslpar.groups import Groups
from dslpar.layers import placement

IGNORE_INDEX = -100


def cross_entropy(
    groups: Groups,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    denominator: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Sum of the token losses of the whole micro-batch over `denominator` (default: its counted tokens, at least 1).

    `logits`: as stored, [batch, sequence, V/n]. `labels` [batch, sequence]: of the whole micro-batch, equal on all
    ranks of the tensor group. The same number on every one of them, to the bit; the backward is of each one's own
    tokens.
    """
    if denominator is None:
        denominator = (labels != ignore_index).sum().clamp(min=1)
    cuts = placement.inner_cuts(groups.tensor)
    for dim, letters in enumerate((cuts.batch, cuts.sequence)):
        labels = placement.take(labels, dim, groups.tensor, groups.coord, letters)
    logits, labels = logits.flatten(0, -2), labels.flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if groups.axis(*cuts.features).size == 1:
        total = functional.cross_entropy(logits[:, :vocab_size], labels, ignore_index=ignore_index, reduction="sum")
    else:
        total = _vocabulary_parallel(groups, logits, labels, vocab_size, ignore_index)
    return comm.summed(total, groups.axis(*cuts.tokens)) / denominator


def _vocabulary_parallel(groups: Groups, logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Sum of the losses of this rank's tokens: [M, V/n] and [M] to a scalar."""
    letters = placement.inner_cuts(groups.tensor).features
    index, _ = placement.piece(groups.tensor, groups.coord, letters)
    first = index * logits.shape[-1]
    ignored = labels == ignore_index
    targets = (labels - first).masked_fill(ignored, -1)
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits, targets, groups.axis(*letters), vocab_size - first
    )
    return losses.masked_fill(ignored, 0).sum()


class _TokenLosses(torch.autograd.Function):
    """[M, V/n] logits and targets counted from this rank's first column, to [M] losses, equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, num_columns: int) -> Tensor:
        if num_columns < logits.shape[-1]:
            logits = logits.clone()
            logits[:, max(num_columns, 0) :] = -torch.inf
        maximum = comm.all_reduce(logits.amax(-1, keepdim=True), axis, "max")
        shifted = logits - maximum
        outside = (targets < 0) | (targets >= logits.shape[-1])
        targets = targets.masked_fill(outside, 0).unsqueeze(-1)
        target = shifted.gather(-1, targets).squeeze(-1).masked_fill(outside, 0)
        exponents = shifted.exp_()
        sums = torch.stack([exponents.sum(-1), target])
        exponent_sum, target = comm.start_all_reduce_(sums, axis).wait()
        ctx.save_for_backward(exponents.div_(exponent_sum.unsqueeze(-1)), targets, outside)
        losses: Tensor = exponent_sum.log() - target
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, targets, outside = ctx.saved_tensors
        loss_grad = grads[0].unsqueeze(-1)
        logits_grad = softmax * loss_grad
        own = loss_grad.masked_fill(outside.unsqueeze(-1), 0)
        return logits_grad.scatter_add_(-1, targets, -own), None, None, None
