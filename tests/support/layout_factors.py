"""Factors of a layout with their levels, for covering arrays and random layouts.

    row = {name: levels[0] for name, levels in FACTORS.items()} | {"mode": "2d", "zero": 1}
    config, world_size = config_of(row)          # sections as a dict, of sizes as they are published
    job_of(row)                                  # None: lint refuses it

Configs are as large as published ones. `dslpar.parity` shrinks them, so shrinking is tested as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslpar.layout.resolve import Job
from dslpar.linter import check

Row = Mapping[str, Any]

HIDDEN, HEADS, KV_HEADS, LAYERS, LENGTH, VOCABULARY = 2304, 144, 72, 12, 1152, 50_001
"""Sizes that 2, 3, 4, 9 and 16 ranks divide, and a vocabulary that all of them must pad."""

_DENSE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
_LLAMA = _DENSE | {"num_key_value_heads": KV_HEADS, "bos_token_id": 1, "eos_token_id": 2}
_IMAGES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_labels": 1000,
}
_T5 = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 4 * HIDDEN, "num_heads": HEADS, "vocab_size": VOCABULARY}
_GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 768}
_LATENT = _GROUPS | {"q_lora_rank": 576, "kv_lora_rank": 504, "qk_rope_head_dim": 72, "qk_nope_head_dim": 32}
_LATENT |= {"v_head_dim": 32, "num_key_value_heads": HEADS, "first_k_dense_replace": 3}
_STAGES = {"embed_dim": 192, "num_heads": [12, 24, 48, 96], "num_labels": 1000}
_NO_SIZES: Mapping[str, Any] = {}

_SIGMOID = {
    "num": 16,
    "router": "sigmoid",
    "ffn_hidden_size": 768,
    "balance": 0.0,
    "z_loss": 0.01,
    "bias_update": 0.1,
    "capacity_factor": 1.0,
}
_OF_LLAMA = {"num_kv_heads": KV_HEADS, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GPT": ("GPT", _NO_SIZES),
    "Llama's form": (
        "GPT",
        _OF_LLAMA,
    ),
    "GPT, experts": ("GPT", {"experts": {"num": 16, "top_k": 4, "ffn_hidden_size": 768, "shared": 1, "every": 2}}),
    "GPT, sigmoid": ("GPT", _OF_LLAMA | {"experts": _SIGMOID}),
    "one key head": ("GPT", {"num_kv_heads": 1, "positions": "rotary"}),
    "ResMLP": ("ResMLP", _NO_SIZES),
    "MoCo": ("MoCo", _NO_SIZES),
    "layers_cfg": ("Sequential", _NO_SIZES),
    "BERT": ("transformers.BertForPreTraining", _DENSE),
    "RoBERTa": ("transformers.RobertaForMaskedLM", _DENSE | {"max_position_embeddings": LENGTH + 2}),
    "T5": ("transformers.T5ForConditionalGeneration", _T5 | {"num_layers": 6, "num_decoder_layers": 6}),
    "gated T5": (
        "transformers.T5ForConditionalGeneration",
        _T5 | {"num_layers": 6, "num_decoder_layers": 4, "feed_forward_proj": "gated-gelu"},
    ),
    "ViT": ("transformers.ViTForImageClassification", _IMAGES),
    "MAE": ("transformers.ViTMAEForPreTraining", {k: v for k, v in _IMAGES.items() if k != "num_labels"}),
    "Swin": ("transformers.SwinForImageClassification", _STAGES),
    "SwinV2": ("transformers.Swinv2ForImageClassification", _STAGES),
    "ResNet": ("transformers.ResNetForImageClassification", {"num_labels": 1000}),
    "GPT-2": (
        "transformers.GPT2LMHeadModel",
        {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": LENGTH, "vocab_size": VOCABULARY},
    ),
    "OPT": (
        "transformers.OPTForCausalLM",
        {k: v for k, v in _DENSE.items() if k != "intermediate_size"}
        | {"ffn_dim": 4 * HIDDEN, "word_embed_proj_dim": HIDDEN},
    ),
    "Llama": ("transformers.LlamaForCausalLM", _LLAMA),
    "Qwen3": ("transformers.Qwen3ForCausalLM", _LLAMA | {"head_dim": 32}),
    "Gemma 2": ("transformers.Gemma2ForCausalLM", _LLAMA | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "Qwen2": ("transformers.Qwen2ForCausalLM", _LLAMA),
    "Gemma": ("transformers.GemmaForCausalLM", _LLAMA | {"head_dim": 32}),
    "Gemma 3": ("transformers.Gemma3ForCausalLM", _LLAMA | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "Phi-3": ("transformers.Phi3ForCausalLM", _LLAMA | {"pad_token_id": 0}),
    "OLMo 2": ("transformers.Olmo2ForCausalLM", _LLAMA),
    "GPT-NeoX": ("transformers.GPTNeoXForCausalLM", _DENSE),
    "Bloom": (
        "transformers.BloomForCausalLM",
        {"hidden_size": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCABULARY},
    ),
    "Mistral": ("transformers.MistralForCausalLM", _LLAMA | {"sliding_window": 512}),
    "Mixtral": ("transformers.MixtralForCausalLM", _LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2-MoE": (
        "transformers.Qwen2MoeForCausalLM",
        _LLAMA
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
        | {"shared_expert_intermediate_size": 2304},
    ),
    "OLMoE": ("transformers.OlmoeForCausalLM", _LLAMA | {"num_experts": 16, "num_experts_per_tok": 4}),
    "Qwen3-MoE": (
        "transformers.Qwen3MoeForCausalLM",
        _LLAMA | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "mlp_only_layers": [0]},
    ),
    "DeepSeek-V3": ("transformers.DeepseekV3ForCausalLM", _LLAMA | _LATENT | {"n_group": 4, "topk_group": 2}),
    "DeepSeek-V2": ("transformers.DeepseekV2ForCausalLM", _LLAMA | _LATENT),
    "GLM-4.5": ("transformers.Glm4MoeForCausalLM", _LLAMA | _GROUPS | {"head_dim": 32, "use_qk_norm": True}),
    "GPT-OSS": (
        "transformers.GptOssForCausalLM",
        _LLAMA | {"head_dim": 32, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
}
"""Name -> model type and sizes."""
OF_TRANSFORMERS = tuple(name for name, (kind, _) in FAMILIES.items() if kind.startswith("transformers."))

MIXTURES = (
    *("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE"),
    *("DeepSeek-V3", "DeepSeek-V2", "GLM-4.5", "GPT-OSS", "GPT, experts", "GPT, sigmoid"),
)
"""Families with experts, whose tokens `parallel.expert` sends to them."""
BALANCED = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "GPT, experts")
"""Mixtures that can have a load-balancing loss."""

DECODERS = tuple(name for name, (kind, _) in FAMILIES.items() if kind.endswith(("ForCausalLM", "LMHeadModel")))
"""Families with an optional own head, and linears that can have adapters."""

MODES: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "1d 2": {"size": 2, "mode": "1d"},
    "1d 2 sequence": {"size": 2, "mode": "1d", "sequence": True},
    "1d 3": {"size": 3, "mode": "1d"},
    "2d 4": {"size": 4, "mode": "2d"},
    "2.5d 8": {"size": 8, "mode": "2.5d", "depth": 2},
    "2.5d 2": {"size": 2, "mode": "2.5d", "depth": 2},
    "3d 8": {"size": 8, "mode": "3d"},
    "cuboid 1 2 2": {"size": 4, "mode": "cuboid", "shape": (1, 2, 2)},
    "cuboid 2 1 2": {"size": 4, "mode": "cuboid", "shape": (2, 1, 2)},
    "cuboid 2 3 1": {"size": 6, "mode": "cuboid", "shape": (2, 3, 1)},
    "ring 2": {"size": 2, "mode": "sequence"},
    "ulysses 2": {"size": 2, "mode": "sequence", "impl": "ulysses"},
}
CONTEXTS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "ring 2": {"size": 2, "impl": "ring"},
    "ulysses 2": {"size": 2, "impl": "ulysses"},
    "hybrid 4": {"size": 4, "impl": "hybrid", "ulysses_size": 2},
}
SCHEDULES: Mapping[str, Mapping[str, Any] | None] = {
    "1f1b": None,
    "interleaved": {"type": "interleaved", "num_model_chunks": 2},
    "zero_bubble": {"type": "zero_bubble"},
    "zero_bubble 2": {"type": "zero_bubble", "num_model_chunks": 2},
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"type": "AdamW", "lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"type": "RMSprop", "lr": 1e-3},
    "Adagrad": {"type": "Adagrad", "lr": 1e-2},
}

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "mode": tuple(MODES),
    "keep": (None, "x", "w", "both", "none"),
    "residual": (None, "replicated", "sequence", "hidden", "batch"),
    "inner": (None, "batch", "heads"),
    "overlap": (False, True),
    "context": tuple(CONTEXTS),
    "pipe": (1, 2, 3),
    "schedule": tuple(SCHEDULES),
    "data": (1, 2, 3),
    "expert": (0, 1, 2, 4),  # data ranks that divide the experts; 0: tokens are gathered
    "balance": (False, True),
    "zero": (0, 1, 2, 3),
    "param_gather": (False, True),
    "offload": (False, True),
    "recompute": (0, 1, 2),
    "compile": (False, True),
    "loss_chunks": (1, 3),
    "tied": (True, False),
    "adapters": (False, True),
    "accumulation": (1, 2, 4),  # in a pipeline, multiplied by its ranks
    "clip": (None, 1.0),
    "optimizer": tuple(OPTIMIZERS),
    "order": (None, ("data", "pipe", "tensor")),
}
"""Levels of each factor, the plainest first."""

PLAIN: Row = {name: levels[0] for name, levels in FACTORS.items()}
"""A GPT on one process."""


def config_of(row: Row) -> tuple[dict[str, Any], int]:
    """Return the sections and the number of ranks of a row."""
    mode, context = MODES[row["mode"]], CONTEXTS[row["context"]]
    parallel: dict[str, Any] = {}
    if row["pipe"] > 1:
        parallel["pipeline"] = row["pipe"]
    if mode is not None:
        more = {name: row[name] for name in ("keep", "residual", "inner") if row[name] is not None}
        parallel["tensor"] = dict(mode) | more | ({"comm_overlap": True} if row["overlap"] else {})
    if context is not None:
        parallel["context"] = dict(context)
    if row["order"] is not None:
        parallel["order"] = row["order"]
    tensor_size = (mode["size"] if mode else 1) * (context["size"] if context else 1)
    if row["expert"]:
        parallel["expert"] = row["expert"] * tensor_size
    zero: dict[str, Any] = {"stage": row["zero"]}
    if row["param_gather"]:
        zero["overlap_param_gather"] = True
    if row["offload"]:
        zero["offload_optimizer"] = "cpu"
    config: dict[str, Any] = {
        "model": _model(row),
        "parallel": parallel,
        "zero": zero,
        "optimizer": dict(OPTIMIZERS[row["optimizer"]]),
        "lr_scheduler": {"type": "cosine", "warmup_steps": 3},
        "batch": {"accumulation": row["accumulation"] * row["pipe"], **_batch(row["family"])},
        "train": {"steps": 100, "save_interval": 0},
    }
    if row["clip"] is not None:
        config["train"]["clip_grad_norm"] = row["clip"]
    if row["loss_chunks"] > 1:
        config["train"]["loss_chunks"] = row["loss_chunks"]
    if row["compile"]:
        config["train"] |= {"compile": True, "compile_backend": "aot_eager"}
    if row["recompute"]:
        config["activation_checkpoint"] = row["recompute"]
    if SCHEDULES[row["schedule"]] is not None:
        config["schedule"] = dict(SCHEDULES[row["schedule"]] or {})
    if data := _data(row["family"]):
        config["data"] = data
    return config, row["pipe"] * row["data"] * tensor_size


def job_of(row: Row) -> Job | None:
    """Return the job of a row, or None if lint refuses it."""
    config, world_size = config_of(row)
    checked = check.check(check.load(config), world_size, forecasts=False)
    return None if checked.has_errors else checked.job


def findings_of(row: Row) -> list[str]:
    """Return lint's errors for a row."""
    config, world_size = config_of(row)
    found = check.check(check.load(config), world_size, forecasts=False).findings
    return [f"{each.code} {each.message}" for each in found if each.severity == "error"]


def describe(row: Row) -> str:
    """Return the levels of a row that are not the plainest."""
    return ", ".join(f"{name} {row[name]}" for name in FACTORS if row[name] != PLAIN[name] or name == "family")


def _model(row: Row) -> dict[str, Any]:
    kind, sizes = FAMILIES[row["family"]]
    if kind == "GPT":
        own = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": VOCABULARY}
        if row["family"] in BALANCED:
            sizes = {**sizes, "experts": {**sizes["experts"], "balance": 0.02 if row["balance"] else 0.0}}
        return {"type": "GPT", **own, "max_seq_len": LENGTH, **sizes, "tie_embeddings": row["tied"]}
    if kind in ("ResMLP", "MoCo"):
        heads = {"num_heads": HEADS} if kind == "MoCo" else {}
        return {"type": kind, "num_layers": LAYERS, "hidden_size": HIDDEN, "image_size": 384, "patch_size": 16, **heads}
    if kind == "Sequential":
        return {"type": kind, "layers_cfg": _LAYERS_CFG}
    config = dict(sizes)
    if row["family"] in DECODERS:
        config["tie_word_embeddings"] = row["tied"]
    if row["balance"]:
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    model = {"type": kind, "config": config}
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8}
    if row["family"] in MIXTURES:  # linears of shared experts and of latents have none
        lora |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        lora["target_modules"] = [] if row["expert"] else ["o_proj"]
    return model | ({"lora": lora} if row["adapters"] else {})


_LAYERS_CFG = [
    {"type": "Embedding", "num_embeddings": 256, "embedding_dim": 48},
    {"type": "LayerNorm", "normalized_shape": 48},
    {"type": "Linear", "in_features": 48, "out_features": 96},
    {"type": "GELU"},
    {"type": "Linear", "in_features": 96, "out_features": 48},
    {"type": "Tanh"},
    {"type": "Linear", "in_features": 48, "out_features": 256, "bias": False},
]


def _batch(family: str) -> dict[str, Any]:
    """MoCo's loss contrasts samples, so a micro-batch needs several."""
    return {"micro_size": 16} if family == "MoCo" else {}


def _data(family: str) -> dict[str, Any]:
    if family in ("BERT", "RoBERTa"):
        return {"type": "mlm"}
    if family in ("T5", "gated T5"):
        return {"type": "span", "seq_len": 576}
    if family in ("ViT", "MAE", "Swin", "SwinV2", "ResNet", "ResMLP"):
        return {"type": "images", "path": "images"}
    return {"seq_len": 24} if family == "layers_cfg" else {}
