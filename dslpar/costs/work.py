"""Compute of a rank per layer in the forward of a micro-batch: matrix products, attention, and elementwise operations.

    >>> from dslpar.core.mesh import Tensor
    >>> linear(Tensor(y=2, mode="1d"), 64, 16, 48, role="inward").products
    (Product(rows=64.0, depth=16.0, columns=24.0),)

Sizes are those of the panels that one rank multiplies. `dslpar.costs.memory` defines the letters, panels, and inward
and outward linears. An inward linear multiplies [M/x rows, K/z depth] by [K/z depth, N/y columns]. An outward one has
depth K/y and N/z columns. The backward has two products per product of the forward, each with as many operations:
[rows, columns] @ [columns, depth] for the input's gradient, and [depth, rows] @ [rows, columns] for the weight's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dslpar.core.mesh import Tensor
from dslpar.costs.adapters import Adapter, AdapterSizes, Role, matrices
from dslpar.costs.cuts import inner_cuts, residual_cuts
from dslpar.costs.ring import Number
from dslpar.layout.divisors import ranks, vocabulary


class Product(NamedTuple):
    """A matrix product [rows, depth] @ [depth, columns] on one rank."""

    rows: float
    depth: float
    columns: float


class Scores(NamedTuple):
    """Attention of q, k and v on one rank, without the projections."""

    queries: float
    """Elements of all queries: tokens * heads * head_size."""
    keys: float
    """Keys that a query attends to without a mask: the sequence length."""
    head_size: float
    """Features per head."""
    causal: bool
    """True if a causal mask leaves half of the scores."""


class Work(NamedTuple):
    """Compute of a rank in the forward of a micro-batch."""

    products: tuple[Product, ...] = ()
    """Products with a trained weight."""
    frozen: tuple[Product, ...] = ()
    """Products with a frozen weight. Their backward has only the product for the input's gradient."""
    adapters: tuple[Product, ...] = ()
    """Products with the matrices of LoRA adapters, which are trained."""
    scores: tuple[Scores, ...] = ()
    """Attention without its projections, one entry per attention layer."""
    elementwise: float = 0.0
    """Elements that kernels between the products read or write, such as norms and activation functions."""
    losses: float = 0.0
    """Elements of the logits from which a loss is computed."""

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(
            products=self.products + other.products,
            frozen=self.frozen + other.frozen,
            adapters=self.adapters + other.adapters,
            scores=self.scores + other.scores,
            elementwise=self.elementwise + other.elementwise,
            losses=self.losses + other.losses,
        )

    def __mul__(self, times: Number) -> Work:  # type: ignore[override]
        """Return the work for `times` as many tokens: scale the rows of every product, and everything else."""
        share = float(times)

        def part_of(products: tuple[Product, ...]) -> tuple[Product, ...]:
            return tuple(each._replace(rows=each.rows * share) for each in products)

        return Work(
            products=part_of(self.products),
            frozen=part_of(self.frozen),
            adapters=part_of(self.adapters),
            scores=tuple(each._replace(queries=each.queries * share) for each in self.scores),
            elementwise=self.elementwise * share,
            losses=self.losses * share,
        )


def linear(
    tensor: Tensor,
    tokens: Number,
    in_features: int,
    out_features: int,
    *,
    role: Role,
    adapters: Sequence[Adapter] | None = None,
) -> Work:
    """Count a linear layer. The product's kernel adds the bias. With `adapters` (not None) the weight is frozen."""
    rows = float(tokens) / tensor.x
    inner, residual = tensor.y, tensor.z
    cuts = (residual, inner) if role == "inward" else (inner, residual)
    product = Product(rows, in_features / cuts[0], out_features / cuts[1])
    if adapters is None:
        return Work(products=(product,))
    beside = list(matrices(tensor, in_features, adapters, role))
    return Work(
        frozen=(product,),
        adapters=tuple(Product(rows, float(each.depth), float(each.columns)) for pair in beside for each in pair),
        elementwise=sum((3 * rows * float(b.columns) for _, b in beside), 0.0),  # added to the frozen weight's result
    )


def norm(tensor: Tensor, tokens: Number, hidden_size: int) -> Work:
    """Count a norm, which reads and writes the residual stream once."""
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
    adapters: AdapterSizes | None = None,
) -> Work:
    """Count attention: the projection to q, k and v, rotary positions, the scores, and the output projection."""
    head_size = hidden_size / num_heads
    kv_size = int(head_size * (kv_heads or num_heads))
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", adapters=qkv)
    rotated = 4 * _inner(tensor, tokens, hidden_size + kv_size) if rotary else 0.0
    queries = _inner(tensor, tokens, hidden_size)
    core = Work(scores=(Scores(queries, seq_len, head_size, causal),), elementwise=rotated)
    return inward + core + linear(tensor, tokens, hidden_size, hidden_size, role="outward", adapters=out)


def mlp(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "gelu",
    adapters: AdapterSizes | None = None,
) -> Work:
    """Count an MLP: the up linear, the activation function, and the down linear; with 'swiglu' up includes the gate."""
    blocks = 2 if activation == "swiglu" else 1
    of_up, of_down = (None, None) if adapters is None else (adapters.up, adapters.down)
    up = linear(tensor, tokens, hidden_size, blocks * ffn_size, role="inward", adapters=of_up)
    activated = Work(elementwise=(blocks + 1) * _inner(tensor, tokens, ffn_size))
    return up + activated + linear(tensor, tokens, ffn_size, hidden_size, role="outward", adapters=of_down)


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> Work:
    """Count a linear over the tokens of a sample, and the copies that transpose its input and output."""
    stored = _residual(tensor, tokens, hidden_size)
    return Work(products=(Product(stored / num_tokens, num_tokens, num_tokens),), elementwise=4 * stored)


def embedding(tensor: Tensor, tokens: Number, hidden_size: int) -> Work:
    """Count the look-up of tokens, and the sum with position embeddings."""
    return Work(elementwise=4 * _residual(tensor, tokens, hidden_size))


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int, *, frozen: bool = False) -> Work:
    """Count the head and the loss."""
    padded = vocabulary(vocab_size, tensor).value
    product = linear(tensor, tokens, hidden_size, padded, role="inward", adapters=() if frozen else None)
    return product + Work(losses=_inner(tensor, tokens, padded))


def _residual(tensor: Tensor, tokens: Number, features: int) -> float:
    """Return the elements of the residual stream that a rank stores."""
    cuts = residual_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)


def _inner(tensor: Tensor, tokens: Number, features: int) -> float:
    """Return the elements of an inner activation that a rank stores."""
    cuts = inner_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)
