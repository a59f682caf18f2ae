"""What a GPT sends, holds and computes: the closed forms of its layers, added up.

>>> gpt2 = GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
>>> num_multiplied_weights(gpt2)
123532032
>>> round(flops_per_token(gpt2, 1024).mfu_causal / flops_per_token(gpt2, 1024).mfu_6n, 3)
1.076
"""

from __future__ import annotations

from dslpar.core.mesh import Tensor
from dslpar.forecast import flops, memory, traffic, work
from dslpar.forecast.flops import Flops
from dslpar.forecast.memory import LayerMemory
from dslpar.forecast.model_costs import Costs, ModelCosts
from dslpar.forecast.ring import LayerTraffic, Number
from dslpar.forecast.work import Work
from dslpar.models.gpt.layout import block_weights
from dslpar.models.gpt.section import GPT


def layer_traffic(model: GPT, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return what a rank sends for a transformer block: two norms, attention, MLP."""
    hidden, bias = model.hidden_size, model.bias
    return (
        traffic.norm(cuboid, tokens, hidden, kind=model.norm, bias=bias) * 2
        + traffic.attention(cuboid, tokens, hidden, model.num_heads, kv_heads=model.kv_heads, bias=bias)
        + traffic.mlp(cuboid, tokens, hidden, model.ffn_size, activation=model.activation, bias=bias)
    )


def model_traffic(model: GPT, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return what a rank sends for the whole model and its loss: one micro-batch of `tokens`, all on one stage."""
    hidden, vocab = model.hidden_size, model.vocab_size
    learned = model.positions == "learned"
    return (
        traffic.embedding(cuboid, tokens, vocab, hidden)
        + (traffic.position_embedding(cuboid, model.max_seq_len, hidden) if learned else LayerTraffic())
        + layer_traffic(model, cuboid, tokens) * model.num_layers
        + traffic.norm(cuboid, tokens, hidden, kind=model.norm, bias=model.bias)
        + traffic.head(cuboid, tokens, hidden, vocab)
        + traffic.cross_entropy(cuboid, tokens)
    )


def layer_memory(model: GPT, cuboid: Tensor, tokens: Number) -> LayerMemory:
    """Return what a rank holds of a block without dropout and rotary positions.

    With gelu, and where all is whole, that is 16 s b h elements (sequence s, samples b, hidden size h).
    """
    hidden, bias = model.hidden_size, model.bias
    norm = memory.norm(cuboid, tokens, hidden, kind=model.norm, bias=bias)
    attention = memory.attention(cuboid, tokens, hidden, model.num_heads, kv_heads=model.kv_heads, bias=bias)
    mlp = memory.mlp(cuboid, tokens, hidden, model.ffn_size, activation=model.activation, bias=bias)
    return norm + norm + attention + mlp


def _mlp_traffic(model: GPT, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    hidden, bias = model.hidden_size, model.bias
    norm = traffic.norm(cuboid, tokens, hidden, kind=model.norm, bias=bias)
    return norm + traffic.mlp(cuboid, tokens, hidden, model.ffn_size, activation=model.activation, bias=bias)


def _mlp_costs(model: GPT, cuboid: Tensor, tokens: Number) -> Costs:
    """Return what the second norm and the MLP cost, with the sum that they begin with."""
    hidden, bias, ffn = model.hidden_size, model.bias, model.ffn_size
    return Costs(
        work=_around(model, cuboid, tokens) + work.mlp(cuboid, tokens, hidden, ffn, activation=model.activation),
        traffic=_mlp_traffic(model, cuboid, tokens),
        memory=memory.norm(cuboid, tokens, hidden, kind=model.norm, bias=bias)
        + memory.mlp(cuboid, tokens, hidden, ffn, activation=model.activation, bias=bias),
    )


def model_costs(model: GPT, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts:
    """Return what blocks, tables, and head with loss cost a rank for a micro-batch of `tokens`."""
    hidden, vocab = model.hidden_size, model.vocab_size
    positions = model.max_seq_len if model.positions == "learned" else 0
    tables = memory.embedding(cuboid, vocab, hidden, positions)
    looked_up = traffic.embedding(cuboid, tokens, vocab, hidden)
    first = Costs(
        work=work.embedding(cuboid, tokens, hidden),
        traffic=looked_up + (traffic.position_embedding(cuboid, positions, hidden) if positions else LayerTraffic()),
        memory=tables,
    )
    last = Costs(
        work=work.norm(cuboid, tokens, hidden) + work.head(cuboid, tokens, hidden, vocab),
        traffic=traffic.norm(cuboid, tokens, hidden, kind=model.norm, bias=model.bias)
        + traffic.head(cuboid, tokens, hidden, vocab)
        + traffic.cross_entropy(cuboid, tokens),
        memory=memory.norm(cuboid, tokens, hidden, kind=model.norm, bias=model.bias)
        + memory.head(cuboid, tokens, hidden, vocab),
    )
    return ModelCosts(
        first=first,
        layer=Costs(
            work=_layer_work(model, cuboid, tokens, seq_len),
            traffic=layer_traffic(model, cuboid, tokens),
            memory=layer_memory(model, cuboid, tokens),
        ),
        last=last,
        boundary=memory.residual(cuboid, tokens, hidden),
        mlp_part=_mlp_costs(model, cuboid, tokens),
        weights_of_parts=_mlp_traffic(model, cuboid, 0),
        attention_working=memory.attention_working(
            *(cuboid, tokens, hidden, model.num_heads),
            kv_heads=model.kv_heads,
            rotary=model.positions == "rotary",
        ),
        tied=memory.embedding(cuboid, vocab, hidden).weights if model.tie_embeddings else 0,
        logits=memory.logits(cuboid, tokens, vocab),
    )


def _layer_work(model: GPT, cuboid: Tensor, tokens: Number, seq_len: int) -> Work:
    hidden, around = model.hidden_size, _around(model, cuboid, tokens)
    attention = work.attention(
        *(cuboid, tokens, seq_len, hidden, model.num_heads),
        kv_heads=model.kv_heads,
        rotary=model.positions == "rotary",
    )
    mlp = work.mlp(cuboid, tokens, hidden, model.ffn_size, activation=model.activation)
    return around + attention + around + mlp


def _around(model: GPT, cuboid: Tensor, tokens: Number) -> Work:
    return work.norm(cuboid, tokens, model.hidden_size) + work.residual_add(cuboid, tokens, model.hidden_size)


def flops_per_token(model: GPT, seq_len: int) -> Flops:
    """Return the FLOPs of a token in a sequence of `seq_len`, averaged over it."""
    # The products of attention: q with k, and the weights with v.
    score_products = 2 * model.num_layers * model.hidden_size * seq_len
    return flops.per_token(num_multiplied_weights(model), score_products)


def num_multiplied_weights(model: GPT) -> int:
    """Return the weights that each token is multiplied with: attention's, the MLP's, and the head, tied or not."""
    return model.num_layers * block_weights(model) + model.hidden_size * model.vocab_size
