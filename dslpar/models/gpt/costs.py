"""Layers and FLOPs of a GPT.

>>> gpt2 = GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
>>> num_multiplied_weights(gpt2)
123532032
>>> round(flops_per_token(gpt2, 1024).mfu_causal / flops_per_token(gpt2, 1024).mfu_6n, 3)
1.076
"""

from __future__ import annotations

from dslpar.costs import flops
from dslpar.costs.adapters import AdapterSizes
from dslpar.costs.flops import Flops
from dslpar.costs.layers import (
    CrossEntropy,
    Embedding,
    Head,
    Layers,
    Mixture,
    ModelLayers,
    Norm,
    ResidualAdd,
    Vectors,
    attention,
    mlp,
)
from dslpar.models.gpt.layout import block_weights, shared_ffn
from dslpar.models.gpt.section import GPT


def layers(model: GPT, seq_len: int, adapters: AdapterSizes | None = None, causal: bool = True) -> ModelLayers:
    """Return the model's layers: two norms, attention and MLP per block.

    In a block with `experts` a mixture is in place of the MLP. With `adapters` only these are trained, and the block's
    own weights are frozen. Dropout is not counted. Without any
    sharding, a block with gelu saves 16 s b h elements (sequence s, samples b, hidden size h).
    """
    hidden, vocab, bias, frozen = model.hidden_size, model.vocab_size, model.bias, adapters is not None
    table = Embedding(vocab, hidden, frozen=adapters is not None and not adapters.trains_table)
    positions: Layers = (Vectors(model.max_seq_len * hidden, frozen),) if model.positions == "learned" else ()
    norm = Norm(hidden, model.norm, bias, frozen)
    core = attention(
        hidden,
        model.num_heads,
        seq_len,
        kv_heads=model.kv_heads,
        bias=bias,
        causal=causal,
        rotary=model.positions == "rotary",
        adapters=adapters,
    )
    head = Head(hidden, vocab, frozen=adapters is not None and not adapters.trains_head)
    attention_part = (norm, ResidualAdd(hidden), *core)
    of_mlp = mlp(hidden, model.ffn_size, activation=model.activation, bias=bias, adapters=adapters)
    kinds = [model.has_mixture(index) for index in range(model.num_layers)]
    parts = {kind: (norm, ResidualAdd(hidden), *(_mixture(model, frozen) if kind else of_mlp)) for kind in set(kinds)}
    are_equal = len(parts) == 1
    return ModelLayers(
        first=(table, *positions),
        block=attention_part if are_equal else (),
        mlp_part=parts[kinds[0]] if are_equal else (),
        unequal=() if are_equal else tuple([attention_part + parts[kind] for kind in kinds]),
        last=(norm, head, CrossEntropy(vocab)),
        boundary=hidden,
        tied=Embedding(vocab, hidden, frozen=table.frozen and head.frozen) if model.tie_embeddings else None,
    )


def _mixture(model: GPT, frozen: bool) -> Layers:
    """Return a mixture, and the MLP of its shared experts; neither has a bias."""
    assert model.experts is not None, "a block with a mixture"
    hidden, blocks = model.hidden_size, 2 if model.activation == "swiglu" else 1
    experts = Mixture(
        hidden,
        model.expert_ffn_size,
        model.experts.num,
        model.experts.top_k,
        frozen=frozen,
        blocks=blocks,
        is_own=True,
        has_capacity=model.experts.capacity_factor is not None,
    )
    shared = shared_ffn(model)
    return (experts, *(mlp(hidden, shared, activation=model.activation, bias=False) if shared else ()))


def flops_per_token(model: GPT, seq_len: int) -> Flops:
    """Return the FLOPs per token, averaged over a sequence of `seq_len`."""
    # Attention has two products: q with k, and the attention weights with v.
    score_products = 2 * model.num_layers * model.hidden_size * seq_len
    return flops.per_token(num_multiplied_weights(model), score_products)


def num_multiplied_weights(model: GPT) -> int:
    """Return the number of weights that each token is multiplied with: attention, MLP, and the head, tied or not.

    Of a mixture's experts only those count that a token visits.
    """
    blocks = sum(block_weights(model, model.has_mixture(index)) for index in range(model.num_layers))
    return blocks + model.hidden_size * model.vocab_size
