"""Costs of a transformers decoder or encoder, approximated by a GPT of the same sizes with the model's weight count.

A block of such a model has attention and an MLP, whatever the name of its class. dslpar's table of transformers classes
(`dslpar.schema.transformers_configs`) tells which MLPs have a gate, and how many parameters a block has. Forecasts are
less accurate for parts that a GPT does not have: transformers' own kernels between the products, and attention windows
(ignored). Experts whose tokens are gathered have the traffic and memory of one MLP with the features of the active
experts, and the products of experts. Those that tokens are sent to count exactly (`parallel.expert`). Attention with
latents counts as its own linears. The first blocks of a model may have an MLP, as in DeepSeek-V3.

With adapters (`model.lora`) all other weights are frozen, except the linears, the token table and the head that
`modules_to_save` names. Norms in `modules_to_save` and the biases of `bias='all'` are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.costs import flops, memory
from dslpar.costs.adapters import Adapter, AdapterSizes
from dslpar.costs.collective_traffic import Number
from dslpar.costs.family_interface import costs_of
from dslpar.costs.flops import Flops
from dslpar.costs.layers import (
    Activation,
    AttentionCore,
    ExpertAdapters,
    GatheredMixture,
    Layers,
    Linear,
    Mixture,
    ModelLayers,
    mlp,
)
from dslpar.costs.model_costs import Costs, CostsFunction, ModelCosts, function_of
from dslpar.layout import transformers_costs
from dslpar.schema import families
from dslpar.schema.sections import LoRA, Model
from dslpar.schema.transformers_configs import TransformersConfig


def gpt_of(config: TransformersConfig | None, seq_len: int) -> Model | None:
    """Return a GPT section with the model's sizes; None if a size is unknown, or if the model's layers differ."""
    if config is None or "parts" not in config.row or len(config.row["blocks"]) != 1:
        return None
    hidden, heads, vocab = (config.size(name) for name in ("hidden", "heads", "vocab"))
    layers, ffn = config.num_layers, _ffn_size(config)
    blocks = transformers_costs.block_parameters(config)
    if hidden is None or heads is None or vocab is None or layers is None or ffn is None or blocks is None:
        return None
    if len(set(blocks)) > 1 + (config.num_dense > 0):
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


class _Kind(NamedTuple):
    """Blocks of a model that are alike."""

    attention: Layers
    mlp: Layers
    """The rest of a block if tokens are gathered."""
    mixture: Layers | None
    """The rest of a block if tokens are sent to experts; None: the block has an MLP."""
    share: Fraction
    """Parameters of the model's block, in units of those that a GPT's block without adapters has."""

    def layers(self, exchanges: bool) -> Layers:
        """Return the layers of a block."""
        return self.attention + self.rest(exchanges)

    def rest(self, exchanges: bool) -> Layers:
        """Return the layers of a block after attention."""
        return self.mixture if exchanges and self.mixture is not None else self.mlp


def costs_function(config: TransformersConfig | None, seq_len: int, lora: LoRA | None = None) -> CostsFunction | None:
    """Return the function that computes the costs of the model's parts on a rank; None if its sizes are unknown."""
    gpt = gpt_of(config, seq_len)
    if gpt is None or config is None:
        return None
    family: Any = costs_of(gpt)
    adapters = None if lora is None else adapter_sizes(config, gpt, lora)
    of_gpt: ModelLayers = family.layers(gpt, seq_len, adapters, causal=config.is_causal)
    kinds = _kinds(config, of_gpt, seq_len, adapters, lora)
    gathered, exchanging = (function_of(_with_kinds(of_gpt, kinds, exchanges)) for exchanges in (False, True))
    has_mixtures = any(kind.mixture is not None for kind in kinds)

    def model_costs(cuboid: TensorMesh, tokens: Number) -> ModelCosts:
        exchanges = cuboid.exchanges_tokens and has_mixtures
        found = (exchanging if exchanges else gathered)(cuboid, tokens)
        held = {kind: _held(config, kind, exchanges, cuboid, frozen=lora is not None) for kind in set(kinds)}
        if not found.units:
            return replace(found, layer=_with_weights(found.layer, held[kinds[0]]))
        units = tuple(_with_weights(unit, held[kind]) for unit, kind in zip(found.units, kinds, strict=True))
        return replace(found, units=units, layer=sum(units, Costs()))

    return model_costs


def _with_kinds(of_gpt: ModelLayers, kinds: Sequence[_Kind], exchanges: bool) -> ModelLayers:
    """Return the layers of a model with these blocks."""
    if len(set(kinds)) == 1:
        return replace(of_gpt, block=kinds[0].attention, mlp_part=kinds[0].rest(exchanges))
    return replace(of_gpt, block=(), mlp_part=(), unequal=tuple(kind.layers(exchanges) for kind in kinds))


def _kinds(
    config: TransformersConfig,
    of_gpt: ModelLayers,
    seq_len: int,
    adapters: AdapterSizes | None,
    lora: LoRA | None,
) -> Sequence[_Kind]:
    """Return the kind of each block: with experts, or one of the first blocks of some models, with an MLP.

    `of_gpt` are the layers of `gpt_of`, whose MLP has the features of the active experts.
    """
    parameters = transformers_costs.block_parameters(config)
    assert parameters is not None, "known, since there is a GPT of these sizes"
    latent = _latent_attention(config, seq_len) if adapters is None else None
    attention = of_gpt.block if latent is None else (*of_gpt.block[:2], *latent)
    norm_and_add = tuple(each for each in of_gpt.mlp_part if not isinstance(each, Linear | Activation))
    ffn, mixture = config.size("ffn"), _mixture(config, frozen=adapters is not None)

    def kind(mlp_part: Layers, mixture: Layers | None, parameters: int) -> _Kind:
        own = int(memory.total(_without_adapters(attention + mlp_part), TensorMesh(), 0).weights)
        return _Kind(attention, mlp_part, mixture, Fraction(parameters, own))

    gathered, sent = of_gpt.mlp_part, None
    if mixture is not None:
        of_active = tuple(each for each in of_gpt.mlp_part if isinstance(each, Linear | Activation))
        beside = _expert_adapters(mixture, lora)
        gathered = (*norm_and_add, GatheredMixture(of_active, mixture), *beside)
        sent = (*norm_and_add, mixture, *beside)
    with_experts = kind(gathered, sent, parameters[-1])
    if not config.num_dense or ffn is None:
        return [with_experts] * len(parameters)
    of_mlp = mlp(of_gpt.boundary, ffn, activation="swiglu", bias=False, adapters=adapters)
    dense = kind((*norm_and_add, *of_mlp), None, parameters[0])
    return [dense if number < config.num_dense else with_experts for number in range(len(parameters))]


def _expert_adapters(mixture: Mixture, lora: LoRA | None) -> Layers:
    """Return the adapters of experts' weights, if there are any; a target in one block counts in all."""
    names = set() if lora is None else {target.rpartition(".")[2] for target in lora.target_parameters}
    features = {
        "gate_up_proj": (mixture.hidden_size, 2 * mixture.ffn_size),
        "down_proj": (mixture.ffn_size, mixture.hidden_size),
    }
    adapted = [sizes for name, sizes in features.items() if name in names]
    if lora is None or not adapted:
        return ()
    return (ExpertAdapters(mixture.num_experts, mixture.active, lora.r, tuple(adapted)),)


def _without_adapters(layers: Layers) -> Layers:
    kept = [each for each in layers if not isinstance(each, ExpertAdapters)]
    linears = (each.layers if isinstance(each, GatheredMixture) else (each,) for each in kept)
    return tuple(replace(each, adapters=None) if isinstance(each, Linear) else each for each in chain(*linears))


def _mixture(config: TransformersConfig, *, frozen: bool) -> Mixture | None:
    """Return the mixture of a block with experts. `frozen`: only adapters are trained (`_expert_adapters`)."""
    whole = transformers_costs.mixture_weights(config, TensorMesh())
    hidden, experts, active = (config.size(name) for name in ("hidden", "experts", "active_experts"))
    ffn = config.size("expert_ffn") or config.size("ffn")
    if whole is None or hidden is None or experts is None or active is None or ffn is None:
        return None
    has_gate = config.model in transformers_costs.SHARED_GATES
    return Mixture(hidden, ffn, experts, active, whole.shared // (3 * hidden), has_gate, frozen)


def _latent_attention(config: TransformersConfig, seq_len: int) -> Layers | None:
    """Return attention with latents (MLA, as in DeepSeek-V2 and V3) without biases; None: the model has none.

    Keys and values have different numbers of features. `AttentionCore` has one, their mean, with which its operations
    and saved tensors are the same.
    """
    names = ("hidden", "heads", "kv_latent", "plain_dim", "rotary_dim", "value_dim")
    hidden, heads, kv_latent, plain, rotary, value = (config.size(name) or 0 for name in names)
    if not kv_latent:
        return None
    queries, q_latent = heads * (plain + rotary), config.size("q_latent") or 0
    to_queries = (
        (Linear(hidden, q_latent, "inward", bias=False), Linear(q_latent, queries, "inward", bias=False))
        if q_latent
        else (Linear(hidden, queries, "inward", bias=False),)
    )
    features = heads * (plain + rotary + value) // 2
    return (
        *to_queries,
        Linear(hidden, kv_latent + rotary, "inward", bias=False),
        Linear(kv_latent, heads * (plain + value), "inward", bias=False),
        AttentionCore(features, features, heads, seq_len, config.is_causal, rotary=True),
        Linear(heads * value, hidden, "outward", bias=False),
    )


class _Held(NamedTuple):
    """Weights of a block on a rank, more than those of its layers' closed forms."""

    weights: Number
    frozen: Number
    experts: Number


def _held(config: TransformersConfig, kind: _Kind, exchanges: bool, cuboid: TensorMesh, *, frozen: bool) -> _Held:
    """Return how many more weights a rank holds of a block than the closed forms of its layers say.

    Their sum is that of the model's block, which has parts that a GPT does not have. If tokens are exchanged, the
    weights of all blocks are exact.
    """
    layers = kind.layers(exchanges)
    counted = memory.total(layers, cuboid, 0)
    own = Fraction(counted.frozen if frozen else counted.weights)  # also of a whole float
    if exchanges and kind.mixture is not None:
        held = transformers_costs.mixture_weights(config, cuboid)
        assert held is not None, "known for one rank"
        return _Held(
            held.total - own, held.total - own if frozen else 0, 0 if frozen else held.experts - counted.experts
        )
    if exchanges:
        dense = transformers_costs.dense_weights(config, cuboid)
        assert dense is not None, "known for one rank"
        return _Held(dense - own, dense - own if frozen else 0, 0)
    more = kind.share * own - own
    return _Held(more, more if frozen else 0, 0)


def _with_weights(costs: Costs, more: _Held) -> Costs:
    held = costs.memory
    return costs._replace(
        memory=held._replace(
            weights=held.weights + more.weights,
            frozen=held.frozen + more.frozen,
            experts=held.experts + more.experts,
        )
    )


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
    mixture = _mixture(config, frozen=True)
    for each_mixture in _expert_adapters(mixture, lora) if mixture is not None else ():
        assert isinstance(each_mixture, ExpertAdapters)
        of_one = each_mixture.r * sum(inputs + outputs for inputs, outputs in each_mixture.weights)
        of_adapters += (gpt.num_layers - config.num_dense) * each_mixture.active * of_one
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
    if config.size("experts") is not None:  # linears of experts have no adapters
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
