"""Traffic of each layer in closed form: elements that a rank sends, by collective and axis, forward and backward.

    >>> from dslpar.core.mesh import Tensor
    >>> up = linear(Tensor(q=2, y=2, residual="hidden"), 64, 16, 48, role="inward", bias=False)
    >>> {key: int(elements) for key, elements in up.forward.items()}
    {('all_gather', 'y'): 256, ('all_gather', 'q'): 192}
    >>> int(up.total)
    1088

`dslpar.costs.ring` has the formula of each collective. `tests.support.traffic_counter` counts the traffic of a running
job, and tests compare it with these functions.

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
group's sizes and modes), and `tokens` is M.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dslpar.core.mesh import Tensor
from dslpar.costs.adapters import Adapter, AdapterSizes, Role, matrices
from dslpar.costs.cuts import inner_cuts, residual_cuts
from dslpar.costs.ring import (
    NOTHING,
    LayerTraffic,
    Number,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    ratio,
    reduce_scatter,
)
from dslpar.layout.divisors import ranks, vocabulary
from dslpar.layout.sharding import Letters, samples_are_cut_first


class _Operand(NamedTuple):
    """Operand or result of a matrix product: the panel that a rank multiplies, and the axes that shard it in memory."""

    tensor: Tensor
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


def _residual(tensor: Tensor, tokens: Number, features: int) -> _Operand:
    panel = ratio(tokens * features, tensor.x * tensor.z)
    return _Operand(tensor, ("y",), panel, replicated=tensor.residual == "replicated")


def _inner(tensor: Tensor, tokens: Number, features: int) -> _Operand:
    return _Operand(tensor, ("z",), ratio(tokens * features, tensor.x * tensor.y))


def _weight(tensor: Tensor, elements: int) -> _Operand:
    return _Operand(tensor, ("q",), ratio(elements, tensor.y * tensor.z))


def linear(
    tensor: Tensor,
    tokens: Number,
    in_features: int,
    out_features: int,
    *,
    role: Role,
    bias: bool = True,
    gather_output: bool = False,
    input_grad: bool = True,
    weight_grad: bool = True,
    adapters: Sequence[Adapter] | None = None,
) -> LayerTraffic:
    """Count a linear layer.

    For a fused linear, such as q, k and v, `out_features` is the sum over its parts. `input_grad` and `weight_grad`
    select the gradients that the backward computes. `gather_output` gathers all output features on every rank; the
    backward of this gather sends nothing. With `adapters` (not None) weight and bias are frozen.
    """
    inward = role == "inward"
    kinds = (_residual, _inner) if inward else (_inner, _residual)
    x, y = kinds[0](tensor, tokens, in_features), kinds[1](tensor, tokens, out_features)
    w = _weight(tensor, in_features * out_features)
    regather_x = NOTHING if tensor.keep in ("x", "both") else x.gather()
    regather_w = NOTHING if tensor.keep in ("w", "both") else w.gather()
    backward = [y.gather()]
    if input_grad:
        backward += [regather_w, x.reduce()]
    if adapters:
        backward.append(regather_x)
        for matrix in (each for pair in matrices(tensor, in_features, adapters, role) for each in pair):
            backward.append(all_reduce(tensor, tensor.summed_by_layers(matrix.partial), matrix.elements))
    if weight_grad and adapters is None:
        backward += [regather_x, w.reduce(), _depth_all_reduce(w)]
    if bias and adapters is None:
        backward.append((inner_vectors if inward else residual_vectors)(tensor, out_features).backward)
    sent = LayerTraffic(Traffic.sum(x.gather(), w.gather(), y.reduce()), Traffic.sum(*backward))
    return sent + _gathered_output(tensor, tokens, out_features, role) if gather_output else sent


def _gathered_output(tensor: Tensor, tokens: Number, features: int, role: Role) -> LayerTraffic:
    """Count the gather of all features on every rank: one all-gather per axis, the fastest axis first."""
    cuts = inner_cuts(tensor) if role == "inward" else residual_cuts(tensor)
    sent, gathered = NOTHING, ratio(tokens * features, ranks(tensor, cuts.tokens + cuts.features))
    for letter in reversed(cuts.features):
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return LayerTraffic(forward=sent)


def _depth_all_reduce(w: _Operand) -> Traffic:
    return all_reduce(w.tensor, w.tensor.summed_by_layers(("d",)), ratio(w.panel, w.tensor.q))


def residual_vectors(tensor: Tensor, elements: int) -> LayerTraffic:
    """Count vector parameters of the residual stream (an outward bias, a norm's gain), with `elements` in all.

    Their gradients are summed over the axes that split the residual's tokens, but not over d if ZeRO sums over d.
    """
    cuts = residual_cuts(tensor)
    summed = tensor.summed_by_layers(cuts.tokens)
    return LayerTraffic(backward=all_reduce(tensor, summed, ratio(elements, ranks(tensor, cuts.features))))


def inner_vectors(tensor: Tensor, elements: int) -> LayerTraffic:
    """Count vector parameters of inner activations (an inward bias), with `elements` in all."""
    cuts = inner_cuts(tensor)
    summed = tensor.summed_by_layers(cuts.tokens)
    return LayerTraffic(backward=all_reduce(tensor, summed, ratio(elements, ranks(tensor, cuts.features))))


def norm(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    *,
    kind: str = "layernorm",
    bias: bool = True,
    frozen: bool = False,
) -> LayerTraffic:
    """Count a norm of the residual stream.

    LayerNorm exchanges two statistics per token, and RMSNorm one. Neither sends statistics if no axis shards the hidden
    dim.
    """
    cut = residual_cuts(tensor).features
    rows = ratio(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    if kind == "rmsnorm":
        sums = all_reduce(tensor, cut, rows)
        statistics = LayerTraffic(forward=sums, backward=sums)
    else:
        gathered = all_gather(tensor, cut, 2 * rows * ranks(tensor, cut))
        statistics = LayerTraffic(forward=gathered, backward=all_reduce(tensor, cut, 2 * rows))
    num_vectors = 0 if frozen else 2 if bias and kind == "layernorm" else 1
    return statistics + residual_vectors(tensor, num_vectors * hidden_size)


def attention(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    num_heads: int,
    *,
    kv_heads: int | None = None,
    bias: bool = True,
    adapters: AdapterSizes | None = None,
) -> LayerTraffic:
    """Count attention with its projections; `kv_heads` None means as many as `num_heads`.

    With `adapters` (not None) all weights of the layer are frozen. The same holds in `mlp`.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", bias=bias, adapters=qkv)
    outward = linear(tensor, tokens, hidden_size, hidden_size, role="outward", bias=bias, adapters=out)
    return inward + _sequence_attention(tensor, tokens, hidden_size, kv_size) + outward


def _sequence_attention(tensor: Tensor, tokens: Number, q_size: int, kv_size: int) -> LayerTraffic:
    """Count the traffic of attention over a sequence that context parallelism splits, causal or not."""
    if tensor.context == 1:
        return LayerTraffic()
    pieces = ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features)
    exchanging, passing = ("ulysses", "ring") if tensor.impl == "hybrid" else ("d", "d")
    exchanged, kv = ratio(2 * tokens * (q_size + kv_size), pieces), ratio(2 * tokens * kv_size, pieces)
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


def mlp(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "gelu",
    bias: bool = True,
    adapters: AdapterSizes | None = None,
) -> LayerTraffic:
    """Count an MLP: the up and down linears, and with 'swiglu' the gate, which is fused with up."""
    blocks = 2 if activation == "swiglu" else 1
    of_up, of_down = (None, None) if adapters is None else (adapters.up, adapters.down)
    up = linear(tensor, tokens, hidden_size, blocks * ffn_size, role="inward", bias=bias, adapters=of_up)
    return up + linear(tensor, tokens, ffn_size, hidden_size, role="outward", bias=bias, adapters=of_down)


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerTraffic:
    """Count a linear over the tokens of a sample.

    If ranks split the sequence, an all-to-all first gives each rank whole sequences of fewer features, and a second one
    goes back. Every rank has the whole matrix, and computes a gradient from its own samples and features.
    """
    cuts = residual_cuts(tensor)
    stored = ratio(tokens * hidden_size, ranks(tensor, cuts.tokens + cuts.features))
    exchanged = all_to_all(tensor, cuts.sequence, stored) * 2
    letters = tensor.summed_by_layers(cuts.tokens + cuts.features)
    summed = all_reduce(tensor, letters, num_tokens**2 + num_tokens)
    return LayerTraffic(forward=exchanged, backward=exchanged + summed)


def mean_of_tokens(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerTraffic:
    """Count the mean over each sample's tokens; every rank gets the means of all samples and features."""
    cuts = residual_cuts(tensor)
    samples = ratio(tokens, num_tokens)
    gathered = samples * hidden_size / ranks(tensor, cuts.batch + cuts.features)
    sent = all_reduce(tensor, cuts.sequence, gathered)
    for letter in (*reversed(cuts.batch), *reversed(cuts.features)):
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return LayerTraffic(forward=sent)


def first_token(tensor: Tensor, samples: Number, hidden_size: int) -> LayerTraffic:
    """Count the gather of each sample's first token on all ranks that split the sequence."""
    cuts = residual_cuts(tensor)
    if ranks(tensor, cuts.sequence) == 1:
        return LayerTraffic()
    whole = ratio(samples * hidden_size, ranks(tensor, cuts.features))
    pieces = ratio(whole, ranks(tensor, cuts.batch))
    gathered = all_gather(tensor, cuts.sequence, pieces * ranks(tensor, cuts.sequence))
    if samples_are_cut_first(tensor, cuts):
        return LayerTraffic(forward=gathered, backward=all_gather(tensor, cuts.sequence, pieces))
    return LayerTraffic(
        forward=gathered + all_gather(tensor, cuts.batch, whole), backward=all_gather(tensor, cuts.tokens, whole)
    )


def batch_norm(tensor: Tensor, features: int, *, after: Role, affine: bool = True) -> LayerTraffic:
    """Count a BatchNorm within its tensor group: the sums for mean and variance, forward and backward, and its vectors.

    `after` is the role of the linear whose output is normalized.
    """
    cuts = inner_cuts(tensor) if after == "inward" else residual_cuts(tensor)
    statistics = all_reduce(tensor, cuts.tokens, ratio(2 * features, ranks(tensor, cuts.features)))
    vectors = (inner_vectors if after == "inward" else residual_vectors)(tensor, 2 * features if affine else 0)
    return LayerTraffic(forward=statistics, backward=statistics) + vectors


def whole_inner(tensor: Tensor, tokens: Number, features: int) -> LayerTraffic:
    """Count the gather of a whole inner activation [tokens, features] on every rank."""
    cuts = inner_cuts(tensor)
    sent, gathered = NOTHING, ratio(tokens * features, ranks(tensor, cuts.tokens + cuts.features))
    for letter in (*reversed(cuts.tokens), *reversed(cuts.features)):
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return LayerTraffic(forward=sent)


def embedding(
    tensor: Tensor, tokens: Number, vocab_size: int, hidden_size: int, *, frozen: bool = False
) -> LayerTraffic:
    """Count the look-up in the token table, which acts like an outward linear of one-hot vectors."""
    w = _weight(tensor, vocabulary(vocab_size, tensor).value * hidden_size)
    y = _residual(tensor, tokens, hidden_size)
    backward = NOTHING if frozen else y.gather() + w.reduce() + _depth_all_reduce(w)
    return LayerTraffic(forward=w.gather() + y.reduce(), backward=backward)


def position_embedding(tensor: Tensor, num_positions: int, hidden_size: int) -> LayerTraffic:
    """Count the position table. No axis shards its rows (positions)."""
    return residual_vectors(tensor, num_positions * hidden_size)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int, *, frozen: bool = False) -> LayerTraffic:
    """Count the head, with tied or untied weights."""
    padded = vocabulary(vocab_size, tensor).value
    return linear(tensor, tokens, hidden_size, padded, role="inward", bias=False, weight_grad=not frozen)


def cross_entropy(tensor: Tensor, tokens: Number) -> LayerTraffic:
    """Count the loss: all-reduces of a maximum and two sums per token, and of the mean, all in the forward."""
    features, cut = inner_cuts(tensor).features, inner_cuts(tensor).tokens
    rows = ratio(tokens, ranks(tensor, cut))
    mean = 1.0 if isinstance(tokens, float) else 1
    return LayerTraffic(forward=all_reduce(tensor, features, 3 * rows) + all_reduce(tensor, cut, mean))
