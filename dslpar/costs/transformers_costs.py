"""Costs of a transformers decoder or encoder, approximated by a GPT of the same sizes with the model's weight count.

A block of such a model has attention and an MLP, whatever the name of its class. dslpar's table of transformers classes
(`dslpar.schema.transformers_configs`) tells which MLPs have a gate, and how many parameters a block has. Forecasts are
less accurate for parts that a GPT does not have: transformers' own kernels between the products, and
attention windows (ignored). Experts count as one MLP with the features of the active experts, or exactly if tokens are
sent to them (`parallel.expert`).

With adapters (`model.lora`) all other weights are frozen, except the linears, the token table and the head that
`modules_to_save` names. Norms in `modules_to_save` and the biases of `bias='all'` are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from dslpar.core.mesh import TensorMesh
from dslpar.costs import flops
from dslpar.costs.adapters import Adapter, AdapterSizes
from dslpar.costs.collective_traffic import Number
from dslpar.costs.family_interface import costs_of
from dslpar.costs.flops import Flops
from dslpar.costs.layers import Activation, Linear, Mixture, ModelLayers
from dslpar.costs.model_costs import CostsFunction, ModelCosts, function_of
from dslpar.layout import transformers_costs
from dslpar.layout.family_interface import layout_of
from dslpar.layout.stages import EvenWeights
from dslpar.schema import families
from dslpar.schema.sections import LoRA, Model
from dslpar.schema.transformers_configs import TransformersConfig


def gpt_of(config: TransformersConfig | None, seq_len: int) -> Model | None:
    """Return a GPT section with the model's sizes; None if a size is unknown, or if the model's layers differ."""
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
"""Matches a table entry for a block whose MLP has three matrices, one of which is the gate."""


def _ffn_size(config: TransformersConfig) -> int | None:
    """Return the MLP's inner features per token; with experts, those of the active experts and the shared one."""
    experts, active = config.size("experts"), config.size("active_experts")
    if experts is not None and active is not None:
        of_one = config.size("expert_ffn") or config.size("ffn")
        shared = config.size("shared_ffn") or (config.size("shared_experts") or 0) * (config.size("expert_ffn") or 0)
        return None if of_one is None else active * of_one + shared
    ffn, hidden = config.size("ffn"), config.size("hidden")
    return ffn or (4 * hidden if hidden is not None else None)


def costs_function(config: TransformersConfig | None, seq_len: int, lora: LoRA | None = None) -> CostsFunction | None:
    """Return the function that computes the costs of the model's parts on a rank; None if its sizes are unknown."""
    gpt = gpt_of(config, seq_len)
    if gpt is None or config is None:
        return None
    family: Any = costs_of(gpt)
    adapters = None if lora is None else adapter_sizes(config, gpt, lora)
    is_causal = config.model.endswith(("ForCausalLM", "LMHeadModel"))
    layers = family.layers(gpt, seq_len, adapters, causal=is_causal)
    of_gpt = function_of(layers)
    exchanging = exchanging_costs(config, layers, frozen=lora is not None)
    weights = transformers_costs.pipeline_weights(config, "parameters", seq_len)
    assert isinstance(weights, EvenWeights)
    of_gpt_weights = layout_of(gpt).pipeline_weights(gpt, "parameters", seq_len)
    assert isinstance(of_gpt_weights, EvenWeights), "a GPT without experts"
    share = Fraction(weights.layer, of_gpt_weights.layer)

    def model_costs(cuboid: TensorMesh, tokens: Number) -> ModelCosts:
        if cuboid.exchanges_tokens and exchanging is not None:
            return exchanging(cuboid, tokens)
        found = of_gpt(cuboid, tokens)
        memory = found.layer.memory
        own = memory.weights if lora is None else memory.frozen
        held = share * own
        memory = memory._replace(weights=held + memory.weights - own, frozen=0 if lora is None else held)
        return replace(found, layer=found.layer._replace(memory=memory))

    return model_costs


def exchanging_costs(config: TransformersConfig, of_gpt: ModelLayers, *, frozen: bool) -> CostsFunction | None:
    """Return the function that computes the costs of a mixture whose tokens are exchanged; None without experts.

    `of_gpt` are the layers of `gpt_of`. The MLP's linears give way to the mixture. The parameters of a rank are exact.
    `frozen` is True if only adapters are trained, of which experts have none.
    """
    whole = transformers_costs.mixture_weights(config, TensorMesh())
    hidden, experts, active = (config.size(name) for name in ("hidden", "experts", "active_experts"))
    ffn = config.size("expert_ffn") or config.size("ffn")
    if whole is None or hidden is None or experts is None or active is None or ffn is None:
        return None
    has_gate = config.model in transformers_costs.SHARED_GATES
    mixture = Mixture(hidden, ffn, experts, active, whole.shared // (3 * hidden), has_gate, frozen)
    around = tuple(each for each in of_gpt.mlp_part if not isinstance(each, Linear | Activation))
    made = function_of(replace(of_gpt, mlp_part=(*around, mixture)))

    def model_costs(cuboid: TensorMesh, tokens: Number) -> ModelCosts:
        found, held = made(cuboid, tokens), transformers_costs.mixture_weights(config, cuboid)
        assert held is not None, "known for one rank"
        memory = found.layer.memory
        adapters = memory.weights - memory.frozen if frozen else 0
        memory = memory._replace(
            weights=held.total + adapters,
            frozen=held.total if frozen else 0,
            experts=0 if frozen else held.experts,
        )
        return replace(found, layer=found.layer._replace(memory=memory))

    return model_costs


def flops_per_token(config: TransformersConfig | None, seq_len: int, lora: LoRA | None = None) -> Flops | None:
    """Return the FLOPs per token; None if the model's sizes are unknown."""
    multiplied = transformers_costs.num_multiplied_weights(config)
    scores = transformers_costs.score_products(config, seq_len)
    if multiplied is None or scores is None:
        return None
    if lora is None:
        return flops.per_token(multiplied, scores)
    gpt: Any = gpt_of(config, seq_len)
    if gpt is None or config is None:
        return None
    sizes = adapter_sizes(config, gpt, lora)
    hidden, ffn = gpt.hidden_size, gpt.ffn_size
    kv, gates = hidden // gpt.num_heads * gpt.kv_heads, 2 if gpt.activation == "swiglu" else 1
    of_adapters, frozen = 0, multiplied - (hidden * gpt.vocab_size if sizes.trains_head else 0)
    for beside, inputs, outputs in (
        (sizes.qkv, hidden, hidden + 2 * kv),
        (sizes.out, hidden, hidden),
        (sizes.up, hidden, gates * ffn),
        (sizes.down, ffn, hidden),
    ):
        of_adapters += gpt.num_layers * sum(each.r * (inputs + each.out_features) for each in beside or ())
        frozen -= gpt.num_layers * inputs * outputs if beside is None else 0
    return flops.per_token(multiplied + of_adapters, scores, frozen)


# Adapters ---------------------------------------------------------------------------------------------------------

_FUSED = "qkv", ("q", "kv", "kv")
_OUT, _UP, _DOWN = ("out", ("hidden",)), ("up", ("ffn",)), ("down", ("hidden",))
_Q, _KV = ("qkv", ("q",)), ("qkv", ("kv",))
_PROJ = {"self_attn.q_proj": _Q, "self_attn.k_proj": _KV, "self_attn.v_proj": _KV}
_LLAMA = _PROJ | {"self_attn.o_proj": _OUT, "mlp.gate_proj": _UP, "mlp.up_proj": _UP, "mlp.down_proj": _DOWN}
_LINEARS: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "GPT2": {"attn.c_attn": _FUSED, "attn.c_proj": _OUT, "mlp.c_fc": _UP, "mlp.c_proj": _DOWN},
    "OPT": _PROJ | {"self_attn.out_proj": _OUT, "fc1": _UP, "fc2": _DOWN},
    "Phi3": {
        "self_attn.qkv_proj": _FUSED,
        "self_attn.o_proj": _OUT,
        "mlp.gate_up_proj": ("up", ("ffn", "ffn")),
        "mlp.down_proj": _DOWN,
    },
    "Bloom Falcon": {
        "self_attention.query_key_value": _FUSED,
        "self_attention.dense": _OUT,
        "mlp.dense_h_to_4h": _UP,
        "mlp.dense_4h_to_h": _DOWN,
    },
    "GPTNeoX": {
        "attention.query_key_value": _FUSED,
        "attention.dense": _OUT,
        "mlp.dense_h_to_4h": _UP,
        "mlp.dense_4h_to_h": _DOWN,
    },
    "PhiFor": _PROJ | {"self_attn.dense": _OUT, "mlp.fc1": _UP, "mlp.fc2": _DOWN},
    "Bert Roberta Electra": {
        "attention.self.query": _Q,
        "attention.self.key": _KV,
        "attention.self.value": _KV,
        "attention.output.dense": _OUT,
        "intermediate.dense": _UP,
        "output.dense": _DOWN,
    },
}
"""Linears of a block, for transformers classes whose names begin with a word of the outer key. The inner key is the end
of a linear's name. Its value is the corresponding linear of dslpar's GPT, and the linear's output features. Classes
without an entry have Llama's names.
"""
_HEADS, _TABLES = {"lm_head", "embed_out", "output_projection"}, {"embed_tokens", "wte", "embed_in", "word_embeddings"}


def adapter_sizes(config: TransformersConfig, gpt: Any, lora: LoRA) -> AdapterSizes:
    """Return the adapters of a model's blocks; linears in `modules_to_save` are trained themselves and have none.

    A target whose name is not in `_LINEARS` counts as an up linear, or is ignored if the model has experts.
    """
    names = dict(next((each for key, each in _LINEARS.items() if config.model.startswith(tuple(key.split()))), _LLAMA))
    if gpt.activation != "swiglu":
        names.pop("mlp.gate_proj", None)
    if config.size("experts") is not None:  # experts have no adapters
        names = {name: each for name, each in names.items() if each[0] in ("qkv", "out")}
    head_dim = config.size("head_dim") or gpt.hidden_size // gpt.num_heads
    sizes = {"q": head_dim * gpt.num_heads, "kv": head_dim * gpt.kv_heads, "hidden": gpt.hidden_size}
    sizes["ffn"] = gpt.ffn_size
    beside: dict[str, list[Adapter]] = {}
    targets: Sequence[str] = tuple(names) if isinstance(lora.target_modules, str) else lora.target_modules
    for target in targets:
        for linear, outputs in _named(names, target) or ([] if config.size("experts") is not None else [_UP]):
            beside.setdefault(linear, []).append(Adapter(lora.r, sum(sizes[output] for output in outputs)))
    # One dslpar linear computes all projections of the same input: q, k and v, or a gate and up.
    whole = {linear for name in lora.modules_to_save for linear, _ in _named(names, name)}
    ends = {name.rpartition(".")[2] for name in lora.modules_to_save}
    linears: dict[str, Any] = {linear: tuple(adapters) for linear, adapters in beside.items()}
    return AdapterSizes(
        **linears | dict.fromkeys(whole),
        trains_table=bool(ends & _TABLES),
        trains_head=bool(ends & _HEADS),
    )


def _named(names: Mapping[str, tuple[str, tuple[str, ...]]], target: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the linears that a LoRA target matches by its whole name, by the end of its name, or by a longer path."""
    return [each for name, each in names.items() if f".{name}".endswith(f".{target}") or target.endswith(f".{name}")]
