"""The loss of a model that brings none: cross-entropy over classes or tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dslpar.layers import IGNORE_INDEX
from dslpar.models.layered import Labels


def cross_entropy(logits: Tensor, labels: Labels) -> Tensor:
    """The sum over counted labels, over their number or over `labels[1]`; a label of -100 is not counted.

    `logits` [batch, classes] with labels [batch], or [batch, sequence, vocabulary] with [batch, sequence].
    """
    labels, denominator = labels if isinstance(labels, tuple) else (labels, (labels != IGNORE_INDEX).sum().clamp(min=1))
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / denominator
