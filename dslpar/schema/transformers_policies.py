"""Policies of transformers models, for classes whose own plan (`base_model_tp_plan`) is not sufficient. No torch.

Most decoders need no policy here: dslpar derives one from their plan (DERIVED). `dslpar.schema.policy` has the terms.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslpar.schema.policy import WITHOUT_ROUTER_NOISE, Policy

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
BLOOM = Policy(
    blocks=("transformer.h",),
    regions={
        "transformer.h.*.self_attention": ("query_key_value",),
        "transformer.h.*.mlp": ("dense_h_to_4h",),
    },
    outward=("transformer.h.*.self_attention.dense", "transformer.h.*.mlp.dense_4h_to_h"),
    local={"transformer.h.*.self_attention": ("num_heads",)},
    own_attention={"transformer.h.*.self_attention": ("alibi",)},
    returns={"transformer.h": ("",)},
    requires={"slow_but_exact": False},
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
    requires=WITHOUT_ROUTER_NOISE,
)
GLM4_MOE = Policy(
    blocks=("model.layers",),
    regions={
        "model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj"),
        "model.layers.*.mlp": {"x": ("gate_proj", "up_proj")},
        "model.layers.*.mlp.shared_experts": {"x": ("gate_proj", "up_proj")},
    },
    outward=(
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.down_proj",
        "model.layers.*.mlp.shared_experts.down_proj",
    ),
    experts=("model.layers.*.mlp.experts",),
    routers=("model.layers.*.mlp.gate",),
    per_head=("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"),
    requires=WITHOUT_ROUTER_NOISE,
)
"""transformers' plan lacks the norms of heads, which `use_qk_norm` adds."""
GPT_OSS = Policy(
    blocks=("model.layers",),
    regions={"model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
    outward=("model.layers.*.self_attn.o_proj",),
    head_vectors=("model.layers.*.self_attn.sinks",),
    experts=("model.layers.*.mlp.experts",),
    routers=("model.layers.*.mlp.router",),
    requires=WITHOUT_ROUTER_NOISE,
)


def _bert(base: str) -> Policy:
    """Return the policy of a BERT-like encoder; its pooler and output heads are not sharded."""
    layer = f"{base}.encoder.layer"
    return Policy(
        blocks=(layer,),
        regions={f"{layer}.*.attention.self": ("query", "key", "value"), f"{layer}.*.intermediate": ("dense",)},
        outward=(f"{layer}.*.attention.output.dense", f"{layer}.*.output.dense"),
        inputs=("input_ids", "attention_mask", "token_type_ids"),
        whole=("back",),
    )


T5 = Policy(
    blocks=("encoder.block", "decoder.block"),
    regions={
        "encoder.block.*.layer.0.SelfAttention": ("q", "k", "v"),
        "encoder.block.*.layer.1.DenseReluDense": ("wi", "wi_0", "wi_1"),
        "decoder.block.*.layer.0.SelfAttention": ("q", "k", "v"),
        "decoder.block.*.layer.1.EncDecAttention": {"hidden_states": ("q",), "key_value_states": ("k", "v")},
        "decoder.block.*.layer.2.DenseReluDense": ("wi", "wi_0", "wi_1"),
    },
    outward=("*.block.*.layer.*.*.o", "*.block.*.layer.*.DenseReluDense.wo"),
    local={"*.block.*.layer.*.SelfAttention": ("n_heads",), "*.block.*.layer.*.EncDecAttention": ("n_heads",)},
    head_tables=("*.block.0.layer.0.SelfAttention.relative_attention_bias",),
    inputs=("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
    returns={"encoder.block": ("position_bias", ""), "decoder.block": ("position_bias", "")},
)
VIT = Policy(
    blocks=("vit.layers",),
    regions={"vit.layers.*.attention": ("q_proj", "k_proj", "v_proj"), "vit.layers.*.mlp": ("fc1",)},
    outward=("vit.layers.*.attention.o_proj", "vit.layers.*.mlp.fc2"),
    inputs=("pixel_values",),
    whole=("front", "back"),
)
SWIN = Policy(
    blocks=("swin.encoder.layers.*.blocks",),
    regions={
        "swin.encoder.layers.*.blocks.*.attention": ("q_proj", "k_proj", "v_proj"),
        "swin.encoder.layers.*.blocks.*.mlp": ("fc1",),
    },
    outward=("swin.encoder.layers.*.blocks.*.attention.o_proj", "swin.encoder.layers.*.blocks.*.mlp.fc2"),
    head_tables=("swin.encoder.layers.*.blocks.*.attention.relative_position_bias",),
    inputs=("pixel_values",),
    returns={"swin.encoder.layers.*.blocks": ("",)},
    whole=("front", "between", "back"),
    grid=True,
)
_SWINV2_BLOCK = "swinv2.encoder.layers.*.blocks.*"
SWINV2 = Policy(
    blocks=("swinv2.encoder.layers.*.blocks",),
    regions={
        f"{_SWINV2_BLOCK}.attention.self": ("query", "key", "value"),
        f"{_SWINV2_BLOCK}.intermediate": ("dense",),
    },
    outward=(f"{_SWINV2_BLOCK}.attention.output.dense", f"{_SWINV2_BLOCK}.output.dense"),
    local={f"{_SWINV2_BLOCK}.attention.self": ("num_attention_heads", "all_head_size")},
    own_attention={f"{_SWINV2_BLOCK}.attention.self": ()},
    head_vectors=(f"{_SWINV2_BLOCK}.attention.self.logit_scale",),
    per_head=(f"{_SWINV2_BLOCK}.attention.self.continuous_position_bias_mlp.0",),
    head_tables=(f"{_SWINV2_BLOCK}.attention.self.continuous_position_bias_mlp.2",),
    inputs=("pixel_values",),
    returns={"swinv2.encoder.layers.*.blocks": ("",)},
    whole=("front", "between", "back"),
    grid=True,
)
VIT_MAE = Policy(
    blocks=("vit.layers", "decoder.decoder_layers"),
    regions={
        "vit.layers.*.attention": ("q_proj", "k_proj", "v_proj"),
        "vit.layers.*.mlp": ("fc1",),
        "decoder.decoder_layers.*.attention": ("q_proj", "k_proj", "v_proj"),
        "decoder.decoder_layers.*.mlp": ("fc1",),
    },
    outward=(
        *("vit.layers.*.attention.o_proj", "vit.layers.*.mlp.fc2"),
        *("decoder.decoder_layers.*.attention.o_proj", "decoder.decoder_layers.*.mlp.fc2"),
    ),
    inputs=("pixel_values", "noise"),
    returns={"vit.embeddings": ("mask", "ids_restore")},
    whole=("front", "between", "back"),
    loss="pixel_values",
)
RESNET = Policy(
    blocks=("resnet.encoder.stages.*.layers",),
    regions={},
    outward=(),
    inputs=("pixel_values",),
    batch_norms=True,
    whole=("front", "between", "back"),
)

_BERT_HEADS = ("MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification")

DERIVED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Apertus", "Arcee", "AriaText", "Beam", "Cohere2", "Cohere2Moe", "CohereCompass", "Cohere", "Cwm"),
        *("DeepseekV2", "DeepseekV3", "Dots1", "Ernie4_5", "Exaone4", "ExaoneMoe", "FlexOlmo", "GPTNeoX", "Gemma2"),
        *("Gemma3", "Gemma4", "Gemma4Unified", "Gemma", "Glm4", "Glm4Moe", "Glm4MoeLite", "Glm", "Granite"),
        *("GraniteMoe", "GraniteMoeSWA", "GraniteMoeShared", "GraniteSWA", "HYV3", "Helium", "HyperCLOVAX", "Jais2"),
        *("Kolibri1", "Llama", "Mellum", "MiMoV2Flash", "MiniCPM3", "MiniMaxM2", "Ministral3", "Ministral"),
        *("Mistral4", "Mistral", "Mixtral", "NanoChat", "Nemotron", "Olmo2", "Olmo3", "Olmo", "Olmoe", "Phi3", "Phi"),
        *("Phimoe", "Qwen2", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "SolarOpen", "Starcoder2", "VaultGemma"),
        "Youtu",
    )
)
"""Classes whose derived policy was verified by `python -m tests.support.derive_all` (docs/derived_policies.md)."""

POLICIES: Mapping[str, Policy] = {
    "BloomForCausalLM": BLOOM,
    "GPT2LMHeadModel": GPT2,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "OPTForCausalLM": OPT,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    **{f"BertFor{head}": _bert("bert") for head in _BERT_HEADS},
    **{f"RobertaFor{head}": _bert("roberta") for head in _BERT_HEADS if head != "PreTraining"},
    "T5ForConditionalGeneration": T5,
    "ViTForImageClassification": VIT,
    "ViTMAEForPreTraining": VIT_MAE,
    "SwinForImageClassification": SWIN,
    "Swinv2ForImageClassification": SWINV2,
    "ResNetForImageClassification": RESNET,
}
"""Class name -> policy."""
