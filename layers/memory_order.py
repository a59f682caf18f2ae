"""Activations [batch, sequence, features] whose tokens stand in memory by sequence first, as Megatron-LM stores them.

Where the sequence is cut, pieces that are gathered stand one after the other: first all samples' first tokens. Their
panel is handed on as it is, a transposed view, which saves a copy of it; and what is computed from it stands likewise:
elementwise functions keep the order of their input, and products do it here. The residual between layers is the
opposite: always contiguous, for code around the layers may `view` it.

    y = linear(x, weight)           # in the memory order of x, as every function here
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def is_sequence_first(x: Tensor) -> bool:
    """Whether x [batch, sequence, features] is contiguous as [sequence, batch, features], and is not as it stands."""
    return x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def as_stored(x: Tensor) -> Tensor:
    """Return x, or its contiguous view [sequence, batch, features]."""
    return x.transpose(0, 1) if is_sequence_first(x) else x


def from_stored(stored: Tensor, x: Tensor) -> Tensor:
    """Return by its dims what was computed from `as_stored(x)`."""
    return stored.transpose(0, 1) if is_sequence_first(x) else stored


def tokens(x: Tensor) -> Tensor:
    """Flatten [..., features] to [tokens, features], in the order in which the tokens stand in memory."""
    return as_stored(x).flatten(0, -2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [..., K] and [N, K] to [..., N]."""
    return from_stored(functional.linear(as_stored(x), weight, bias), x)


def weight_factors(y_grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of dW = dY^T X over all tokens: [..., N] and [..., K] as [N, tokens] and [tokens, K]."""
    if is_sequence_first(y_grad) and is_sequence_first(x):
        y_grad, x = y_grad.transpose(0, 1), x.transpose(0, 1)
    return y_grad.flatten(0, -2).t(), x.flatten(0, -2)
