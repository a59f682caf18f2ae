"""Policies of transformers' models whose plans say too little, by class. No torch.

What a plan says is derived from it: most decoders need no line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslpar.policies.policy import Policy

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


DERIVED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Arcee", "Cohere", "Cohere2", "CohereCompass", "Cwm", "Ernie4_5", "Exaone4", "GPTNeoX", "Gemma", "Gemma2"),
        *("Gemma3", "Gemma4Unified", "Glm", "Glm4", "Granite", "Helium", "HyperCLOVAX", "Jais2", "Llama", "Ministral"),
        *("Ministral3", "Mistral", "NanoChat", "Nemotron", "Olmo", "Olmo2", "Olmo3", "Phi", "Phi3", "Qwen2", "Qwen3"),
        *("SeedOss", "SmolLM3", "Starcoder2", "VaultGemma"),
    )
)
"""Classes whose derived policy is proven, by `python -m tests.support.derive_all` (docs/derived_policies.md)."""

POLICIES: Mapping[str, Policy] = {
    "GPT2LMHeadModel": GPT2,
    "OPTForCausalLM": OPT,
}
"""By the class's name."""
