"""Token ids and labels: every rank of a tensor group has the whole micro-batch, and takes its own tokens from it.

    ids = local_tokens(groups, ids, residual_cuts(groups.tensor))

As in torch, an id outside the vocabulary is an error, in every layout. Without a check, each rank would only see that
the id is not among its own rows, and continue.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.activation_sharding import check_divides
from dslpar.layers.placement import ActivationSharding


def local_tokens(groups: Groups, ids: Tensor, cuts: ActivationSharding) -> Tensor:
    """Take this rank's ids: [batch, sequence] to [batch/x, sequence], or [tokens] to [tokens/x]."""
    if ids.dim() == 1:
        return placement.take(ids, 0, groups.tensor, groups.coord, cuts.tokens)
    ids = placement.take(ids, 0, groups.tensor, groups.coord, cuts.batch)
    return placement.take_tokens(ids, 1, groups.tensor, groups.coord, cuts.sequence)


def check_shape(groups: Groups, ids: Tensor, cuts: ActivationSharding) -> None:
    """Raise DslparError if ids have neither one nor two dims, or a dim does not divide over the ranks."""
    if ids.dim() not in (1, 2):
        message = f"ids of shape {tuple(ids.shape)}"
        raise_finding("TEN226", message, "[batch, sequence] or [tokens], of the whole micro-batch", key="model")
    check_divides(groups, ids, cuts.of(ids.dim() + 1)[:-1], "the ids")


def check_range(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None = None) -> None:
    """Check that every id names a row, or is `ignore_index`.

    On a CPU this takes two passes over the ids. On an accelerator the host does not wait for the result: as in torch, a
    failed check is an assertion on the device.

    Raises:
        DslparError: an id is outside the vocabulary.
    """
    right = (ids >= 0) & (ids < vocab_size)
    if ignore_index is not None:
        right |= ids == ignore_index
    if ids.device.type != "cpu":
        torch._assert_async(right.all(), f"{what} outside the vocabulary of {vocab_size}")
    elif not right.all():
        _refuse_id(int(ids[~right][0]), vocab_size, what)


def row_index(index: int, vocab_size: int) -> int:
    """Return the row that `index` names; a negative index counts from the end. Raises: DslparError: no such row."""
    if not -vocab_size <= index < vocab_size:
        _refuse_id(index, vocab_size, "padding_idx")
    return index % vocab_size


def _refuse_id(number: int, vocab_size: int, what: str) -> NoReturn:
    message = f"{number} among the {what}, but the vocabulary has {vocab_size} entries, 0 to {vocab_size - 1}"
    hint = f"vocab_size={number + 1}, or more, if it is a token" if number >= 0 else f"mask {what} that do not count"
    raise_finding("TEN222", message, hint, key="model.vocab_size")
