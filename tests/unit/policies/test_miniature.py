"""Miniatures of configs: any config class shrinks, with its own settings, or refuses by a finding."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.core.errors import DslparError
from dslpar.policies.miniature import default_config, dropping, shrunk


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Swin", {"depths": [2, 1, 1, 1], "num_heads": [4, 8, 16, 32], "embed_dim": 16, "image_size": 64}),
        ("ResNet", {"hidden_sizes": [16, 32, 64, 128], "depths": [2, 1, 1, 1]}),
        ("Segformer", {"hidden_sizes": [16, 32, 80, 128], "num_attention_heads": [4, 8, 20, 32]}),
        ("ViT", {"image_size": 12, "patch_size": 4}),
        ("Falcon", {"head_dim": 8}),
        ("Jamba", {"layers_block_type": ["mamba"] * 3}),
        ("Mamba", {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}),
        ("Mamba2", {"num_heads": 8, "head_dim": 16}),
        ("GPTNeo", {"attention_layers": ["global", "local", "global"]}),
        ("Whisper", {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64}),
        ("ProphetNet", {"hidden_size": 64}),
        ("XLNet", {"n_layer": 3}),
        ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    ],
)
def test_sizes_that_a_class_derives_follow(name: str, expected: dict[str, Any]) -> None:
    small = shrunk(getattr(transformers, f"{name}Config")())
    assert {key: getattr(small, key) for key in expected} == expected


def test_configs_within_a_config_shrink() -> None:
    small = shrunk(transformers.LlavaConfig(), {"text_config.num_hidden_layers": 2})
    assert (small.text_config.num_hidden_layers, small.text_config.hidden_size) == (2, 64)
    assert (small.vision_config.num_hidden_layers, small.vision_config.image_size) == (3, 12)


def test_lists_by_layer_have_the_length_that_is_asked_for() -> None:
    small = shrunk(transformers.Gemma2Config(), {"num_hidden_layers": 2})
    assert small.layer_types == ["sliding_attention", "full_attention"]


def test_settings_that_are_no_sizes_stay() -> None:
    small = shrunk(transformers.PhiConfig(qk_layernorm=True, resid_pdrop=0.1, rope_theta=5.0, eos_token_id=[3, 4]))
    assert (small.qk_layernorm, small.resid_pdrop, small.rope_parameters["rope_theta"]) == (True, 0.0, 5.0)
    assert small.eos_token_id == [1]
    assert dropping(small).resid_pdrop == 0.2


def test_lists_of_rotary_features_follow_the_size_of_heads() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.5] * 48, "short_factor": [1.0] * 48}
    small = shrunk(transformers.Phi3Config(rope_parameters=rope))
    assert (len(small.rope_parameters["long_factor"]), len(small.rope_parameters["short_factor"])) == (4, 4)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("LlamaConfig", {"num_attention_heads": "many"}, "LlamaConfig refuses its miniature: .*num_attention_heads"),
        ("Mamba2Config", {"head_dim": 5}, "hidden_size \\* expand"),
    ],
)
def test_values_that_a_class_refuses_are_a_finding(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DslparError, match=f"CFG223 .*{said}.*\nhelp: append key=value"):
        shrunk(getattr(transformers, name)(), changes)


def test_a_class_whose_defaults_contradict_takes_changes() -> None:
    cls = transformers.Gemma4AssistantForCausalLM
    with pytest.raises(DslparError, match="its own defaults"):
        default_config(cls, {})
    config = default_config(
        cls, {"text_config.hidden_size_per_layer_input": 0, "text_config.vocab_size_per_layer_input": 0}
    )
    assert config.text_config.hidden_size_per_layer_input == 0


def _config_classes() -> list[type]:
    """Return the config classes of all model classes whose packages are installed."""
    found = set()
    for name in dir(transformers):
        with contextlib.suppress(ImportError):  # a placeholder of a class that needs another package
            found.add(getattr(getattr(transformers, name), "config_class", None))
    return sorted(filter(inspect.isclass, found), key=lambda cls: str(cls.__name__))


@pytest.mark.prove
def test_every_config_class_shrinks_or_refuses() -> None:
    refused, of_transformers = [], []
    for cls in _config_classes():
        try:
            config = cls()
        except Exception:  # noqa: BLE001  # the class refuses its own defaults
            of_transformers.append(cls.__name__)
            continue
        try:
            shrunk(config)
        except DslparError:
            refused.append(cls.__name__)
    assert len(refused) <= 32, refused
    assert len(of_transformers) <= 10, of_transformers
