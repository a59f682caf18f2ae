"""Layers of a model as records of their sizes: the tree from which memory, traffic and work are computed.

    >>> [type(layer).__name__ for layer in mlp(16, 64)]
    ['Linear', 'Activation', 'Linear']

Each model family describes its layers once, as a `ModelLayers`. Three modules have a closed form for each kind of
layer: `dslpar.costs.memory`, `dslpar.costs.traffic` and `dslpar.costs.work`. `walk` calls one of them for each layer.
torchinfo and DeepSpeed's FLOPs profiler walk a model's modules in the same way, but need the built model.

Sizes are those of the whole model. The closed forms divide them over the ranks of a tensor group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from dslpar.core.mesh import TensorMesh
from dslpar.costs.adapters import Adapter, AdapterSizes, Role
from dslpar.costs.collective_traffic import Number, ratio

Cost = TypeVar("Cost")


class Layer:
    """Layer of a model. Its closed forms are called with the tokens of a micro-batch."""


Layers: TypeAlias = tuple[Layer, ...]


@dataclass(frozen=True)
class Linear(Layer):
    """Linear layer; for a fused one, such as q, k and v, `out_features` is the sum over its parts."""

    in_features: int
    out_features: int
    role: Role
    bias: bool = True
    gather_output: bool = False
    """True if every rank gets all output features. The backward of this gather sends nothing."""
    input_grad: bool = True
    """True if the backward computes the input's gradient."""
    adapters: tuple[Adapter, ...] | None = None
    """Low-rank adapters. If not None, weight and bias are frozen, also with no adapters at all."""


@dataclass(frozen=True)
class Norm(Layer):
    """Norm of the residual stream: 'layernorm' or 'rmsnorm'."""

    hidden_size: int
    kind: str = "layernorm"
    bias: bool = True
    frozen: bool = False


@dataclass(frozen=True)
class Affine(Layer):
    """Elementwise map of the residual's features by a gain and, with `bias`, a shift."""

    hidden_size: int
    bias: bool = True


@dataclass(frozen=True)
class Vectors(Layer):
    """Vectors over the residual's features that are added to it, such as position embeddings or a class token."""

    elements: int
    frozen: bool = False


@dataclass(frozen=True)
class ResidualAdd(Layer):
    """Sum of the residual stream and a layer's result."""

    hidden_size: int


@dataclass(frozen=True)
class AttentionCore(Layer):
    """Attention of q, k and v without dropout or mask, and without its projections."""

    hidden_size: int
    """Features of all queries."""
    kv_size: int
    """Features of all keys."""
    num_heads: int
    seq_len: int
    """Keys that a query attends to without a causal mask."""
    causal: bool = True
    rotary: bool = False
    result_is_saved: bool = True
    """True if the output projection saves the result as its input. If it is frozen without adapters, it does not."""


@dataclass(frozen=True)
class Activation(Layer):
    """Activation function of an MLP with `features` results; a gate and the values it multiplies are two `blocks`."""

    features: int
    blocks: int = 1


@dataclass(frozen=True)
class TokenLinear(Layer):
    """Linear over the `num_tokens` tokens of a sample. Every rank holds the whole weight."""

    hidden_size: int
    num_tokens: int


@dataclass(frozen=True)
class Embedding(Layer):
    """Token table, with its rows padded to a multiple of the ranks that shard them."""

    vocab_size: int
    hidden_size: int
    frozen: bool = False


@dataclass(frozen=True)
class Head(Layer):
    """Linear to the logits of a vocabulary, padded as the token table is; its weight may be tied to the table's."""

    hidden_size: int
    vocab_size: int
    frozen: bool = False


@dataclass(frozen=True)
class CrossEntropy(Layer):
    """Mean cross-entropy of a head's logits."""

    vocab_size: int


@dataclass(frozen=True)
class Classifier(Layer):
    """Linear from one vector per sample to the logits of classes, with their loss, computed whole on every rank."""

    hidden_size: int
    num_classes: int


@dataclass(frozen=True)
class MeanOfTokens(Layer):
    """Mean over each sample's tokens. Every rank gets the means of all samples and features."""

    hidden_size: int
    num_tokens: int


@dataclass(frozen=True)
class FirstToken(Layer):
    """First token of each sample, on all ranks that split the sequence."""

    hidden_size: int


@dataclass(frozen=True)
class BatchNorm(Layer):
    """BatchNorm of a linear's output."""

    features: int
    after: Role
    """Role of the linear."""
    affine: bool = True


@dataclass(frozen=True)
class GatheredInner(Layer):
    """Inner activation [tokens, features] that is gathered whole on every rank."""

    features: int


@dataclass(frozen=True)
class Mixture(Layer):
    """Mixture of experts that sends tokens to the ranks of their experts (`TensorMesh.exchanges_tokens`)."""

    hidden_size: int
    ffn_size: int
    """Inner features of one expert."""
    num_experts: int
    active: int
    """Experts that a token is sent to."""
    shared_ffn: int = 0
    """Inner features of the shared expert, which all tokens visit; 0 without one."""
    shared_gate: bool = False
    """True if a vector over the residual's features computes the shared expert's weight."""
    frozen: bool = False
    blocks: int = 2
    """Blocks of `ffn_size` features that an expert's first linear computes: 2 for values and their gate."""
    is_own: bool = False
    """True for `dslpar.layers.Mixture`, whose activations save their input alone; False for transformers' code."""
    has_capacity: bool = False
    """True if ranks of the tensor group exchange all choices, to keep those that fit into a capacity."""

    @property
    def kept(self) -> int:
        """Inner activations of `ffn_size` features that an expert saves, besides the input of its last linear."""
        return self.blocks if self.is_own else self.blocks + 1

    @property
    def matrices(self) -> int:
        """Matrices of `hidden_size` * `ffn_size` elements in an expert."""
        return self.blocks + 1

    def share(self, tensor: TensorMesh) -> int:
        """Return the number of experts that a rank has places for: all ranks have as many as the fullest."""
        return -(-self.num_experts // (tensor.e * tensor.size))

    def own_tokens(self, tensor: TensorMesh, tokens: Number) -> Number:
        """Return the tokens that a rank routes: each rank of a tensor group has other ones."""
        return ratio(tokens, tensor.size)

    def rows(self, tensor: TensorMesh, tokens: Number) -> Number:
        """Return the rows that a rank's experts compute if each expert gets as many tokens: the *even load*."""
        return ratio(tokens * self.active * tensor.e * self.share(tensor), self.num_experts)


@dataclass(frozen=True)
class ExpertAdapters(Layer):
    """Low-rank adapters of the frozen weights of a mixture's experts, which each use adds to the weights."""

    num_experts: int
    active: int
    r: int
    weights: tuple[tuple[int, int], ...]
    """(input, output) features of each adapted weight of an expert."""

    def share(self, tensor: TensorMesh) -> int:
        """Return the number of experts that a rank has places for."""
        return -(-self.num_experts // (tensor.e * tensor.size))


@dataclass(frozen=True)
class GatheredMixture(Layer):
    """Mixture that runs on all tokens of a replica, which every rank of the tensor group gathers.

    Its traffic and memory are approximately those of `layers`, an MLP with the features of the active experts. Its
    products are those of the experts, with fewer rows each.
    """

    layers: Layers
    mixture: Mixture


# Layers of layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerSample(Layer):
    """Layers that run on one token per sample of `num_tokens`."""

    layers: Layers
    num_tokens: int


@dataclass(frozen=True)
class Repeated(Layer):
    """Layers that run `times` per micro-batch with the same weights."""

    layers: Layers
    times: int


@dataclass(frozen=True)
class ForwardOnly(Layer):
    """Layers without a backward, such as a momentum encoder's. Their weights are frozen."""

    layers: Layers


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """Layers of a model: those that a pipeline partitions, and those before and after them."""

    first: Layers
    """Layers before the blocks: embedding tables, the projection of image patches."""
    block: Layers = ()
    """One layer of the pipeline's partition without `mlp_part`. All such layers are equal, but for `unequal`."""
    mlp_part: Layers = ()
    """End of a layer of the partition, which the setting `mlp_chunks` computes for one chunk of tokens at a time."""
    last: Layers
    """Layers after the blocks: the last norm, the head, the loss."""
    boundary: int
    """Features per token of the activation between two layers of the partition."""
    unequal: tuple[Layers, ...] = ()
    """The layers of the partition one by one, if they differ; `block` and `mlp_part` are then empty."""
    tied: Embedding | None = None
    """Token table in `first` whose weight the head in `last` shares."""

    @property
    def layer(self) -> Layers:
        """One layer of the pipeline's partition; the last one, if they are `unequal`."""
        return self.unequal[-1] if self.unequal else self.block + self.mlp_part

    @property
    def whole(self) -> Layers:
        """All layers of the model if the partition's are `unequal`."""
        return (*self.first, *itertools.chain.from_iterable(self.unequal), *self.last)


def attention(
    hidden_size: int,
    num_heads: int,
    seq_len: int = 1,
    *,
    kv_heads: int | None = None,
    bias: bool = True,
    causal: bool = True,
    rotary: bool = False,
    adapters: AdapterSizes | None = None,
) -> Layers:
    """Return attention with its projections; `kv_heads` None means as many as `num_heads`.

    With `adapters` (not None) all weights are frozen but those of linears for which `adapters` has None. The same holds
    in `mlp`. `seq_len` and `causal` change the work alone.
    """
    kv_size = hidden_size // num_heads * (kv_heads or num_heads)
    qkv, out = (None, None) if adapters is None else (adapters.qkv, adapters.out)
    core = AttentionCore(hidden_size, kv_size, num_heads, seq_len, causal, rotary, result_is_saved=out != ())
    return (
        Linear(hidden_size, hidden_size + 2 * kv_size, "inward", bias, adapters=qkv),
        core,
        Linear(hidden_size, hidden_size, "outward", bias, adapters=out),
    )


def mlp(
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "gelu",
    bias: bool = True,
    adapters: AdapterSizes | None = None,
) -> Layers:
    """Return an MLP; with 'swiglu' its first linear includes the gate."""
    blocks = 2 if activation == "swiglu" else 1
    up, down = (None, None) if adapters is None else (adapters.up, adapters.down)
    return (
        Linear(hidden_size, blocks * ffn_size, "inward", bias, adapters=up),
        Activation(ffn_size, blocks),
        Linear(ffn_size, hidden_size, "outward", bias, adapters=down),
    )


Forms: TypeAlias = Mapping[type[Layer], Callable[[Any, TensorMesh, Number], Cost]]
"""The closed form of each kind of layer but `PerSample`, as a function of layer, tensor group and tokens."""


def walk(forms: Forms[Cost], layers: Iterable[Layer], tensor: TensorMesh, tokens: Number) -> list[Cost]:
    """Return the cost of each layer on one rank of a tensor group; the layers within a `PerSample` count one by one."""
    costs: list[Cost] = []
    for layer in layers:
        if isinstance(layer, PerSample):
            costs += walk(forms, layer.layers, tensor, ratio(tokens, layer.num_tokens))
        else:
            costs.append(forms[type(layer)](layer, tensor, tokens))
    return costs


def within(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield layers and the layers within them."""
    for layer in layers:
        yield layer
        yield from within(getattr(layer, "layers", ()))
