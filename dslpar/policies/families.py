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
PHI3 = Policy(
    blocks=("model.layers",),
    regions={"model.layers.*.self_attn": ("qkv_proj",), "model.layers.*.mlp": ("gate_up_proj",)},
    outward=("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
    fused={
        "qkv_proj": ("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
        "gate_up_proj": 2,
    },
    local={"model.layers.*.self_attn": ("config.num_attention_heads", "num_key_value_heads")},
)
OLMO2 = Policy(
    blocks=("model.layers",),
    regions={
        "model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj"),
        "model.layers.*.mlp": {"x": ("gate_proj", "up_proj")},
    },
    outward=("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
    inner_norms=("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"),
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
    for name in ("Cohere", "GPTNeoX", "Gemma", "Gemma2", "Gemma3", "Llama", "Mistral", "Qwen2", "Qwen3")
)
"""Classes whose derived policy is proven: tests/distributed/policies compares each with plain transformers."""

POLICIES: Mapping[str, Policy] = {
    "GPT2LMHeadModel": GPT2,
    "Phi3ForCausalLM": PHI3,
    "Olmo2ForCausalLM": OLMO2,
    "OPTForCausalLM": OPT,
}
"""By the class's name."""
