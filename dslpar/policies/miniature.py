"""Miniature: a config of the same class with small sizes, which a CPU builds and runs in a second.

    shrunk(LlamaConfig(tie_word_embeddings=True)).hidden_size      # 64

A config class derives values from others: sizes of heads, kinds of layers, names of stages. So the miniature is not a
copy with other numbers. It is constructed from the settings that differ from the class's defaults, and from small
sizes. Lists with an entry per layer or stage, and configs within the config, shrink in the same way.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(_LAYERS, 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "global_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 80),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "decoder_intermediate_size"), 80),
    "decoder_hidden_size": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 70),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 32),
    "sliding_window": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Field -> its value in a miniature, if the config has a value there. 70 rows of a vocabulary are padded in every mode.

A field that another field's `attribute_map` names is found by both names.
"""
_AT_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "rotary_dim": 4,
    "num_kv_shared_layers": 1,
}
"""Field -> its largest value in a miniature."""
_FLOATS: Mapping[str, float] = {**dict.fromkeys(("initializer_range", "init_std"), 0.2), "mask_ratio": 0.6}
"""Field -> its value: with weights of this size, activations are of order 1, and a lost term shows."""
_NEEDED: Mapping[str, int] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "vocab_size": 70,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
"""Fields that a class may leave open (DeepSeek-V2, Dots1, HunYuan, Nemotron), but without which it does not run."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OF_CLASS: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
}
"""Config class -> settings that its models need, and its defaults lack."""
_STAGES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_sizes", "embed_dim", "dims", "channels"), 16),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 4),
}
"""Field with a number per stage -> the first one; the others keep their ratio to it."""
_PATCH, _FLAT, _WINDOW = 4, 3, 2
"""Pixels per side of a patch, patches per side of an image of a model without stages, and patches per side of a window.

Nine patches and a class token are divisible by two. An image of a model with stages has one window in the last stage.
"""


def shrunk(config: Any, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a tiny config of the same class: sizes are shrunk, dropout is off, `changes` apply, the rest is equal.

    A change of a config within the config has a dotted name, such as text_config.num_hidden_layers.

    Raises:
        DslparError: the class does not accept these values.
    """
    cls, of = type(config), _own_settings(config)
    known = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set(vars(config))
    values = {name: value for name, value in vars(config).items() if name in known}
    own, within = _split(config, changes or {})
    given = {
        **_OF_CLASS.get(cls.__name__, {}),
        **of,
        **_sizes(config, values),
        **_image(values),
        **_rotary(values),
        **_lists(values, next((own[name] for name in _LAYERS if name in own), _SIZES["num_hidden_layers"])),
        **{name: 0.0 for name, value in values.items() if _drops(name, value)},
        **{name: shrunk(value, within.get(name)) for name, value in values.items() if _is_config(value)},
        **own,
    }
    return constructed(cls, given)


def default_config(cls: Any, changes: Mapping[str, Any]) -> Any:
    """Return a model class's config with its defaults; with `changes` if the defaults alone are refused.

    Raises:
        DslparError: the config class refuses both, or the model class has none.
    """
    of = getattr(cls, "config_class", None)
    if not isinstance(of, type):
        message = f"{cls.__name__} has no config class of its own"
        raise_finding("CFG223", message, "name a class for a task, such as LlamaForCausalLM", key="model.type")
    try:
        return constructed(of, {}, "its own defaults")
    except DslparError:
        if not changes:
            raise
        return constructed(of, _nested(changes), "these values")


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes as arguments of a config class, with those of configs within it as dicts."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        *within, last = name.split(".")
        place = found
        for each in within:
            place = place.setdefault(each, {})
        place[last] = value
    return found


def constructed(cls: Any, given: Mapping[str, Any], what: str = "its miniature") -> Any:
    """Construct a config from values, which `what` describes. Raises: DslparError: the class refuses them."""
    try:
        return cls(**given)
    except Exception as error:  # noqa: BLE001  # config classes raise what they like, their own validators included
        said = " ".join(str(error).split())
        message = f"{cls.__name__} refuses {what}: {said or type(error).__name__}"
        hint = "append key=value with what it asks for, such as num_attention_heads=8"
        raise_finding("CFG223", message, hint, key="model.config")


def dropping(config: Any) -> Any:
    """Return the config with every dropout rate set, except layerdrop."""
    made = copy.deepcopy(config)
    for name, value in vars(config).items():
        if _drops(name, value) and "layerdrop" not in name:
            setattr(made, name, 0.2)
    return made


def _drops(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float)


def _is_config(value: object) -> bool:
    return isinstance(value, PreTrainedConfig)


def _own_settings(config: Any) -> dict[str, Any]:
    """Return what differs from a config of this class without arguments, and the implementations of its layers."""
    try:
        default = vars(type(config)())
    except Exception:  # noqa: BLE001  # a class whose sizes have no defaults: all of its values are its own
        default = {}
    found = {
        name: copy.deepcopy(value)
        for name, value in vars(config).items()
        if not name.startswith("_") and not _is_config(value) and (name not in default or default[name] != value)
    }
    return found | {"attn_implementation": config._attn_implementation}


def _split(config: Any, changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the changes of the config itself, under its own names, and those of configs within it by their names."""
    own: dict[str, Any] = {}
    within: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, dot, rest = name.partition(".")
        if dot:
            within.setdefault(first, {})[rest] = value
        else:
            own[config.attribute_map.get(name, name)] = value
    return own, within


def _sizes(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small values of single numbers."""
    found: dict[str, Any] = {}
    for name, value in {**_SIZES, **_FLOATS}.items():
        own = config.attribute_map.get(name, name)
        full = values.get(own)
        if isinstance(full, int | float) and (full or name.endswith("_id")):
            found[own] = value
        elif isinstance(full, list) and name.endswith("_id"):  # several ends of text
            found[own] = [value]
    found |= {name: min(values[name], most) for name, most in _AT_MOST.items() if isinstance(values.get(name), int)}
    found |= {name: _NEEDED[name] for name in _NEEDED if name in values and values[name] is None and name not in found}
    if "expand" in values and "head_dim" in found:  # Mamba 2's heads are of the expanded residual
        found["head_dim"] *= values["expand"]
    if values.get("kv_lora_rank"):  # latent attention: each head has a key, of which rotary rotates head_dim
        found["num_key_value_heads"] = found.get("num_attention_heads", _SIZES["num_attention_heads"])
        rotary, plain = (_SIZES[each] for each in ("qk_rope_head_dim", "qk_nope_head_dim"))
        both = values.get("qk_rope_head_dim", 0) + values.get("qk_nope_head_dim", 0)
        found["head_dim"] = (
            rotary + plain if vars(config).get("head_dim") == both else rotary
        )  # Mistral 4's is both parts
    beyond = _SIZES["vocab_size"]
    for name, value in values.items():
        if name.endswith(("token_id", "token_index")) and name not in found and isinstance(value, int):
            found[name] = value if value < beyond else beyond - 1 - len(found) % 8
    return found


def _image(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small sizes of images and patches, whole numbers or one per side."""
    found: dict[str, Any] = {}
    patch = values.get("patch_size")
    if patch:
        found["patch_size"] = _like(patch, _PATCH)
    if values.get("image_size"):
        depths: Any = values.get("depths")
        patches = _WINDOW * 2 ** (len(depths) - 1) if _is_list(depths) else _FLAT
        found["image_size"] = _like(values["image_size"], patches * _PATCH)
    if values.get("window_size"):
        found["window_size"] = _like(values["window_size"], _WINDOW)
    return found


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary positions, whose lists have an entry per pair of features (LongRoPE, M-RoPE)."""
    full = values.get("rope_parameters")
    if not isinstance(full, Mapping):
        return {}
    share = full.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    pairs = int(_SIZES["head_dim"] * share) // 2

    def small(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: small(each) for name, each in value.items()}
        if not _is_list(value):
            return value
        is_of_sections = len(value) == 3 and all(isinstance(each, int) for each in value)
        return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3] if is_of_sections else list(value)[:pairs]

    changed = small(full)
    return {} if changed == full else {"rope_parameters": changed}


def _like(full: Any, small: int) -> Any:
    return [small] * len(full) if _is_list(full) else small


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _lists(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the lists with an entry per layer or stage, shrunk; `num_layers` is the miniature's."""
    found: dict[str, Any] = {}
    if _is_list(values.get("depths")):
        found["depths"] = [min(depth, 1 if stage else 2) for stage, depth in enumerate(values["depths"])]
        if isinstance(values.get("embed_dim"), int):
            found["embed_dim"] = _STAGES["embed_dim"]
    for name, first in _STAGES.items():
        if _is_list(values.get(name)) and all(isinstance(each, int) for each in values[name]):
            found[name] = _in_ratio(values[name], first)
    if _is_list(values.get("attention_types")):  # GPT-Neo: groups of kinds, each with a number of repetitions
        kinds = [kind for group, times in values["attention_types"] for kind in group * times]
        found["attention_types"] = [[_every_kind(kinds, num_layers), 1]]
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)
    for name, value in values.items():
        if _is_list(value) and layers and len(value) == layers and name not in found:
            found[name] = _every_kind(value, num_layers)
    return found


def _in_ratio(full: Sequence[int], first: int) -> list[int]:
    """Return multiples of four in about the ratios of `full`, beginning with `first`."""
    return [-(-each * first // full[0] // 4) * 4 for each in full]


def _every_kind(full: Sequence[Any], length: int) -> list[Any]:
    """Return a list of `length` in which the entries of `full` take turns."""
    kinds = [each for number, each in enumerate(full) if each not in full[:number]]
    return [kinds[number % len(kinds)] for number in range(length)]
