"""Costs of a decoder or encoder of transformers': those of the GPT that has its sizes, its weights counted as they are.

A block of such a model is attention and an MLP of some sizes, whatever its class is called; which MLP has a gate, and
how many elements a block holds, is in the table of its classes. Not the same as the GPT, and so forecast less well:
kernels of transformers' own code between the products, experts (counted as one MLP of those that a token takes), and
windows of attention (counted as if there were none).
"""

from __future__ import annotations

import re
from fractions import Fraction

from dslpar.core.frozen import replace
from dslpar.core.mesh import Tensor
from dslpar.forecast import flops
from dslpar.forecast.family import costs_of
from dslpar.forecast.flops import Flops
from dslpar.forecast.model_costs import ModelCosts
from dslpar.forecast.ring import Number
from dslpar.layout import transformers_costs
from dslpar.layout.family import layout_of
from dslpar.layout.stages import EvenWeights
from dslpar.schema import families
from dslpar.schema.sections import Model
from dslpar.schema.transformers_configs import TransformersConfig


def gpt_of(config: TransformersConfig | None, seq_len: int) -> Model | None:
    """Return the GPT of a model's sizes; None where one of them is not known, or layers differ among themselves."""
    if config is None or "parts" not in config.row or len(config.row["blocks"]) != 1:
        return None
    hidden, heads, vocab = (config.size(name) for name in ("hidden", "heads", "vocab"))
    layers, ffn = config.num_layers, _ffn_size(config)
    weights = transformers_costs.pipeline_weights(config, "parameters", seq_len)
    if hidden is None or heads is None or vocab is None or layers is None or ffn is None:
        return None
    if not isinstance(weights, EvenWeights):
        return None
    gated = any(_THREE_MATRICES.search(part) for part in config.row["parts"].values())
    rotary = config.size("positions") is None or "rope_theta" in config.values or "rope_parameters" in config.values
    made: Model = families.class_of("GPT", "section")(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.size("kv_heads"),
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_seq_len=max(seq_len, 1),
        norm="rmsnorm" if gated else "layernorm",
        activation="swiglu" if gated else "gelu",
        positions="rotary" if rotary else "learned",
        bias=not gated,
        tie_embeddings=bool(config.values.get("tie_word_embeddings", True)),
    )
    return made


_THREE_MATRICES = re.compile(r"\b3 [a-z_*]*ffn\b")
"""In what a block holds: an MLP of three, one of which is its gate."""


def _ffn_size(config: TransformersConfig) -> int | None:
    """Return the features of the MLP that a token takes: of experts the active ones, and the shared one."""
    experts, active = config.size("experts"), config.size("active_experts")
    if experts is not None and active is not None:
        of_one = config.size("expert_ffn") or config.size("ffn")
        return None if of_one is None else active * of_one + (config.size("shared_ffn") or 0)
    ffn, hidden = config.size("ffn"), config.size("hidden")
    return ffn or (4 * hidden if hidden is not None else None)


def model_costs(config: TransformersConfig | None, cuboid: Tensor, tokens: Number, seq_len: int) -> ModelCosts | None:
    """Return what the model's parts cost a rank; None where its sizes are not known."""
    gpt = gpt_of(config, seq_len)
    if gpt is None or config is None:
        return None
    found = costs_of(gpt).model_costs(gpt, cuboid, tokens, seq_len)
    of_gpt = layout_of(gpt).pipeline_weights(gpt, "parameters", seq_len)
    weights = transformers_costs.pipeline_weights(config, "parameters", seq_len)
    assert isinstance(weights, EvenWeights)
    held = Fraction(weights.layer, of_gpt.layer) * found.layer.memory.weights
    layer = replace(found.layer, memory=replace(found.layer.memory, weights=held))
    if not config.model.endswith(("ForCausalLM", "LMHeadModel")):
        scores = tuple(each._replace(causal=False) for each in layer.work.scores)
        layer = replace(layer, work=replace(layer.work, scores=scores))
    return replace(found, layer=layer)


def flops_per_token(config: TransformersConfig | None, seq_len: int) -> Flops | None:
    """Return the FLOPs of a token; None where the model's sizes are not known."""
    multiplied = transformers_costs.num_multiplied_weights(config)
    scores = transformers_costs.score_products(config, seq_len)
    if multiplied is None or scores is None:
        return None
    return flops.per_token(multiplied, scores)
