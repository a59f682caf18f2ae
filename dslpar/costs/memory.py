"""Memory of each layer in closed form: elements that a rank stores of its weights, and saves for the backward.

    >>> from dslpar.core.mesh import Tensor
    >>> layer = linear(Tensor(q=2, y=2, residual="hidden"), 64, 16, 48, role="inward")
    >>> int(layer.weights), int(layer.saved.elements)
    (216, 512)

Letters: M tokens of a micro-batch, K and N features in and out; x = d q. A linear saves its input and its weight, as
gathered panels if `keep` names them, else as stored. A weight that is not gathered is the parameter itself and costs
nothing. A panel of the input is M K / (x z) elements (inward) or M K / (x y) (outward). Saved:

=======  ============================  =====================================
keep     input                         weight
=======  ============================  =====================================
x        its panel                     -
w        as stored                     its panel, K N / (y z)
both     its panel                     its panel
none     as stored                     -
=======  ============================  =====================================

A tensor that two layers save counts once. Elements of a wider type than the model's are counted apart, in `Saved.wide`:
float32 or wider, per token, or per token and head. Korthikanti et al. (arXiv 2205.05198) count the same way: a sum over
the block's activations, each once, divided as tensor and sequence parallelism divide them.
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
    """Elements that are kept until the backward."""

    elements: Number = 0
    """In the model's type: activations, and panels of weights."""
    wide: Number = 0
    """In float32 or wider: statistics of norms, the log-sum-exp of attention."""

    def __add__(self, other: Saved) -> Saved:  # type: ignore[override]
        return Saved(elements=self.elements + other.elements, wide=self.wide + other.wide)


class LayerMemory(NamedTuple):
    """Elements that a rank stores of a layer."""

    weights: Number
    """Parameters."""
    saved: Saved
    """Saved by one micro-batch."""
    frozen: Number = 0
    """Part of `weights` that is not trained."""

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
    """Count a linear layer with its input; for several blocks of features, `out_features` is their sum.

    With `adapters` weight and bias are frozen; if it is empty, the input is not saved.
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
    """Count a norm with its input, and one (RMSNorm) or two statistics per token."""
    vectors, statistics = (1, 1) if kind == "rmsnorm" else (1 + bias, 2)
    rows = ratio(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    pieces = ranks(tensor, residual_cuts(tensor).features)
    # torch's RMSNorm, used if features are whole, also saves its result unless a kernel fuses it (CPU).
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
    """Count fused attention without dropout or mask: q, k, v, its result, its log-sum-exp, the result's panel.

    With `adapters` all weights are frozen; this holds for the functions below too.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    inward = linear(tensor, tokens, hidden_size, hidden_size + 2 * kv_size, role="inward", bias=bias, adapters=qkv)
    outward = linear(tensor, tokens, hidden_size, hidden_size, role="outward", bias=bias, adapters=out)
    result = _inner(tensor, tokens, hidden_size)
    core = _inner(tensor, tokens, hidden_size + 2 * kv_size)
    # Before the output projection, the result crosses ranks: those that exchanged its tokens for heads, or the ranks of
    # z that gather it. A second copy lives then. If the projection saves no input, attention itself saves the result.
    if out == () or tensor.ulysses > 1 or (tensor.z > 1 and tensor.keep in ("x", "both")):
        core += result
    wide = _inner(tensor, tokens, num_heads)
    return inward + LayerMemory(weights=0, saved=Saved(elements=core, wide=wide)) + outward


def attention_working(
    tensor: Tensor, tokens: Number, hidden_size: int, num_heads: int, *, kv_heads: int | None = None, rotary: bool
) -> Saved:
    """Count what attention needs besides what it saves, at the fullest moment of a recomputed layer's backward.

    The moment is the core's backward (in `dslpar.layers.context_attention` a ring's gradients add up in float32), the
    rotation of queries and keys back, or an exchange of tokens for heads. Saved tensors that do not exist at that
    moment are subtracted.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    q, kv = _inner(tensor, tokens, hidden_size), _inner(tensor, tokens, kv_size)
    exchanges = tensor.ulysses > 1
    if tensor.ring == 1:
        core = Saved(elements=2 * q + 2 * kv + (2 * q if exchanges else 0))
    else:
        messages = 4 if tensor.ring > 2 else 2  # keys and values, each the present and the arriving one
        # Gradients of a block: for half of the keys and all queries, or the reverse on the first ranks.
        parts = max(q + kv, ratio(q, 2) + 2 * kv) if tensor.zigzag else q + 2 * kv
        core = Saved(elements=q + messages * kv + parts, wide=q + 4 * kv)
    saved = 2 * q + 2 * kv
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
    """Count an MLP: up, the activation's saved input (two blocks with 'swiglu'), and down."""
    inner = (2 if activation == "swiglu" else 1) * ffn_size
    of_up, of_down = (None, None) if adapters is None else (adapters.up, adapters.down)
    up = linear(tensor, tokens, hidden_size, inner, role="inward", bias=bias, adapters=of_up)
    activated = LayerMemory(weights=0, saved=Saved(elements=_inner(tensor, tokens, inner)))
    return up + activated + linear(tensor, tokens, ffn_size, hidden_size, role="outward", bias=bias, adapters=of_down)


def embedding(
    tensor: Tensor, vocab_size: int, hidden_size: int, num_positions: int = 0, *, frozen: bool = False
) -> LayerMemory:
    """Count the token table with its padding, and a position table; the result is the next layer's saved input."""
    rows = ratio(vocabulary(vocab_size, tensor).value, tensor.y * tensor.q * tensor.z)
    positions = ratio(num_positions, ranks(tensor, residual_cuts(tensor).features))
    weights = hidden_size * (rows + positions)
    return LayerMemory(weights=weights, saved=Saved(), frozen=weights if frozen else 0)


def head(tensor: Tensor, tokens: Number, hidden_size: int, vocab_size: int, *, frozen: bool = False) -> LayerMemory:
    """Count the head with its input; `ModelCosts.logits` counts the logits."""
    padded = vocabulary(vocab_size, tensor).value
    adapters = () if frozen else None
    return linear(tensor, tokens, hidden_size, padded, role="inward", bias=False, adapters=adapters)


def logits(tensor: Tensor, tokens: Number, vocab_size: int) -> Number:
    """Return the elements of logits that a rank holds."""
    return _inner(tensor, tokens, vocabulary(vocab_size, tensor).value)


def residual(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements that a rank stores of the residual stream."""
    return _residual(tensor, tokens, features)


def affine(tensor: Tensor, tokens: Number, hidden_size: int, *, bias: bool = True) -> LayerMemory:
    """Count an affine map of the residual's features, with its input."""
    vectors = ratio((1 + bias) * hidden_size, ranks(tensor, residual_cuts(tensor).features))
    return LayerMemory(weights=vectors, saved=Saved(elements=_residual(tensor, tokens, hidden_size)))


def token_linear(tensor: Tensor, tokens: Number, hidden_size: int, num_tokens: int) -> LayerMemory:
    """Count a linear over the tokens of a sample, whole on every rank, with its input."""
    return LayerMemory(weights=num_tokens**2 + num_tokens, saved=Saved(elements=_residual(tensor, tokens, hidden_size)))


def _input(tensor: Tensor, tokens: Number, features: int, role: Role) -> Number:
    """Return the elements that a linear saves of its input: its panel, or the stored piece."""
    stored = (_residual if role == "inward" else _inner)(tensor, tokens, features)
    if tensor.keep not in ("x", "both"):
        return stored
    other = tensor.z if role == "inward" else tensor.y
    return ratio(tokens * features, tensor.x * other)


def _residual(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements that a rank stores of the residual."""
    return ratio(tokens * features, ranks(tensor, residual_cuts(tensor).tokens + residual_cuts(tensor).features))


def _inner(tensor: Tensor, tokens: Number, features: int) -> Number:
    """Return the elements that a rank stores of an inner activation."""
    return ratio(tokens * features, ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features))
