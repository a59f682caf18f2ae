"""The transformers model that equals a GPT: its class, its config, the names of its weights. Needs no torch.

>>> model = GPT(num_layers=2, hidden_size=8, num_heads=2, vocab_size=64, max_seq_len=16, activation="gelu_tanh")
>>> class_of(model), config_of(model)["activation_function"], tensors_of(model, "blocks.1.mlp.up.weight")
('GPT2LMHeadModel', 'gelu_new', (('transformer.h.1.mlp.c_fc.weight', True),))
>>> fields_of({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12})["hidden_size"]
768

Both models compute the same, weight by weight. A config.json with an option that a GPT has no field for is refused.
(The converters of Megatron-LM and LiBai consist of such tables. Here one table serves export, import and a run's
start.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.models.gpt.section import GPT
from dslpar.schema.sections import Experts

Config = Mapping[str, Any]

_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' name of an activation -> dslpar's name; the last two are the same function."""


class _Kind(NamedTuple):
    """A transformers class, and how it maps to a GPT."""

    needs: Mapping[str, tuple[object, ...]]
    """Field of a GPT -> the values for which it equals this class."""
    config: Callable[[GPT], dict[str, Any]]
    fields: Callable[[Config], dict[str, Any]]
    refused: Callable[[Config], Iterator[str]]
    """Yields the options of a config that no GPT supports."""
    blocks: str
    """Prefix of a block's number in the names of weights."""
    names: Mapping[str, tuple[str, ...]]
    """dslpar's module -> transformers' modules whose weights it concatenates; names in a block are relative to it."""
    transposed: tuple[str, ...] = ()
    """dslpar's modules whose weights have the shape [in, out] in transformers."""
    experts: Mapping[str, tuple[object, ...]] | None = None
    """Key of a GPT's `experts` -> the values for which it equals this class; None: this class has no experts."""
    parameters: Mapping[str, str] = {}
    """Parameter in a block -> its name in transformers, where no name of a module tells it."""


def class_of(model: GPT) -> str:
    """Return the transformers class that computes the same as a GPT. Raises: DslparError: none does."""
    wrong = {name: list(_misfits(model, kind)) for name, kind in _KINDS.items()}
    fitting = [name for name, problems in wrong.items() if not problems]
    if not fitting:
        nearest = min(wrong, key=lambda name: len(wrong[name]))
        details = [f"{name} has {', '.join(problems)}" for name, problems in wrong.items()]
        *names, last = wrong
        message = f"neither {', '.join(names)} nor {last} in transformers computes the same as this GPT"
        hint = f"use dslpar's own format; a run with {', '.join(wrong[nearest])} is a {nearest}"
        raise_finding("CKP222", message, hint, key="model", details=details)
    return fitting[0]


def _misfits(model: GPT, kind: _Kind) -> Iterator[str]:
    for field, values in kind.needs.items():
        if getattr(model, field) not in values:
            yield f"{field}={' or '.join(map(repr, values))}"
    if (model.experts is None) != (kind.experts is None):
        yield "experts left out" if kind.experts is None else "experts"
    for field, values in (kind.experts or {}).items() if model.experts is not None else ():
        if getattr(model.experts, field) not in values:
            yield f"experts.{field}={' or '.join(map(repr, values))}"
    if kind is _KINDS["GPT2LMHeadModel"] and model.kv_heads != model.num_heads:
        yield f"num_kv_heads={model.num_heads}"


def config_of(model: GPT) -> dict[str, Any]:
    """Return the config arguments of `class_of(model)`. Ids of special tokens are None: a GPT does not know them."""
    found = _KINDS[class_of(model)].config(model)
    return found | {"tie_word_embeddings": model.tie_embeddings, "initializer_range": model.init_std}


def tensors_of(model: GPT, parameter: str) -> tuple[tuple[str, bool], ...]:
    """Return the transformers tensors that form a parameter, in order: (name, whether it is [in, out])."""
    kind = _KINDS[class_of(model)]
    module, _, own = parameter.rpartition(".")
    before = ""
    if module.startswith("blocks."):
        _, number, module = module.split(".", 2)
        before = f"{kind.blocks}.{number}."
    if (name := kind.parameters.get(f"{module}.{own}")) is not None:
        return ((f"{before}{name}", False),)
    names = kind.names[module]
    return tuple((f"{before}{name}.{own}", own == "weight" and module in kind.transposed) for name in names)


Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The fields of a `dslpar.models.pretrained.StoredPart`, whose module imports torch."""


def stored(model: GPT) -> dict[str, list[Part]]:
    """Return the tensors of a folder's files that form the weights of mixtures, which are stored expert by expert."""
    found: dict[str, list[Part]] = {}
    hidden, ffn, number = model.hidden_size, model.expert_ffn_size, model.num_experts or 0
    for index in filter(model.has_mixture, range(model.num_layers)):
        block, files = f"model.layers.{index}.mlp", f"model.layers.{index}.block_sparse_moe"
        found[f"{block}.gate.weight"] = [(f"{files}.gate.weight", (0, 0), (number, hidden), (0, 1))]
        found[f"{block}.experts.gate_up_proj"] = [
            (f"{files}.experts.{at}.{own}.weight", (at, first, 0), (1, ffn, hidden), (-1, 0, 1))
            for at in range(number)
            for own, first in (("w1", 0), ("w3", ffn))
        ]
        found[f"{block}.experts.down_proj"] = [
            (f"{files}.experts.{at}.w2.weight", (at, 0, 0), (1, hidden, ffn), (-1, 0, 1)) for at in range(number)
        ]
    return found


def base_prefix(model: GPT) -> str:
    """Return transformers' prefix for names of the model without its head: "transformer" or "model"."""
    return _KINDS[class_of(model)].blocks.partition(".")[0]


def fields_of(config: Config, path: str = "config.json") -> dict[str, Any]:
    """Return the fields of the GPT that a config.json describes, without dropout and `init_std`.

    Raises:
        DslparError: the config is of another model type, or has options that no GPT supports; lists all reasons.
    """
    kind = next((kind for name, kind in _KINDS.items() if config.get("model_type") == _MODEL_TYPES[name]), None)
    if kind is None:
        message = f"{path} describes a model of type {config.get('model_type')!r}, but a GPT is {_one_of(_MODEL_TYPES)}"
        raise_finding("CKP222", message, "use type='transformers.X', which runs transformers' own code", path)
    if refused := list(kind.refused(config)):
        message = f"{path} describes a model that dslpar's GPT cannot compute: {', '.join(refused)}"
        raise_finding("CKP222", message, "use type='transformers.X', which runs transformers' own code", path)
    return kind.fields(config)


def check_fits(model: GPT, config: Config, path: str) -> None:
    """Check that a GPT is the model of a config.json. Raises: DslparError: fields differ; lists all of them."""
    found, differ = fields_of(config, path), differences(model, config, path)
    if differ:
        details = [
            f"model.{name} is {shown(of)}, but config.json has {shown(value)}" for name, (of, value) in differ.items()
        ]
        written = ", ".join(f"{name}={shown(value)}" for name, value in found.items())
        message = f"{path} has the weights of another model:"
        raise_finding("CKP207", message, f"model = dict(type='GPT', {written}, pretrained=...)", path, "model", details)


def shown(value: object) -> str:
    """Return a field's value as a config writes it."""
    if not isinstance(value, Experts):
        return repr(value)
    given = {item.name: getattr(value, item.name) for item in fields(value)}
    usual = {item.name: item.default for item in fields(value)}
    return f"dict({', '.join(f'{name}={of!r}' for name, of in given.items() if of != usual[name])})"


def differences(model: GPT, config: Config, path: str = "config.json") -> dict[str, tuple[object, object]]:
    """Return {field: (GPT's value, config.json's value)} for differing fields. Raises: DslparError: as `fields_of`."""
    found = fields_of(config, path)
    # The losses of routers are no property of weights.
    own_experts, of_config = model.experts, found.setdefault("experts", None)
    if own_experts is not None and of_config is not None:
        own_experts = replace(own_experts, ffn_hidden_size=model.expert_ffn_size)
        found["experts"] = replace(of_config, balance=own_experts.balance, z_loss=own_experts.z_loss)
    # Not the fields left out here whose value in config.json follows from other fields: they differ only if those do.
    follows = {"num_kv_heads": found["num_heads"], "ffn_hidden_size": 4 * found["hidden_size"], "experts": None}
    found = {name: value for name, value in found.items() if getattr(model, name) is not None or follows[name] != value}
    own = {"num_kv_heads": model.kv_heads, "ffn_hidden_size": model.ffn_size, "experts": own_experts}
    if model.experts is not None:  # its blocks have no MLP
        found.pop("ffn_hidden_size", None)
    pairs = {name: (own.get(name, getattr(model, name)), value) for name, value in found.items()}
    # Rotary positions have no table, so a run may have shorter or longer sequences.
    free = "max_seq_len" if model.positions == "rotary" else ""
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name != free}


# ---- GPT-2 ----


def _gpt2_config(model: GPT) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_seq_len,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size,
        "activation_function": next(name for name, own in _GELUS.items() if own == model.activation),
        "layer_norm_epsilon": model.layernorm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }


def _gpt2_fields(config: Config) -> dict[str, Any]:
    hidden, heads = config.get("n_embd", 768), config.get("n_head", 12)
    return {
        "num_layers": config.get("n_layer", 12),
        "hidden_size": hidden,
        "num_heads": heads,
        "vocab_size": config.get("vocab_size", 50257),
        "max_seq_len": config.get("n_positions", 1024),
        "num_kv_heads": heads,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "norm": "layernorm",
        "activation": _GELUS[config.get("activation_function", "gelu_new")],
        "positions": "learned",
        "bias": True,
        "layernorm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _gpt2_refused(config: Config) -> Iterator[str]:
    if config.get("activation_function", "gelu_new") not in _GELUS:
        yield f"activation_function={config['activation_function']!r}"
    for name, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(name, usual) != usual:
            yield f"{name}={config[name]!r}"


# ---- Llama ----


def _llama_config(model: GPT) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.layernorm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.dropout,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _rope(config: Config) -> Config:
    """Return the settings of rotary positions; before transformers 5 they were in two keys."""
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or older


def _llama_fields(config: Config) -> dict[str, Any]:
    heads = config.get("num_attention_heads", 32)
    return {
        "num_layers": config.get("num_hidden_layers", 32),
        "hidden_size": config.get("hidden_size", 4096),
        "num_heads": heads,
        "vocab_size": config.get("vocab_size", 32000),
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_hidden_size": config.get("intermediate_size", 11008),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        "rope_theta": _rope(config).get("rope_theta", 10000.0),
        "bias": config.get("attention_bias", False),
        "layernorm_eps": config.get("rms_norm_eps", 1e-6),
    }


def _llama_refused(config: Config) -> Iterator[str]:
    rope = _rope(config)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"rope_type={kind!r}"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={config['hidden_act']!r}"
    if config.get("attention_bias", False) != config.get("mlp_bias", False):
        yield f"attention_bias={config.get('attention_bias', False)!r} with mlp_bias={config.get('mlp_bias', False)!r}"
    usual = config.get("hidden_size", 4096) // config.get("num_attention_heads", 32)
    if (config.get("head_dim") or usual) != usual:
        yield f"head_dim={config['head_dim']!r}"


# ---- Mixtral ----


def _mixtral_config(model: GPT) -> dict[str, Any]:
    experts = model.experts
    assert experts is not None, "a GPT with experts"
    found = _llama_config(model)
    del found["attention_bias"], found["mlp_bias"]
    return found | {
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
        "output_router_logits": experts.balance > 0,
        "router_aux_loss_coef": experts.balance or 0.001,
    }


def _mixtral_fields(config: Config) -> dict[str, Any]:
    sizes = {"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    sizes |= {"max_position_embeddings": 131072}
    found = _llama_fields({**sizes, **config})
    balance = config.get("router_aux_loss_coef", 0.001) if config.get("output_router_logits", False) else 0.0
    experts = Experts(
        num=config.get("num_local_experts", 8),
        top_k=config.get("num_experts_per_tok", 2),
        ffn_hidden_size=found["ffn_hidden_size"],
        balance=balance,
    )
    return {**found, "bias": False, "experts": experts}


def _mixtral_refused(config: Config) -> Iterator[str]:
    yield from _llama_refused(config)
    if config.get("sliding_window") is not None:
        yield f"sliding_window={config['sliding_window']!r}"
    if config.get("router_jitter_noise"):
        yield f"router_jitter_noise={config['router_jitter_noise']!r}"


def _one_of(types: Mapping[str, str]) -> str:
    *names, last = (f"a {name!r}" for name in types.values())
    return f"{', '.join(names)} or {last}"


_MODEL_TYPES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
_KINDS: dict[str, _Kind] = {
    "GPT2LMHeadModel": _Kind(
        needs={"norm": ("layernorm",), "activation": ("gelu", "gelu_tanh"), "positions": ("learned",), "bias": (True,)},
        config=_gpt2_config,
        fields=_gpt2_fields,
        refused=_gpt2_refused,
        blocks="transformer.h",
        names={
            "embedding.tokens": ("transformer.wte",),
            "embedding.positions": ("transformer.wpe",),
            "norm1": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "norm2": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
            "norm": ("transformer.ln_f",),
            "head": ("lm_head",),
        },
        transposed=("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    ),
    "LlamaForCausalLM": _Kind(
        needs={"norm": ("rmsnorm",), "activation": ("swiglu",), "positions": ("rotary",)},
        config=_llama_config,
        fields=_llama_fields,
        refused=_llama_refused,
        blocks="model.layers",
        names={
            "embedding.tokens": ("model.embed_tokens",),
            "norm1": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "norm2": ("post_attention_layernorm",),
            "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
            "norm": ("model.norm",),
            "head": ("lm_head",),
        },
    ),
}
_KINDS["MixtralForCausalLM"] = _KINDS["LlamaForCausalLM"]._replace(
    needs={**_KINDS["LlamaForCausalLM"].needs, "bias": (False,)},
    config=_mixtral_config,
    fields=_mixtral_fields,
    refused=_mixtral_refused,
    experts={"shared": (0,), "every": (1,), "router": ("softmax",), "renormalize": (True,), "bias_update": (None,)},
    parameters={
        "mlp.router": "mlp.gate.weight",
        "mlp.up": "mlp.experts.gate_up_proj",
        "mlp.down": "mlp.experts.down_proj",
    },
)
