"""Ids and labels: the whole micro-batch on every rank of a tensor group, of which each takes its own tokens.

    ids = own_tokens(groups, ids, residual_cuts(groups.tensor))

A number that names no row of the vocabulary is an error, as in torch, and in every layout: a rank that looked up or
compared its own part alone would find nothing there, and go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.boundary import check_divides, wrong_shape
from dslpar.layers.placement import Cuts


def own_tokens(groups: Groups, ids: Tensor, cuts: Cuts) -> Tensor:
    """Those of this rank, of [batch, sequence] or [tokens]."""
    for dim, letters in enumerate(cuts.of(ids.dim() + 1)[:-1]):
        ids = placement.take(ids, dim, groups.tensor, groups.coord, letters)
    return ids


def check_shape(groups: Groups, ids: Tensor, cuts: Cuts) -> None:
    """Raises: DslparError, of ids with neither one dim nor two, or of a number that the ranks cannot share out."""
    if ids.dim() not in (1, 2):
        message = f"ids of shape {tuple(ids.shape)}"
        raise wrong_shape(message, "[batch, sequence] or [tokens], of the whole micro-batch")
    check_divides(groups, ids, cuts.of(ids.dim() + 1)[:-1], "the ids")


def check_range(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None = None) -> None:
    """All ids name a row, or are `ignore_index`. On a CPU: two passes over them.

    On an accelerator nobody waits for the answer: there, as in torch, it is the device that stops.

    Raises:
        DslparError: one does not.
    """
    right = (ids >= 0) & (ids < vocab_size)
    if ignore_index is not None:
        right |= ids == ignore_index
    if ids.device.type != "cpu":
        torch._assert_async(right.all(), f"{what} outside the vocabulary of {vocab_size}")
    elif not right.all():
        raise DslparError([_outside(int(ids[~right][0]), vocab_size, what)])


def row_of(index: int, vocab_size: int) -> int:
    """The row that `index` names; a negative one counts from the end. Raises: DslparError, where there is none."""
    if not -vocab_size <= index < vocab_size:
        raise DslparError([_outside(index, vocab_size, "padding_idx")])
    return index % vocab_size


def _outside(number: int, vocab_size: int, what: str) -> Finding:
    return finding(
        "TEN222",
        f"{number} among the {what}, and the vocabulary has {vocab_size} entries, 0 to {vocab_size - 1}",
        f"vocab_size={number + 1}, or more, if it is a token" if number >= 0 else f"mask {what} that do not count",
        key="model.vocab_size",
    )
