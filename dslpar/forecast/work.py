"""What a rank computes for each layer in the forward of a micro-batch: products, attention, and what lies between.

    >>> from dslpar.core.mesh import Tensor
    >>> linear(Tensor(y=2, mode="1d"), 64, 16, 48, role="inward").products
    (Product(rows=64.0, depth=16.0, columns=24.0),)

Sizes are those of the pieces that one rank multiplies (`dslpar.forecast.memory` has the letters): an inward linear has
M/x rows, K/z deep, N/y columns; an outward one K/y and N/z. A backward has two products of the same operations for each
of them, one of the same rows and one with rows and depth exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.core.frozen import frozen
from dslpar.core.mesh import Tensor
from dslpar.forecast.ring import Number
from dslpar.forecast.traffic import Role
from dslpar.layout.divisors import ranks, vocabulary
from dslpar.layout.sharding import inner_cuts, residual_cuts


class Product(NamedTuple):
    """A matrix product [rows, depth] @ [depth, columns] on one rank."""

    rows: float
    depth: float
    columns: float


class Scores(NamedTuple):
    """Attention between q, k and v and its result, on one rank."""

    queries: float
    """Elements of all queries: tokens * heads * head_size."""
    keys: float
    """Keys that a query could meet, without a mask."""
    head_size: float
    causal: bool


@frozen
class Work:
    """What a rank computes in the forward of a micro-batch."""

    products: tuple[Product, ...] = ()
    scores: tuple[Scores, ...] = ()
    elementwise: float = 0.0
    """Elements that kernels between the products read or write, of activations."""
    losses: float = 0.0
    """Elements of logits that a loss is computed of."""

    def __add__(self, other: Work) -> Work:
        return Work(
            products=self.products + other.products,
            scores=self.scores + other.scores,
            elementwise=self.elementwise + other.elementwise,
            losses=self.losses + other.losses,
        )

    def __mul__(self, times: Number) -> Work:
        """Repeat it, or a part of it: the rows of every product, and all else."""
        share = float(times)
        return Work(
            products=tuple(each._replace(rows=each.rows * share) for each in self.products),
            scores=tuple(each._replace(queries=each.queries * share) for each in self.scores),
            elementwise=self.elementwise * share,
            losses=self.losses * share,
        )


def linear(tensor: Tensor, tokens: Number, in_features: int, out_features: int, *, role: Role) -> Work:
    """Count a linear layer; biases are added by the product."""
    rows = float(tokens) / tensor.x
    inner, residual = tensor.y, tensor.z
    cuts = (residual, inner) if role == "inward" else (inner, residual)
    return Work(products=(Product(rows, in_features / cuts[0], out_features / cuts[1]),))


def norm(tensor: Tensor, tokens: Number, hidden_size: int) -> Work:
    """Count a norm: read and written once."""
    return Work(elementwise=2 * _residual(tensor, tokens, hidden_size))


def residual_add(tensor: Tensor, tokens: Number, hidden_size: int) -> Work:
    """Count the sum of the residual stream and a layer's result."""
    return Work(elementwise=3 * _residual(tensor, tokens, hidden_size))


def attention(
    tensor: Tensor,
    tokens: Number,
    seq_len: int,
    hidden_size: int,
    num_heads: int,
    *,
    kv_heads: int | None = None,
    causal: bool = True,
    rotary: bool = False,
) -> Work:
    """Count attention: q, k and v, the heads, the projection back."""
    head_size = hidden_size / num_heads
    kv_size = int(head_size * (kv_heads or num_heads))
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward")
    rotated = 4 * _inner(tensor, tokens, hidden_size + kv_size) if rotary else 0.0
    queries = _inner(tensor, tokens, hidden_size)
    core = Work(scores=(Scores(queries, seq_len, head_size, causal),), elementwise=rotated)
    return inward + core + linear(tensor, tokens, hidden_size, hidden_size, role="outward")


def mlp(tensor: Tensor, tokens: Number, hidden_size: int, ffn_size: int, *, activation: str = "gelu") -> Work:
    """Count an MLP: up, the activation, down; with 'swiglu' a gate beside up."""
    blocks = 2 if activation == "swiglu" else 1
    up = linear(tensor, tokens, hidden_size, blocks * ffn_size, role="inward")
    activated = Work(elementwise=(blocks + 1) * _inner(tensor, tokens, ffn_size))
    return up + activated + linear(tensor, tokens, ffn_size, hidden_size, role="outward")


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> Work:
    """Count a linear over the tokens of a sample, whose matrix every rank has whole, with both changes of layout."""
    stored = _residual(tensor, tokens, hidden_size)
    return Work(products=(Product(stored / num_tokens, num_tokens, num_tokens),), elementwise=4 * stored)


def embedding(tensor: Tensor, tokens: Number, hidden_size: int) -> Work:
    """Count a look-up, and the sum with positions."""
    return Work(elementwise=4 * _residual(tensor, tokens, hidden_size))


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int) -> Work:
    """Count the head and the loss of its logits."""
    padded = vocabulary(vocab_size, tensor).value
    product = linear(tensor, tokens, hidden_size, padded, role="inward")
    return product + Work(losses=_inner(tensor, tokens, padded))


def _residual(tensor: Tensor, tokens: Number, features: int) -> float:
    """Return the elements that a rank stores of the residual."""
    cuts = residual_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)


def _inner(tensor: Tensor, tokens: Number, features: int) -> float:
    """Return the elements that a rank stores of an inner activation."""
    cuts = inner_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)
