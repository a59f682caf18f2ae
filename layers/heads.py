"""Heads of attention, shared out over the ranks of a tensor group; and what does not fit them.

The linter says the same of GPT before any process starts; of a model of your own, nothing is known before it is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslpar.core.errors import WORLD, DslparError, Finding, Location
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import inner_cuts, piece, residual_cuts


def heads_of_rank(groups: Groups, hidden_size: int, num_heads: int, num_kv_heads: int, *, rotary: bool) -> list[int]:
    """How many heads of queries, keys and values each rank computes. Raises: DslparError, with all that is wrong."""
    tensor = groups.tensor
    shared_by = groups.axis(*inner_cuts(tensor).features).size
    exchanged_by = tensor.x if tensor.split == "sequence" and tensor.impl == "ulysses" else 1
    ranks = shared_by * exchanged_by
    wrong = [
        _does_not_divide("TEN205", "heads-do-not-divide-hidden", "hidden_size", hidden_size, num_heads, "num_heads"),
        _does_not_divide(
            "TEN207", "kv-heads-do-not-divide-heads", "num_heads", num_heads, num_kv_heads, "num_kv_heads"
        ),
        _does_not_divide("TEN201", "heads-do-not-divide", "num_heads", num_heads, ranks, "the ranks that share them"),
        _does_not_divide("TEN206", "kv-heads-do-not-divide", "num_kv_heads", num_kv_heads, ranks, "these ranks"),
    ]
    if rotary and num_heads > 0 and hidden_size // num_heads % 2:
        wrong.append(_finding("TEN209", "odd-head", *_odd(hidden_size, num_heads), "model.hidden_size"))
    if findings := [finding for finding in wrong if finding is not None]:
        raise DslparError(findings)
    return [num_heads // shared_by, num_kv_heads // shared_by, num_kv_heads // shared_by]


def own_samples(groups: Groups, mask: Tensor, x: Tensor) -> Tensor:
    """Of a padding mask of the whole micro-batch, the samples that this rank attends for; their sequences whole.

    `x` is the stored residual [batch, sequence, hidden]. Raises: DslparError, of a mask of another shape or type.
    """
    cuts = residual_cuts(groups.tensor)
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in (cuts.batch, cuts.sequence)]
    shape = tuple(length * count for length, count in zip(x.shape, counts, strict=False))
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        message = f"a mask {tuple(mask.shape)} of {mask.dtype}, and the micro-batch is {shape}"
        hint = f"bool {shape}, True where a token is no padding, whole on every rank: for example, ids != pad_id"
        raise DslparError([_finding("TEN223", "wrong-mask", message, hint, "model")])
    index, count = piece(groups.tensor, groups.coord, inner_cuts(groups.tensor).batch)
    return mask.chunk(count)[index]


def _does_not_divide(code: str, name: str, what: str, number: int, by: int, by_what: str) -> Finding | None:
    if by < 1:
        return _finding(code, name, f"{by_what} is {by}", f"{by_what}=1, or more", f"model.{by_what}")
    if number % by == 0:
        return None
    below, above = number // by * by, -(-number // by) * by
    return _finding(
        code, name, f"{what} {number} does not divide by {by}, {by_what}", f"{what}={below or above}", f"model.{what}"
    )


def _odd(hidden_size: int, num_heads: int) -> tuple[str, str]:
    """What is said, and the help."""
    message = f"a head has {hidden_size // num_heads} features, and rotary positions turn pairs of them"
    return message, f"hidden_size={-(-hidden_size // (2 * num_heads)) * 2 * num_heads}"


def _finding(code: str, name: str, message: str, hint: str, key: str) -> Finding:
    return Finding(code, name, "error", message, hint, Location(WORLD), key)
