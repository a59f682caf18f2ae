"""Policies of transformers' models whose plans say too little, by class. No torch.

What a plan says is derived from it: most decoders need no line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslpar.policies.policy import WITHOUT_AUXILIARY_LOSS, Policy

GPT2 = Policy(
    blocks=("transformer.h",),
    regions={"transformer.h.*.attn": ("c_attn",), "transformer.h.*.mlp": ("c_fc",)},
    outward=("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"),
    fused={"c_attn": 3},
    local={"transformer.h.*.attn": ("split_size", "num_heads")},
)
OPT = Policy(
    blocks=("model.decoder.layers",),
    regions={"model.decoder.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
    inward=("model.decoder.layers.*.fc1",),
    outward=("model.decoder.layers.*.self_attn.out_proj", "model.decoder.layers.*.fc2"),
    local={"model.decoder.layers.*.self_attn": ("num_heads",)},
    requires={"layerdrop": 0.0, "layer_norm_elementwise_affine": True},
)
QWEN2_MOE = Policy(
    blocks=("model.layers",),
    regions={
        "model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj"),
        "model.layers.*.mlp": {"x": ("gate_proj", "up_proj")},
        "model.layers.*.mlp.shared_expert": {"x": ("gate_proj", "up_proj")},
    },
    outward=(
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.down_proj",
        "model.layers.*.mlp.shared_expert.down_proj",
    ),
    experts=("model.layers.*.mlp.experts",),
    routers=("model.layers.*.mlp.gate", "model.layers.*.mlp.shared_expert_gate"),
    requires=WITHOUT_AUXILIARY_LOSS,
)

DERIVED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Arcee", "AriaText", "Cohere", "Cohere2", "Cohere2Moe", "CohereCompass", "Cwm", "Ernie4_5", "Exaone4"),
        *("FlexOlmo", "GPTNeoX", "Gemma", "Gemma2", "Gemma3", "Gemma4Unified", "Glm", "Glm4", "Granite", "Helium"),
        *("HyperCLOVAX", "Jais2", "Llama", "Mellum", "Ministral", "Ministral3", "Mistral", "Mixtral", "NanoChat"),
        *("Nemotron", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Phi", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SeedOss"),
        *("SmolLM3", "Starcoder2", "VaultGemma"),
    )
)
"""Classes whose derived policy is proven, by `python -m tests.support.derive_all` (docs/derived_policies.md)."""

POLICIES: Mapping[str, Policy] = {
    "GPT2LMHeadModel": GPT2,
    "OPTForCausalLM": OPT,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
}
"""By the class's name."""
