"""Sizes of a GPT: divisibility conditions, layer weights, and fields that follow from others.

Pipeline stages are balanced by the layer weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Attention, Condition
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.stages import EvenWeights, num_matches
from dslpar.models.gpt.section import GPT


def attention_sizes(model: GPT) -> Attention:
    """Return the sizes of attention, whose conditions depend on one another."""
    return Attention(model.hidden_size, model.num_heads, model.num_kv_heads, model.positions == "rotary")


def conditions(model: GPT, cuboid: TensorMesh, seq_len: int) -> list[Condition]:
    """Return the divisibility conditions; `seq_len` 0: unknown."""
    return [
        *divisors.attention(attention_sizes(model), cuboid),
        *divisors.inner_features(model.ffn_size, cuboid),
        *divisors.sequence(seq_len, cuboid),
    ]


def padding(model: GPT, cuboid: TensorMesh) -> list[Condition]:
    """Return the condition on the vocabulary, which padding meets."""
    return [divisors.vocabulary(model.vocab_size, cuboid)]


# The cut over stages ----------------------------------------------------------------------------------------------


def pipeline_weights(model: GPT, method: str, seq_len: int) -> EvenWeights:
    """Return the weight of each block, and of tables, norm and head on the first and last stage, for pipeline cuts.

    'cost': multiplications in a token's forward, in a sequence of `seq_len`; an embedding lookup counts 0.
    'parameters': elements that a stage holds; both the first and the last stage hold a tied table. 'type:REGEX': 1 for
    each layer whose class matches.

        >>> model = GPT(num_layers=3, hidden_size=4, num_heads=1, vocab_size=10, max_seq_len=2)
        >>> pipeline_weights(model, "cost", 2).loads((2, 1))
        (400, 240)
    """
    hidden = model.hidden_size
    table = hidden * model.vocab_size
    if method == "cost":
        # Half of the causal scores are computed, in each of two products.
        return EvenWeights(first=0, layer=block_weights(model) + seq_len * hidden, last=table)
    if method == "parameters":
        positions = hidden * model.max_seq_len if model.positions == "learned" else 0
        return EvenWeights(table + positions, block_parameters(model), table + norm_parameters(model))
    token, position, block, norm, head = (num_matches(method, [name]) for name in class_names(model))
    return EvenWeights(token + position, block, norm + head)


def class_names(model: GPT) -> Sequence[str]:
    """Return the class names of the layers in order; the third is the class of all blocks."""
    positions = "PositionEmbedding" if model.positions == "learned" else "Dropout"
    norm = "LayerNorm" if model.norm == "layernorm" else "RMSNorm"
    return "Embedding", positions, "Block", norm, "Head"


def block_weights(model: GPT) -> int:
    """Return the elements of a block's matrices: q, k, v and output of attention, two or three of the MLP."""
    hidden, ffn = model.hidden_size, model.ffn_size
    qkv, up = hidden + 2 * kv_features(model), (2 if model.activation == "swiglu" else 1) * ffn
    return hidden * (qkv + hidden) + hidden * (up + ffn)


def block_parameters(model: GPT) -> int:
    """Return all elements of a block: its matrices, their biases if there are any, two norms."""
    hidden, up = model.hidden_size, (2 if model.activation == "swiglu" else 1) * model.ffn_size
    biases = hidden + 2 * kv_features(model) + hidden + up + hidden if model.bias else 0
    return block_weights(model) + biases + 2 * norm_parameters(model)


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
    return None
