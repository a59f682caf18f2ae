"""Activations [batch, sequence, features] that are sequence first in memory, as Megatron-LM stores them.

If the sequence is cut, gathered pieces follow one another in memory: the first tokens of all samples come first. The
panel is passed on as a transposed view, which saves a copy. Results keep this order: elementwise functions keep the
order of their input, and the functions of this module do so for products. The residual between layers is always
contiguous instead, because code around the layers may `view` it.

    y = linear(x, weight)           # in the memory order of x, as every function here
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def is_sequence_first(x: Tensor) -> bool:
    """Return whether x [batch, sequence, features] is not contiguous, but would be as [sequence, batch, features]."""
    return x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def as_stored(x: Tensor) -> Tensor:
    """Return x, or its contiguous view [sequence, batch, features]."""
    return x.transpose(0, 1) if is_sequence_first(x) else x


def from_stored(stored: Tensor, x: Tensor) -> Tensor:
    """Undo `as_stored` for a result that was computed from `as_stored(x)`."""
    return stored.transpose(0, 1) if is_sequence_first(x) else stored


def tokens(x: Tensor) -> Tensor:
    """Flatten [..., features] to [tokens, features], with the tokens in their memory order."""
    return as_stored(x).flatten(0, -2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [..., K] and [N, K] to [..., N]."""
    return from_stored(functional.linear(as_stored(x), weight, bias), x)


def weight_factors(y_grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of dW = dY^T X over all tokens: [..., N] and [..., K] as [N, tokens] and [tokens, K]."""
    if is_sequence_first(y_grad) and is_sequence_first(x):
        y_grad, x = y_grad.transpose(0, 1), x.transpose(0, 1)
    return y_grad.flatten(0, -2).t(), x.flatten(0, -2)
