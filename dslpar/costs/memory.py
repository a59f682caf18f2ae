"""Memory of each layer in closed form: elements that a rank stores of its weights, and saves for the backward.

    >>> from dslpar.core.mesh import TensorMesh
    >>> held = total([sizes.Linear(16, 48, "inward")], TensorMesh(q=2, y=2, residual="hidden"), tokens=64)
    >>> int(held.weights), int(held.saved.elements)
    (216, 512)

Letters: M tokens of a micro-batch; K and N input and output features of a linear; d, q, y and z the axes of the tensor
group, with x = d * q. docs/architecture.md, "The cuboid", defines these axes and the terms below:

- An *inward* linear maps the residual stream to inner features (q, k, v, the MLP's hidden layer, logits). An *outward*
  linear maps inner features back.
- *Stored*: a rank's shard of an activation or a weight between layers.
- *Panel*: the operand of a rank's matrix product. Ranks gather it from their shards. The input's panel has M K / (x z)
  elements in an inward linear and M K / (x y) in an outward one. The weight's panel has K N / (y z).

A linear saves its input and, if q > 1, may save its gathered weight. If q = 1, the weight is the parameter itself and
costs nothing more. The setting `keep` (`dslpar.core.mesh.TensorMesh`) selects what a linear saves:

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

All functions return what one rank holds. Their argument `tensor` is the cuboid (the tensor group's sizes and modes),
and `tokens` is M. `FORMS` has the closed form of each kind of layer in `dslpar.costs.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.costs import layers as sizes
from dslpar.costs.adapters import Role, matrices
from dslpar.costs.cached_sharding import inner_cuts, residual_cuts
from dslpar.costs.collective_traffic import Number, ratio
from dslpar.costs.layers import Forms, Layer, walk
from dslpar.layout.divisors import ranks, vocabulary


class Saved(NamedTuple):
    """Elements that autograd saves for the backward."""

    elements: Number = 0
    """In the model's dtype: activations, and gathered weights."""
    wide: Number = 0
    """In float32 or wider: statistics of norms, the log-sum-exp of attention."""

    def __add__(self, other: Saved) -> Saved:  # type: ignore[override]
        return Saved(elements=self.elements + other.elements, wide=self.wide + other.wide)

    def __mul__(self, times: int) -> Saved:  # type: ignore[override]
        return Saved(elements=self.elements * times, wide=self.wide * times)


class LayerMemory(NamedTuple):
    """Elements of a layer that one rank holds."""

    weights: Number = 0
    """Elements of parameters, trained and frozen."""
    saved: Saved = Saved()
    """Elements that one micro-batch saves for the backward."""
    frozen: Number = 0
    """The elements of `weights` that are not trained."""
    experts: Number = 0
    """The elements of `weights` that only the ranks of "expert_data" share: experts that tokens are sent to."""
    of_rows: Number = 0
    """The elements of `saved.elements` that grow with the load of this rank's experts (`dslpar.costs.layers.Mixture`).
    """

    def __add__(self, other: LayerMemory) -> LayerMemory:  # type: ignore[override]
        return LayerMemory(
            weights=self.weights + other.weights,
            saved=self.saved + other.saved,
            frozen=self.frozen + other.frozen,
            experts=self.experts + other.experts,
            of_rows=self.of_rows + other.of_rows,
        )


def total(layers: Iterable[Layer], tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Return the memory of all `layers`."""
    return sum(walk(FORMS, layers, tensor, tokens), LayerMemory())


def linear(layer: sizes.Linear, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a linear layer: its weight, bias and saved input.

    With empty `adapters` no gradient needs the input, so it is not saved.
    """
    role, adapters = layer.role, layer.adapters
    matrix = ratio(layer.in_features * layer.out_features, tensor.y * tensor.z)
    panel = matrix if tensor.keep in ("w", "both") and tensor.q > 1 else 0
    cuts = inner_cuts(tensor) if role == "inward" else residual_cuts(tensor)
    vector = ratio(layer.out_features, ranks(tensor, cuts.features)) if layer.bias else 0
    kept = 0 if adapters == () else _input(tensor, tokens, layer.in_features, role)
    weights, saved = matrix / tensor.q + vector, Saved(elements=kept + panel)
    if adapters is None:
        return LayerMemory(weights=weights, saved=saved)
    pairs = matrices(tensor, layer.in_features, adapters, role)
    return LayerMemory(
        weights=weights + sum(each.elements for pair in pairs for each in pair), saved=saved, frozen=weights
    )


def norm(layer: sizes.Norm, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a norm: its parameters, its saved input, and one (RMSNorm) or two (LayerNorm) statistics per token."""
    is_rms = layer.kind == "rmsnorm"
    vectors, statistics = (1, 1) if is_rms else (1 + layer.bias, 2)
    rows = ratio(tokens, ranks(tensor, residual_cuts(tensor).tokens))
    pieces = ranks(tensor, residual_cuts(tensor).features)
    # torch's RMSNorm runs if no axis shards the features. On a CPU, without a fused kernel, it also saves its result.
    times = 2 if is_rms and pieces == 1 else 1
    saved = Saved(elements=times * residual(tensor, tokens, layer.hidden_size), wide=statistics * rows)
    weights = ratio(vectors * layer.hidden_size, pieces)
    return LayerMemory(weights=weights, saved=saved, frozen=weights if layer.frozen else 0)


def attention_core(layer: sizes.AttentionCore, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count the core of fused attention: q, k, v, its result, and a log-sum-exp per token and head."""
    saved = _inner(tensor, tokens, layer.hidden_size + 2 * layer.kv_size)
    # The output projection counts the result of the core as its input. A second copy exists if the result is exchanged
    # or gathered before the projection: by Ulysses's all-to-all, or over z. If the projection saves no input, the
    # core's own saved result is counted here.
    if not layer.result_is_saved or tensor.ulysses > 1 or (tensor.z > 1 and tensor.keep in ("x", "both")):
        saved += _inner(tensor, tokens, layer.hidden_size)
    return LayerMemory(saved=Saved(elements=saved, wide=_inner(tensor, tokens, layer.num_heads)))


def attention_working(layer: sizes.AttentionCore, tensor: TensorMesh, tokens: Number) -> Saved:
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
    q, kv = _inner(tensor, tokens, layer.hidden_size), _inner(tensor, tokens, layer.kv_size)
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
    others: list[Number] = [2 * (q + 2 * kv) + 2 * (q + kv) - saved] if layer.rotary else []
    others += [4 * (q + 2 * kv) - saved - q] if exchanges else []
    return max([core, *(Saved(elements=each) for each in others)], key=lambda each: each.elements + each.wide)


def activation(layer: sizes.Activation, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count the saved input of an activation function."""
    return LayerMemory(saved=Saved(elements=_inner(tensor, tokens, layer.blocks * layer.features)))


def mixture(layer: sizes.Mixture, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a mixture whose tokens are exchanged, with experts at the even load.

    These are saved, without indices:

    - for each token of this rank, the router's input, the scores of all experts in float32, and for each of its experts
      the output and its weight; dslpar's own layer also saves these experts' scores and their sum in float32;
    - for each row of this rank's experts, the input, inner activations and the input of the last linear. transformers'
      gates save the gate, the values and the activated gate, and a row's weight; dslpar's own only gate and values;
    - for a shared expert, its gathered weights, gate and values, the activated gate and the product, and its output if
      it has a gate.

    With several `expert_chunks` as much is saved, one part after the other. Frozen weights save no inputs. If the
    tensor group stores equal copies of the residual, the router's input is a view that keeps the whole copy.
    """
    hidden, ffn, own = layer.hidden_size, layer.ffn_size, layer.own_tokens(tensor, tokens)
    rows, share = layer.rows(tensor, tokens), layer.share(tensor)
    experts = share * layer.matrices * hidden * ffn
    shared = 3 * hidden * layer.shared_ffn
    inputs = 0 if layer.frozen else 1
    of_rows = rows * (inputs * hidden + (layer.kept + inputs) * ffn + (0 if layer.is_own else 1))
    saved = own * layer.active * (hidden + 1) + of_rows
    joined = ranks(tensor, residual_cuts(tensor).features) > 1
    saved += inputs * (own * hidden if joined else residual(tensor, tokens, hidden))
    if shared:
        saved += own * (3 + inputs) * layer.shared_ffn + (shared if tensor.size > 1 else 0)
        saved += own * (hidden + 1) if layer.shared_gate else 0
    weights = experts + ratio(shared, tensor.size) + (layer.num_experts + layer.shared_gate) * hidden
    return LayerMemory(
        weights=weights,
        saved=Saved(elements=saved, wide=own * (layer.num_experts + (layer.active + 1 if layer.is_own else 0))),
        frozen=weights if layer.frozen else 0,
        experts=0 if layer.frozen else experts,
        of_rows=of_rows,
    )


def expert_adapters(layer: sizes.ExpertAdapters, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count the adapters of a rank's experts, and the weights with adapters that autograd saves."""
    share = layer.share(tensor)
    weights = share * sum(layer.r * (inputs + outputs) for inputs, outputs in layer.weights)
    saved = share * sum(inputs * outputs for inputs, outputs in layer.weights) if tokens else 0
    experts = weights if tensor.exchanges_tokens else 0
    return LayerMemory(weights=weights, saved=Saved(elements=saved), experts=experts)


def _gathered_mixture(layer: sizes.GatheredMixture, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    return total(layer.layers, tensor, tokens)


def embedding(layer: sizes.Embedding, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count the token table with its padding.

    The embedding saves no activations. Its result is counted by the next layer, which saves it as an input.
    """
    rows = ratio(vocabulary(layer.vocab_size, tensor).value, tensor.y * tensor.q * tensor.z)
    weights = layer.hidden_size * rows
    return LayerMemory(weights=weights, frozen=weights if layer.frozen else 0)


def vectors(layer: sizes.Vectors, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count vectors that are added to the residual stream."""
    weights = ratio(layer.elements, ranks(tensor, residual_cuts(tensor).features))
    return LayerMemory(weights=weights, frozen=weights if layer.frozen else 0)


def head(layer: sizes.Head, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count the head's weight and saved input; `logits` counts the head's output."""
    padded = vocabulary(layer.vocab_size, tensor).value
    adapters = () if layer.frozen else None
    return linear(sizes.Linear(layer.hidden_size, padded, "inward", bias=False, adapters=adapters), tensor, tokens)


def classifier(layer: sizes.Classifier, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a classifier's weight, bias and saved input."""
    weights = (layer.hidden_size + 1) * layer.num_classes
    return LayerMemory(weights=weights, saved=Saved(elements=tokens * layer.hidden_size))


def affine(layer: sizes.Affine, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count an elementwise affine map of the residual's features: its vectors and its saved input."""
    weights = ratio((1 + layer.bias) * layer.hidden_size, ranks(tensor, residual_cuts(tensor).features))
    return LayerMemory(weights=weights, saved=Saved(elements=residual(tensor, tokens, layer.hidden_size)))


def token_linear(layer: sizes.TokenLinear, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a linear over the tokens of a sample, and its saved input; every rank holds the whole weight."""
    saved = Saved(elements=residual(tensor, tokens, layer.hidden_size))
    return LayerMemory(weights=layer.num_tokens**2 + layer.num_tokens, saved=saved)


def batch_norm(layer: sizes.BatchNorm, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a BatchNorm: its vectors, its centred input and a statistic per feature, and the input of its gain.

    The centred input is in float32. A ReLU after the norm saves its result, which is the next linear's input.
    """
    stored, cuts = (_inner, inner_cuts) if layer.after == "inward" else (residual, residual_cuts)
    elements, features = (
        stored(tensor, tokens, layer.features),
        ratio(layer.features, ranks(tensor, cuts(tensor).features)),
    )
    saved = Saved(elements=elements if layer.affine else 0, wide=elements + features)
    return LayerMemory(weights=2 * features if layer.affine else 0, saved=saved)


def _repeated(layer: sizes.Repeated, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    once = total(layer.layers, tensor, tokens)
    return once._replace(saved=once.saved * layer.times, of_rows=once.of_rows * layer.times)


def _forward_only(layer: sizes.ForwardOnly, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    weights = total(layer.layers, tensor, tokens).weights
    return LayerMemory(weights=weights, frozen=weights)


def _nothing(layer: Layer, tensor: TensorMesh, tokens: Number) -> LayerMemory:
    """Count a layer without weights whose inputs and results are saved by other layers, or not at all."""
    return LayerMemory()


FORMS: Forms[LayerMemory] = {
    sizes.Activation: activation,
    sizes.Affine: affine,
    sizes.AttentionCore: attention_core,
    sizes.BatchNorm: batch_norm,
    sizes.Classifier: classifier,
    sizes.CrossEntropy: _nothing,
    sizes.Embedding: embedding,
    sizes.FirstToken: _nothing,
    sizes.ForwardOnly: _forward_only,
    sizes.GatheredInner: _nothing,
    sizes.ExpertAdapters: expert_adapters,
    sizes.GatheredMixture: _gathered_mixture,
    sizes.Head: head,
    sizes.Linear: linear,
    sizes.MeanOfTokens: _nothing,
    sizes.Mixture: mixture,
    sizes.Norm: norm,
    sizes.Repeated: _repeated,
    sizes.ResidualAdd: _nothing,
    sizes.TokenLinear: token_linear,
    sizes.Vectors: vectors,
}
"""The closed form of each kind of layer but `PerSample`, which `walk` takes apart."""


def logits(layers: Iterable[Layer], tensor: TensorMesh, tokens: Number) -> Number:
    """Return the elements of the logits that a rank holds while the losses among `layers` are computed."""
    found: Number = 0
    for layer in layers:
        if isinstance(layer, sizes.CrossEntropy):
            found += _inner(tensor, tokens, vocabulary(layer.vocab_size, tensor).value)
        elif isinstance(layer, sizes.Classifier):
            found += tokens * layer.num_classes
        elif isinstance(layer, sizes.PerSample):
            found += logits(layer.layers, tensor, ratio(tokens, layer.num_tokens))
    return found


def residual(tensor: TensorMesh, tokens: Number, features: int) -> Number:
    """Return the elements of the residual stream that a rank stores."""
    return ratio(tokens * features, ranks(tensor, residual_cuts(tensor).tokens + residual_cuts(tensor).features))


def _input(tensor: TensorMesh, tokens: Number, features: int, role: Role) -> Number:
    """Return the elements of a linear's saved input: the panel if `keep` names it, else the stored shard."""
    stored = (residual if role == "inward" else _inner)(tensor, tokens, features)
    if tensor.keep not in ("x", "both"):
        return stored
    other = tensor.z if role == "inward" else tensor.y
    return ratio(tokens * features, tensor.x * other)


def _inner(tensor: TensorMesh, tokens: Number, features: int) -> Number:
    """Return the elements of an inner activation that a rank stores."""
    return ratio(tokens * features, ranks(tensor, inner_cuts(tensor).tokens + inner_cuts(tensor).features))
