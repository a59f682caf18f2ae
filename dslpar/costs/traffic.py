"""Traffic of each layer in closed form: elements that a rank sends, by collective and axis, forward and backward.

    >>> from dslpar.core.mesh import TensorMesh
    >>> up = total([sizes.Linear(16, 48, "inward", bias=False)], TensorMesh(q=2, y=2, residual="hidden"), tokens=64)
    >>> {key: int(elements) for key, elements in up.forward.items()}
    {('all_gather', 'y'): 256, ('all_gather', 'q'): 192}
    >>> int(up.total)
    1088

`dslpar.costs.collective_traffic` has the formula of each collective. `tests.support.traffic_counter` counts the traffic
of a running job, and tests compare it with these functions.

Letters: M tokens of a micro-batch; K and N input and output features of a linear Y = X W; d, q, y and z the axes of the
tensor group, with x = d * q. docs/architecture.md, "The cuboid", defines the axes, inward and outward linears, and
panels (gathered operands). A linear

1. gathers X over the axis that splits neither of its dims (inward: y, outward: z),
2. gathers W over q,
3. reduces Y over the axis that splits K (inward: z, outward: y).

Its backward gathers and reduces in reverse. It also sums dW over d, unless ZeRO does. With f(n) = (n-1)/n, and if all
panels are kept until the backward, an inward linear sends twice, once per direction,

    f(y) MK/(xz) + f(q) KN/(yz) + f(z) MN/(xy)      and once    2 f(d) KN/(qyz)

An outward linear sends the same with y and z exchanged in the terms of X and Y. The backward gathers again each panel
that the setting `keep` does not name. In 1d these are Megatron-LM's four all-reduces per block (arXiv 1909.08053).

All functions count one micro-batch on one rank. They include the gradients of biases and norms' vectors, although
`dslpar.engine.vector_reduction` sums these once per step if it can. The argument `tensor` is the cuboid (the tensor
group's sizes and modes), and `tokens` is M. `FORMS` has the closed form of each kind of layer in `dslpar.costs.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dslpar.core.mesh import TENSOR_AXES, TensorMesh
from dslpar.costs import layers as sizes
from dslpar.costs.adapters import matrices
from dslpar.costs.cached_sharding import inner_cuts, residual_cuts
from dslpar.costs.collective_traffic import (
    NOTHING,
    LayerTraffic,
    Number,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    exchange_of_rows,
    ratio,
    reduce_scatter,
)
from dslpar.costs.layers import Forms, Layer, walk
from dslpar.layout.divisors import ranks, vocabulary
from dslpar.layout.sharding import ActivationSharding, Letters, samples_are_cut_first


def total(layers: Iterable[Layer], tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Return the traffic of all `layers`."""
    sent = walk(FORMS, layers, tensor, tokens)
    return LayerTraffic(Traffic.sum(*[each.forward for each in sent]), Traffic.sum(*[each.backward for each in sent]))


class _Operand(NamedTuple):
    """Operand or result of a matrix product: the panel that a rank multiplies, and the axes that shard it in memory."""

    tensor: TensorMesh
    letters: Letters
    """Axes over which ranks gather the panel, or reduce-scatter it."""
    panel: Number
    """Elements of the panel."""
    replicated: bool = False
    """True if every rank along these axes stores the whole panel. Then it is all-reduced, and never gathered."""

    def gather(self) -> Traffic:
        return NOTHING if self.replicated else all_gather(self.tensor, self.letters, self.panel)

    def reduce(self) -> Traffic:
        how = all_reduce if self.replicated else reduce_scatter
        return how(self.tensor, self.letters, self.panel)


def _residual(tensor: TensorMesh, tokens: Number, features: int) -> _Operand:
    panel = ratio(tokens * features, tensor.x * tensor.z)
    return _Operand(tensor, ("y",), panel, replicated=tensor.residual == "replicated")


def _inner(tensor: TensorMesh, tokens: Number, features: int) -> _Operand:
    return _Operand(tensor, ("z",), ratio(tokens * features, tensor.x * tensor.y))


def _weight(tensor: TensorMesh, elements: int) -> _Operand:
    return _Operand(tensor, ("q",), ratio(elements, tensor.y * tensor.z))


def linear(layer: sizes.Linear, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a linear layer."""
    inward, adapters = layer.role == "inward", layer.adapters
    kinds = (_residual, _inner) if inward else (_inner, _residual)
    x, y = kinds[0](tensor, tokens, layer.in_features), kinds[1](tensor, tokens, layer.out_features)
    w = _weight(tensor, layer.in_features * layer.out_features)
    regather_x = NOTHING if tensor.keep in ("x", "both") else x.gather()
    regather_w = NOTHING if tensor.keep in ("w", "both") else w.gather()
    backward = [y.gather()]
    if layer.input_grad:
        backward += [regather_w, x.reduce()]
    if adapters:
        backward.append(regather_x)
        for matrix in (each for pair in matrices(tensor, layer.in_features, adapters, layer.role) for each in pair):
            backward.append(all_reduce(tensor, tensor.summed_by_layers(matrix.partial), matrix.elements))
    if adapters is None:
        backward += [regather_x, w.reduce(), _depth_all_reduce(w)]
        if layer.bias:
            cuts = inner_cuts(tensor) if inward else residual_cuts(tensor)
            backward.append(_summed_vectors(tensor, cuts, layer.out_features))
    sent = LayerTraffic(Traffic.sum(x.gather(), w.gather(), y.reduce()), Traffic.sum(*backward))
    return sent + _gathered_output(layer, tensor, tokens) if layer.gather_output else sent


def _gathered_output(layer: sizes.Linear, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the gather of all features on every rank: one all-gather per axis, the fastest axis first."""
    cuts = inner_cuts(tensor) if layer.role == "inward" else residual_cuts(tensor)
    stored = ratio(tokens * layer.out_features, ranks(tensor, cuts.tokens + cuts.features))
    return LayerTraffic(forward=_gathers(tensor, reversed(cuts.features), stored))


def _gathers(tensor: TensorMesh, letters: Iterable[str], stored: Number) -> Traffic:
    """Count one all-gather per axis, in order, of `stored` elements per rank."""
    sent, gathered = NOTHING, stored
    for letter in letters:
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return sent


def _depth_all_reduce(w: _Operand) -> Traffic:
    return all_reduce(w.tensor, w.tensor.summed_by_layers(("d",)), ratio(w.panel, w.tensor.q))


def _summed_vectors(tensor: TensorMesh, cuts: ActivationSharding, elements: int) -> Traffic:
    """Count the gradients' sum of vectors with `elements` in all, for features that `cuts` shards.

    It is a sum over the axes that shard the tokens, but not over d if ZeRO sums over d. Vectors of the residual stream
    are outward biases and norms' gains. Vectors of inner activations are inward biases.
    """
    return all_reduce(tensor, tensor.summed_by_layers(cuts.tokens), ratio(elements, ranks(tensor, cuts.features)))


def vectors(layer: sizes.Vectors, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count vectors that are added to the residual stream. No axis shards the rows of a table of positions."""
    if layer.frozen:
        return LayerTraffic()
    return LayerTraffic(backward=_summed_vectors(tensor, residual_cuts(tensor), layer.elements))


def affine(layer: sizes.Affine, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count an elementwise affine map: the gradients of its vectors."""
    return vectors(sizes.Vectors((1 + layer.bias) * layer.hidden_size), tensor, tokens)


def norm(layer: sizes.Norm, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a norm of the residual stream.

    LayerNorm exchanges two statistics per token, and RMSNorm one. Neither sends statistics if no axis shards the hidden
    dim.
    """
    cut = residual_cuts(tensor).features
    rows = ratio(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    if layer.kind == "rmsnorm":
        sums = all_reduce(tensor, cut, rows)
        statistics = LayerTraffic(forward=sums, backward=sums)
    else:
        gathered = all_gather(tensor, cut, 2 * rows * ranks(tensor, cut))
        statistics = LayerTraffic(forward=gathered, backward=all_reduce(tensor, cut, 2 * rows))
    num_vectors = 2 if layer.bias and layer.kind == "layernorm" else 1
    return statistics + vectors(sizes.Vectors(num_vectors * layer.hidden_size, layer.frozen), tensor, tokens)


def attention_core(layer: sizes.AttentionCore, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the traffic of attention over a sequence that context parallelism splits, causal or not."""
    if tensor.context == 1:
        return LayerTraffic()
    pieces = ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features)
    exchanging, passing = ("ulysses", "ring") if tensor.impl == "hybrid" else ("d", "d")
    exchanged = ratio(2 * tokens * (layer.hidden_size + layer.kv_size), pieces)
    kv = ratio(2 * tokens * layer.kv_size, pieces)
    key = "all_to_all", exchanging  # q, k and v together, and the output back
    exchange = Traffic({key: ratio(exchanged, tensor.ulysses) * (tensor.ulysses - 1)}, {key: 2})
    # A ring of n ranks sends keys and values n - 1 times. The backward sends them n - 1 times again, and sends their
    # gradients n times, until these are back at the rank that stores the keys.
    times = tensor.ring - 1
    once = _around(passing, kv, times)
    home = _around(passing, kv, tensor.ring if times else 0)
    return LayerTraffic(forward=exchange + once, backward=exchange + once + home)


def _around(axis: str, elements: Number, times: int) -> Traffic:
    """Count `times` messages of `elements` to the next rank of a ring."""
    return Traffic({("send", axis): elements * times}, {("send", axis): times})


def token_linear(layer: sizes.TokenLinear, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a linear over the tokens of a sample.

    If ranks split the sequence, an all-to-all first gives each rank whole sequences of fewer features, and a second one
    goes back. Every rank has the whole matrix, and computes a gradient from its own samples and features.
    """
    cuts = residual_cuts(tensor)
    stored = ratio(tokens * layer.hidden_size, ranks(tensor, cuts.tokens + cuts.features))
    exchanged = all_to_all(tensor, cuts.sequence, stored) * 2
    letters = tensor.summed_by_layers(cuts.tokens + cuts.features)
    summed = all_reduce(tensor, letters, layer.num_tokens**2 + layer.num_tokens)
    return LayerTraffic(forward=exchanged, backward=exchanged + summed)


def mean_of_tokens(layer: sizes.MeanOfTokens, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the mean over each sample's tokens; every rank gets the means of all samples and features."""
    cuts = residual_cuts(tensor)
    samples = ratio(tokens, layer.num_tokens)
    stored = samples * layer.hidden_size / ranks(tensor, cuts.batch + cuts.features)
    sent = all_reduce(tensor, cuts.sequence, stored)
    return LayerTraffic(sent + _gathers(tensor, (*reversed(cuts.batch), *reversed(cuts.features)), stored))


def first_token(layer: sizes.FirstToken, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the gather of each sample's first token on all ranks that split the sequence; `tokens` are the samples."""
    cuts = residual_cuts(tensor)
    if ranks(tensor, cuts.sequence) == 1:
        return LayerTraffic()
    whole = ratio(tokens * layer.hidden_size, ranks(tensor, cuts.features))
    pieces = ratio(whole, ranks(tensor, cuts.batch))
    gathered = all_gather(tensor, cuts.sequence, pieces * ranks(tensor, cuts.sequence))
    if samples_are_cut_first(tensor, cuts):
        return LayerTraffic(forward=gathered, backward=all_gather(tensor, cuts.sequence, pieces))
    return LayerTraffic(
        forward=gathered + all_gather(tensor, cuts.batch, whole), backward=all_gather(tensor, cuts.tokens, whole)
    )


def batch_norm(layer: sizes.BatchNorm, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a BatchNorm within its tensor group: the sums for mean and variance, both passes, and its vectors."""
    cuts = inner_cuts(tensor) if layer.after == "inward" else residual_cuts(tensor)
    statistics = all_reduce(tensor, cuts.tokens, ratio(2 * layer.features, ranks(tensor, cuts.features)))
    summed = _summed_vectors(tensor, cuts, 2 * layer.features) if layer.affine else NOTHING
    return LayerTraffic(forward=statistics, backward=statistics + summed)


def gathered_inner(layer: sizes.GatheredInner, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the gather of a whole inner activation [tokens, features] on every rank."""
    cuts = inner_cuts(tensor)
    stored = ratio(tokens * layer.features, ranks(tensor, cuts.tokens + cuts.features))
    return LayerTraffic(forward=_gathers(tensor, (*reversed(cuts.tokens), *reversed(cuts.features)), stored))


def mixture(layer: sizes.Mixture, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a mixture whose tokens are exchanged, with experts at the even load.

    1. `dslpar.layers.distinct_tokens`: all-to-alls along axes by features, and an all-gather along a replicated y.
    2. `dslpar.layers.token_exchange`: k n H elements to the experts and as many back, and the numbers of rows, which
       count as elements, for each of `expert_chunks` parts.
    3. The gathered weights of a shared expert, one linear after the other, and the sum of their gradients.
    4. The sum of the router's gradient over the tensor axes.
    5. With a capacity (`dslpar.layers.expert_capacity`), 2 k + 1 numbers per token to all ranks of the tensor group.
       Rows that it drops are counted as if they were sent.

    The backward of 1 and 2 sends as much as the forward, but for the numbers of rows.
    """
    hidden, own, axes = layer.hidden_size, layer.own_tokens(tensor, tokens), tensor.summed_by_layers(TENSOR_AXES)
    distinct = _distinct_tokens(layer, tensor, tokens)
    rows = exchange_of_rows(tensor, 2 * own * layer.active * hidden)
    counts = exchange_of_rows(tensor, tensor.e * tensor.size * layer.share(tensor))
    chunks = tensor.expert_chunks
    part = Traffic(rows, dict.fromkeys(rows, 2 * chunks))  # both ways, in `chunks` parts each
    way = Traffic.sum(distinct, part)
    forward = [way, *[counts] * chunks]
    if layer.has_capacity:
        forward.append(all_gather(tensor, TENSOR_AXES, tokens * (2 * layer.active + 1)))
    backward = [way]
    gradients = [] if layer.frozen else [all_reduce(tensor, axes, layer.num_experts * hidden)]
    if layer.shared_ffn:
        for weight in [hidden * layer.shared_ffn] * 3:
            forward.append(all_gather(tensor, axes, weight))
            gradients.append(reduce_scatter(tensor, axes, weight))
        if layer.shared_gate:
            gradients.append(all_reduce(tensor, axes, hidden))
    backward += [] if layer.frozen else gradients
    return LayerTraffic(Traffic.sum(*forward), Traffic.sum(*backward))


def _distinct_tokens(layer: sizes.Mixture, tensor: TensorMesh, tokens: Number) -> Traffic:
    """Count one way of the residual to distinct tokens and back, which sends as much in the backward."""
    cuts = residual_cuts(tensor)
    stored = ratio(tokens * layer.hidden_size, ranks(tensor, cuts.tokens + cuts.features))
    copies = tuple(letter for letter in ("y",) if letter not in cuts.tokens + cuts.features)
    each = ratio(stored, ranks(tensor, copies))
    exchanged = [all_to_all(tensor, (letter,), each) for letter in cuts.features]
    return Traffic.sum(*exchanged, *exchanged, all_gather(tensor, copies, stored))


def _gathered_mixture(layer: sizes.GatheredMixture, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    return total(layer.layers, tensor, tokens)


def embedding(layer: sizes.Embedding, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the look-up in the token table, which acts like an outward linear of one-hot vectors."""
    w = _weight(tensor, vocabulary(layer.vocab_size, tensor).value * layer.hidden_size)
    y = _residual(tensor, tokens, layer.hidden_size)
    backward = NOTHING if layer.frozen else y.gather() + w.reduce() + _depth_all_reduce(w)
    return LayerTraffic(forward=w.gather() + y.reduce(), backward=backward)


def head(layer: sizes.Head, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the head, with tied or untied weights."""
    padded = vocabulary(layer.vocab_size, tensor).value
    adapters = () if layer.frozen else None
    return linear(sizes.Linear(layer.hidden_size, padded, "inward", bias=False, adapters=adapters), tensor, tokens)


def cross_entropy(layer: sizes.CrossEntropy, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count the loss: all-reduces of a maximum and two sums per token, and of the mean, all in the forward."""
    features, cut = inner_cuts(tensor).features, inner_cuts(tensor).tokens
    rows = ratio(tokens, ranks(tensor, cut))
    mean = 1.0 if isinstance(tokens, float) else 1
    return LayerTraffic(forward=all_reduce(tensor, features, 3 * rows) + all_reduce(tensor, cut, mean))


def _repeated(layer: sizes.Repeated, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    return total(layer.layers, tensor, tokens) * layer.times


def _forward_only(layer: sizes.ForwardOnly, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    return LayerTraffic(forward=total(layer.layers, tensor, tokens).forward)


def _nothing(layer: Layer, tensor: TensorMesh, tokens: Number) -> LayerTraffic:
    """Count a layer that each rank computes from what it stores, without weights that are summed over ranks."""
    return LayerTraffic()


FORMS: Forms[LayerTraffic] = {
    sizes.Activation: _nothing,
    sizes.Affine: affine,
    sizes.AttentionCore: attention_core,
    sizes.BatchNorm: batch_norm,
    sizes.Classifier: _nothing,
    sizes.CrossEntropy: cross_entropy,
    sizes.Embedding: embedding,
    sizes.FirstToken: first_token,
    sizes.ForwardOnly: _forward_only,
    sizes.GatheredInner: gathered_inner,
    sizes.ExpertAdapters: _nothing,
    sizes.GatheredMixture: _gathered_mixture,
    sizes.Head: head,
    sizes.Linear: linear,
    sizes.MeanOfTokens: mean_of_tokens,
    sizes.Mixture: mixture,
    sizes.Norm: norm,
    sizes.Repeated: _repeated,
    sizes.ResidualAdd: _nothing,
    sizes.TokenLinear: token_linear,
    sizes.Vectors: vectors,
}
"""The closed form of each kind of layer but `PerSample`, which `walk` takes apart."""
