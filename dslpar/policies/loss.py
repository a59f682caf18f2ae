"""Losses of transformers models: cross-entropy of sharded or full logits, and losses that a forward computes itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import cross_entropy
from dslpar.models.layered import Labels, Loss
from dslpar.models.sequential import cross_entropy as whole_loss

__all__ = ["ModelLoss", "OwnLoss", "vocabulary_loss", "whole_loss"]


class ModelLoss:
    """Sum of cross-entropies: of the first logits, by `of_first`, and of each further output, which is full."""

    def __init__(self, of_first: Loss, num_labels: int) -> None:
        self.of_first, self.num_labels = of_first, num_labels
        """Number of label tensors of a micro-batch."""

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """Return the sum of the losses. `labels`: one tensor per loss, and optionally the first loss's denominator."""
        if self.num_labels == 1:
            return self.of_first(output, labels)
        given, denominator = labels[: self.num_labels], labels[self.num_labels :]
        total = self.of_first(output[0], (given[0], *denominator) if denominator else given[0])
        for logits, own in zip(output[1:], given[1:], strict=True):
            total = total + whole_loss(logits, own)
        return total


def vocabulary_loss(groups: Groups, vocab_size: int, logits: Tensor, labels: Labels) -> Tensor:
    labels, denominator = (labels, None) if isinstance(labels, torch.Tensor) else labels
    return cross_entropy(groups, logits, labels, vocab_size, denominator)


class OwnLoss:
    """Loss that a model's own forward computes, such as ViTMAE's over the pixels of masked patches.

    The forward runs once more, with stand-ins for its child modules that return the outputs computed before.
    """

    def __init__(self, model: Any, argument: str, outputs: Sequence[str]) -> None:
        self.argument, self.outputs = argument, outputs
        self.shell = copy.copy(model)
        self.children = {name: _Given() for name, _ in model.named_children()}
        self.shell._modules = self.children

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """Return the loss of a micro-batch, full on each rank; `labels` is passed as the forward's argument."""
        given = dict(zip(self.outputs, output if isinstance(output, tuple) else (output,), strict=True))
        for child in self.children.values():
            child.given = given
        own = labels[0] if isinstance(labels, tuple) else labels
        loss: Tensor = self.shell.forward(**{self.argument: own}).loss
        for child in self.children.values():
            child.given = {}
        return loss


class _Given(nn.Module):
    """Stand-in for a child: returns `given` as attributes; other attributes are None."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Mapping[str, Tensor] = {}

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the outputs, for any arguments."""
        return _Outputs(**self.given)


class _Outputs(SimpleNamespace):
    def __getattr__(self, _: str) -> None:
        return None
