"""Divide the heads of attention over the ranks of a tensor group; refuse numbers that do not divide.

The linter says the same of GPT before any process starts; of a model of your own, nothing is known before it is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import WORLD, DslparError, Finding, Location
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import inner_cuts, piece, residual_cuts
from dslpar.linter.registry import rule_finding


def local_heads(groups: Groups, hidden_size: int, num_heads: int, num_kv_heads: int, *, rotary: bool) -> list[int]:
    """Return how many heads of queries, keys and values each rank computes. Raises: DslparError: all that is wrong."""
    tensor = groups.tensor
    shared_by = groups.axis(*inner_cuts(tensor).features).size
    exchanged_by = tensor.x if tensor.split == "sequence" and tensor.impl == "ulysses" else 1
    ranks = shared_by * exchanged_by
    wrong = [
        _does_not_divide("TEN205", "hidden_size", hidden_size, num_heads, "num_heads"),
        _does_not_divide("TEN207", "num_heads", num_heads, num_kv_heads, "num_kv_heads"),
        _does_not_divide("TEN201", "num_heads", num_heads, ranks, "the ranks that share them"),
        _does_not_divide("TEN206", "num_kv_heads", num_kv_heads, ranks, "these ranks"),
    ]
    if rotary and num_heads > 0 and hidden_size // num_heads % 2:
        message = f"a head has {hidden_size // num_heads} features, and rotary positions turn pairs of them"
        hint = f"hidden_size={-(-hidden_size // (2 * num_heads)) * 2 * num_heads}"
        wrong.append(rule_finding("TEN209", message, hint, Location(WORLD), "model.hidden_size"))
    if findings := [finding for finding in wrong if finding is not None]:
        raise DslparError(findings)
    return [num_heads // shared_by, num_kv_heads // shared_by, num_kv_heads // shared_by]


def local_samples(groups: Groups, mask: Tensor, x: Tensor) -> Tensor:
    """Take this rank's samples of a padding mask: [batch, sequence] of the whole micro-batch to [batch/x, sequence].

    `x` is the stored residual [batch/x, sequence, H/z]. Raises: DslparError: the mask has another shape or type.
    """
    cuts = residual_cuts(groups.tensor)
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in (cuts.batch, cuts.sequence)]
    shape = tuple(length * count for length, count in zip(x.shape, counts, strict=False))
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        message = f"a mask {tuple(mask.shape)} of {mask.dtype}, and the micro-batch is {shape}"
        hint = f"bool {shape}, True where a token is no padding, whole on every rank: for example, ids != pad_id"
        raise_finding("TEN223", message, hint, key="model")
    index, count = piece(groups.tensor, groups.coord, inner_cuts(groups.tensor).batch)
    return mask.chunk(count)[index]


def _does_not_divide(code: str, what: str, number: int, by: int, by_what: str) -> Finding | None:
    if by < 1:
        return rule_finding(code, f"{by_what} is {by}", f"{by_what}=1, or more", Location(WORLD), f"model.{by_what}")
    if number % by == 0:
        return None
    below, above = number // by * by, -(-number // by) * by
    message = f"{what} {number} does not divide by {by}, {by_what}"
    return rule_finding(code, message, f"{what}={below or above}", Location(WORLD), f"model.{what}")
