"""Memory of each layer in closed form: elements that a rank stores of its weights, and saves for the backward.

    >>> from dslpar.core.mesh import Tensor
    >>> layer = linear(Tensor(q=2, y=2, residual="hidden"), 64, 16, 48, role="inward")
    >>> int(layer.weights), int(layer.saved.elements)
    (216, 512)

Letters: M tokens of a micro-batch; K and N input and output features of a linear; d, q, y and z the axes of the tensor
group, with x = d * q. docs/architecture.md, "The cuboid", defines these axes and the terms below:

- An *inward* linear maps the residual stream to inner features (q, k, v, the MLP's hidden layer, logits). An *outward*
  linear maps inner features back.
- *Stored*: a rank's shard of an activation or a weight between layers.
- *Panel*: the operand of a rank's matrix product. Ranks gather it from their shards. The input's panel has M K / (x z)
  elements in an inward linear and M K / (x y) in an outward one. The weight's panel has K N / (y z).

A linear saves its input and, if q > 1, may save its gathered weight. If q = 1, the weight is the parameter itself and
costs nothing more. The setting `keep` (`dslpar.core.mesh.Tensor`) selects what a linear saves:

=======  ===========  ======
keep     input        weight
=======  ===========  ======
x        panel        -
w        as stored    panel
both     panel        panel
none     as stored    -
=======  ===========  ======

A tensor that two layers save counts once. Float32 numbers per token, or per token and head, are counted separately in
`Saved.wide`. Korthikanti et al. (arXiv 2205.05198) count in the same way: they sum a block's saved activations, each
once, and divide by the degrees of tensor and sequence parallelism.

All functions return what one rank holds. Their first argument `tensor` is the cuboid (the tensor group's sizes and
modes), and `tokens` is M.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dslpar.core.mesh import Tensor
from dslpar.costs.adapters import Adapter, AdapterSizes, Role, matrices
from dslpar.costs.cuts import inner_cuts, residual_cuts
from dslpar.costs.ring import Number, ratio
from dslpar.layout.divisors import ranks, vocabulary


class Saved(NamedTuple):
    """Elements that autograd saves for the backward."""

    elements: Number = 0
    """In the model's dtype: activations, and gathered weights."""
    wide: Number = 0
    """In float32 or wider: statistics of norms, the log-sum-exp of attention."""

    def __add__(self, other: Saved) -> Saved:  # type: ignore[override]
        return Saved(elements=self.elements + other.elements, wide=self.wide + other.wide)


class LayerMemory(NamedTuple):
    """Elements of a layer that one rank holds."""

    weights: Number
    """Elements of parameters, trained and frozen."""
    saved: Saved
    """Elements that one micro-batch saves for the backward."""
    frozen: Number = 0
    """The elements of `weights` that are not trained."""

    def __add__(self, other: LayerMemory) -> LayerMemory:  # type: ignore[override]
        return LayerMemory(
            weights=self.weights + other.weights,
            saved=self.saved + other.saved,
            frozen=self.frozen + other.frozen,
        )


def linear(
    tensor: Tensor,
    tokens: Number,
    in_features: int,
    out_features: int,
    *,
    role: Role,
    bias: bool = True,
    adapters: Sequence[Adapter] | None = None,
) -> LayerMemory:
    """Count a linear layer: its weight, bias and saved input.

    For a fused linear, such as q, k and v, `out_features` is the sum over its parts. With `adapters` (not None) weight
    and bias are frozen. With an empty `adapters` no gradient needs the input, so it is not saved.
    """
    matrix = ratio(in_features * out_features, tensor.y * tensor.z)
    panel = matrix if tensor.keep in ("w", "both") and tensor.q > 1 else 0
    cuts = inner_cuts(tensor) if role == "inward" else residual_cuts(tensor)
    vector = ratio(out_features, ranks(tensor, cuts.features)) if bias else 0
    kept = 0 if adapters == () else _input(tensor, tokens, in_features, role)
    weights, saved = matrix / tensor.q + vector, Saved(elements=kept + panel)
    if adapters is None:
        return LayerMemory(weights=weights, saved=saved)
    pairs = matrices(tensor, in_features, adapters, role)
    return LayerMemory(
        weights=weights + sum(each.elements for pair in pairs for each in pair), saved=saved, frozen=weights
    )


def norm(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    *,
    kind: str = "layernorm",
    bias: bool = True,
    frozen: bool = False,
) -> LayerMemory:
    """Count a norm: its parameters, its saved input, and one (RMSNorm) or two (LayerNorm) statistics per token."""
    vectors, statistics = (1, 1) if kind == "rmsnorm" else (1 + bias, 2)
    rows = ratio(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    pieces = ranks(tensor, residual_cuts(tensor).features)
    # torch's RMSNorm runs if no axis shards the features. On a CPU, without a fused kernel, it also saves its result.
    times = 2 if kind == "rmsnorm" and pieces == 1 else 1
    saved = Saved(elements=times * _residual(tensor, tokens, hidden_size), wide=statistics * rows)
    weights = ratio(vectors * hidden_size, pieces)
    return LayerMemory(weights=weights, saved=saved, frozen=weights if frozen else 0)


def attention(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    num_heads: int,
    *,
    kv_heads: int | None = None,
    bias: bool = True,
    adapters: AdapterSizes | None = None,
) -> LayerMemory:
    """Count fused attention without dropout or mask, with its projections.

    The core saves q, k, v, its result, and a log-sum-exp per token and head. With `adapters` (not None) all weights of
    the layer are frozen. The same holds in `mlp`.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", bias=bias, adapters=qkv)
    outward = linear(tensor, tokens, hidden_size, hidden_size, role="outward", bias=bias, adapters=out)
    result = _inner(tensor, tokens, hidden_size)
    core = _inner(tensor, tokens, hidden_size + 2 * kv_size)
    # The output projection's `linear` counts the result of the core as its input. A second copy exists if the result
    # is exchanged or gathered before the projection: by Ulysses's all-to-all, or over z. If the projection saves no
    # input (frozen, without adapters), the core's own saved result is counted here.
    if out == () or tensor.ulysses > 1 or (tensor.z > 1 and tensor.keep in ("x", "both")):
        core += result
    wide = _inner(tensor, tokens, num_heads)
    return inward + LayerMemory(weights=0, saved=Saved(elements=core, wide=wide)) + outward


def attention_working(
    tensor: Tensor, tokens: Number, hidden_size: int, num_heads: int, *, kv_heads: int | None = None, rotary: bool
) -> Saved:
    """Count the temporaries of attention's backward at its fullest moment, in addition to the tensors that it saves.

    Below, q is the size of the queries on this rank, and also of the result. kv is the size of the keys, and also of
    the values. Attention saves q, k, v and its result, 2 q + 2 kv in all. Three moments are compared:

    1. Core: the backward of the attention kernel holds the result's gradient (q) and makes the gradients of q, k and v
       (q + 2 kv). With Ulysses, two more tensors of the result's size exist. A ring (`dslpar.layers.context_attention`)
       holds the result's gradient, the keys and values of the present block and of the arriving one, the gradients of
       the present block, and sums of gradients in float32: one for the queries, and for keys and values the present
       sums and those in transit.
    2. Rotary: after the core, the gradients of queries and keys are rotated back.
    3. Exchange: after the core, Ulysses's all-to-all returns the gradients of q, k and v.

    At moments 2 and 3 the tensors that the core saved are already freed, so their size is subtracted.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    q, kv = _inner(tensor, tokens, hidden_size), _inner(tensor, tokens, kv_size)
    exchanges = tensor.ulysses > 1
    if tensor.ring == 1:
        core = Saved(elements=2 * q + 2 * kv + (2 * q if exchanges else 0))
    else:
        messages = 4 if tensor.ring > 2 else 2  # keys and values, of the present block and, if it exists, the next one
        # Gradients of one block. In zigzag order a block has all queries and half of the keys or, on the first ranks,
        # half of the queries and all keys.
        parts = max(q + kv, ratio(q, 2) + 2 * kv) if tensor.zigzag else q + 2 * kv
        core = Saved(elements=q + messages * kv + parts, wide=q + 4 * kv)
    saved = 2 * q + 2 * kv
    # Rotary: gradients of q, k and v before and after the rotation, and two more tensors for queries and keys.
    # Exchange: four tensors with the gradients of q, k and v. It also frees the second saved copy of the result (- q).
    others: list[Number] = [2 * (q + 2 * kv) + 2 * (q + kv) - saved] if rotary else []
    others += [4 * (q + 2 * kv) - saved - q] if exchanges else []
    return max([core, *(Saved(elements=each) for each in others)], key=lambda each: each.elements + each.wide)


def mlp(
    tensor: Tensor,
    tokens: Number,
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "gelu",
    bias: bool = True,
    adapters: AdapterSizes | None = None,
) -> LayerMemory:
    """Count an MLP: the up linear, the saved input of the activation function, and the down linear.

    With 'swiglu' the up linear includes the gate, and the saved input has twice the features.
    """
    inner = (2 if activation == "swiglu" else 1) * ffn_size
    of_up, of_down = (None, None) if adapters is None else (adapters.up, adapters.down)
    up = linear(tensor, tokens, hidden_size, inner, role="inward", bias=bias, adapters=of_up)
    activated = LayerMemory(weights=0, saved=Saved(elements=_inner(tensor, tokens, inner)))
    return up + activated + linear(tensor, tokens, ffn_size, hidden_size, role="outward", bias=bias, adapters=of_down)


def embedding(
    tensor: Tensor, vocab_size: int, hidden_size: int, num_positions: int = 0, *, frozen: bool = False
) -> LayerMemory:
    """Count the token table with its padding, and the position table.

    The embedding saves no activations. Its result is counted by the next layer, which saves it as an input.
    """
    rows = ratio(vocabulary(vocab_size, tensor).value, tensor.y * tensor.q * tensor.z)
    positions = ratio(num_positions, ranks(tensor, residual_cuts(tensor).features))
    weights = hidden_size * (rows + positions)
    return LayerMemory(weights=weights, saved=Saved(), frozen=weights if frozen else 0)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int, *, frozen: bool = False) -> LayerMemory:
    """Count the head's weight and saved input; `logits` counts the head's output."""
    padded = vocabulary(vocab_size, tensor).value
    adapters = () if frozen else None
    return linear(tensor, tokens, hidden_size, padded, role="inward", bias=False, adapters=adapters)


def logits(tensor: Tensor, tokens: Number, vocab_size: int) -> Number:
    """Return the elements of logits that a rank holds."""
    return _inner(tensor, tokens, vocabulary(vocab_size, tensor).value)


def residual(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements of the residual stream that a rank stores."""
    return _residual(tensor, tokens, features)


def affine(tensor: Tensor, tokens: Number, hidden_size: int, *, bias: bool = True) -> LayerMemory:
    """Count an elementwise affine map of the residual's features: its vectors and its saved input."""
    vectors = ratio((1 + bias) * hidden_size, ranks(tensor, residual_cuts(tensor).features))
    return LayerMemory(weights=vectors, saved=Saved(elements=_residual(tensor, tokens, hidden_size)))


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerMemory:
    """Count a linear over the tokens of a sample, and its saved input; every rank holds the whole weight."""
    return LayerMemory(weights=num_tokens**2 + num_tokens, saved=Saved(elements=_residual(tensor, tokens, hidden_size)))


def _input(tensor: Tensor, tokens: Number, features: int, role: Role) -> Number:
    """Return the elements of a linear's saved input: the panel if `keep` names it, else the stored shard."""
    stored = (_residual if role == "inward" else _inner)(tensor, tokens, features)
    if tensor.keep not in ("x", "both"):
        return stored
    other = tensor.z if role == "inward" else tensor.y
    return ratio(tokens * features, tensor.x * other)


def _residual(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements of the residual stream that a rank stores."""
    return ratio(tokens * features, ranks(tensor, residual_cuts(tensor).tokens + residual_cuts(tensor).features))


def _inner(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements of an inner activation that a rank stores."""
    return ratio(tokens * features, ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features))
