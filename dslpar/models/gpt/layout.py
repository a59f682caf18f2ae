"""Sizes of a GPT: divisibility conditions, layer weights, and fields that follow from others.

Pipeline stages are balanced by the layer weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Attention, Condition
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.stages import EvenWeights, Weights, num_matches
from dslpar.models.gpt.section import GPT


def attention_sizes(model: GPT) -> Attention:
    """Return the sizes of attention, whose conditions depend on one another."""
    return Attention(model.hidden_size, model.num_heads, model.num_kv_heads, model.positions == "rotary")


def conditions(model: GPT, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    """Return the divisibility conditions; `seq_len` 0: unknown."""
    found = [*divisors.attention(attention_sizes(model), cuboid)]
    if model.experts is None or not all(map(model.has_mixture, range(model.num_layers))):
        found += divisors.inner_features(model.ffn_size, cuboid)
    if shared := shared_ffn(model):
        found += divisors.inner_features(shared, cuboid, SHARED_FFN)
    return [*found, *divisors.sequence(seq_len, cuboid)]


SHARED_FFN = "model.experts.ffn_hidden_size"
"""The key that determines the features of shared experts, which an MLP on all ranks of the tensor group computes."""


def shared_ffn(model: GPT) -> int:
    """Return the features of the hidden layers of a mixture's shared experts together; 0 if there are none."""
    return 0 if model.experts is None else model.experts.shared * model.expert_ffn_size


def padding(model: GPT, cuboid: TensorMesh) -> list[Condition]:
    """Return the condition on the vocabulary, which padding meets."""
    return [divisors.vocabulary(model.vocab_size, cuboid)]


# The cut over stages ----------------------------------------------------------------------------------------------


def pipeline_weights(model: GPT, method: str, seq_len: int) -> Weights:
    """Return the weight of each block, and of tables, norm and head on the first and last stage, for pipeline cuts.

    If some blocks have a mixture of experts and others an MLP, the result lists the weights of all blocks, and those of
    the first and the last block include the rest of their stages.

    'cost': multiplications in a token's forward, in a sequence of `seq_len`; an embedding lookup counts 0.
    'parameters': elements that a stage holds; both the first and the last stage hold a tied table. 'type:REGEX': 1 for
    each layer whose class matches.

        >>> model = GPT(num_layers=3, hidden_size=4, num_heads=1, vocab_size=10, max_seq_len=2)
        >>> pipeline_weights(model, "cost", 2).loads((2, 1))
        (400, 240)
    """
    hidden = model.hidden_size
    table = hidden * model.vocab_size
    of_block: Callable[[bool], int]
    if method == "cost":
        # Half of the causal scores are computed, in each of two products.
        first, last, of_block = 0, table, lambda mixture: block_weights(model, mixture) + seq_len * hidden
    elif method == "parameters":
        positions = hidden * model.max_seq_len if model.positions == "learned" else 0
        first, last = table + positions, table + norm_parameters(model)
        of_block = partial(block_parameters, model)
    else:
        token, position, *blocks, norm, head = (num_matches(method, [name]) for name in class_names(model))
        first, last, of_block = token + position, norm + head, lambda mixture: blocks[-1 if mixture else 0]
    kinds = [model.has_mixture(index) for index in range(model.num_layers)]
    if len(set(kinds)) == 1:
        return EvenWeights(first, of_block(kinds[0]), last)
    listed = [of_block(kind) for kind in kinds]
    return [listed[0] + first, *listed[1:-1], listed[-1] + last]


def class_names(model: GPT) -> Sequence[str]:
    """Return the class names of the layers, each once, in order; blocks come third, and with mixtures fourth too."""
    positions = "PositionEmbedding" if model.positions == "learned" else "Dropout"
    norm = "LayerNorm" if model.norm == "layernorm" else "RMSNorm"
    kinds = sorted({model.has_mixture(index) for index in range(model.num_layers)})
    return "Embedding", positions, *("MixtureBlock" if kind else "Block" for kind in kinds), norm, "Head"


def block_weights(model: GPT, mixture: bool = False) -> int:
    """Return the elements of a block's matrices that a token is multiplied with: of attention, and of the MLP.

    Of a mixture, these are the matrices of `top_k` experts, of the shared experts, and the router.
    """
    active = model.experts.top_k if mixture and model.experts else 0
    return _attention_weights(model) + (_mixture_weights(model, active) if mixture else _mlp_weights(model))


def block_parameters(model: GPT, mixture: bool = False) -> int:
    """Return all elements of a block: its matrices, their biases if there are any, two norms."""
    hidden, up = model.hidden_size, _up_blocks(model) * model.ffn_size
    biases = hidden + 2 * kv_features(model) + hidden if model.bias else 0
    found = _attention_weights(model) + biases + 2 * norm_parameters(model)
    if mixture:
        return found + _mixture_weights(model, model.num_experts or 0)
    return found + _mlp_weights(model) + (up + hidden if model.bias else 0)


def _attention_weights(model: GPT) -> int:
    return model.hidden_size * (2 * model.hidden_size + 2 * kv_features(model))


def _mlp_weights(model: GPT) -> int:
    return model.hidden_size * (_up_blocks(model) + 1) * model.ffn_size


def _mixture_weights(model: GPT, experts: int) -> int:
    """Return the elements of the router, of so many experts, and of the shared ones; they have no biases."""
    features = experts * model.expert_ffn_size + shared_ffn(model)
    return model.hidden_size * ((model.num_experts or 0) + (_up_blocks(model) + 1) * features)


def _up_blocks(model: GPT) -> int:
    return 2 if model.activation == "swiglu" else 1


def kv_features(model: GPT) -> int:
    """Return the features of all key heads, or of all value heads, per token."""
    return model.kv_heads * model.hidden_size // model.num_heads


def norm_parameters(model: GPT) -> int:
    """Return the number of parameters of a norm; RMSNorm has no bias."""
    return model.hidden_size * (2 if model.bias and model.norm == "layernorm" else 1)


# Fields that may be left out ---------------------------------------------------------------------------------------


def inferred(model: GPT, field: str) -> InferredValue | None:
    """Return the value of a field that was left out; None if it does not follow from other fields."""
    if field == "num_kv_heads":
        return InferredValue(
            model.num_heads, "left out: each head has keys and values of its own", ("model.num_heads",)
        )
    if field == "ffn_hidden_size":
        return InferredValue(4 * model.hidden_size, f"4 * hidden_size {model.hidden_size}", ("model.hidden_size",))
    if field == "experts.ffn_hidden_size":
        return InferredValue(model.ffn_size, "the model's ffn_hidden_size", ("model.ffn_hidden_size",))
    return None
