"""Traffic of each layer in closed form: elements that a rank sends, by collective and axis, forward and backward.

    >>> from dslpar.core.mesh import Tensor
    >>> up = linear(Tensor(q=2, y=2, residual="hidden"), 64, 16, 48, role="inward", bias=False)
    >>> {key: int(elements) for key, elements in up.forward.items()}
    {('all_gather', 'y'): 256, ('all_gather', 'q'): 192}
    >>> int(up.total)
    1088

`dslpar.costs.ring` has the formula of each collective. `tests.support.traffic_counter` counts the same while a job
runs, and tests compare the two.

Letters: M tokens of a micro-batch, K and N features in and out, h hidden size; x = d q. A linear gathers X over the
axis that splits neither of its dims, gathers W over q, and reduces Y over the axis of K. Its backward does the reverse,
and sums dW over d unless ZeRO does. With f(n) = (n-1)/n, and all panels kept, an inward linear sends twice

    f(y) MK/(xz) + f(q) KN/(yz) + f(z) MN/(xy)      and once    2 f(d) KN/(qyz)

and an outward one the same with y and z exchanged in the terms of X and Y. A panel that `keep` does not name is
gathered once more. In 1d these are Megatron-LM's four all-reduces per block (arXiv 1909.08053). All counts are per
micro-batch. They include the gradients of vectors, which `dslpar.engine.vector_reduction` sums once per step if it can.
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
    """Operand of a matrix product: the axes over which its pieces are gathered, and the elements of the panel."""

    tensor: Tensor
    letters: Letters
    panel: Number
    replicated: bool = False
    """True if ranks along these axes store the whole panel: it is not gathered, and is reduced by an all-reduce."""

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
    """Count a linear layer; for several blocks of features, `out_features` is their sum.

    `input_grad` and `weight_grad` select the gradients of the backward. `gather_output` gives all features to every
    rank, and sends nothing in the backward. With `adapters` weight and bias are frozen.
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
    """Gather all features on every rank, one axis after the other, starting with the axis that splits last."""
    cuts = inner_cuts(tensor) if role == "inward" else residual_cuts(tensor)
    sent, gathered = NOTHING, ratio(tokens * features, ranks(tensor, cuts.tokens + cuts.features))
    for letter in reversed(cuts.features):
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return LayerTraffic(forward=sent)


def _depth_all_reduce(w: _Operand) -> Traffic:
    return all_reduce(w.tensor, w.tensor.summed_by_layers(("d",)), ratio(w.panel, w.tensor.q))


def residual_vectors(tensor: Tensor, elements: int) -> LayerTraffic:
    """Count vectors that are added to or multiplied with the residual (a bias, a norm's gain), with `elements` in all.

    Their gradients are summed over the axes that split the residual's tokens, but not over d if ZeRO does so.
    """
    cuts = residual_cuts(tensor)
    summed = tensor.summed_by_layers(cuts.tokens)
    return LayerTraffic(backward=all_reduce(tensor, summed, ratio(elements, ranks(tensor, cuts.features))))


def inner_vectors(tensor: Tensor, elements: int) -> LayerTraffic:
    """Count vectors that are added to or multiplied with inner activations, with `elements` in all."""
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
    """Count a norm of the residual: two statistics per token, one for RMSNorm; nothing if the hidden dim is whole."""
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
    """Count attention: q, k and v, the heads, the output projection; `kv_heads` None: as many as num_heads.

    With `adapters` all weights are frozen; this holds for the functions below too.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", bias=bias, adapters=qkv)
    outward = linear(tensor, tokens, hidden_size, hidden_size, role="outward", bias=bias, adapters=out)
    return inward + _sequence_attention(tensor, tokens, hidden_size, kv_size) + outward


def _sequence_attention(tensor: Tensor, tokens: Number, q_size: int, kv_size: int) -> LayerTraffic:
    """Count the traffic of attention over a split sequence, causal or not."""
    if tensor.context == 1:
        return LayerTraffic()
    pieces = ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features)
    exchanging, passing = ("ulysses", "ring") if tensor.impl == "hybrid" else ("d", "d")
    exchanged, kv = ratio(2 * tokens * (q_size + kv_size), pieces), ratio(2 * tokens * kv_size, pieces)
    key = "all_to_all", exchanging  # q, k and v together, and the output back
    exchange = Traffic({key: ratio(exchanged, tensor.ulysses) * (tensor.ulysses - 1)}, {key: 2})
    # A ring passes keys and values n - 1 times. The backward does so again, and returns their gradients in n passes.
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
    """Count an MLP: up and down, and with 'swiglu' a gate beside up."""
    blocks = 2 if activation == "swiglu" else 1
    of_up, of_down = (None, None) if adapters is None else (adapters.up, adapters.down)
    up = linear(tensor, tokens, hidden_size, blocks * ffn_size, role="inward", bias=bias, adapters=of_up)
    return up + linear(tensor, tokens, ffn_size, hidden_size, role="outward", bias=bias, adapters=of_down)


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerTraffic:
    """Count a linear over the tokens of a sample; a split sequence is exchanged for fewer features and back.

    Every rank has the whole matrix, and computes its gradient from its own samples and features.
    """
    cuts = residual_cuts(tensor)
    stored = ratio(tokens * hidden_size, ranks(tensor, cuts.tokens + cuts.features))
    exchanged = all_to_all(tensor, cuts.sequence, stored) * 2
    letters = tensor.summed_by_layers(cuts.tokens + cuts.features)
    summed = all_reduce(tensor, letters, num_tokens**2 + num_tokens)
    return LayerTraffic(forward=exchanged, backward=exchanged + summed)


def mean_of_tokens(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerTraffic:
    """Count the mean of each sample's tokens, whole on every rank."""
    cuts = residual_cuts(tensor)
    samples = ratio(tokens, num_tokens)
    gathered = samples * hidden_size / ranks(tensor, cuts.batch + cuts.features)
    sent = all_reduce(tensor, cuts.sequence, gathered)
    for letter in (*reversed(cuts.batch), *reversed(cuts.features)):
        gathered *= ranks(tensor, (letter,))
        sent += all_gather(tensor, (letter,), gathered)
    return LayerTraffic(forward=sent)


def first_token(tensor: Tensor, samples: Number, hidden_size: int) -> LayerTraffic:
    """Count the first token of each sample, sent from the ranks that hold it to all ranks that split the sequence."""
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
    """Count a BatchNorm within its tensor group: mean and variance, forward and backward, and its vectors."""
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
    """Count the look-up in the token table: an outward linear of a one-hot."""
    w = _weight(tensor, vocabulary(vocab_size, tensor).value * hidden_size)
    y = _residual(tensor, tokens, hidden_size)
    backward = NOTHING if frozen else y.gather() + w.reduce() + _depth_all_reduce(w)
    return LayerTraffic(forward=w.gather() + y.reduce(), backward=backward)


def position_embedding(tensor: Tensor, num_positions: int, hidden_size: int) -> LayerTraffic:
    """Count the position table; every rank has all of its rows."""
    return residual_vectors(tensor, num_positions * hidden_size)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int, *, frozen: bool = False) -> LayerTraffic:
    """Count the head: the tied token table, or its own."""
    padded = vocabulary(vocab_size, tensor).value
    return linear(tensor, tokens, hidden_size, padded, role="inward", bias=False, weight_grad=not frozen)


def cross_entropy(tensor: Tensor, tokens: Number) -> LayerTraffic:
    """Count the loss: a maximum and two sums per token, and the mean itself, all in the forward."""
    features, cut = inner_cuts(tensor).features, inner_cuts(tensor).tokens
    rows = ratio(tokens, ranks(tensor, cut))
    mean = 1.0 if isinstance(tokens, float) else 1
    return LayerTraffic(forward=all_reduce(tensor, features, 3 * rows) + all_reduce(tensor, cut, mean))
