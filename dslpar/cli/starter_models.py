"""Starter models: find a config's section `model` by a short name, a transformers class, or a folder with weights.

    model = find_model("llama"); model.section, model.data
    find_model("Qwen3ForCausalLM"); find_model("/models/Llama-3.2-1B")

This module needs no torch. Sizes are small, so that a first run takes seconds on a CPU, like Hugging Face's
tiny-random-... models. For a larger model, change only the numbers in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dslpar.core.suggest import did_you_mean
from dslpar.layout.transformers_data_types import data_types
from dslpar.schema.transformers_configs import CONFIG_JSON, PACKAGE, TransformersConfig, table
from dslpar.schema.transformers_policies import DERIVED, POLICIES

LAYERS, HIDDEN, HEADS, SEQ_LEN, IMAGE, CLASSES = 4, 128, 8, 128, 32, 10
VOCAB = 384
"""Bytes and special tokens, rounded up to a multiple of 128."""
VOCAB_MULTIPLE = 64
"""Vocabularies are multiples of this, so that they divide over ranks, as in Megatron-LM and nanoGPT."""

_GPT = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": 256, "max_seq_len": SEQ_LEN}
_LLAMA = {
    "num_kv_heads": HEADS // 2,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "tie_embeddings": False,
}
_RESMLP = {"num_layers": LAYERS, "hidden_size": HIDDEN, "image_size": IMAGE, "patch_size": 4, "num_classes": CLASSES}
_CLASSES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "vitmae": "ViTMAEForPreTraining",
    "swin": "SwinForImageClassification",
    "resnet": "ResNetForImageClassification",
    "gpt2": "GPT2LMHeadModel",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_SIZES = {
    "layers": LAYERS,
    "decoder_layers": LAYERS,
    "hidden": HIDDEN,
    "heads": HEADS,
    "kv_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "ffn": 2 * HIDDEN,
    "experts": 4,
    "active_experts": 2,
    "expert_ffn": HIDDEN,
    "shared_ffn": HIDDEN,
    "vocab": VOCAB,
    "positions": SEQ_LEN,
    "image": IMAGE,
    "patch": 4,
    "channels": 3,
}
"""Sizes by dslpar.schema.transformers_configs' names. A class gets those that its transformers config has."""
_FIELDS: Mapping[str, object] = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "router_jitter_noise": 0.0,  # other values are refused, since random numbers would depend on the layout
}
"""Values by the names in transformers' configs. A class gets those that its config has."""
_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": HEADS,
}
"""Values for classes with latent attention, which has its own keys for head sizes."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MORE: Mapping[str, Mapping[str, object]] = {
    "SwinForImageClassification": {"embed_dim": 32, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4},
    "Swinv2ForImageClassification": {"embed_dim": 32, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4},
    "ResNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 2, 1]},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 64,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 128,
    },
    "RobertaForMaskedLM": {"max_position_embeddings": SEQ_LEN + 2},  # its positions start after the padding token's id
    "OPTForCausalLM": {"word_embed_proj_dim": HIDDEN},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},  # a second token embedding is refused
}
_LONG = 1024
"""The most tokens per sample in a first run, for models that accept longer samples."""
NAMES = ("gpt", "llama", "resmlp", *_CLASSES)
"""The short names."""


class StarterError(ValueError):
    """An invalid choice. The message says why, and what to choose."""


class Model(NamedTuple):
    """A config's section `model`, and the kind of data that the model learns from."""

    section: Mapping[str, object]
    data: Sequence[str]
    """Possible types of the section `data`, the usual one first; empty: a user's program must pass the data."""
    tokenizer: str = ""
    """A folder with a tokenizer.json for text data."""
    seq_len: int | None = None
    """Tokens per sample; None: the longest that the model accepts."""

    def with_classes(self, count: int) -> Model:
        """Return the model with `count` classes. A model without classes, or from a folder, stays unchanged."""
        section: dict[str, Any] = dict(self.section)
        if "num_classes" in section:
            section["num_classes"] = count
        elif "num_labels" in section.get("config", {}):
            section["config"] = section["config"] | {"num_labels": count}
        return self._replace(section=section)

    def with_vocabulary(self, count: int) -> Model:
        """Return the model with a vocabulary of at least `count` tokens. A model from a folder stays unchanged."""
        section: dict[str, Any] = dict(self.section)
        size = -(-count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if "vocab_size" in section:
            section["vocab_size"] = max(size, section["vocab_size"])
        elif "vocab_size" in section.get("config", {}):
            section["config"] = section["config"] | {"vocab_size": max(size, section["config"]["vocab_size"])}
        return self._replace(section=section)


def find_model(name: str, beside: str = ".") -> Model:
    """Return the model for a short name, a class, or a folder. Paths in its section are relative to `beside`.

    Raises:
        StarterError: the model is unknown, has no proven policy, or its folder cannot be read.
    """
    if name in ("gpt", "llama"):
        return Model({"type": "GPT", **_GPT, **(_LLAMA if name == "llama" else {})}, ("text",))
    if name == "resmlp":
        return Model({"type": "ResMLP", **_RESMLP}, ("images",))
    if os.path.isdir(name):
        return _of_folder(name, beside)
    cls = _CLASSES.get(name, name.removeprefix(PACKAGE))
    known = table()["models"]
    if cls not in known:
        hint = did_you_mean(cls, (*NAMES, *known)) or f"choose one of {', '.join(NAMES)}"
        raise StarterError(f"no model {name!r}: {hint}; or a transformers class, or a folder with a {CONFIG_JSON}")
    _check_trained(cls)
    small = _small_config(cls)
    longest = TransformersConfig(cls, small, None).longest_sequence
    return Model({"type": PACKAGE + cls, "config": small}, data_types(cls), seq_len=None if longest else SEQ_LEN)


def _check_trained(cls: str) -> None:
    """Raise StarterError for a class without a proven policy, since a run would refuse to train it."""
    if cls not in POLICIES and cls not in DERIVED:
        raise StarterError(f"{cls} has no proven policy: docs/transformers.md lists the classes that have one")


def _small_config(cls: str) -> dict[str, object]:
    config, more = TransformersConfig(cls, {}, None), _MORE.get(cls, {})
    named = {config.own_name(size): value for size, value in _SIZES.items()}
    values: dict[str, object] = {name: value for name, value in named.items() if name}
    values |= {name: value for name, value in _FIELDS.items() if config.values.get(name, value) != value}
    if "kv_lora_rank" in config.values:
        values |= {name: value for name, value in _LATENT.items() if name in config.values}
        if "head_dim" in values:  # the size of rotary embeddings
            values["head_dim"] = _LATENT["qk_rope_head_dim"]
    values |= more
    if cls.endswith("ForImageClassification"):
        values["num_labels"] = CLASSES
    pad = config.values.get("pad_token_id")
    if "vocab_size" in values and type(pad) is int and pad >= VOCAB:
        values["pad_token_id"] = 0
    return values


def _of_folder(folder: str, beside: str) -> Model:
    path = os.path.join(folder, CONFIG_JSON)
    try:
        with open(path, encoding="utf-8") as file:
            config: Any = json.load(file)
        (cls,) = config["architectures"]
    except OSError as error:
        raise StarterError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StarterError(f"{path} does not name the class that saved it, in `architectures`") from error
    _check_trained(str(cls))
    relative = folder if os.path.isabs(folder) else os.path.relpath(folder, beside)
    tokenizer = relative if os.path.exists(os.path.join(folder, "tokenizer.json")) else ""
    longest = TransformersConfig(str(cls), config, None).longest_sequence or _LONG
    return Model(
        {"type": f"{PACKAGE}{cls}", "pretrained": relative}, data_types(str(cls)), tokenizer, min(longest, _LONG)
    )
