"""Rotary position embedding: rotate queries and keys by their position (RoFormer, arXiv 2104.09864).

Letters: D features per head. Pair i of D/2 turns by position * theta^(-2i/D), so that the product of a query and a key
depends on their distance alone. Pairs are (i, i + D/2), the "rotate half" of GPT-NeoX, Llama and Hugging Face's
weights. RoFormer itself pairs neighbours (2i, 2i + 1), which is the same up to a permutation of W_q's and W_k's rows.

    rotary = Rotary(theta=10000.0)
    qkv = rotary(qkv, first=0, num_heads=12)       # [batch, sequence, heads, D], of which 12 are queries and keys

The other heads, the values, are copied along, so that the input can be freed. Values that are views of the input would
keep all of it in memory until the backward.

Angles are computed in float64, the rotation in float32 or wider, and the result has the input's dtype. The tables of
cosines and sines belong to no module: they are not saved, sharded, cast with the weights or sent between stages. They
are made at their first use, and cached for the last few (positions, device, dtype). All layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dslpar.layout.token_order import Run, Runs

Ranges = tuple[tuple[int, int], ...]
"""Positions: (first, end) of each run."""


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding, as a value that all layers of a model may share."""

    theta: float = 10000.0
    """Base of the angles. The longest wavelength is almost 2 pi theta tokens: the last exponent is 2/D short of 1."""

    def __call__(
        self, x: Tensor, first: int = 0, num_heads: int | None = None, sequence_dim: int = 1, tokens: Runs | None = None
    ) -> Tensor:
        """Rotate the first `num_heads` heads (None: all) of `x` [batch, sequence, heads, D]; return the same shape.

        `tokens` are the positions of the tokens, counted from `first`. By default they follow one another from `first`.
        D must be even. With `sequence_dim` 0, `x` is [sequence, batch, heads, D].
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        tokens = tokens or (Run(0, x.shape[sequence_dim]),)
        positions = tuple((first + run.first, first + run.end) for run in tokens)
        table = _table(self.theta, x.shape[3], positions, x.device, wide)
        cos, sin = (table if sequence_dim == 1 else table.unsqueeze(2)).unbind()
        return cast("Tensor", _Rotate.apply(x, cos, sin, x.shape[2] if num_heads is None else num_heads))  # type: ignore[no-untyped-call]


def _table(theta: float, head_dim: int, positions: Ranges, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _make_table(theta, head_dim, positions, device, dtype)


# Marks the result as constant for torch.compile, else a compiled block would make its table in every forward. This
# needs a function of its own, since torch.compile looks through a cache. torch.compiler.assume_constant_result sets the
# same attribute, but first imports torch's compiler, which takes a second even in processes that compile nothing.
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=8)
def _make_table(theta: float, head_dim: int, positions: Ranges, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines, [2, sequence, 1, D/2]."""
    assert head_dim % 2 == 0, f"a head of {head_dim} features is not made of pairs"
    with torch.inference_mode(False):  # else training could not use a table that was first made in evaluation
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        ranges = [torch.arange(first, end, dtype=torch.float64, device="cpu") for first, end in positions]
        angles = torch.outer(torch.cat(ranges), theta**-exponents).unsqueeze(1)
        return torch.stack([angles.cos(), angles.sin()]).to(device, dtype)


class _Rotate(torch.autograd.Function):
    """Rotate by the angles forward, and by their negatives backward. Only the tables are saved for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = num_heads
        return _rotated(x, cos, sin, num_heads, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, ctx.num_heads, -1), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, num_heads: int, sign: int) -> Tensor:
    """Rotate by `sign` times the angles, out of place, so that torch.compile can fuse it into one kernel."""
    a, b = x[:, :, :num_heads].to(cos.dtype).chunk(2, -1)
    real = (a * cos).addcmul_(b, sin, value=-sign)
    imaginary = (b * cos).addcmul_(a, sin, value=sign)
    rotated = torch.cat([real, imaginary], -1).to(x.dtype)
    return rotated if num_heads == x.shape[2] else torch.cat([rotated, x[:, :, num_heads:]], 2)
