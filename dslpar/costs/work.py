"""Compute of a rank per layer in the forward of a micro-batch: matrix products, attention, and elementwise operations.

    >>> from dslpar.core.mesh import TensorMesh
    >>> total([sizes.Linear(16, 48, "inward")], TensorMesh(y=2, mode="1d"), tokens=64).products
    (Product(rows=64.0, depth=16.0, columns=24.0),)

Sizes are those of the panels that one rank multiplies. `dslpar.costs.memory` defines the letters, panels, and inward
and outward linears. An inward linear multiplies [M/x rows, K/z depth] by [K/z depth, N/y columns]. An outward one has
depth K/y and N/z columns. The backward has two products per product of the forward, each with as many operations:
[rows, columns] @ [columns, depth] for the input's gradient, and [depth, rows] @ [rows, columns] for the weight's.
`FORMS` has the closed form of each kind of layer in `dslpar.costs.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.costs import layers as sizes
from dslpar.costs.adapters import matrices
from dslpar.costs.cached_sharding import inner_cuts, residual_cuts
from dslpar.costs.collective_traffic import Number
from dslpar.costs.layers import Forms, Layer, walk
from dslpar.layout.divisors import ranks, vocabulary


class Product(NamedTuple):
    """A matrix product [rows, depth] @ [depth, columns] on one rank."""

    rows: float
    depth: float
    columns: float


class Grouped(NamedTuple):
    """Products of several weights in one kernel, each with rows of its own: [rows, depth] @ [depth, columns] each."""

    num: int
    """Weights, such as the experts of a rank."""
    rows: float
    """Rows of one weight."""
    depth: float
    columns: float
    times: int = 1
    """Kernels, one after the other, in which the same weights meet `rows` rows each."""

    @property
    def product(self) -> Product:
        """The product of one kernel's rows with a weight of this size, which has as many operations."""
        return Product(self.num * self.rows, self.depth, self.columns)


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


class WeightSum(NamedTuple):
    """Sum of `num` experts' weights and their low-rank adapters, which these experts' rows are multiplied with."""

    num: float
    rows: float
    """Rows of one expert."""
    inputs: float
    outputs: float
    r: float
    """Rank of the adapters."""

    @property
    def elements(self) -> float:
        """Elements of the sum, and of its gradient."""
        return self.num * self.inputs * self.outputs


class Work(NamedTuple):
    """Compute of a rank in the forward of a micro-batch."""

    products: tuple[Product, ...] = ()
    """Products with a trained weight."""
    frozen: tuple[Product, ...] = ()
    """Products with a frozen weight. Their backward has only the product for the input's gradient."""
    adapters: tuple[Product, ...] = ()
    """Products with the matrices of LoRA adapters, which are trained."""
    grouped: tuple[Grouped, ...] = ()
    """Products of experts with trained weights."""
    sums: tuple[WeightSum, ...] = ()
    """Sums of experts' frozen weights and their adapters."""
    scores: tuple[Scores, ...] = ()
    """Attention without its projections, one entry per attention layer."""
    elementwise: float = 0.0
    """Elements that kernels between the products read or write, such as norms and activation functions."""
    losses: float = 0.0
    """Elements of the logits from which a loss is computed."""

    @property
    def kernels(self) -> tuple[Product, ...]:
        """The products of each kernel in `grouped`, with the rows of all its weights."""
        return tuple([each.product for each in self.grouped for _ in range(each.times)])

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(
            products=self.products + other.products,
            frozen=self.frozen + other.frozen,
            adapters=self.adapters + other.adapters,
            grouped=self.grouped + other.grouped,
            sums=self.sums + other.sums,
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
            grouped=tuple(each._replace(rows=each.rows * share) for each in self.grouped),
            sums=tuple(each._replace(rows=each.rows * share) for each in self.sums),
            scores=tuple(each._replace(queries=each.queries * share) for each in self.scores),
            elementwise=self.elementwise * share,
            losses=self.losses * share,
        )


def total(layers: Iterable[Layer], tensor: TensorMesh, tokens: Number) -> Work:
    """Return the work of all `layers`."""
    parts = walk(FORMS, layers, tensor, tokens)
    return Work(
        products=tuple([each for part in parts for each in part.products]),
        frozen=tuple([each for part in parts for each in part.frozen]),
        adapters=tuple([each for part in parts for each in part.adapters]),
        grouped=tuple([each for part in parts for each in part.grouped]),
        sums=tuple([each for part in parts for each in part.sums]),
        scores=tuple([each for part in parts for each in part.scores]),
        elementwise=sum([part.elementwise for part in parts]),
        losses=sum([part.losses for part in parts]),
    )


def linear(layer: sizes.Linear, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a linear layer. The product's kernel adds the bias."""
    rows = float(tokens) / tensor.x
    inner, residual = tensor.y, tensor.z
    cuts = (residual, inner) if layer.role == "inward" else (inner, residual)
    product = Product(rows, layer.in_features / cuts[0], layer.out_features / cuts[1])
    if layer.adapters is None:
        return Work(products=(product,))
    beside = list(matrices(tensor, layer.in_features, layer.adapters, layer.role))
    return Work(
        frozen=(product,),
        adapters=tuple(Product(rows, float(each.depth), float(each.columns)) for pair in beside for each in pair),
        elementwise=sum((3 * rows * float(b.columns) for _, b in beside), 0.0),  # added to the frozen weight's result
    )


def norm(layer: sizes.Norm, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a norm, which reads and writes the residual stream once."""
    return Work(elementwise=2 * _residual(tensor, tokens, layer.hidden_size))


def affine(layer: sizes.Affine, tensor: TensorMesh, tokens: Number) -> Work:
    """Count an affine map. Gain and shift are two operations, each of which reads and writes the residual stream."""
    return Work(elementwise=2 * (1 + layer.bias) * _residual(tensor, tokens, layer.hidden_size))


def residual_add(layer: sizes.ResidualAdd, tensor: TensorMesh, tokens: Number) -> Work:
    """Count the sum of the residual stream and a layer's result."""
    return Work(elementwise=3 * _residual(tensor, tokens, layer.hidden_size))


def attention_core(layer: sizes.AttentionCore, tensor: TensorMesh, tokens: Number) -> Work:
    """Count rotary positions and the scores."""
    rotated = 4 * _inner(tensor, tokens, layer.hidden_size + layer.kv_size) if layer.rotary else 0.0
    queries = _inner(tensor, tokens, layer.hidden_size)
    scores = Scores(queries, layer.seq_len, layer.hidden_size / layer.num_heads, layer.causal)
    return Work(scores=(scores,), elementwise=rotated)


def activation(layer: sizes.Activation, tensor: TensorMesh, tokens: Number) -> Work:
    """Count an activation function, which reads its blocks and writes its result."""
    return Work(elementwise=(layer.blocks + 1) * _inner(tensor, tokens, layer.features))


def token_linear(layer: sizes.TokenLinear, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a linear over the tokens of a sample, and the copies that transpose its input and output."""
    stored, num_tokens = _residual(tensor, tokens, layer.hidden_size), layer.num_tokens
    return Work(products=(Product(stored / num_tokens, num_tokens, num_tokens),), elementwise=4 * stored)


MOVED, MOVED_OF_ROW = 9, 13
"""Elements that moving a token's copy for one expert reads and writes per feature: on the token's rank (its copy in the
order of experts, its output put back and weighted, and the sum) and on the expert's rank (its copies in the order of
experts and in transformers' own order, and its output in the order of arrival)."""


def mixture(layer: sizes.Mixture, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a mixture whose tokens are exchanged, with experts at the even load."""
    hidden, ffn = float(layer.hidden_size), float(layer.ffn_size)
    own, rows = float(layer.own_tokens(tensor, tokens)), float(layer.rows(tensor, tokens))
    share, chunks = layer.share(tensor), tensor.expert_chunks
    each = rows / share / chunks
    grouped = Grouped(share, each, hidden, layer.blocks * ffn, chunks), Grouped(share, each, ffn, hidden, chunks)
    products = [Product(own, hidden, float(layer.num_experts))]
    elementwise = own * layer.active * MOVED * hidden + rows * (MOVED_OF_ROW * hidden + layer.matrices * ffn)
    elementwise += own * 4 * layer.num_experts  # float32 probabilities, read and written
    if layer.shared_ffn:
        products += [Product(own, hidden, 2.0 * layer.shared_ffn), Product(own, float(layer.shared_ffn), hidden)]
        elementwise += own * (3 * layer.shared_ffn + 3 * hidden)
    if layer.frozen:
        made = Work(products=tuple(products), grouped=grouped)
        return Work(frozen=made.products + made.kernels, elementwise=elementwise)
    return Work(products=tuple(products), grouped=grouped, elementwise=elementwise)


def expert_adapters(layer: sizes.ExpertAdapters, tensor: TensorMesh, tokens: Number) -> Work:
    """Count the sums of experts' weights and adapters, at the even load."""
    share = float(layer.share(tensor))
    rows = float(tokens) * layer.active * tensor.e / layer.num_experts
    made = [WeightSum(share, rows, float(inputs), float(outputs), float(layer.r)) for inputs, outputs in layer.weights]
    return Work(sums=tuple(made))


def gathered_mixture(layer: sizes.GatheredMixture, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a mixture on gathered tokens: each rank computes the rows of its own experts, at the even load.

    These are as many as if tokens were sent within the tensor group. That every rank runs the router on all tokens is
    not counted.
    """
    return mixture(layer.mixture, replace(tensor, e=1, expert_chunks=1), tokens)


def embedding(layer: sizes.Embedding, tensor: TensorMesh, tokens: Number) -> Work:
    """Count the look-up of tokens, and the sum with position embeddings."""
    return Work(elementwise=4 * _residual(tensor, tokens, layer.hidden_size))


def head(layer: sizes.Head, tensor: TensorMesh, tokens: Number) -> Work:
    """Count the head's product."""
    padded = vocabulary(layer.vocab_size, tensor).value
    adapters = () if layer.frozen else None
    return linear(sizes.Linear(layer.hidden_size, padded, "inward", bias=False, adapters=adapters), tensor, tokens)


def cross_entropy(layer: sizes.CrossEntropy, tensor: TensorMesh, tokens: Number) -> Work:
    """Count the loss."""
    return Work(losses=_inner(tensor, tokens, vocabulary(layer.vocab_size, tensor).value))


def classifier(layer: sizes.Classifier, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a classifier and its loss, which every rank computes whole."""
    product = Product(float(tokens), layer.hidden_size, layer.num_classes)
    return Work(products=(product,), losses=float(tokens) * layer.num_classes)


def batch_norm(layer: sizes.BatchNorm, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a BatchNorm, which runs operation by operation (`dslpar.layers.batch_norm`)."""
    stored = (_inner if layer.after == "inward" else _residual)(tensor, tokens, layer.features)
    # Read and write: centre, square, scale, and gain and shift. Read alone: the sums of the mean and of the variance.
    return Work(elementwise=(2 * (5 if layer.affine else 3) + 2) * stored)


def _repeated(layer: sizes.Repeated, tensor: TensorMesh, tokens: Number) -> Work:
    return total(layer.layers, tensor, tokens) * layer.times


def _forward_only(layer: sizes.ForwardOnly, tensor: TensorMesh, tokens: Number) -> Work:
    """Count layers without a backward as a third of trained ones, whose backward takes twice as long as the forward."""
    return total(layer.layers, tensor, tokens) * (1 / 3)


def _nothing(layer: Layer, tensor: TensorMesh, tokens: Number) -> Work:
    """Count a layer that runs on one token per sample or less, or that the count of another layer includes."""
    return Work()


FORMS: Forms[Work] = {
    sizes.Activation: activation,
    sizes.Affine: affine,
    sizes.AttentionCore: attention_core,
    sizes.BatchNorm: batch_norm,
    sizes.Classifier: classifier,
    sizes.CrossEntropy: cross_entropy,
    sizes.Embedding: embedding,
    sizes.FirstToken: _nothing,
    sizes.ForwardOnly: _forward_only,
    sizes.GatheredInner: _nothing,
    sizes.ExpertAdapters: expert_adapters,
    sizes.GatheredMixture: gathered_mixture,
    sizes.Head: head,
    sizes.Linear: linear,
    sizes.MeanOfTokens: _nothing,
    sizes.Mixture: mixture,
    sizes.Norm: norm,
    sizes.Repeated: _repeated,
    sizes.ResidualAdd: residual_add,
    sizes.TokenLinear: token_linear,
    sizes.Vectors: _nothing,
}
"""The closed form of each kind of layer but `PerSample`, which `walk` takes apart."""


def _residual(tensor: TensorMesh, tokens: Number, features: int) -> float:
    """Return the elements of the residual stream that a rank stores."""
    cuts = residual_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)


def _inner(tensor: TensorMesh, tokens: Number, features: int) -> float:
    """Return the elements of an inner activation that a rank stores."""
    cuts = inner_cuts(tensor)
    return float(tokens) * features / ranks(tensor, cuts.tokens + cuts.features)
