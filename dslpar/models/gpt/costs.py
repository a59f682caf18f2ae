"""Communication, memory and compute of a GPT: the sums of its layers' closed forms.

>>> gpt2 = GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
>>> num_multiplied_weights(gpt2)
123532032
>>> round(flops_per_token(gpt2, 1024).mfu_causal / flops_per_token(gpt2, 1024).mfu_6n, 3)
1.076
"""

from __future__ import annotations

from functools import lru_cache

from dslpar.core.mesh import Tensor
from dslpar.costs import flops, memory, traffic, work
from dslpar.costs.adapters import AdapterSizes
from dslpar.costs.flops import Flops
from dslpar.costs.memory import LayerMemory
from dslpar.costs.model_costs import Costs, ModelCosts
from dslpar.costs.ring import LayerTraffic, Number
from dslpar.models.gpt.layout import block_weights
from dslpar.models.gpt.section import GPT


def layer_traffic(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None = None) -> LayerTraffic:
    """Return the traffic per rank of a transformer block: two norms, attention, MLP.

    With `adapters` only these are trained, and the block's own weights are frozen. The same holds for all functions
    below.
    """
    norm = _norm(model, cuboid, tokens, adapters).traffic
    attention, mlp = (of(model, cuboid, tokens, adapters) for of in (_attention_traffic, _mlp_traffic))
    return norm + attention + (norm + mlp)


def model_traffic(model: GPT, cuboid: Tensor, tokens: Number) -> LayerTraffic:
    """Return the traffic per rank of the whole model and its loss for a micro-batch of `tokens`, all on one stage."""
    hidden, vocab = model.hidden_size, model.vocab_size
    learned = model.positions == "learned"
    return (
        traffic.embedding(cuboid, tokens, vocab, hidden)
        + (traffic.position_embedding(cuboid, model.max_seq_len, hidden) if learned else LayerTraffic())
        + layer_traffic(model, cuboid, tokens) * model.num_layers
        + _norm(model, cuboid, tokens, None).traffic
        + traffic.head(cuboid, tokens, hidden, vocab)
        + traffic.cross_entropy(cuboid, tokens)
    )


def layer_memory(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None = None) -> LayerMemory:
    """Return the memory per rank of a block without dropout and rotary positions.

    With gelu and without any sharding, that is 16 s b h elements (sequence s, samples b, hidden size h).
    """
    norm = _norm(model, cuboid, tokens, adapters).memory
    attention, mlp = (of(model, cuboid, tokens, adapters) for of in (_attention_memory, _mlp_memory))
    return norm + attention + (norm + mlp)


def _norm(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None) -> Costs:
    """Return the costs of a norm; `work` includes the residual addition before it."""
    hidden, kind, bias, frozen = model.hidden_size, model.norm, model.bias, adapters is not None
    return Costs(
        work=work.norm(cuboid, tokens, hidden) + work.residual_add(cuboid, tokens, hidden),
        traffic=traffic.norm(cuboid, tokens, hidden, kind=kind, bias=bias, frozen=frozen),
        memory=memory.norm(cuboid, tokens, hidden, kind=kind, bias=bias, frozen=frozen),
    )


def _attention_traffic(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None) -> LayerTraffic:
    sizes = cuboid, tokens, model.hidden_size, model.num_heads
    return traffic.attention(*sizes, kv_heads=model.kv_heads, bias=model.bias, adapters=adapters)


def _attention_memory(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None) -> LayerMemory:
    sizes = cuboid, tokens, model.hidden_size, model.num_heads
    return memory.attention(*sizes, kv_heads=model.kv_heads, bias=model.bias, adapters=adapters)


def _mlp_traffic(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None) -> LayerTraffic:
    sizes = cuboid, tokens, model.hidden_size, model.ffn_size
    return traffic.mlp(*sizes, activation=model.activation, bias=model.bias, adapters=adapters)


def _mlp_memory(model: GPT, cuboid: Tensor, tokens: Number, adapters: AdapterSizes | None) -> LayerMemory:
    sizes = cuboid, tokens, model.hidden_size, model.ffn_size
    return memory.mlp(*sizes, activation=model.activation, bias=model.bias, adapters=adapters)


@lru_cache(maxsize=256)
def _weights_of_parts(model: GPT, cuboid: Tensor, adapters: AdapterSizes | None) -> LayerTraffic:
    """Return the traffic of norm and MLP for 0 tokens. Cached, since a search needs it for each micro-batch."""
    return _norm(model, cuboid, 0, adapters).traffic + _mlp_traffic(model, cuboid, 0, adapters)


def model_costs(
    model: GPT, cuboid: Tensor, tokens: Number, seq_len: int, adapters: AdapterSizes | None = None
) -> ModelCosts:
    """Return the costs per rank of blocks, tables, and head with loss for a micro-batch of `tokens`."""
    hidden, vocab, rotary = model.hidden_size, model.vocab_size, model.positions == "rotary"
    positions = model.max_seq_len if model.positions == "learned" else 0
    no_table = adapters is not None and not adapters.trains_table
    no_head = adapters is not None and not adapters.trains_head
    looked_up = traffic.embedding(cuboid, tokens, vocab, hidden, frozen=no_table)
    of_positions = positions and adapters is None
    tied = memory.embedding(cuboid, vocab, hidden).weights if model.tie_embeddings else 0
    first = Costs(
        work=work.embedding(cuboid, tokens, hidden),
        traffic=looked_up + (traffic.position_embedding(cuboid, positions, hidden) if of_positions else LayerTraffic()),
        memory=memory.embedding(cuboid, vocab, hidden, positions, frozen=no_table),
    )
    norm = _norm(model, cuboid, tokens, adapters)
    sizes = cuboid, tokens, seq_len, hidden, model.num_heads
    attention_part = norm + Costs(
        work=work.attention(*sizes, kv_heads=model.kv_heads, rotary=rotary, adapters=adapters),
        traffic=_attention_traffic(model, cuboid, tokens, adapters),
        memory=_attention_memory(model, cuboid, tokens, adapters),
    )
    mlp_part = norm + Costs(
        work=work.mlp(cuboid, tokens, hidden, model.ffn_size, activation=model.activation, adapters=adapters),
        traffic=_mlp_traffic(model, cuboid, tokens, adapters),
        memory=_mlp_memory(model, cuboid, tokens, adapters),
    )
    head_traffic = traffic.head(cuboid, tokens, hidden, vocab, frozen=no_head)
    last = Costs(
        work=work.norm(cuboid, tokens, hidden) + work.head(cuboid, tokens, hidden, vocab, frozen=no_head),
        traffic=norm.traffic + head_traffic + traffic.cross_entropy(cuboid, tokens),
        memory=norm.memory + memory.head(cuboid, tokens, hidden, vocab, frozen=no_head),
    )
    return ModelCosts(
        first=first,
        layer=attention_part + mlp_part,
        last=last,
        boundary=memory.residual(cuboid, tokens, hidden),
        mlp_part=mlp_part,
        weights_of_parts=_weights_of_parts(model, cuboid, adapters),
        attention_working=memory.attention_working(
            cuboid, tokens, hidden, model.num_heads, kv_heads=model.kv_heads, rotary=rotary
        ),
        tied=tied,
        tied_frozen=tied if no_table and no_head else 0,
        logits=memory.logits(cuboid, tokens, vocab),
    )


def flops_per_token(model: GPT, seq_len: int) -> Flops:
    """Return the FLOPs per token, averaged over a sequence of `seq_len`."""
    # Attention has two products: q with k, and the attention weights with v.
    score_products = 2 * model.num_layers * model.hidden_size * seq_len
    return flops.per_token(num_multiplied_weights(model), score_products)


def num_multiplied_weights(model: GPT) -> int:
    """Return the number of weights that each token is multiplied with: attention, MLP, and the head, tied or not."""
    return model.num_layers * block_weights(model) + model.hidden_size * model.vocab_size
