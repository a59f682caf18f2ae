"""Configs of transformers models, as far as lint needs them, without importing transformers.

A value comes from `model.config`, else from the config.json of `pretrained`, else from the defaults of the model's
config class in the table data/transformers.json. A class that is not in the table has no known defaults.

Config classes have different names for one size. NAMES lists them: the size "hidden" is the field `hidden_size` in
Llama and `n_embd` in GPT-2.

    >>> config = config_of("transformers.GPT2LMHeadModel", {"config": {"hidden_size": 48, "n_head": 6}})
    >>> config.size("hidden"), config.key("hidden"), config.size("layers"), config.given("layers")
    (48, 'hidden_size', 12, '')
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from dslpar.core.regular_file import read_bounded
from dslpar.schema.tables import load_table

PACKAGE = "transformers."
CONFIG_JSON = "config.json"
NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "decoder_layers": ("num_decoder_layers", "decoder_num_hidden_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token"),
    "q_latent": ("q_lora_rank",),
    "kv_latent": ("kv_lora_rank",),
    "rotary_dim": ("qk_rope_head_dim",),
    "plain_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "image": ("image_size",),
    "patch": ("patch_size",),
    "channels": ("num_channels",),
}
"""Size -> its names in transformers' config classes."""
LIMIT = 2**31
"""Upper bound of sizes (exclusive), the same as for dslpar's own keys."""

GATED = "gated-gelu"
"""Value of T5's feed_forward_proj for an MLP with a gate; the table treats it as a switch, like a boolean field."""


class ConfigFile(NamedTuple):
    """The config.json of a folder that transformers saved."""

    path: str
    values: Mapping[str, Any]
    """Empty if the file cannot be read."""
    text: str = ""
    problem: str = ""
    """Reason why the file cannot be read; empty if it can."""
    missing: bool = False
    """Whether the file does not exist."""


class TransformersConfig:
    """The values of a model's config, and the origin of each."""

    def __init__(self, model: str, written: Mapping[str, Any], file: ConfigFile | None) -> None:
        self.model = model
        """The class, without its package."""
        self.file = file
        row = table()["models"].get(model, {})
        self.row: Mapping[str, Any] = row
        """The model's row in the table; empty if it has none."""
        self.known: Mapping[str, Any] = table()["configs"].get(row.get("config"), {})
        """The config class's row in the table; empty if it has none."""
        self.other_names: Mapping[str, str] = self.known.get("names", {})
        self.keys = {self.other_names.get(key, key): key for key in written}
        """Field -> its key in model.config."""
        of_file = {self.other_names.get(key, key): value for key, value in (file.values if file else {}).items()}
        self.in_file = {self.other_names.get(key, key): key for key in (file.values if file else {})}
        """Field -> its key in config.json."""
        of_config = {self.other_names.get(key, key): value for key, value in written.items()}
        self.values: Mapping[str, Any] = {**self.known.get("defaults", {}), **of_file, **of_config}

    def overridden(self, name: str, value: Any) -> TransformersConfig:
        """Return the config with another value of a field."""
        return TransformersConfig(self.model, {**{key: self.values[key] for key in self.keys}, name: value}, self.file)

    def own_name(self, size: str) -> str:
        """Return the field of this config for a size (a key of NAMES); empty if it has none."""
        names = [self.other_names.get(name, name) for name in NAMES[size]]
        return next((name for name in names if name in self.values), "")

    def key(self, size: str) -> str:
        """Return the key of a size for messages: as in model.config, else as in config.json, else as in the class."""
        return self.author_key(self.own_name(size))

    def author_key(self, name: str) -> str:
        """Return the key of a field for messages: as in model.config, else as in config.json, else as in the class."""
        return self.keys.get(name, self.in_file.get(name, name))

    def given(self, size: str) -> str:
        """Return the origin of a size: "config" (model.config), "file" (config.json), or empty for a default."""
        return self.origin(self.own_name(size))

    def origin(self, name: str) -> str:
        """Return the origin of a field: "config", "file", or empty for a default."""
        return "config" if name in self.keys else "file" if name in self.in_file else ""

    def size(self, size: str) -> int | None:
        """Return a size (a key of NAMES) if its value is valid, else None; see `number`."""
        return self.number(self.own_name(size))

    def number(self, name: str) -> int | None:
        """Return the value of a field if it is a whole number from 1 to LIMIT - 1, else None."""
        value = self.values.get(name)
        return value if type(value) is int and 0 < value < LIMIT else None

    @property
    def is_causal(self) -> bool:
        """Return whether tokens attend only to themselves and earlier tokens, by the class's name."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def unused_positions(self) -> int:
        """Rows of the position table that no token uses: RoBERTa's positions start after the id of its padding."""
        pad = self.values.get("pad_token_id")
        return pad + 1 if self.known.get("model_type") == "roberta" and type(pad) is int else 0

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest sample; None if unknown."""
        positions = self.size("positions")
        return None if positions is None else positions - self.unused_positions

    @property
    def num_dense(self) -> int:
        """Number of blocks with an MLP instead of experts, which come before all others, as in DeepSeek-V3."""
        return self.number("first_k_dense_replace") or 0

    @property
    def num_layers(self) -> int | None:
        """Number of blocks in all lists, which a pipeline partitions; None if unknown."""
        counts = [self.number(name) for name in self.row.get("blocks", {}).values()]
        return None if None in counts else sum(filter(None, counts)) or None


def table() -> Mapping[str, Any]:
    """Return the table of config classes and models."""
    return load_table("transformers")


@cache
def installed_version() -> str | None:
    """Return the version of transformers on this machine, without importing it; None if it is not installed."""
    from importlib import metadata  # only a mistake needs it

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def config_of(target: str, args: Mapping[str, Any]) -> TransformersConfig | None:
    """Return the config of a model, from its class's full name and its arguments; None if it is unknown."""
    given, folder = args.get("config"), args.get("pretrained")
    if not target.startswith(PACKAGE) or not isinstance(given, Mapping | None):
        return None
    if given is None and not isinstance(folder, str):
        return None
    file = read_config_json(folder) if isinstance(folder, str) else None
    written = {str(name): value for name, value in (given or {}).items() if name != "_target_"}
    return TransformersConfig(target.rpartition(".")[2], written, file)


def read_config_json(folder: str) -> ConfigFile:
    """Read a folder's config.json; a mistake is in the result's `problem`."""
    path = os.path.join(folder, CONFIG_JSON)
    try:
        text = read_bounded(path, MAX_BYTES).decode()
    except FileNotFoundError:
        return ConfigFile(path, {}, problem="there is no such file", missing=True)
    except (OSError, UnicodeDecodeError) as error:
        return ConfigFile(path, {}, problem=getattr(error, "strerror", None) or "it is not UTF-8 text")
    if len(text) > MAX_BYTES:
        return ConfigFile(path, {}, problem=f"it is longer than {MAX_BYTES:,} bytes")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ConfigFile(path, {}, text, f"it is not JSON: {error}")
    if not isinstance(values, dict):
        return ConfigFile(path, {}, text, "it is not a JSON object")
    return ConfigFile(path, values, text)


MAX_BYTES = 4 << 20
"""Limit for a config.json. It has some KiB, or 2 MiB with the names of 21,841 classes."""
