"""Deriving policies from transformers' plans and models; tests/distributed/policies tests exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.models.layered import build_module
from dslpar.policies.constructed import fill_buffers
from dslpar.policies.derive import derive
from dslpar.policies.model import HuggingFaceModel
from dslpar.schema.policy import Policy
from tests.support.derive_all import miniature


def derived(name: str) -> Policy:
    return derive(on_meta(name))


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(miniature(name))


def test_several_linears_in_one_weight() -> None:
    """Glm's plan gathers gate_up_proj's output, since its code splits it in two. Phi-3's plan counts heads, too."""
    assert derived("GlmForCausalLM").fused == {"gate_up_proj": 2}
    phi3 = derived("Phi3ForCausalLM")
    counts = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
    assert phi3.fused == {"qkv_proj": counts, "gate_up_proj": 2}
    assert phi3.local == {"model.layers.*.self_attn": ("config.num_attention_heads", "num_key_value_heads")}
    assert derived("GPTNeoXForCausalLM").fused == {}


def test_norms_over_all_features_of_a_region() -> None:
    olmo2 = derived("Olmo2ForCausalLM")
    assert olmo2.inner_norms == ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")
    assert olmo2.regions["model.layers.*.mlp"] == {"x": ("gate_proj", "up_proj")}
    qwen3 = derived("Qwen3ForCausalLM")
    assert (qwen3.inner_norms, qwen3.per_head) == ((), olmo2.inner_norms)


def test_latents_and_sinks() -> None:
    youtu, at = derived("YoutuForCausalLM"), "model.layers.*.self_attn"
    assert youtu.regions[at] == {"hidden_states": ("q_a_proj", "kv_a_proj_with_mqa")}
    assert youtu.from_latent == (f"{at}.q_b_proj", f"{at}.kv_b_proj")
    assert youtu.per_head == (f"{at}.q_a_layernorm", f"{at}.kv_a_layernorm")
    assert derived("GraniteSWAForCausalLM").head_vectors == (f"{at}.sinks",)


def test_words_that_are_not_understood_are_named() -> None:
    model = on_meta("LlamaForCausalLM")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp": "all_reduce"}
    with pytest.raises(DslparError, match=r"TEN234 .*model\.layers\.\*\.mlp: 'all_reduce' of LlamaMLP"):
        derive(model)


def test_values_that_only_a_constructor_knows() -> None:
    """These are xIELU's constants and initial weights, which `_init_weights` leaves."""
    model = on_meta("ApertusForCausalLM")
    part = nn.ModuleDict({"act_fn": model.model.layers[1].mlp.act_fn})
    fill_buffers(model, part, "model.layers.1.mlp")
    assert part["act_fn"].beta.item() == 0.5
    assert model.model.layers[1].mlp.act_fn.alpha_p.is_meta
    module = build_module(HuggingFaceModel(type(model), model.config), Groups(Mesh()), seed=3)
    begun = dict(module.named_parameters())["model.layers.0.mlp.act_fn.alpha_p"]
    assert begun.item() == pytest.approx(torch.expm1(torch.tensor(0.8)).log().item(), rel=1e-2)


def test_a_parameter_that_nobody_begins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HuggingFaceModel(transformers.LlamaForCausalLM, miniature("LlamaForCausalLM"))
    monkeypatch.setattr(type(model.model), "_init_weights", lambda *_: None)
    with pytest.raises(DslparError, match=r"TEN234 .*\.weight: transformers' `_init_weights` does not set its values"):
        build_module(model, Groups(Mesh()), seed=3)


def test_a_buffer_that_is_saved_is_read_with_the_weights(tmp_path: Path) -> None:
    """DeepSeek-V3's routers add a bias that is no parameter."""
    plain = transformers.DeepseekV3ForCausalLM(miniature("DeepseekV3ForCausalLM"))
    plain.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0]))
    plain.save_pretrained(tmp_path)
    model = HuggingFaceModel(type(plain), pretrained=str(tmp_path), policy="derived")
    layers = {layer.name: layer for layer in model.layers(Groups(Mesh()))}
    block = layers["model.layers.1"].build()
    assert block.mlp.gate.e_score_correction_bias.tolist() == [0.5, 1.0, 2.0, 3.0]
    assert "mlp.gate.e_score_correction_bias" in block.state_dict()
