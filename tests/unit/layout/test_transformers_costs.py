"""Lint's costs of a transformers model, against the model that transformers builds on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout.family_interface import pipeline_weights
from dslpar.layout.stages import EvenWeights
from dslpar.layout.transformers_costs import num_multiplied_weights, num_parameters, score_products
from dslpar.schema.sections import OtherModel
from dslpar.schema.transformers_configs import GATED, NAMES, table
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

SIZES = {
    "layers": 3,
    "decoder_layers": 2,
    "hidden": 48,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 10,
    "ffn": 72,
    "experts": 6,
    "expert_ffn": 20,
    "shared_ffn": 28,
    "shared_experts": 2,
    "q_latent": 26,
    "kv_latent": 22,
    "rotary_dim": 6,
    "plain_dim": 14,
    "value_dim": 18,
    "active_experts": 2,
    "vocab": 99,
    "positions": 40,
    "image": 36,
    "patch": 6,
    "channels": 4,
}
"""Other sizes than those by which the table was found."""
QUICK = {"GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"}
CLASSES = sampled((name for name, row in table()["models"].items() if "parts" in row), QUICK)
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)


def model_of(name: str, config: dict[str, Any]) -> OtherModel:
    return OtherModel(target=f"transformers.{name}", args={"config": config})


def configs(name: str) -> Iterator[dict[str, Any]]:
    """Yield the sizes, then with each switch toggled, then without the derived ones."""
    row = table()["models"][name]
    defaults = table()["configs"][row["config"]]["defaults"]
    own = {size: next((each for each in names if each in defaults), None) for size, names in NAMES.items()}
    given: dict[str, Any] = {key: SIZES[size] for size, key in own.items() if key is not None}
    if name == "CohereCompassForCausalLM":  # cannot be built without it
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        given["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    # some configs' defaults would exceed the small vocabulary
    given |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    yield given
    if "first_k_dense_replace" in defaults:
        yield given | {"first_k_dense_replace": 0}
        yield given | {"first_k_dense_replace": 2}
    for switch in row.get("switches", {}):
        yield given | {switch: not defaults[switch] if isinstance(defaults[switch], bool) else GATED}
    for size in ("kv_heads", "head_dim", "ffn"):
        key = own[size]
        if key is not None and defaults[key] is None:
            config = {each: value for each, value in given.items() if each != key}
            if is_taken(name, config):
                yield config


def is_taken(name: str, config: dict[str, Any]) -> bool:
    """Return whether transformers can build it: some models need keys that their config may leave out."""
    import transformers

    cls = getattr(transformers, name)
    try:
        with torch.device("meta"):
            cls._from_config(cls.config_class(**config))
    except TypeError:
        return False
    return True


@needs_transformers
@pytest.mark.parametrize("name", CLASSES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    import transformers

    cls = getattr(transformers, name)
    for config in configs(name):
        with torch.device("meta"):
            model = cls._from_config(cls.config_class(**config))
        model.tie_weights()
        held = sum(p.numel() for p in model.parameters())
        assert num_parameters(model_of(name, config).transformers) == held, config


@needs_transformers
def test_every_class_with_a_policy_is_in_the_table() -> None:
    """Otherwise lint knows neither its layers nor its sizes: run python tools/transformers_tables.py."""
    assert {*table()["models"]} >= {*DERIVED, *POLICIES}


@needs_transformers
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert", "vit", "mixtral"])
def test_a_pipeline_cuts_what_lint_counts(family: str) -> None:
    from dslpar.policies.model import HuggingFaceModel
    from tests.support import hugging_face as hf

    made = hf.FAMILIES[family]
    layers = HuggingFaceModel(made.classes()[0], made.config()).layers(Groups(Mesh()))
    counted = max(layer.layer_idx for layer in layers if layer.layer_idx is not None) + 1
    assert model_of(made.classes()[0].__name__, dict(made.sizes)).num_layers == counted


def test_weights_of_a_pipeline() -> None:
    config = {"n_embd": 4, "n_layer": 3, "n_head": 1, "vocab_size": 10, "n_positions": 2}
    model = model_of("GPT2LMHeadModel", config)
    block, norm = 12 * 16, 8
    biases = 9 * 4 + 16
    assert pipeline_weights(model, "cost", 2) == EvenWeights(first=0, layer=block + 2 * 4, last=40)
    assert pipeline_weights(model, "parameters", 2) == EvenWeights(40 + 8, block + biases, norm + 40)
    assert pipeline_weights(model, "type:Block", 2) is None
    assert num_multiplied_weights(model.transformers) == 3 * block + 40
    assert score_products(model.transformers, 2) == 3 * 2 * 2 * 4


def test_experts_that_do_not_compute_cost_nothing() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 10}
    config = sizes | {"num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 3}
    model = model_of("MixtralForCausalLM", config)
    attention, router, expert = 4 * 64, 5 * 8, 3 * 80
    assert num_multiplied_weights(model.transformers) == attention + router + 2 * expert + 24


def test_biases_of_experts_are_no_matrices() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 3}
    config = sizes | {"intermediate_size": 10, "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    attention, router, expert = 4 * 64, 5 * 8, 3 * 80
    model = model_of("GptOssForCausalLM", config)
    assert num_multiplied_weights(model.transformers) == attention + router + 2 * expert + 24


def test_blocks_without_experts_come_first_and_latents_have_three_sizes_of_heads() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 3, "intermediate_size": 10}
    latent = {"q_lora_rank": 5, "kv_lora_rank": 7, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2}
    config = sizes | latent | experts | {"num_hidden_layers": 3, "first_k_dense_replace": 2}
    model = model_of("DeepseekV3ForCausalLM", config)
    attention = 5 * 8 + 2 * (4 + 2) * 5 + (7 + 2) * 8 + 2 * (4 + 6) * 7 + 2 * 6 * 8
    scores = 11 * 2 * (4 + 2 + 6)
    dense, sparse = attention + 3 * 80, attention + 4 * 8 + (2 + 2) * 3 * 48
    assert pipeline_weights(model, "cost", 11) == [
        each + scores // 2 + end for each, end in ((dense, 0), (dense, 0), (sparse, 24))
    ]
    assert score_products(model.transformers, 11) == 3 * scores


def test_lists_of_blocks_are_weighed_one_by_one() -> None:
    config = {"num_layers": 2, "num_decoder_layers": 1, "d_model": 8, "d_kv": 2, "num_heads": 3, "d_ff": 5}
    model = model_of("T5ForConditionalGeneration", config | {"vocab_size": 7, "relative_attention_num_buckets": 4})
    weights = pipeline_weights(model, "parameters", 0)
    encoder, decoder, bias, table_ = 2 * 40 + 16 + 4 * 48, 2 * 40 + 24 + 8 * 48, 12, 56
    assert weights == [table_ + encoder + bias, encoder, decoder + bias + 16 + table_]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}),  # the table does not have which of its blocks hold what
        ("LlamaForCausalLM", {"hidden_size": "64"}),
        ("NoSuchForCausalLM", {"hidden_size": 64}),
    ],
)
def test_what_is_not_known_is_not_guessed(name: str, config: dict[str, Any]) -> None:
    model = model_of(name, config)
    assert num_parameters(model.transformers) is None
    assert pipeline_weights(model, "cost", 8) is None
