"""The model of a Hugging Face folder, for another framework's config that does not say its sizes: `--model FOLDER`.

Only config.json is read, so the folder needs no weights. The names of its sizes are those of transformers' configs.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from typing import Any

FILE = "config.json"
_SIZES = {
    "hidden_size": "hidden_size",
    "n_embd": "hidden_size",
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "num_attention_heads": "num_heads",
    "n_head": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "n_positions": "max_seq_len",
}
"""Size of a transformers config -> size of dslpar's GPT."""
_NOT_SIZES = (
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "auto_map",
    "_name_or_path",
)
"""Keys of config.json that say which class it is of, or how its weights are stored."""


class ModelFolderError(ValueError):
    """The folder has no config.json that names a model; the message says what is missing."""


def file_of(name: str) -> str:
    """Return the path of config.json if `name` is it, or the folder that has it; else an empty text."""
    if os.path.isdir(name):
        return os.path.join(name, FILE)
    return name if os.path.basename(name) == FILE else ""


def read(file: str) -> Mapping[str, Any]:
    """Read a config.json. Raises ModelFolderError if it cannot be read, or names no class."""
    try:
        with open(file, encoding="utf-8") as stream:
            config = json.load(stream)
    except OSError as error:
        raise ModelFolderError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelFolderError(f"{file} is not JSON") from error
    if (
        not isinstance(config, Mapping)
        or not isinstance(config.get("architectures"), list)
        or not config["architectures"]
    ):
        raise ModelFolderError(f"{file} names no class in architectures")
    return config


def section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section for a config.json: transformers' class with its sizes, and without weights."""
    sizes = {key: value for key, value in config.items() if key not in _NOT_SIZES}
    return {"type": f"transformers.{config['architectures'][0]}", "config": sizes}


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a config.json as those of dslpar's GPT, for the arithmetic that all frameworks share."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    sizes = {ours: config[theirs] for theirs, ours in _SIZES.items() if type(config.get(theirs)) is int}
    head_dim = config.get("head_dim")
    if type(head_dim) is int and sizes.get("hidden_size") != head_dim * sizes.get("num_heads", 0):
        sizes.pop("hidden_size", None)  # a head has other features than hidden_size / num_heads
    return {"type": "GPT", **sizes}
