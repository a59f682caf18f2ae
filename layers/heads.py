"""Divide attention heads over the ranks of a tensor group; refuse numbers that do not divide.

The linter checks dslpar's model families with the same conditions (layout/divisors.py) before any process starts. A
model of your own can only be checked when it is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import WORLD, DslparError, Finding, Location
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import inner_cuts, piece, residual_cuts
from dslpar.layout import divisors
from dslpar.layout.nearest import describe, nearest_attention
from dslpar.linter.registry import rule_finding

# Not TEN202 and TEN208, which concern hidden_size alone: for these the weights' placements raise TEN227, as for any
# layer.
_CODES = ("TEN201", "TEN205", "TEN206", "TEN207", "TEN209")


def local_heads(
    groups: Groups, hidden_size: int, num_heads: int, num_kv_heads: int | None, *, rotary: bool
) -> list[int]:
    """Return the numbers of query, key and value heads per rank; `num_kv_heads` None: as many as query heads.

    Raises:
        DslparError: a number of heads is below 1, or heads do not divide over the ranks (lists all violations).
    """
    for code, name, count in (("TEN205", "num_heads", num_heads), ("TEN207", "num_kv_heads", num_kv_heads)):
        if count is not None and count < 1:
            raise DslparError([_finding(code, name, f"{name} is {count}", f"{name}=1, or more")])
    sizes = divisors.Attention(hidden_size, num_heads, num_kv_heads, rotary)
    conditions = divisors.attention(sizes, groups.tensor)
    wrong = {each.code: each for each in conditions if each.code in _CODES and not each.holds}
    if "TEN205" in wrong:
        wrong.pop("TEN209", None)  # without whole heads it is meaningless whether a head's features are even
    if wrong:
        hint = describe(nearest_attention(sizes, groups.tensor))
        raise DslparError(
            [
                _finding(code, each.key, f"{each.key} {each.value} is not divisible by {each.why}", hint)
                for code, each in sorted(wrong.items())
            ]
        )
    shared_by = groups.axis(*inner_cuts(groups.tensor).features).size
    kept = (num_heads if num_kv_heads is None else num_kv_heads) // shared_by
    return [num_heads // shared_by, kept, kept]


def _finding(code: str, key: str, message: str, hint: str) -> Finding:
    return rule_finding(code, message, hint, Location(WORLD), f"model.{key}")


def local_samples(groups: Groups, mask: Tensor, x: Tensor) -> Tensor:
    """Take this rank's samples of a mask: [batch, sequence] of the whole micro-batch to [batch/x, sequence].

    `x` is the stored residual [batch/x, sequence, H/z]. Raises: DslparError: the mask has the wrong shape or type.
    """
    cuts = residual_cuts(groups.tensor)
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in (cuts.batch, cuts.sequence)]
    shape = tuple(length * count for length, count in zip(x.shape, counts, strict=False))
    if mask.dtype not in (torch.bool, torch.int32) or tuple(mask.shape) != shape:
        message = f"a mask {tuple(mask.shape)} of {mask.dtype}, but the micro-batch is {shape}"
        hint = f"bool {shape}, True where a token is not padding, whole on every rank: for example, ids != pad_id; or"
        hint += " int32, numbers of documents from 1"
        raise_finding("TEN223", message, hint, key="model")
    index, count = piece(groups.tensor, groups.coord, inner_cuts(groups.tensor).batch)
    return mask.chunk(count)[index]
