"""Sizes of a GPT: what must divide by what, what its layers weigh in a pipeline, and what follows from other fields."""

from __future__ import annotations

from collections.abc import Sequence

from dslpar.core.mesh import Tensor
from dslpar.layout import divisors
from dslpar.layout.decision import Decision
from dslpar.layout.divisors import Attention, Condition
from dslpar.layout.stages import EvenWeights, num_matches
from dslpar.models.gpt.section import GPT


def attention_sizes(model: GPT) -> Attention:
    """Return the sizes that hang together in attention."""
    return Attention(model.hidden_size, model.num_heads, model.num_kv_heads, model.positions == "rotary")


def conditions(model: GPT, cuboid: Tensor, seq_len: int) -> list[Condition]:
    """Return what must divide by what; `seq_len` 0: not known."""
    return [
        *divisors.attention(attention_sizes(model), cuboid),
        *divisors.inner_features(model.ffn_size, cuboid),
        *divisors.sequence(seq_len, cuboid),
    ]


def padding(model: GPT, cuboid: Tensor) -> list[Condition]:
    """Return the vocabulary with its padding."""
    return [divisors.vocabulary(model.vocab_size, cuboid)]


# The cut over stages ----------------------------------------------------------------------------------------------


def pipeline_weights(model: GPT, method: str, seq_len: int) -> EvenWeights:
    """Return what each block weighs, and what tables, norm and head add to the first and the last stage.

    By 'cost': multiplications of a token's forward, in a sequence of `seq_len`; the embedding is a look-up and costs
    next to nothing. By 'parameters': elements that a stage holds; a tied table is held by the first and by the last.
    By 'type:REGEX': 1 for each layer whose class matches.

        >>> model = GPT(num_layers=3, hidden_size=4, num_heads=1, vocab_size=10, max_seq_len=2)
        >>> pipeline_weights(model, "cost", 2).loads((2, 1))
        (400, 240)
    """
    hidden = model.hidden_size
    table = hidden * model.vocab_size
    if method == "cost":
        # Of the causal scores a half is computed, for each of two products.
        return EvenWeights(first=0, layer=block_weights(model) + seq_len * hidden, last=table)
    if method == "parameters":
        positions = hidden * model.max_seq_len if model.positions == "learned" else 0
        return EvenWeights(table + positions, block_parameters(model), table + norm_parameters(model))
    token, position, block, norm, head = (num_matches(method, [name]) for name in class_names(model))
    return EvenWeights(token + position, block, norm + head)


def class_names(model: GPT) -> Sequence[str]:
    """Return the classes of the layers in order; the third is that of all blocks."""
    positions = "PositionEmbedding" if model.positions == "learned" else "Dropout"
    norm = "LayerNorm" if model.norm == "layernorm" else "RMSNorm"
    return "Embedding", positions, "Block", norm, "Head"


def block_weights(model: GPT) -> int:
    """Return the elements of a block's matrices: attention's four (less of keys and values), the MLP's two or three."""
    hidden, ffn = model.hidden_size, model.ffn_size
    qkv, up = hidden + 2 * kv_features(model), (2 if model.activation == "swiglu" else 1) * ffn
    return hidden * (qkv + hidden) + hidden * (up + ffn)


def block_parameters(model: GPT) -> int:
    """Return all elements of a block: its matrices, their biases if they have any, two norms."""
    hidden, up = model.hidden_size, (2 if model.activation == "swiglu" else 1) * model.ffn_size
    biases = hidden + 2 * kv_features(model) + hidden + up + hidden if model.bias else 0
    return block_weights(model) + biases + 2 * norm_parameters(model)


def kv_features(model: GPT) -> int:
    """Return the features of all keys, or of all values, of a token."""
    return model.kv_heads * model.hidden_size // model.num_heads


def norm_parameters(model: GPT) -> int:
    """Return the parameters of a norm: RMSNorm has no bias."""
    return model.hidden_size * (2 if model.bias and model.norm == "layernorm" else 1)


# Fields that may be left out ---------------------------------------------------------------------------------------


def inferred(model: GPT, field: str) -> Decision | None:
    """Return what a field is that was left out; None where no other field tells."""
    if field == "num_kv_heads":
        return Decision(model.num_heads, "left out: each head has keys and values of its own", ("model.num_heads",))
    if field == "ffn_hidden_size":
        return Decision(4 * model.hidden_size, f"4 * hidden_size {model.hidden_size}", ("model.hidden_size",))
    return None
