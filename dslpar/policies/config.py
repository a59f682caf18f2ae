"""Config of a transformers model: build it, and check that the model's policy covers its settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.models.pretrained import read_config
from dslpar.policies.derive import derive
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.schema.policy import Policy, match
from dslpar.schema.transformers_policies import DERIVED


def lists_of_blocks(model: Any, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the lists of blocks that match the patterns: in the patterns' order, then the model's."""
    names = [name for name, _ in model.named_modules()]
    return tuple(name for pattern in patterns for name in names if match((pattern,), name)) or tuple(patterns)


def config_of(cls: Any, config: Any, pretrained: str | None) -> Any:
    """Return a new config object from `config`, or from the folder `pretrained`, whose values `config` overrides.

    Raises:
        DslparError: `config` and `pretrained` are both missing, `config` is not a dict although a folder is given, or
            the folder's config is unreadable.
    """
    if pretrained is not None:
        read_config(pretrained)
        if config is not None and not isinstance(config, Mapping):
            raise_finding(
                "CFG223", "with pretrained=, the config must be a dict of what differs", "dict(...)", key="model"
            )
        return cls.config_class.from_pretrained(pretrained, local_files_only=True, **(config or {}))
    if config is None:
        raise_finding("CFG223", f"{cls.__name__} without a config", "config=dict(...), or pretrained='folder'")
    return cls.config_class(**config) if isinstance(config, Mapping) else copy.deepcopy(config)


def check_settings(name: str, config: Any, policy: Policy) -> None:
    """Raise DslparError if the config has settings that the policy does not cover; the error lists all of them."""
    wrong = {each: value for each, value in policy.requires.items() if getattr(config, each, value) != value}
    if wrong:
        raise DslparError(
            [
                finding(
                    "TEN234",
                    f"{name} with {each}={getattr(config, each)!r}: its policy is for {each}={value!r}",
                    f"{each}={value!r}",
                    key="model.config",
                )
                for each, value in wrong.items()
            ]
        )


def check_table(model: Any, policy: Policy) -> None:
    """Raise DslparError if the token table and the residual have different widths: no policy has a linear between."""
    if "input_ids" not in policy.inputs:
        return
    table, hidden = model.get_input_embeddings(), getattr(model.config, "hidden_size", None)
    if isinstance(table, nn.Embedding) and hidden and table.embedding_dim != hidden:
        message = (
            f"{type(model).__name__}: its embedding has {table.embedding_dim} features, but its blocks have {hidden}"
        )
        is_named = hasattr(model.config, "word_embed_proj_dim")
        hint = f"word_embed_proj_dim={hidden}" if is_named else NEEDS_OWN_CODE
        raise_finding("TEN234", message, hint, key="model.config")


def proven_policy(model: Any) -> Policy:
    """Return the policy derived from transformers' plan. Raises: DslparError: it is not tested for this class."""
    name = type(model).__name__
    found = derive(model)  # before the check, since its findings are more specific
    if name not in DERIVED:
        message = f"{name}: the policy derived from transformers' plan is not tested for this class"
        raise_finding("TEN234", message, "policy='derived' uses it untested; or write a policy", key="model.policy")
    return found
